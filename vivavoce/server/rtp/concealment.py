"""Packet-loss concealment by repeating pitch periods, in the style of ITU-T G.711 Appendix I."""

import numpy as np

from vivavoce.dialogue.items import Samples

HISTORY_SECONDS = 0.05
MIN_PITCH_SECONDS, MAX_PITCH_SECONDS = (
    0.005,
    0.015,
)  # 200 to 66 Hz; shorter periods repeat within one
TEMPLATE_SECONDS = 0.02  # compared with the history to find the pitch period
FULL_SECONDS = 0.01  # repeated at full level, then fading
FADE_SECONDS = 0.05  # to silence
SILENCE_POWER = 1e-9


class PitchConcealment:
    """Continues a stream over lost samples.

    The last pitch period is repeated, its end cross-faded with what came before it so that the repetitions join; it
    fades to silence within 60 ms. The first received samples afterwards are cross-faded with the continuation.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._history: Samples = np.zeros(round(HISTORY_SECONDS * rate), np.float32)
        self._period: Samples | None = None  # repeated during a loss
        self._lost = 0  # samples since the loss began

    def received(self, samples: Samples) -> Samples:
        """The samples as they are to be played."""
        if self._period is not None:
            size = min(self._overlap(len(self._period)), len(samples))
            tail = self._continue(size)
            ramp = np.linspace(0, 1, size, dtype=np.float32)
            samples = np.concatenate([tail * (1 - ramp) + samples[:size] * ramp, samples[size:]])
            self._period, self._lost = None, 0
        self._append(samples)
        return samples

    def lost(self, count: int) -> Samples:
        """As many samples in place of lost ones."""
        if self._period is None:
            self._period = self._last_period()
        samples = self._continue(count)
        self._append(samples)
        return samples

    def _append(self, samples: Samples) -> None:
        self._history = np.concatenate([self._history, samples])[-len(self._history) :]

    def _continue(self, count: int) -> Samples:
        if self._period is None:
            return np.zeros(count, np.float32)
        positions = self._lost + np.arange(count)
        gain = np.clip(1 - (positions / self.rate - FULL_SECONDS) / FADE_SECONDS, 0, 1)
        self._lost += count
        return (self._period[positions % len(self._period)] * gain).astype(np.float32)

    def _last_period(self) -> Samples:
        lag = self._pitch_lag()
        period, overlap = self._history[-lag:].copy(), self._overlap(lag)
        ramp = np.linspace(0, 1, overlap, dtype=np.float32)
        before = self._history[-lag - overlap : -lag]  # what leads into the start of the period
        period[-overlap:] = period[-overlap:] * (1 - ramp) + before * ramp
        return period

    def _overlap(self, lag: int) -> int:
        return max(1, lag // 4)

    def _pitch_lag(self) -> int:
        """The lag of the largest normalised correlation of the last samples with earlier ones."""
        template = round(TEMPLATE_SECONDS * self.rate)
        min_lag, max_lag = round(MIN_PITCH_SECONDS * self.rate), round(MAX_PITCH_SECONDS * self.rate)
        recent = self._history[-template:]
        earlier = self._history[-template - max_lag : -min_lag]
        correlation = np.correlate(earlier, recent, "valid")  # by lag, from `max_lag` down
        energy = np.convolve(np.square(earlier, dtype=np.float64), np.ones(template), "valid")
        score = correlation / np.sqrt(np.maximum(energy, SILENCE_POWER * template))
        return max_lag - int(np.argmax(score))
