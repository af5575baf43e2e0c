"""What comes out of the client's loudspeaker, on the clock: the reference by which our own echo is known."""

from collections import deque

import numpy as np

from vivavoce.audio.live_resample import LiveResampler
from vivavoce.dialogue.interface import Samples

KEPT_SECONDS = 8.0
SMALLEST_GAP = 0.02  # seconds: what follows within it follows at once


class OutputTimeline:
    """The last seconds of output at another rate, by the time at which they are played.

    Sound is brought to that rate when somebody reads it: where no echo is looked for, nobody does.
    """

    def __init__(self, output_rate: int, rate: int) -> None:
        self.rate = rate
        self._resampler = LiveResampler(output_rate, rate)
        self._state = self._resampler.initial_state()
        self._sound = np.zeros(0, np.float32)
        self._start = 0  # of `_sound`, in samples of the clock
        self._gains: list[tuple[int, float]] = [(0, 1.0)]  # from which sample of the clock on
        self._played: deque[tuple[float, Samples]] = deque()  # from which moment on; not at our rate yet

    def set_gain(self, moment: float, gain: float) -> None:
        """From this moment on it is played this loud."""
        self._gains.append((round(moment * self.rate), gain))

    def play(self, moment: float, samples: Samples) -> None:
        """These samples are played from this moment on, or after those before where they are not done yet."""
        self._played.append((moment, samples))
        while self._played[0][0] < moment - 2 * KEPT_SECONDS:
            self._played.popleft()

    def stop(self, moment: float) -> None:
        """Nothing is played from this moment on."""
        self._catch_up()
        kept = max(0, round(moment * self.rate) - self._start)
        self._sound = self._sound[:kept]
        self._state = self._resampler.initial_state()

    def read(self, moment: float, samples: int) -> Samples:
        """What is played from this moment on; silence where nothing is."""
        self._catch_up()
        found = np.zeros(samples, np.float32)
        offset = round(moment * self.rate) - self._start
        first = max(0, offset)
        piece = self._sound[first : max(first, offset + samples)]
        found[first - offset : first - offset + len(piece)] = piece
        self._drop_before(round((moment - KEPT_SECONDS) * self.rate))
        return self._as_loud(found, round(moment * self.rate))

    @property
    def _end(self) -> int:
        return self._start + len(self._sound)

    def _catch_up(self) -> None:
        while self._played:
            self._take(*self._played.popleft())

    def _take(self, moment: float, samples: Samples) -> None:
        begin = round((moment - self._resampler.lag_seconds) * self.rate)
        if begin > self._end + SMALLEST_GAP * self.rate:
            self._append_silence_until(begin)
            self._state = self._resampler.initial_state()
        sound, self._state = self._resampler.step(self._state, samples[None])
        self._sound = np.concatenate([self._sound, sound[0]])

    def _as_loud(self, samples: Samples, begin: int) -> Samples:
        while len(self._gains) > 1 and self._gains[1][0] <= begin - KEPT_SECONDS * self.rate:
            del self._gains[0]
        loudness = np.ones(len(samples), np.float32)
        for start, gain in self._gains:
            loudness[max(0, start - begin) :] = gain
        return samples * loudness

    def _append_silence_until(self, sample: int) -> None:
        missing = sample - self._end
        if missing > KEPT_SECONDS * self.rate:
            self._sound, self._start = np.zeros(0, np.float32), sample
        elif missing > 0:
            self._sound = np.concatenate([self._sound, np.zeros(missing, np.float32)])

    def _drop_before(self, sample: int) -> None:
        old = min(sample - self._start, len(self._sound))
        if old > self.rate:  # in large pieces, for copying is what costs
            self._sound, self._start = self._sound[old:].copy(), self._start + old
