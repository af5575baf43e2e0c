"""A look-ahead peak limiter: no sample over the ceiling, no click, and nothing changed where nothing is too loud."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vivavoce.audio.level import from_db
from vivavoce.audio.pcm import check_finite

Samples = NDArray[np.float32]
Decibels = NDArray[np.float64]


@dataclass(frozen=True)
class LimiterState:
    """Where one stream stands: the samples still looking ahead, and the gain reductions they depend on."""

    held: Samples  # [channel, time]: at most the look-ahead
    reductions: Decibels  # [time], ≤ 0, with the release applied; the last is the newest


class Limiter:
    """Turns down, for all channels alike, just what would pass the ceiling, and lets go slowly.

    The gain reaches a peak's reduction by a smooth ramp within the look-ahead before it, and returns at
    `release_db_per_second`. A stream lags by the look-ahead; `flush` gives the rest.
    """

    def __init__(
        self,
        rate: int,
        ceiling_dbfs: float = -1.0,
        lookahead_seconds: float = 0.002,
        release_db_per_second: float = 60.0,
    ) -> None:
        self.ceiling = from_db(ceiling_dbfs)
        self.lookahead = max(1, round(lookahead_seconds * rate))
        self.release_db = release_db_per_second / rate

    def initial_state(self, channels: int = 1) -> LimiterState:
        """The state before the first sample: nothing held, nothing turned down."""
        return LimiterState(np.zeros((channels, 0), np.float32), np.zeros(2 * self.lookahead))

    def step(self, state: LimiterState, samples: Samples) -> tuple[Samples, LimiterState]:
        """The samples that are ready, `lookahead` behind the input.  # [channel, time] → [channel, time]"""
        check_finite(samples)
        return self._advance(state, samples, samples.shape[1])

    def flush(self, state: LimiterState) -> Samples:
        """What was still looking ahead when the sound ended.  # [channel, time]"""
        waiting = state.held.shape[1]
        silence = np.zeros((len(state.held), self.lookahead), np.float32)
        return self._advance(state, silence, self.lookahead)[0][:, :waiting]

    def forward(self, samples: Samples) -> Samples:
        """The whole sound, limited, in its place.  # [channel, time] → [channel, time]"""
        output, state = self.step(self.initial_state(len(samples)), samples)
        return np.concatenate([output, self.flush(state)], axis=1)

    def _advance(self, state: LimiterState, samples: Samples, count: int) -> tuple[Samples, LimiterState]:
        if count == 0:
            return samples, state
        joined = np.concatenate([state.held, samples], axis=1)
        reductions = np.concatenate([state.reductions, self._released(state.reductions[-1], samples)])
        gains = 10.0 ** (self._smoothed(reductions) / 20.0)  # one for each new sample, meant for the one lookahead ago
        ready = max(0, joined.shape[1] - self.lookahead)
        output = joined[:, :ready] * gains[gains.size - ready :]
        # Rounding alone can pass the ceiling by the last bit.
        limited = np.clip(output, -self.ceiling, self.ceiling).astype(np.float32)
        return limited, LimiterState(joined[:, ready:].copy(), reductions[count:].copy())

    def _released(self, last: float, samples: Samples) -> Decibels:
        """The reduction each sample needs, or what is left of an earlier one as it is let go."""
        loudness = np.abs(samples, dtype=np.float64).max(axis=0)
        needed = -20.0 * np.log10(np.maximum(loudness / self.ceiling, 1.0))
        # r[n] = min(needed[n], r[n-1] + release) without a loop: a running minimum of what is tilted by the release
        tilt = self.release_db * np.arange(1, needed.size + 1)
        tilted = np.minimum.accumulate(np.concatenate([[last], needed - tilt]))[1:]
        return np.minimum(tilted + tilt, 0.0)

    def _smoothed(self, reductions: Decibels) -> Decibels:
        """Ramps that are down in time: the mean of minima, each of which has the peak within its window."""
        window = self.lookahead + 1
        if not reductions.any():
            return np.zeros(reductions.size - 2 * self.lookahead)
        lowest = sliding_window_view(reductions, window).min(axis=-1)
        return np.asarray(sliding_window_view(lowest, window).mean(axis=-1))
