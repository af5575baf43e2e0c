"""SIP messages (RFC 3261): parsed within limits, checked for the headers that every message has, and written.

Header values are kept as they were written, since a peer compares tags and branches byte by byte.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from vivavoce.errors import InputError
from vivavoce.server.sip.addresses import SipAddress, Uri, Via, split_outside_quotes

MAX_MESSAGE_BYTES = 16 << 10
MAX_HEADERS = 128
COMPACT_NAMES = {
    **{"i": "Call-ID", "m": "Contact", "e": "Content-Encoding", "l": "Content-Length", "c": "Content-Type"},
    **{"f": "From", "s": "Subject", "k": "Supported", "t": "To", "v": "Via", "r": "Refer-To", "b": "Referred-By"},
    **{"x": "Session-Expires", "o": "Event", "u": "Allow-Events", "y": "Identity"},
}
BRANCH_PREFIX = "z9hG4bK"
SDP = "application/sdp"
PHRASES = {
    **{100: "Trying", 180: "Ringing", 200: "OK", 202: "Accepted", 400: "Bad Request", 401: "Unauthorized"},
    **{403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout", 415: "Unsupported Media"},
    **{416: "Unsupported URI Scheme", 420: "Bad Extension", 422: "Session Interval Too Small", 480: "Unavailable"},
    **{481: "Call/Transaction Does Not Exist", 482: "Loop Detected", 483: "Too Many Hops", 486: "Busy Here"},
    **{
        487: "Request Terminated",
        488: "Not Acceptable Here",
        489: "Bad Event",
        491: "Request Pending",
        500: "Server Internal Error",
    },
    **{501: "Not Implemented", 503: "Service Unavailable", 505: "Version Not Supported", 600: "Busy Everywhere"},
    **{603: "Decline", 606: "Not Acceptable"},
}

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN = re.compile(r"[A-Za-z0-9.!%*_+`'~-]{1,64}")
_CSEQ = re.compile(r"([0-9]{1,10})\s+(\S+)")
_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*(?:;.*)?")

Headers = list[tuple[str, str]]


class SipMessage(ABC):
    """What requests and responses have in common."""

    def __init__(self, headers: Headers, body: bytes = b"") -> None:
        self.headers, self.body = headers, body

    @property
    @abstractmethod
    def start_line(self) -> str:
        """The first line, without its end."""
        ...

    def get(self, name: str) -> str | None:
        """The first header of this name."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), None)

    def all(self, name: str) -> list[str]:
        """The values of all headers of this name, of which each may be a list with commas."""
        lines = [value for each, value in self.headers if each.lower() == name.lower()]
        return [value for line in lines for value in split_outside_quotes(line, ",")]

    def tokens(self, name: str) -> set[str]:
        """The values of a header such as Supported, in lower case."""
        return {value.lower() for value in self.all(name)}

    def number(self, name: str) -> int | None:
        """A header that begins with a number, such as Expires; None without one. InputError where it has none."""
        value = self.get(name)
        if value is None:
            return None
        match = _NUMBER.fullmatch(value)
        if match is None:
            raise InputError(f"the header {name} has no number")
        return int(match[1])

    def add(self, name: str, value: str) -> None:
        self.headers.append((name, value))

    def set_body(self, body: bytes, content_type: str) -> None:
        self.body = body
        self.add("Content-Type", content_type)

    @cached_property
    def call_id(self) -> str:
        return self.get("Call-ID") or ""

    @cached_property
    def from_address(self) -> SipAddress:
        return SipAddress.parse(self.get("From") or "")

    @cached_property
    def to_address(self) -> SipAddress:
        return SipAddress.parse(self.get("To") or "")

    @cached_property
    def via(self) -> Via:
        """The topmost one."""
        return Via.parse(next(iter(self.all("Via")), ""))

    @cached_property
    def cseq(self) -> tuple[int, str]:
        match = _CSEQ.fullmatch(self.get("CSeq") or "")
        if match is None:
            raise InputError("the header CSeq is not a number and a method")
        return int(match[1]), match[2]

    @cached_property
    def contact(self) -> Uri | None:
        """The first address of the Contact header."""
        first = next(iter(self.all("Contact")), None)
        return None if first is None or first == "*" else SipAddress.parse(first).uri

    @property
    def sdp(self) -> str | None:
        """The SDP of the body; None where there is none. InputError where the body is something else."""
        if not self.body:
            return None
        kind = (self.get("Content-Type") or SDP).partition(";")[0].strip().lower()
        if kind != SDP:
            raise InputError(f"a body of the type {kind[:40]!r} is not supported")
        return self.body.decode("utf8", "replace")

    def encode(self) -> bytes:
        """The message as it is sent."""
        lines = [self.start_line, *(f"{name}: {value}" for name, value in self.headers)]
        head = "\r\n".join((*lines, f"Content-Length: {len(self.body)}", "", ""))
        return head.encode("utf8", "surrogateescape") + self.body


