"""SIP addresses: URIs, name-addr values such as `"Ann" <sip:ann@example.com>;tag=1`, and Via headers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vivavoce.errors import InputError

Transport = Literal["udp", "tcp", "tls"]

DEFAULT_PORTS: dict[Transport, int] = {"udp": 5060, "tcp": 5060, "tls": 5061}
TRANSPORTS: tuple[Transport, ...] = ("udp", "tcp", "tls")

_URI = re.compile(
    r"(?P<scheme>sips?):(?:(?P<user>[^@<>\"\s]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?"
    r"(?P<parameters>(?:;[^;?<>\"\s]*)*)(?:\?(?P<headers>[^<>\"\s]*))?",
    re.IGNORECASE,
)
_TEL = re.compile(r"tel:(?P<user>\+?[0-9A-Fa-f*#().-]+)(?P<parameters>(?:;[^;?<>\"\s]*)*)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:\"(?:[^\"\\]|\\.)*\"\s*|[^<>\"]*)<(?P<uri>[^<>]*)>\s*(?P<parameters>(?:;.*)?)")
_VIA = re.compile(
    r"SIP\s*/\s*2\.0\s*/\s*(?P<transport>[A-Za-z]+)\s+(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
    r"(?:\s*:\s*(?P<port>\d{1,5}))?\s*(?P<parameters>(?:;.*)?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Uri:
    """A sip, sips or tel URI. Parts are kept as they were written; a host is in lower case, without brackets."""

    scheme: str
    user: str
    """With a password, if any; the number of a tel URI."""
    host: str
    port: int | None
    parameters: Mapping[str, str]
    """By their names in lower case."""
    text: str

    @classmethod
    def parse(cls, text: str) -> "Uri":
        """The URI; InputError where it is not one."""
        if (match := _URI.fullmatch(text)) is not None:
            host = match["host"].lower().strip("[]")
            port = _port(match["port"])
            return cls(
                match["scheme"].lower(), match["user"] or "", host, port, split_parameters(match["parameters"]), text
            )
        if (match := _TEL.fullmatch(text)) is not None:
            return cls("tel", match["user"], "", None, split_parameters(match["parameters"]), text)
        raise InputError("not a sip, sips or tel URI")

    @property
    def transport(self) -> Transport:
        """The transport that it asks for."""
        named = self.parameters.get("transport", "").lower()
        if self.scheme == "sips" or named == "tls":
            return "tls"
        return "tcp" if named == "tcp" else "udp"

    @property
    def destination(self) -> "Destination":
        """Where requests to it are sent."""
        return Destination(self.transport, self.host, self.port or DEFAULT_PORTS[self.transport])

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Destination:
    """A transport, a host and a port."""

    transport: Transport
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.transport}:{host_port(self.host, self.port)}"


@dataclass(frozen=True)
class SipAddress:
    """A URI with the parameters of its header, such as its tag."""

    uri: Uri
    parameters: Mapping[str, str]

    @classmethod
    def parse(cls, value: str) -> "SipAddress":
        """The address of a From, To, Contact, Route or Refer-To header; InputError where it is none."""
        value = value.strip()
        if (match := _ADDRESS.fullmatch(value)) is not None:
            return cls(Uri.parse(match["uri"].strip()), split_parameters(match["parameters"]))
        bare, semicolon, parameters = value.partition(";")  # without brackets the parameters are the header's
        return cls(Uri.parse(bare.strip()), split_parameters(semicolon + parameters))

    @property
    def tag(self) -> str:
        return self.parameters.get("tag", "")


@dataclass(frozen=True)
class Via:
    """Where responses to a request are sent."""

    transport: str
    host: str
    port: int | None
    parameters: Mapping[str, str]

    @classmethod
    def parse(cls, value: str) -> "Via":
        """The value of a Via header; InputError where it is none."""
        match = _VIA.fullmatch(value.strip())
        if match is None:
            raise InputError("not a Via header")
        port, parameters = _port(match["port"]), split_parameters(match["parameters"])
        return cls(match["transport"].lower(), match["host"].lower().strip("[]"), port, parameters)

    @property
    def branch(self) -> str:
        return self.parameters.get("branch", "")


def host_port(host: str, port: int) -> str:
    """As it stands in a URI or a Via header."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_parameters(text: str) -> dict[str, str]:
    """The parameters of `;name=value;flag`; quotes around a value are removed."""
    found: dict[str, str] = {}
    for part in split_outside_quotes(text, ";"):
        name, _, value = part.partition("=")
        if name.strip():
            found[name.strip().lower()] = value.strip().strip('"')
    return found


def split_outside_quotes(text: str, separator: str) -> list[str]:
    """The parts of a list, whose quoted strings and <…> may hold the separator."""
    parts, begin, is_escaped, is_quoted, is_bracketed = [], 0, False, False, False
    for index, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif is_quoted and character == "\\":
            is_escaped = True
        elif character == '"':
            is_quoted = not is_quoted
        elif not is_quoted and character in "<>":
            is_bracketed = character == "<"
        elif character == separator and not is_quoted and not is_bracketed:
            parts.append(text[begin:index])
            begin = index + 1
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]


def _port(digits: str | None) -> int | None:
    if digits is None:
        return None
    port = int(digits)
    if not 0 < port < 65_536:
        raise InputError("not a port")
    return port
