"""What is sent to a peer: queued reply audio as payloads of 20 ms, with silence between replies."""

from collections import deque
from math import ceil

import numpy as np

from vivavoce.dialogue.items import Samples
from vivavoce.server.realtime.audio_formats import resampler
from vivavoce.server.rtp.codecs import FRAMES_PER_SECOND, RtpCodec, new_encoder

FADE_SECONDS = 0.005  # of the audio after a cut


class ReplyQueue:
    """Samples that are not sent yet, in order."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.taken = 0
        """Samples that were sent."""
        self._pieces: deque[Samples] = deque()
        self._queued = 0

    @property
    def queued_seconds(self) -> float:
        """Seconds that are not sent yet."""
        return self._queued / self.rate

    @property
    def played_seconds(self) -> float:
        """Seconds that were sent."""
        return self.taken / self.rate

    def write(self, samples: Samples) -> None:
        """Queue samples."""
        if len(samples):
            self._pieces.append(np.asarray(samples, np.float32))
            self._queued += len(samples)

    def take(self, count: int) -> Samples:
        """Up to `count` samples."""
        taken: list[Samples] = []
        while count > 0 and self._pieces:
            piece = self._pieces.popleft()
            taken.append(piece[:count])
            if len(piece) > count:
                self._pieces.appendleft(piece[count:])
            count -= len(taken[-1])
        samples = np.concatenate(taken) if taken else np.zeros(0, np.float32)
        self._queued -= len(samples)
        self.taken += len(samples)
        return samples

    def clear(self) -> float:
        """Drop the queue except for a short fade-out, and return the seconds that were dropped."""
        fade = self.take(round(FADE_SECONDS * self.rate))
        self.taken -= len(fade)
        dropped = self.queued_seconds
        self._pieces.clear()
        self._queued = 0
        self.write(fade * np.linspace(1, 0, len(fade), dtype=np.float32))
        return dropped


class Output:
    """Encodes the queue with one codec."""

    def __init__(self, codec: RtpCodec, queue: ReplyQueue) -> None:
        self._queue = queue
        self._frame = codec.sample_rate // FRAMES_PER_SECOND
        self._encode = new_encoder(codec)
        self._silent_frame = np.zeros(self._frame, np.float32)
        self._silence = self._encode(self._silent_frame) if codec.is_stateless else b""
        self.frame: Samples = self._silent_frame
        """The last 20 ms, before they were encoded."""
        self._resampler = resampler(queue.rate, codec.sample_rate)
        self._ratio = queue.rate / codec.sample_rate
        self._state = self._resampler.initial_state()
        self._pending: Samples = np.zeros(0, np.float32)
        self._is_idle = True

    def payload(self) -> bytes:
        """The next 20 ms, encoded."""
        while (missing := self._frame - len(self._pending)) > 0:
            wanted = ceil(missing * self._ratio)
            samples = self._queue.take(wanted)
            if not len(samples) and self._is_idle:
                self._state, self._pending = self._resampler.initial_state(), self._pending[:0]
                self.frame = self._silent_frame
                return self._silence or self._encode(self.frame)
            self._is_idle = not len(samples)
            padded = np.pad(samples, (0, wanted - len(samples)))
            output, self._state = self._resampler.step(self._state, padded[None])
            self._pending = np.concatenate([self._pending, output[0]])
        self.frame, self._pending = self._pending[: self._frame], self._pending[self._frame :]
        return self._encode(self.frame)