class SipRequest(SipMessage):
    """A SIP request."""

    def __init__(self, method: str, uri: Uri, headers: Headers, body: bytes = b"") -> None:
        super().__init__(headers, body)
        self.method, self.uri = method, uri

    @property
    def start_line(self) -> str:
        return f"{self.method} {self.uri} SIP/2.0"

    def response(self, code: int, to_tag: str = "", headers: Sequence[tuple[str, str]] = ()) -> "SipResponse":
        """A response with the headers that are copied from the request; `to_tag` is added where it has none."""
        copied = [(name, value) for name, value in self.headers if name.lower() in ("via", "from", "call-id", "cseq")]
        to = self.get("To") or ""
        copied.append(("To", f"{to};tag={to_tag}" if to_tag and not self.to_address.tag else to))
        return SipResponse(code, PHRASES.get(code, "Unknown"), [*copied, *headers])


class SipResponse(SipMessage):
    """A SIP response."""

    def __init__(self, code: int, phrase: str, headers: Headers, body: bytes = b"") -> None:
        super().__init__(headers, body)
        self.code, self.phrase = code, phrase

    @property
    def start_line(self) -> str:
        return f"SIP/2.0 {self.code} {self.phrase}"

    @property
    def is_final(self) -> bool:
        return self.code >= 200

    @property
    def is_success(self) -> bool:
        return 200 <= self.code < 300


def parse(data: bytes) -> SipRequest | SipResponse:
    """A message whose routing headers are valid; InputError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise InputError(f"a SIP message has at most {MAX_MESSAGE_BYTES} bytes")
    head, separator, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
    if not separator:
        raise InputError("a SIP message without an empty line after its headers")
    lines = re.sub(r"\r\n[ \t]+", " ", head.decode("utf8", "surrogateescape")).split("\r\n")
    headers = [_header(line) for line in lines[1:]]
    if len(headers) > MAX_HEADERS:
        raise InputError(f"a SIP message has at most {MAX_HEADERS} headers")
    message = _message(lines[0], headers)
    length = message.number("Content-Length")
    if length is not None and length > len(body):
        raise InputError("the body is shorter than its Content-Length")
    message.body = body if length is None else body[:length]
    message.headers = [each for each in headers if each[0].lower() != "content-length"]  # written by `encode`
    _check(message)
    return message


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    name = name.strip()
    if not colon or not _TOKEN.fullmatch(name) or _CONTROL.search(value):
        raise InputError("a header is malformed")
    return COMPACT_NAMES.get(name.lower(), name), value.strip()


def _message(line: str, headers: Headers) -> SipRequest | SipResponse:
    parts = line.split(" ", 2)
    if len(parts) < 3 or _CONTROL.search(line):
        raise InputError("neither a request nor a response")
    if parts[0] == "SIP/2.0":
        if not re.fullmatch("[1-6][0-9][0-9]", parts[1]):
            raise InputError("a response without a status code")
        return SipResponse(int(parts[1]), parts[2], headers)
    if parts[2] != "SIP/2.0" or not _TOKEN.fullmatch(parts[0]):
        raise InputError("neither a request nor a response")
    return SipRequest(parts[0], Uri.parse(parts[1]), headers)


def _check(message: SipRequest | SipResponse) -> None:
    """Raise InputError where a header that every message has is missing or malformed."""
    number, method = message.cseq
    if number >= 1 << 31 or (isinstance(message, SipRequest) and method != message.method):
        raise InputError("the header CSeq does not belong to the request")
    if not message.call_id or not message.from_address.tag or not message.via.branch:
        raise InputError("a message without a Call-ID, a From tag or a Via branch")
    _ = message.to_address, message.contact


def new_branch() -> str:
    return BRANCH_PREFIX + secrets.token_hex(10)


def new_tag() -> str:
    return secrets.token_hex(8)


class StreamReader:
    """Cuts the bytes of a TCP connection into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete; InputError where the stream cannot be cut."""
        self._buffer += data
        messages = []
        while (size := self._message_bytes()) is not None and size <= len(self._buffer):
            messages.append(bytes(self._buffer[:size]))
            del self._buffer[:size]
        if len(self._buffer) > 2 * MAX_MESSAGE_BYTES:
            raise InputError(f"a SIP message has at most {MAX_MESSAGE_BYTES} bytes")
        return messages

    def _message_bytes(self) -> int | None:
        """The length of the first message; None where its headers are not complete."""
        while self._buffer[:2] == b"\r\n":  # a keep-alive
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        lengths = re.findall(
            rb"\r\n(?:content-length|l)[ \t]*:[ \t]*([0-9]{1,9})[ \t]*(?=\r\n)", self._buffer[: end + 2], re.I
        )
        if len(lengths) != 1:
            raise InputError("a SIP message over TCP has one Content-Length")
        return end + 4 + int(lengths[0])
