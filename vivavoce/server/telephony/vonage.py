"""Vonage Voice API WebSockets: 16-bit PCM in binary messages of 20 ms, JSON events and commands in text messages."""

import msgspec
from msgspec import Struct, field

from vivavoce.server.realtime.audio_formats import PCM
from vivavoce.server.telephony import wire

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
    packet_seconds = wire.PACKET_SECONDS
    can_clear = True

    def received(self, message: wire.WireMessage) -> wire.CallEvent | None:
        """The event of a message; binary messages are audio."""
        if isinstance(message, bytes):
            return wire.Audio(message)
        content = wire.decoded(message, VonageMessage)
        match content.event:
            case "websocket:connected":
                name, _, parameters = content.content_type.partition(";")
                rate = parameters.strip().removeprefix("rate=")
                return wire.Started(wire.audio_format(name.strip(), int(rate) if rate.isdecimal() else 0, ENCODINGS))
            case "websocket:dtmf":
                return wire.digit_event(content.digit)
            case "websocket:notify":
                return wire.Played(content.payload.mark)
            case "websocket:cleared":
                return None
        return wire.Unknown()

    def audio(self, data: bytes) -> wire.WireMessage:
        """A binary message."""
        return data

    def mark(self, name: str) -> wire.WireMessage | None:
        """A `notify` command."""
        return msgspec.json.encode(Notify(Notice(name))).decode()

    def clear(self) -> wire.WireMessage | None:
        """A `clear` command."""
        return msgspec.json.encode(Clear()).decode()

    def hang_up(self) -> wire.WireMessage | None:
        """The endpoint ends with its socket."""
        return None
