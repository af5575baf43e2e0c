"""A piece of sound: samples and their rate, travelling together."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.pcm import check_finite
from vivavoce.audio.resample import Quality, check_rate, resample
from vivavoce.errors import InputError


@dataclass(frozen=True, eq=False)
class Sound:
    """Finite float32 samples, full scale at ±1, with their rate. One-dimensional samples become one channel."""

    samples: NDArray[np.float32]  # [channel, time]
    rate: int

    def __post_init__(self) -> None:
        samples = np.atleast_2d(self.samples)
        if samples.dtype.kind != "f":
            raise InputError(f"a sound has float samples, not {samples.dtype}; pcm16_to_float converts 16-bit PCM")
        if samples.ndim != 2 or samples.shape[0] == 0:
            raise InputError(f"a sound has the shape [channel, time], not {list(samples.shape)}")
        check_rate(self.rate)
        check_finite(samples)
        object.__setattr__(self, "samples", np.asarray(samples, dtype=np.float32))

    @property
    def channels(self) -> int:
        return int(self.samples.shape[0])

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1] / self.rate)

    def mono(self) -> "Sound":
        """The mean of the channels, however many there are."""
        return self if self.channels == 1 else Sound(downmix(self.samples), self.rate)

    def resampled(self, rate: int, quality: Quality = "HQ") -> "Sound":
        """The same sound at another rate."""
        return self if rate == self.rate else Sound(resample(self.samples, self.rate, rate, quality), rate)


def downmix(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """One channel, the mean of all: no channel can push it past full scale.  # [channel, time] → [1, time]"""
    return np.asarray(samples.mean(axis=0, keepdims=True), dtype=np.float32)
