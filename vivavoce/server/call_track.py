"""The track a caller hears: packets of 20 ms by absolute deadlines, silence where nothing is said."""

import asyncio
from fractions import Fraction
from typing import Any

import numpy as np

from vivavoce.audio.pcm import float_to_pcm16
from vivavoce.dialogue.interface import Samples
from vivavoce.server.formats import resampler
from vivavoce.server.lane import OutputPiece
from vivavoce.server.wire_reply import WireReply

RATE = 48_000
PACKET = RATE // 50
FADE = RATE // 200  # 5 ms at the edges of a gap


class CallAudioSink:
    """Sound of replies, on its way to the packets."""

    def __init__(self) -> None:
        self._waiting: Samples = np.zeros(0, np.float32)
        self._is_sounding = False
        self._is_ending = False
        self._resampler = resampler(RATE, RATE)
        self._state = self._resampler.initial_state()

    def start(self, rate: int) -> None:
        """The rate at which sound will come."""
        self._resampler = resampler(rate, RATE)
        self._state = self._resampler.initial_state()

    def say(self, reply: WireReply, piece: OutputPiece) -> None:
        """This sound comes next."""
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


def new_track(speaker: CallAudioSink) -> Any:
    """An aiortc track that plays a speaker."""
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
            wait = self._began + self._sent * PACKET / RATE - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                self._sent += int(-wait * RATE / PACKET)
            frame = av.AudioFrame.from_ndarray(float_to_pcm16(speaker.packet())[None], format="s16", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._sent * PACKET
            self._sent += 1
            return frame

    return CallTrack()
