"""Audio of responses between the event log and the wire: logged as samples, encoded where the connection is."""

import struct
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from vivavoce.dialogue.items import Samples
from vivavoce.server.realtime.audio_formats import FormatWriter, OpusWriter, SoundWriter, WireFormat
from vivavoce.server.realtime.server_events import OutputAudioDelta, encode
from vivavoce.server.realtime.session_types import FormatName, SampleRate

OPUS: Final = "opus"
Encoding = FormatName | Literal["opus"]

AUDIO_FRAME = 1
FRAME_HEADER = struct.Struct("<BBHI")
"""Kind (1: audio), version (0), output index, position in the item in ms; then a u32 event number, and the audio."""
OPUS_PACKETS_PER_SECOND = 50
MAX_STREAMS = 4  # items encoded at the same time; the encoder of an item that was cut is dropped as the oldest


class AudioHead(NamedTuple):
    """What the audio of one item has in common."""

    response_id: str
    item_id: str
    output_index: int
    rate: int
    """Of the samples."""
    encoding: Encoding
    wire_rate: SampleRate
    """Of the encoded audio; Opus has one of its own."""
    is_binary: bool


class AudioPiece(Struct, frozen=True, gc=False):
    """A piece of an item's audio; its fields are those of its message to a door process."""

    head: AudioHead
    start: int
    """Samples of the item before this piece."""
    samples: bytes
    """Mono float32 samples."""
    is_end: bool

    @property
    def numbers(self) -> int:
        """Event numbers that the piece takes: the largest number of messages it is encoded to."""
        if self.head.encoding != OPUS:
            return 1
        if not self.samples:
            return 2  # the rest of the resampler may complete one packet and begin another
        return ceil(len(self.samples) // 4 * OPUS_PACKETS_PER_SECOND / self.head.rate)

    @property
    def is_silent(self) -> bool:
        """Whether it is encoded to nothing: the end of audio that is not resampled."""
        return not self.samples and self.head.encoding != OPUS and self.head.rate == self.head.wire_rate

    @property
    def starts_packet(self) -> bool:
        """Whether an encoder that starts here cuts the audio into the same packets as one that started earlier."""
        return self.start * OPUS_PACKETS_PER_SECOND % self.head.rate == 0


@dataclass
class AudioEventEncoder:
    """Encodes the audio pieces of one connection: as events, or as binary frames."""

    tag: str
    """Of the session's event ids."""
    after: int
    """The number of the last event that the client has: nothing up to it is sent again."""
    _writers: dict[str, SoundWriter] = field(default_factory=dict)  # by item

    def messages(self, last: int, payload: str | AudioPiece) -> list[str | bytes]:
        """The messages of a log entry that the client does not have. `last` is the last of its event numbers."""
        if isinstance(payload, str):
            return [payload] if last > self.after else []
        return self._encode(last, payload)

    def _encode(self, last: int, piece: AudioPiece) -> list[str | bytes]:
        head = piece.head
        writer = self._writers.get(head.item_id)
        if writer is None:
            if len(self._writers) == MAX_STREAMS:
                del self._writers[next(iter(self._writers))]
            writer = self._writers[head.item_id] = _new_writer(head)
        samples: Samples = np.frombuffer(piece.samples, np.float32)
        packets = writer.write(samples) if len(samples) else []
        if piece.is_end:
            packets += writer.flush()
            del self._writers[head.item_id]
        first = last + 1 - min(len(packets), piece.numbers)
        numbered = [(min(first + index, last), packet) for index, packet in enumerate(packets)]
        return [self._message(number, piece, packet) for number, packet in numbered if number > self.after]

    def _message(self, number: int, piece: AudioPiece, data: bytes) -> str | bytes:
        head = piece.head
        if not head.is_binary:
            event_id = f"event_{self.tag}_{number}"
            event = OutputAudioDelta(head.response_id, head.item_id, head.output_index, delta=data, event_id=event_id)
            return encode(event).decode()
        start_ms = round(piece.start / head.rate * 1000)
        return FRAME_HEADER.pack(AUDIO_FRAME, 0, head.output_index, start_ms) + number.to_bytes(4, "little") + data


def _new_writer(head: AudioHead) -> SoundWriter:
    if head.encoding == OPUS:
        return OpusWriter(head.rate)
    return FormatWriter(head.rate, WireFormat(head.encoding, head.wire_rate))
