"""Asterisk's channel driver `chan_websocket`: audio in binary messages, control messages as JSON or plain text."""

import msgspec
from msgspec import Struct

from vivavoce.server.realtime.audio_formats import A_LAW, MU_LAW, PCM
from vivavoce.server.telephony import wire

CODECS: dict[str, tuple[str, int]] = {
    **{"ulaw": (MU_LAW, 8_000), "alaw": (A_LAW, 8_000), "slin": (PCM, 8_000)},
    **{"slin16": (PCM, 16_000), "slin24": (PCM, 24_000), "slin48": (PCM, 48_000)},
}
WITHOUT_EFFECT = {"MEDIA_XON", "MEDIA_XOFF", "STATUS", "QUEUE_DRAINED", "MEDIA_BUFFERING_COMPLETED"}


class ControlMessage(Struct):
    """An event of Asterisk."""

    event: str
    format: str = ""
    channel_id: str = ""
    connection_id: str = ""
    digit: str = ""
    correlation_id: str = ""


class Command(Struct, omit_defaults=True):
    """A command to Asterisk."""

    command: str
    correlation_id: str = ""


class AsteriskWebSocket:
    """A WebSocket channel; it answers in the format of Asterisk's first control message."""

    provider = "asterisk"
    packet_seconds = wire.PACKET_SECONDS
    can_clear = True

    def __init__(self) -> None:
        self._is_json = False

    def received(self, message: wire.WireMessage) -> wire.CallEvent | None:
        """The event of a message; binary messages are audio."""
        if isinstance(message, bytes):
            return wire.Audio(message)
        content = wire.decoded(message, ControlMessage) if message.lstrip().startswith("{") else _plain(message)
        match content.event:
            case "MEDIA_START":
                self._is_json = message.lstrip().startswith("{")
                encodings = {name: kind for name, (kind, _) in CODECS.items()}
                rate = CODECS.get(content.format.lower(), ("", 0))[1]
                return wire.Started(
                    wire.audio_format(content.format, rate, encodings), content.channel_id, content.connection_id
                )
            case "DTMF_END":
                return wire.digit_event(content.digit)
            case "MEDIA_MARK_PROCESSED":
                return wire.Played(content.correlation_id)
            case event if event in WITHOUT_EFFECT:
                return None
        return wire.Unknown()

    def audio(self, data: bytes) -> wire.WireMessage:
        """A binary message."""
        return data

    def mark(self, name: str) -> wire.WireMessage | None:
        """`MARK_MEDIA`, which Asterisk has since it has JSON control messages."""
        return self._command("MARK_MEDIA", name) if self._is_json else None

    def clear(self) -> wire.WireMessage | None:
        """`FLUSH_MEDIA`."""
        return self._command("FLUSH_MEDIA")

    def hang_up(self) -> wire.WireMessage | None:
        """`HANGUP`."""
        return self._command("HANGUP")

    def _command(self, name: str, correlation_id: str = "") -> str:
        return msgspec.json.encode(Command(name, correlation_id)).decode() if self._is_json else name


def _plain(message: str) -> ControlMessage:
    """A control message of one line: its name, and its fields as `name:value`."""
    name, *fields = message.split() or [""]
    values = {key: value for key, _, value in (each.partition(":") for each in fields)}
    known = {key: values[key] for key in ControlMessage.__struct_fields__ if key in values and key != "event"}
    return ControlMessage(name, **known)
