"""Telnyx media streaming, bidirectional (`stream_bidirectional_mode: rtp`): G.711 at 8 kHz."""

from msgspec import Struct

from vivavoce.server.realtime.audio_formats import A_LAW, MU_LAW
from vivavoce.server.telephony.event_stream import EventStream, StreamMessage
from vivavoce.server.telephony.wire import CallEvent, Started, WireMessage, audio_format, decoded, required
from vivavoce.server.wire import WireError

ENCODINGS: dict[str, str] = {"pcmu": MU_LAW, "pcma": A_LAW}


class TelnyxMediaFormat(Struct):
    encoding: str
    sample_rate: int = 8_000


class TelnyxStart(Struct):
    media_format: TelnyxMediaFormat
    call_control_id: str = ""


class TelnyxProblem(Struct):
    code: int = 0


class TelnyxMessage(StreamMessage):
    stream_id: str = ""
    start: TelnyxStart | None = None
    payload: TelnyxProblem | None = None


class TelnyxStream(EventStream):
    """Outgoing messages are for the stream of the socket, without its id."""

    provider = "telnyx"

    def event_of(self, content: TelnyxMessage) -> CallEvent | None:
        """The event of a decoded message; Telnyx also reports errors."""
        if content.event == "error":
            code = (content.payload or TelnyxProblem()).code
            raise WireError(f"Telnyx reports the error {code}", "provider_error")
        return super().event_of(content)

    def decode(self, message: WireMessage) -> TelnyxMessage:
        """A message of Telnyx."""
        return decoded(message, TelnyxMessage)

    def started(self, message: TelnyxMessage) -> Started:
        """The event of a `start` message."""
        start = required(message.start, "start")
        format = audio_format(start.media_format.encoding, start.media_format.sample_rate, ENCODINGS)
        return Started(format, start.call_control_id, message.stream_id)
