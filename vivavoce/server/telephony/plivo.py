"""Plivo audio streams (`<Stream bidirectional="true">`): JSON with base64 µ-law or 16-bit PCM."""

import msgspec
from msgspec import Struct

from vivavoce.server.realtime.audio_formats import MU_LAW, PCM, WireFormat
from vivavoce.server.telephony import wire
from vivavoce.server.telephony.event_stream import Dtmf, Media

ENCODINGS: dict[str, str] = {"audio/x-mulaw": MU_LAW, "audio/x-l16": PCM}


class PlivoMediaFormat(Struct, rename="camel"):
    encoding: str
    sample_rate: int = 8_000


class PlivoStart(Struct, rename="camel"):
    media_format: PlivoMediaFormat
    call_id: str = ""
    stream_id: str = ""


class PlivoMessage(Struct):
    """A message of Plivo; each event has one of the parts."""

    event: str
    start: PlivoStart | None = None
    media: Media | None = None
    dtmf: Dtmf | None = None
    name: str = ""


class OutgoingMedia(Struct, rename="camel"):
    content_type: str
    sample_rate: int
    payload: bytes


class PlayAudio(Struct, tag_field="event", tag="playAudio"):
    media: OutgoingMedia


class PlivoCheckpoint(Struct, tag_field="event", tag="checkpoint", rename="camel"):
    stream_id: str
    name: str


class ClearAudio(Struct, tag_field="event", tag="clearAudio", rename="camel"):
    stream_id: str


class PlivoStream:
    """A Plivo stream."""

    provider = "plivo"
    packet_seconds = wire.PACKET_SECONDS
    can_clear = True

    def __init__(self) -> None:
        self._stream = ""
        self._format = WireFormat(MU_LAW, 8_000)

    def received(self, message: wire.WireMessage) -> wire.CallEvent | None:
        """The event of a message."""
        content = wire.decoded(message, PlivoMessage)
        match content.event:
            case "start":
                start = wire.required(content.start, "start")
                self._stream = start.stream_id
                self._format = wire.audio_format(start.media_format.encoding, start.media_format.sample_rate, ENCODINGS)
                return wire.Started(self._format, start.call_id, self._stream)
            case "media":
                media = wire.required(content.media, "media")
                return wire.Audio(media.payload) if media.track == "inbound" else None
            case "playedStream":
                return wire.Played(content.name)
            case "dtmf":
                return wire.digit_event(wire.required(content.dtmf, "dtmf").digit)
            case "stop":
                return wire.CallEnded()
        return None if content.event == "clearedAudio" else wire.Unknown()

    def audio(self, data: bytes) -> wire.WireMessage:
        """A `playAudio` message."""
        name = "audio/x-l16" if self._format.type == PCM else "audio/x-mulaw"
        return _encoded(PlayAudio(OutgoingMedia(name, self._format.rate, data)))

    def mark(self, name: str) -> wire.WireMessage | None:
        """A `checkpoint` message."""
        return _encoded(PlivoCheckpoint(self._stream, name))

    def clear(self) -> wire.WireMessage | None:
        """A `clearAudio` message."""
        return _encoded(ClearAudio(self._stream))

    def hang_up(self) -> wire.WireMessage | None:
        """The stream ends with its socket."""
        return None


def _encoded(message: PlayAudio | PlivoCheckpoint | ClearAudio) -> str:
    return msgspec.json.encode(message).decode()
