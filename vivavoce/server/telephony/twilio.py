"""Twilio Media Streams, bidirectional (`<Connect><Stream>`): µ-law at 8 kHz."""

from msgspec import Struct

from vivavoce.server.realtime.audio_formats import MU_LAW
from vivavoce.server.telephony.event_stream import EventStream, StreamMessage
from vivavoce.server.telephony.wire import Started, WireMessage, audio_format, decoded, required

ENCODINGS: dict[str, str] = {"audio/x-mulaw": MU_LAW}


class TwilioMediaFormat(Struct, rename="camel"):
    encoding: str
    sample_rate: int = 8_000


class TwilioStart(Struct, rename="camel"):
    media_format: TwilioMediaFormat
    call_sid: str = ""


class TwilioMessage(StreamMessage, rename="camel"):
    stream_sid: str = ""
    start: TwilioStart | None = None


class TwilioStream(EventStream):
    """When its socket is closed, the call goes on with the next TwiML verb; without one it ends."""

    provider = "twilio"
    stream_field = "streamSid"

    def decode(self, message: WireMessage) -> TwilioMessage:
        """A message of Twilio."""
        return decoded(message, TwilioMessage)

    def started(self, message: TwilioMessage) -> Started:
        """The event of a `start` message."""
        start = required(message.start, "start")
        format = audio_format(start.media_format.encoding, start.media_format.sample_rate, ENCODINGS)
        return Started(format, start.call_sid, message.stream_sid)
