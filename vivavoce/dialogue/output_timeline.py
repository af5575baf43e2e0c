"""The last seconds of a conversation's output by the time at which they are played: the reference of its echo."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vivavoce.audio.batched_resample import BatchedResampler
from vivavoce.audio.resample import LiveResampler
from vivavoce.dialogue.items import Samples

STORED_SECONDS = 8.0
SMALLEST_GAP = 0.02  # seconds: a shorter gap counts as none


class PlayedOutput(Protocol):
    """Takes note of what is played."""

    def set_gain(self, moment: float, gain: float) -> None:
        """Set the gain of the output from this moment on."""
        ...

    def play(self, moment: float, samples: Samples, now: float) -> None:
        """Add samples that are played from this moment on, or after the samples before them."""
        ...

    def stop(self, moment: float) -> None:
        """Drop the output from this moment on."""
        ...


class OutputTimeline:
    """The last seconds of output at another rate, by the time at which they are played.

    Sound is resampled on reading, so that it costs nothing without echo cancellation.
    """

    def __init__(self, output_rate: int, rate: int) -> None:
        self.rate = rate
        self._resampler = LiveResampler(output_rate, rate)
        self._state = self._resampler.initial_state()
        self._buffer = np.zeros(rate, np.float32)  # the output is its first `_length` samples
        self._length = 0
        self._start = 0  # of the output, on the clock, in samples
        self._gains: list[tuple[int, float]] = [(0, 1.0)]  # since which sample of the clock
        self._played: deque[tuple[float, Samples]] = deque()  # start time and samples, not resampled yet

    def set_gain(self, moment: float, gain: float) -> None:
        """Set the gain of the output from this moment on."""
        self._gains.append((round(moment * self.rate), gain))

    def play(self, moment: float, samples: Samples, now: float) -> None:
        """Add samples that are played from this moment on, or after the samples before them."""
        self._played.append((moment, samples))
        while self._played[0][0] < now - 2 * STORED_SECONDS:
            self._played.popleft()

    def stop(self, moment: float) -> None:
        """Drop the output from this moment on."""
        self._catch_up()
        self._length = min(self._length, max(0, round(moment * self.rate) - self._start))
        self._state = self._resampler.initial_state()

    def read(self, moment: float, samples: int) -> Samples:
        """The output from this moment on; silence where there is none."""
        self._catch_up()
        return self.read_stored(moment, samples)

    def read_stored(self, moment: float, samples: int) -> Samples:
        """As `read`, of what was resampled already; valid until the next call."""
        begin = round(moment * self.rate)
        offset = begin - self._start
        if 0 <= offset <= self._length - samples:
            output = self._buffer[offset : offset + samples]
        else:
            output = np.zeros(samples, np.float32)
            first, last = max(0, offset), min(self._length, offset + samples)
            if last > first:
                output[first - offset : last - offset] = self._buffer[first:last]
        output = self._with_gain(output, begin)
        self._drop_before(begin - round(STORED_SECONDS * self.rate))
        return output

    @property
    def _end(self) -> int:
        return self._start + self._length

    def _catch_up(self) -> None:
        while self._played:
            samples = self._next_piece()
            sound, self._state = self._resampler.step(self._state, samples[None])
            self._append(sound[0])

    @staticmethod
    def catch_up_many(timelines: Sequence["OutputTimeline"], resampler: BatchedResampler) -> None:
        """Resample what is to be played of many conversations with the same rates."""
        while waiting := [each for each in timelines if each._played]:
            pieces = [each._next_piece() for each in waiting]
            sounds, states = resampler.step([each._state for each in waiting], pieces)
            for timeline, sound, state in zip(waiting, sounds, states, strict=True):
                timeline._state = state
                timeline._append(sound)

    def _next_piece(self) -> Samples:
        """The next samples to be resampled, after silence where there is a gap before them."""
        moment, samples = self._played.popleft()
        begin = round((moment - self._resampler.lag_seconds) * self.rate)
        if begin > self._end + SMALLEST_GAP * self.rate:
            self._append_silence_until(begin)
            self._state = self._resampler.initial_state()
        return samples

    def _append(self, sound: Samples) -> None:
        length = self._length + len(sound)
        if length > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(max(length, len(self._buffer)), np.float32)])
        self._buffer[self._length : length] = sound
        self._length = length

    def _with_gain(self, samples: Samples, begin: int) -> Samples:
        while len(self._gains) > 1 and self._gains[1][0] <= begin - STORED_SECONDS * self.rate:
            del self._gains[0]
        if len(self._gains) == 1 and self._gains[0][1] == 1.0:
            return samples
        gains = np.ones(len(samples), np.float32)
        for start, gain in self._gains:
            gains[max(0, start - begin) :] = gain
        return samples * gains

    def _append_silence_until(self, sample: int) -> None:
        missing = sample - self._end
        if missing > STORED_SECONDS * self.rate:
            self._length, self._start = 0, sample
        elif missing > 0:
            self._append(np.zeros(missing, np.float32))

    def _drop_before(self, sample: int) -> None:
        old = min(sample - self._start, self._length)
        if old > self.rate:  # in large pieces, to copy rarely
            kept = self._buffer[old : self._length].copy()
            self._buffer = np.concatenate([kept, np.zeros(self.rate, np.float32)])
            self._length, self._start = len(kept), self._start + old
