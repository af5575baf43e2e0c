"""Vonage Voice API WebSockets: 16-bit PCM in binary messages of 20 ms, JSON events and commands in text messages."""

import msgspec
from msgspec import Struct, field

from vivavoce.server.realtime.audio_formats import PCM
from vivavoce.server.telephony.wire import (
    PACKET_SECONDS,
    Audio,
    CallEvent,
    Played,
    Started,
    Unknown,
    WireMessage,
    audio_format,
    decoded,
    digit_event,
)

ENCODINGS: dict[str, str] = {"audio/l16": PCM}


class Notice(Struct):
    mark: str = ""


class VonageMessage(Struct):
    """An event of Vonage; headers of the endpoint come as further fields of `websocket:connected`."""

    event: str
    content_type: str = field(name="content-type", default="")
    digit: str = ""
    payload: Notice = field(default_factory=Notice)


class Clear(Struct, tag_field="action", tag="clear"):
    """Drops the audio that was not played."""


class Notify(Struct, tag_field="action", tag="notify"):
    """Is answered with its payload when the audio before it was played."""

    payload: Notice


class VonageEndpoint:
    """A WebSocket endpoint of a Vonage call."""

    provider = "vonage"
    packet_seconds = PACKET_SECONDS
    can_clear = True

    def received(self, message: WireMessage) -> CallEvent | None:
        """The event of a message; binary messages are audio."""
        if isinstance(message, bytes):
            return Audio(message)
        content = decoded(message, VonageMessage)
        match content.event:
            case "websocket:connected":
                name, _, parameters = content.content_type.partition(";")
                rate = parameters.strip().removeprefix("rate=")
                return Started(audio_format(name.strip(), int(rate) if rate.isdecimal() else 0, ENCODINGS))
            case "websocket:dtmf":
                return digit_event(content.digit)
            case "websocket:notify":
                return Played(content.payload.mark)
            case "websocket:cleared":
                return None
        return Unknown()

    def audio(self, data: bytes) -> WireMessage:
        """A binary message."""
        return data

    def mark(self, name: str) -> WireMessage | None:
        """A `notify` command."""
        return msgspec.json.encode(Notify(Notice(name))).decode()

    def clear(self) -> WireMessage | None:
        """A `clear` command."""
        return msgspec.json.encode(Clear()).decode()

    def hang_up(self) -> WireMessage | None:
        """The endpoint ends with its socket."""
        return None
