"""The shape that Twilio, Telnyx and Exotel share: JSON events with base64 audio; their fields differ in names."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from vivavoce.server.telephony import wire


class Media(Struct):
    payload: bytes
    track: str = "inbound"


class StreamMark(Struct):
    name: str


class Dtmf(Struct):
    digit: str


class StreamMessage(Struct):
    """A message of the provider; each event has one of the parts. Providers add `start` and the id of the stream."""

    event: str
    media: Media | None = None
    mark: StreamMark | None = None
    dtmf: Dtmf | None = None


class EventStream(ABC):
    """A stream of one call."""

    provider: str
    packet_seconds = wire.PACKET_SECONDS
    can_clear = True
    stream_field: ClassVar[str | None] = None
    """The name of the stream's id in outgoing messages."""

    def __init__(self) -> None:
        self._stream = ""

    @abstractmethod
    def decode(self, message: wire.WireMessage) -> StreamMessage:
        """The message, with the fields of the provider."""
        ...

    @abstractmethod
    def started(self, message: Any) -> wire.Started:
        """The event of a `start` message."""
        ...

    def received(self, message: wire.WireMessage) -> wire.CallEvent | None:
        """The event of a message."""
        return self.event_of(self.decode(message))

    def event_of(self, content: Any) -> wire.CallEvent | None:
        """The event of a decoded message."""
        match content.event:
            case "start":
                started = self.started(content)
                self._stream = started.stream_id
                return started
            case "media":
                media = wire.required(content.media, "media")
                return wire.Audio(media.payload) if media.track == "inbound" else None
            case "mark":
                return wire.Played(wire.required(content.mark, "mark").name)
            case "dtmf":
                return wire.digit_event(wire.required(content.dtmf, "dtmf").digit)
            case "stop":
                return wire.CallEnded()
        return None if content.event == "connected" else wire.Unknown()

    def audio(self, data: bytes) -> wire.WireMessage:
        """A `media` message."""
        return self._message("media", media={"payload": data})

    def mark(self, name: str) -> wire.WireMessage | None:
        """A `mark` message."""
        return self._message("mark", mark={"name": name})

    def clear(self) -> wire.WireMessage | None:
        """A `clear` message. Some providers answer it with all marks that wait."""
        return self._message("clear")

    def hang_up(self) -> wire.WireMessage | None:
        """The stream ends with its socket."""
        return None

    def _message(self, event: str, **parts: dict[str, bytes] | dict[str, str]) -> str:
        stream = {} if self.stream_field is None else {self.stream_field: self._stream}
        return msgspec.json.encode({"event": event, **stream, **parts}).decode()
