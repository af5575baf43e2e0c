"""SRTP with keys from SDP (RFC 4568): the `a=crypto` attribute, and protection of packets by libsrtp."""

import base64
import binascii
import re
import secrets
from dataclasses import dataclass
from typing import Final, Literal, get_args

import pylibsrtp

from vivavoce.server.wire import WireError

Suite = Literal["AES_CM_128_HMAC_SHA1_80", "AES_CM_128_HMAC_SHA1_32"]
SUITES: Final[tuple[Suite, ...]] = get_args(Suite)
KEY_BYTES: Final = 30  # 16 of the master key, 14 of the master salt
MAX_PACKET_BYTES: Final = 1_500  # the buffer of pylibsrtp

_CRYPTO = re.compile(r"(\d{1,9}) +([\w-]+) +inline:([A-Za-z0-9+/=]+)(?:\|(2\^\d+|\d+))?(\|\d+:\d+)?(?: +(\S.*))?")
_PROFILES = {
    "AES_CM_128_HMAC_SHA1_80": pylibsrtp.Policy.SRTP_PROFILE_AES128_CM_SHA1_80,
    "AES_CM_128_HMAC_SHA1_32": pylibsrtp.Policy.SRTP_PROFILE_AES128_CM_SHA1_32,
}


@dataclass(frozen=True)
class CryptoAttribute:
    """The value of an `a=crypto` line: a suite, and the key with which its side sends."""

    tag: int
    suite: Suite
    key: bytes
    """Master key and master salt."""

    @classmethod
    def parse(cls, value: str) -> "CryptoAttribute":
        """The attribute of a value like `1 AES_CM_128_HMAC_SHA1_80 inline:…`; WireError where it cannot be used."""
        found = _CRYPTO.fullmatch(value.strip())
        if found is None:
            raise WireError("an a=crypto attribute is TAG SUITE inline:KEY", "invalid_sdp")
        tag, suite, key, _lifetime, master_key_index, parameters = found.groups()
        if suite not in SUITES:
            raise WireError(f"SRTP suite {suite} is not supported; use one of {', '.join(SUITES)}", "invalid_sdp")
        if master_key_index or parameters:
            raise WireError("SRTP master key identifiers and session parameters are not supported", "invalid_sdp")
        try:
            decoded = base64.b64decode(key, validate=True)
        except binascii.Error:
            raise WireError("the key of an a=crypto attribute is not base64", "invalid_sdp") from None
        if len(decoded) != KEY_BYTES:
            raise WireError(f"the key of {suite} has {KEY_BYTES} bytes, not {len(decoded)}", "invalid_sdp")
        return cls(int(tag), suite, decoded)

    @classmethod
    def new(cls, suite: Suite = SUITES[0], tag: int = 1) -> "CryptoAttribute":
        """An attribute with a new random key."""
        return cls(tag, suite, secrets.token_bytes(KEY_BYTES))

    def format(self) -> str:
        """The value for an `a=crypto` line."""
        return f"{self.tag} {self.suite} inline:{base64.b64encode(self.key).decode()}"

    def __repr__(self) -> str:
        return f"CryptoAttribute(tag={self.tag}, suite={self.suite!r})"


@dataclass(frozen=True)
class SrtpKeys:
    """The suite of a call, and the master key and salt of each side."""

    suite: Suite
    local: bytes
    remote: bytes

    @classmethod
    def of(cls, local: CryptoAttribute, remote: CryptoAttribute) -> "SrtpKeys":
        """The keys of our attribute and the peer's, which have the same suite."""
        if local.suite != remote.suite:
            raise WireError(f"SRTP suites differ: {local.suite} and {remote.suite}", "invalid_sdp")
        return cls(local.suite, local.key, remote.key)

    def __repr__(self) -> str:
        return f"SrtpKeys(suite={self.suite!r})"


class SrtpTransport:
    """Protects the packets of one stream and verifies those of its peer."""

    def __init__(self, keys: SrtpKeys) -> None:
        profile = _PROFILES[keys.suite]
        any_outbound, any_inbound = pylibsrtp.Policy.SSRC_ANY_OUTBOUND, pylibsrtp.Policy.SSRC_ANY_INBOUND
        self._outbound = pylibsrtp.Session(pylibsrtp.Policy(keys.local, any_outbound, 0, profile))
        self._inbound = pylibsrtp.Session(pylibsrtp.Policy(keys.remote, any_inbound, 0, profile))

    def protect(self, packet: bytes, is_rtcp: bool) -> bytes:
        """The packet encrypted and authenticated."""
        return bytes(self._outbound.protect_rtcp(packet) if is_rtcp else self._outbound.protect(packet))

    def unprotect(self, packet: bytes, is_rtcp: bool) -> bytes | None:
        """The packet decrypted; None where it is not authentic, or was received before."""
        try:
            return bytes(self._inbound.unprotect_rtcp(packet) if is_rtcp else self._inbound.unprotect(packet))
        except (pylibsrtp.Error, ValueError):
            return None
