"""Digest authentication (RFC 7616): answers challenges of registrars and proxies, and challenges callers."""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vivavoce.errors import InputError
from vivavoce.server.sip.addresses import split_outside_quotes
from vivavoce.server.sip.messages import SipRequest, SipResponse

NONCE_SECONDS = 60.0
NONCE_BYTES = 16
REALM = "vivavoce"

Hash = Callable[[bytes], "hashlib._Hash"]
ALGORITHMS: dict[str, Hash] = {"md5": hashlib.md5, "sha-256": hashlib.sha256}


@dataclass(frozen=True)
class Account:
    """A name and a password."""

    user: str
    password: str

    @classmethod
    def parse(cls, text: str) -> "Account":
        """The account of `name:password`; InputError where there is none. The message does not quote it."""
        user, _, password = text.partition(":")
        if not user or not password or not text.isprintable() or '"' in user:
            raise InputError("a SIP account is name:password")
        return cls(user, password)


def parse_digest(value: str) -> Mapping[str, str]:
    """The parameters of a challenge or of credentials, by their names in lower case; InputError for other schemes."""
    scheme, _, rest = value.strip().partition(" ")
    if scheme.lower() != "digest":
        raise InputError("only digest authentication is supported")
    parameters = {}
    for part in split_outside_quotes(rest, ","):
        name, equals, quoted = part.partition("=")
        if not equals:
            raise InputError("a digest parameter is malformed")
        parameters[name.strip().lower()] = re.sub(r"\\(.)", r"\1", quoted.strip().removeprefix('"').removesuffix('"'))
    return parameters


def digest_response(
    account: Account, method: str, parameters: Mapping[str, str], uri: str, nonce_count: str = "", cnonce: str = ""
) -> str:
    """The `response` parameter of credentials; InputError for an algorithm that is not supported."""
    algorithm = ALGORITHMS.get(parameters.get("algorithm", "MD5").lower())
    if algorithm is None:
        raise InputError("the digest algorithm is not supported; known are MD5 and SHA-256")

    def hashed(*parts: str) -> str:
        return algorithm(":".join(parts).encode()).hexdigest()

    secret = hashed(account.user, parameters.get("realm", ""), account.password)
    nonce, request = parameters.get("nonce", ""), hashed(method, uri)
    if nonce_count:
        return hashed(secret, nonce, nonce_count, cnonce, "auth", request)
    return hashed(secret, nonce, request)


def credentials(account: Account, method: str, uri: str, challenge: str) -> str:
    """The value of an Authorization header that answers a challenge; InputError where it cannot be answered."""
    parameters = parse_digest(challenge)
    values = [("username", account.user), *((name, parameters.get(name, "")) for name in ("realm", "nonce"))]
    values.append(("uri", uri))
    offered = {each.strip().lower() for each in parameters.get("qop", "").split(",") if each.strip()}
    if offered and "auth" not in offered:
        raise InputError("the challenge asks for integrity protection, which is not supported")
    nonce_count, cnonce = ("00000001", secrets.token_hex(8)) if offered else ("", "")
    values.append(("response", digest_response(account, method, parameters, uri, nonce_count, cnonce)))
    if "opaque" in parameters:
        values.append(("opaque", parameters["opaque"]))
    quoted = [f'{name}="{_escaped(value)}"' for name, value in values]
    if "algorithm" in parameters:
        quoted.append(f"algorithm={parameters['algorithm']}")
    if offered:
        quoted += ["qop=auth", f"nc={nonce_count}", f'cnonce="{cnonce}"']
    return "Digest " + ", ".join(quoted)


def authorization(account: Account, request: SipRequest, response: SipResponse) -> tuple[str, str] | None:
    """The header that answers a response with 401 or 407; None where it has no challenge that can be answered."""
    name, answer = {401: ("WWW-Authenticate", "Authorization"), 407: ("Proxy-Authenticate", "Proxy-Authorization")}[
        response.code
    ]
    for each, value in response.headers:
        if each.lower() != name.lower():
            continue
        try:
            return answer, credentials(account, request.method, str(request.uri), value)
        except InputError:  # another challenge may follow, with another algorithm
            continue
    return None


class Authenticator:
    """Challenges callers. Its nonces hold their time and the caller's address, and need no memory here."""

    def __init__(self, accounts: Mapping[str, Account]) -> None:
        self._accounts, self._secret = accounts, secrets.token_bytes(32)

    def challenge(self, source: str) -> tuple[str, str]:
        """The header of a response with 401. MD5: older telephones know nothing else."""
        nonce = self._nonce(f"{asyncio.get_running_loop().time():.3f}", source)
        return "WWW-Authenticate", f'Digest realm="{REALM}", nonce="{nonce}", algorithm=MD5, qop="auth"'

    def admits(self, request: SipRequest, source: str) -> bool:
        """Whether a request has the credentials of an account."""
        value = request.get("Authorization")
        if value is None:
            return False
        try:
            given = parse_digest(value)
            account = self._accounts.get(
                given.get("username", ""), Account(secrets.token_hex(8), secrets.token_hex(16))
            )
            checked = {**given, "realm": REALM, "algorithm": "MD5"}
            nonce_count, cnonce = (given.get("nc", ""), given.get("cnonce", "")) if "qop" in given else ("", "")
            expected = digest_response(account, request.method, checked, given.get("uri", ""), nonce_count, cnonce)
        except InputError:
            return False
        is_right = hmac.compare_digest(expected.encode(), given.get("response", "").encode("utf8", "replace"))
        return self._is_fresh(given.get("nonce", ""), source) and is_right

    def _is_fresh(self, nonce: str, source: str) -> bool:
        at, _, _ = nonce.partition(".n")
        try:
            age = asyncio.get_running_loop().time() - float(at)
        except ValueError:
            return False
        expected = self._nonce(at, source)
        return 0 <= age < NONCE_SECONDS and hmac.compare_digest(expected.encode(), nonce.encode("utf8", "replace"))

    def _nonce(self, at: str, source: str) -> str:
        signed = hmac.digest(self._secret, f"{at} {source}".encode("utf8", "replace"), hashlib.sha256)
        return f"{at}.n{signed[:NONCE_BYTES].hex()}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
