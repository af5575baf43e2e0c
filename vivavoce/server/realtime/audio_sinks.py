"""Where the audio of responses goes: base64 in events, binary frames, or packets on a WebRTC track."""

import asyncio
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from vivavoce.audio.io import float_to_pcm16
from vivavoce.dialogue.events import Samples
from vivavoce.server.realtime.audio_formats import FormatWriter, OpusWriter, SoundWriter, resampler
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.output import OutputPiece
from vivavoce.server.realtime.response import ResponseEncoder
from vivavoce.server.realtime.session_config import output_format
from vivavoce.server.realtime.session_types import Binary

AUDIO_FRAME = 1
FRAME_HEADER = struct.Struct("<BBHI")
"""Kind (1: audio), version (0), output index, milliseconds into the item; then a u32 event number, and the audio."""

CALL_RATE = 48_000
PACKET = CALL_RATE // 50
FADE = CALL_RATE // 200  # 5 ms at the edges of a gap


class AudioSink(Protocol):
    """Takes the audio of responses when it is to go out."""

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Send a piece now."""
        ...

    def clear(self) -> None:
        """Drop what was not played."""
        ...


@dataclass
class ItemAudioStream:
    """The encoder of one item's audio."""

    writer: SoundWriter
    seconds: float = 0.0


@dataclass
class WebSocketOutput:
    """Audio into the event log. Binary frames are only for replies of the conversation, one at a time."""

    log: EventLog
    rate: int
    binary: Binary | None = None
    _streams: dict[str, ItemAudioStream] = field(default_factory=dict)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Encode a piece and log it."""
        stream = self._streams.get(piece.item)
        if stream is None:
            stream = self._streams[piece.item] = ItemAudioStream(self._writer(reply))
        packets = stream.writer.write(piece.samples) if len(piece.samples) else []
        if piece.is_end:
            packets += stream.writer.flush()
            del self._streams[piece.item]
        for packet in packets:
            self._send(reply, piece, packet, round(stream.seconds * 1000))
        stream.seconds += len(piece.samples) / self.rate

    def clear(self) -> None:
        """What waits in the writers is dropped."""
        self._streams.clear()

    def _writer(self, reply: ResponseEncoder) -> SoundWriter:
        if self._is_binary(reply) and self.binary == "opus":
            return OpusWriter(self.rate)
        return FormatWriter(self.rate, output_format(reply.session))

    def _is_binary(self, reply: ResponseEncoder) -> bool:
        return self.binary is not None and not reply.is_out_of_band

    def _send(self, reply: ResponseEncoder, piece: OutputPiece, data: bytes, start_ms: int) -> None:
        if not self._is_binary(reply):
            self.log.append(reply.audio(piece.item, data), is_sound=True)
            return
        header = FRAME_HEADER.pack(AUDIO_FRAME, 0, reply.open[piece.item].output_index, start_ms)
        self.log.append_frame(header, data)


class CallOutput:
    """Audio of responses as packets of 20 ms, silence where there is none."""

    def __init__(self) -> None:
        self._waiting: Samples = np.zeros(0, np.float32)
        self._is_sounding = False
        self._is_ending = False
        self._resampler = resampler(CALL_RATE, CALL_RATE)
        self._state = self._resampler.initial_state()

    def start(self, rate: int) -> None:
        """Set the rate of the pieces to come."""
        self._resampler = resampler(rate, CALL_RATE)
        self._state = self._resampler.initial_state()

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Queue a piece."""
        output, self._state = self._resampler.step(self._state, piece.samples[None])
        pieces = [self._waiting, output[0]]
        if piece.is_end:
            pieces.append(self._resampler.flush(self._state)[0])
            self._state = self._resampler.initial_state()
        self._waiting = np.concatenate(pieces)
        self._is_ending = piece.is_end

    def clear(self) -> None:
        """Drop what waits, but for a short fade."""
        self._waiting = self._waiting[:FADE]
        self._is_ending = True
        self._state = self._resampler.initial_state()

    def packet(self) -> Samples:
        """The next 20 ms. A piece that is not whole waits for its rest, unless none comes."""
        if len(self._waiting) < PACKET and not (self._is_ending and len(self._waiting)):
            self._is_sounding = False
            return np.zeros(PACKET, np.float32)
        samples, self._waiting = self._waiting[:PACKET].copy(), self._waiting[PACKET:]
        ramp = np.linspace(0, 1, min(FADE, len(samples)), dtype=np.float32)
        if not self._is_sounding:
            samples[: len(ramp)] *= ramp
        if self._is_ending and not len(self._waiting):
            samples[len(samples) - len(ramp) :] *= ramp[::-1]
        self._is_sounding = True
        return np.pad(samples, (0, PACKET - len(samples)))


def new_track(output: CallOutput) -> Any:
    """An aiortc track that plays this output."""
    import av
    from aiortc.mediastreams import MediaStreamTrack

    class CallTrack(MediaStreamTrack):
        kind = "audio"

        def __init__(self) -> None:
            super().__init__()
            self._began: float | None = None
            self._sent = 0

        async def recv(self) -> Any:
            """The next packet, at its time; slots missed in a stall are skipped, not sent in a burst."""
            loop = asyncio.get_running_loop()
            self._began = loop.time() if self._began is None else self._began
            wait = self._began + self._sent * PACKET / CALL_RATE - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                self._sent += int(-wait * CALL_RATE / PACKET)
            frame = av.AudioFrame.from_ndarray(float_to_pcm16(output.packet())[None], format="s16", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = CALL_RATE, Fraction(1, CALL_RATE), self._sent * PACKET
            self._sent += 1
            return frame

    return CallTrack()
