"""Exotel AgentStream (the Voicebot applet): 16-bit PCM, little-endian, in messages of 100 ms."""

from msgspec import Struct, field

from vivavoce.server.realtime.audio_formats import PCM
from vivavoce.server.telephony.event_stream import EventStream, StreamMessage
from vivavoce.server.telephony.wire import Started, WireMessage, audio_format, decoded, required


class ExotelMediaFormat(Struct):
    """Its `encoding` has had several names; the audio is always 16-bit PCM."""

    sample_rate: int = 8_000


class ExotelStart(Struct):
    media_format: ExotelMediaFormat = field(default_factory=ExotelMediaFormat)
    call_sid: str = ""


class ExotelMessage(StreamMessage):
    stream_sid: str = ""
    start: ExotelStart | None = None


class ExotelStream(EventStream):
    """The applet ends with its socket."""

    provider = "exotel"
    packet_seconds = 0.1  # Exotel documents gaps for smaller messages
    stream_field = "stream_sid"

    def decode(self, message: WireMessage) -> ExotelMessage:
        """A message of Exotel."""
        return decoded(message, ExotelMessage)

    def started(self, message: ExotelMessage) -> Started:
        """The event of a `start` message."""
        start = required(message.start, "start")
        format = audio_format("pcm", start.media_format.sample_rate, {"pcm": PCM})
        return Started(format, start.call_sid, message.stream_sid)
