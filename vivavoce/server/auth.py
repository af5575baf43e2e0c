"""Authentication: API keys, short-lived browser keys bound to a session, and checks of the Host and Origin headers."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from vivavoce.server.config import ServerOptions, is_loopback
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.wire import WireError

BROWSER_KEY = "ek_"
PROTOCOL_KEY = "openai-insecure-api-key."  # a subprotocol with the key: browsers cannot set headers of a WebSocket
MAX_BROWSER_KEYS = 10_000


@dataclass(frozen=True)
class Identity:
    """An authenticated caller."""

    session: SessionParams | None = None
    """The session a browser key is bound to."""
    browser_key: bytes | None = None
    """The hash of a browser key; None: an API key, or none is needed."""

    @property
    def is_browser(self) -> bool:
        """Whether the caller may only open sessions, and end those it has opened."""
        return self.browser_key is not None

    def check_may_do_more(self) -> None:
        """WireError 403 for a caller that may only open sessions."""
        if self.is_browser:
            raise WireError("a browser key only opens sessions; use an API key", "invalid_api_key", status=403)


@dataclass(frozen=True)
class BrowserKey:
    """A short-lived key for a browser."""

    session: SessionParams
    expires_at: float


class Keys:
    """The keys of one server. Browser keys are stored as hashes until they expire."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._digests = [key_digest(key) for key in options.api_keys]
        self._browser_keys: dict[bytes, BrowserKey] = {}

    def admit(self, key: str | None) -> Identity:
        """The caller with this key; WireError 401 for an unknown key. Without API keys every caller is admitted."""
        if key is not None and key.startswith(BROWSER_KEY):
            digest = key_digest(key)
            known = self._browser_keys.get(digest)
            if known is not None and known.expires_at > time.time():
                return Identity(known.session, digest)
            raise WireError("this browser key is unknown or has expired", "invalid_api_key", status=401)
        if not self._digests:
            return Identity()
        digest = key_digest(key or "")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # every key, in constant time
        if not any(matches):
            problem = "no API key was given" if key is None else "the API key is not one of this server's"
            raise WireError(f"{problem}; send it as Authorization: Bearer", "invalid_api_key", status=401)
        return Identity()

    def mint(self, session: SessionParams, seconds: float | None) -> tuple[str, int]:
        """A new browser key for a session, and when it expires."""
        now = time.time()
        self._browser_keys = {digest: key for digest, key in self._browser_keys.items() if key.expires_at > now}
        if len(self._browser_keys) >= MAX_BROWSER_KEYS:
            raise WireError("too many browser keys are in use; try again later", "too_many_keys", status=429)
        key = BROWSER_KEY + secrets.token_urlsafe(32)
        expires_at = int(now + (seconds or self._options.browser_key_seconds))
        self._browser_keys[key_digest(key)] = BrowserKey(session, expires_at)
        return key, expires_at


def request_key(headers: Mapping[str, str]) -> str | None:
    """The key in a request's headers: Bearer, or among the offered WebSocket protocols."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in offered_protocols(headers):
        if protocol.startswith(PROTOCOL_KEY):
            return protocol.removeprefix(PROTOCOL_KEY)
    return None


def offered_protocols(headers: Mapping[str, str]) -> list[str]:
    """The WebSocket subprotocols a client offers."""
    return [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",") if name.strip()]


def check_origin(headers: Mapping[str, str], options: ServerOptions) -> None:
    """WireError 403 for a page whose origin is not allowed, and for a Host header that does not name this server."""
    host = headers.get("host", "")
    if not _is_known_host(host, options):
        raise WireError(
            f"{host!r} is not a host name of this server; allow it with --allow-host", "unknown_host", status=403
        )
    origin = headers.get("origin")
    if origin is not None and not is_allowed_origin(origin, host, options):
        raise WireError(
            f"the origin {origin} is not allowed; allow it with --allow-origin", "origin_not_allowed", status=403
        )


def is_allowed_origin(origin: str, host: str, options: ServerOptions) -> bool:
    """Whether a page may connect: the page of this server, a page on this machine, or one of the allowed origins."""
    if "*" in options.allowed_origins or origin in options.allowed_origins:
        return True
    parts = urlsplit(origin)
    return parts.netloc == host or (is_loopback(parts.hostname or "") and is_loopback(options.host))


def _is_known_host(host: str, options: ServerOptions) -> bool:
    """On loopback the Host header is checked against DNS rebinding; other addresses require a key anyway."""
    if not is_loopback(options.host) or "*" in options.allowed_hosts:
        return True
    name = urlsplit(f"//{host}").hostname or ""
    return is_loopback(name) or name in options.allowed_hosts


def key_digest(key: str) -> bytes:
    """The hash by which a key is known."""
    return hashlib.sha256(key.encode("utf8", "surrogatepass")).digest()
