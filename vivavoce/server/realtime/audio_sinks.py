"""Where the sound of replies goes on a socket: base64 in events, or binary frames."""

import base64
import struct
from dataclasses import dataclass, field
from typing import Any

from vivavoce.server.realtime.audio_formats import FormatWriter, OpusWriter, SoundWriter
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.output import OutputPiece
from vivavoce.server.wire_reply import WireReply
from vivavoce.server.wire_settings import output_format

SOUND_FRAME = 1
FRAME_HEADER = struct.Struct("<BBHI")
"""Kind (1: sound), version (0), output index, milliseconds into the item; then a u32 event number, and the sound."""


@dataclass
class VoiceSelection:
    """The sound of one item on its way."""

    writer: SoundWriter
    seconds: float = 0.0


@dataclass
class SocketAudioSink:
    """Sound into the journal. Binary frames are only for replies of the conversation, one at a time."""

    journal: EventLog
    rate: int
    binary: str | None = None
    _voices: dict[str, VoiceSelection] = field(default_factory=dict)

    def say(self, reply: WireReply, piece: OutputPiece) -> None:
        """The sound in its format, told now."""
        voice = self._voices.get(piece.item)
        if voice is None:
            voice = self._voices[piece.item] = VoiceSelection(self._writer(reply))
        packets = voice.writer.write(piece.samples) if len(piece.samples) else []
        if piece.is_end:
            packets += voice.writer.flush()
            del self._voices[piece.item]
        for packet in packets:
            self._tell(reply, piece, packet, round(voice.seconds * 1000))
        voice.seconds += len(piece.samples) / self.rate

    def clear(self) -> None:
        """What waits in the writers is dropped."""
        self._voices.clear()

    def _writer(self, reply: WireReply) -> SoundWriter:
        if self._is_binary(reply) and self.binary == "opus":
            return OpusWriter(self.rate)
        return FormatWriter(self.rate, output_format(reply.session))

    def _is_binary(self, reply: WireReply) -> bool:
        return self.binary is not None and not reply.is_out_of_band

    def _tell(self, reply: WireReply, piece: OutputPiece, data: bytes, start_ms: int) -> None:
        if not self._is_binary(reply):
            event: dict[str, Any] = reply.sound(piece.item, base64.b64encode(data).decode("ascii"))
            self.journal.append(event, is_sound=True)
            return
        header = FRAME_HEADER.pack(SOUND_FRAME, 0, reply.open[piece.item].output_index, start_ms)
        self.journal.append_frame(header, data)
