"""What the message shapes of all providers have in common: events of a call, and the interface of a shape.

A shape has no sockets: it turns messages into events, and audio and commands into messages.
"""

from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from vivavoce.server.realtime.audio_formats import A_LAW, MU_LAW, PCM, WireFormat
from vivavoce.server.realtime.session_types import SampleRate
from vivavoce.server.wire import WireError

Shape = TypeVar("Shape")

WireMessage: TypeAlias = str | bytes
"""A text or a binary message; on TCP, a frame."""

DIGITS = frozenset("0123456789*#ABCD")
PCM_RATES: dict[int, SampleRate] = {8_000: 8_000, 16_000: 16_000, 24_000: 24_000, 48_000: 48_000}
PACKET_SECONDS = 0.02


class Started(NamedTuple):
    """The call has started."""

    format: WireFormat
    """Of the audio in both directions."""
    call_id: str = ""
    """The provider's name of the call."""
    stream_id: str = ""


class Audio(NamedTuple):
    """Audio of the caller."""

    data: bytes


class Digit(NamedTuple):
    """The caller has pressed a key."""

    digit: str


class Played(NamedTuple):
    """The audio before a mark has been played, or was dropped by a clear."""

    mark: str


class CallEnded(NamedTuple):
    """The caller has hung up, or the provider has stopped the stream."""


class Unknown(NamedTuple):
    """A well-formed message that the shape does not know; providers add new ones."""


CallEvent: TypeAlias = Started | Audio | Digit | Played | CallEnded | Unknown


class MediaWire(Protocol):
    """The message shape of one provider, for one call."""

    provider: str
    packet_seconds: float
    """Length of the audio in one outgoing message; the last one of a reply is padded with silence."""
    can_clear: bool
    """Whether the provider buffers audio and drops it when it is cleared."""

    def received(self, message: WireMessage) -> CallEvent | None:
        """The event of a message, None where it has none; WireError for a malformed message."""
        ...

    def audio(self, data: bytes) -> WireMessage:
        """A message that plays audio."""
        ...

    def mark(self, name: str) -> WireMessage | None:
        """A message that is answered once the audio before it was played; None: the provider has no marks."""
        ...

    def clear(self) -> WireMessage | None:
        """A message that drops the audio that was not played; None: the provider cannot do so."""
        ...

    def hang_up(self) -> WireMessage | None:
        """A message that ends the call; None: closing the connection does."""
        ...


def decoded(message: WireMessage, shape: type[Shape]) -> Shape:
    """The JSON object of a text message; numbers may be strings. WireError where it does not have the shape."""
    if isinstance(message, bytes):
        raise WireError("a binary message on a stream of JSON messages", "invalid_message")
    try:
        return msgspec.json.decode(message, type=shape, strict=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:  # the message does not quote the audio
        raise WireError(f"a message is malformed: {error}", "invalid_message") from None


def required(value: Shape | None, name: str) -> Shape:
    """A part of a message that must be present."""
    if value is None:
        raise WireError(f"a message has no {name!r}", "invalid_message")
    return value


def digit_event(digit: str) -> Digit:
    """The event of a key; WireError for what no telephone has."""
    if digit.upper() not in DIGITS:
        raise WireError("a DTMF digit is one of 0-9, *, # and A-D", "invalid_message")
    return Digit(digit.upper())


def audio_format(encoding: str, rate: int, encodings: dict[str, str]) -> WireFormat:
    """The format that a provider calls `encoding`; WireError for a codec that is not supported."""
    kind = encodings.get(encoding.lower())
    if kind == MU_LAW and rate == 8_000:
        return WireFormat(MU_LAW, 8_000)
    if kind == A_LAW and rate == 8_000:
        return WireFormat(A_LAW, 8_000)
    if kind == PCM and rate in PCM_RATES:
        return WireFormat(PCM, PCM_RATES[rate])
    known = ", ".join(encodings)
    raise WireError(f"the codec {encoding[:40]!r} at {rate} Hz is not supported; use {known}", "unsupported_codec")
