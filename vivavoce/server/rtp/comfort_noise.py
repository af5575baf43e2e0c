"""Comfort noise (RFC 3389): the sender describes its background noise, the receiver makes noise like it in pauses."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import from_db
from vivavoce.dialogue.items import Samples

MAX_ORDER = 12  # reflection coefficients that are used; RFC 3389 lets a receiver ignore the rest
MAX_REFLECTION = 0.98  # bounds the resonance of the filter
HIGHEST_LEVEL_DB = -30.0  # louder descriptions are not background noise
LOOP = 8_192  # samples of noise, repeated


@dataclass(frozen=True)
class NoiseDescription:
    """Level in dB of full scale, and the reflection coefficients of the spectrum."""

    level_db: float
    reflections: tuple[float, ...] = ()

    @classmethod
    def parse(cls, payload: bytes) -> "NoiseDescription | None":
        """The description in a comfort noise payload; None where it is empty."""
        if not payload:
            return None
        reflections = tuple((each - 127) * 258 / 32_768 for each in payload[1 : 1 + MAX_ORDER])
        return cls(-float(payload[0] & 0x7F), reflections)


class ComfortNoise:
    """Makes noise of a description; silence before the first one."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._description: NoiseDescription | None = None
        self._loop: Samples = np.zeros(LOOP, np.float32)
        self._position = 0

    def describe(self, noise: NoiseDescription) -> None:
        """Use this description from now on."""
        if noise == self._description:
            return
        self._description = noise
        response = np.abs(np.fft.rfft(_prediction_filter(noise.reflections), LOOP))
        white = np.fft.rfft(self._random.standard_normal(LOOP))
        white[0] = 0
        shaped = np.fft.irfft(white / response, LOOP)
        level = from_db(min(noise.level_db, HIGHEST_LEVEL_DB))
        self._loop = (level * shaped / np.sqrt(np.mean(np.square(shaped)))).astype(np.float32)

    def make(self, count: int) -> Samples:
        """The next samples."""
        samples = self._loop[(self._position + np.arange(count)) % LOOP]
        self._position = (self._position + count) % LOOP
        return samples


def _prediction_filter(reflections: tuple[float, ...]) -> NDArray[np.float64]:
    """The prediction error filter of reflection coefficients, by the Levinson recursion; noise is its inverse."""
    taps = np.ones(1)
    for reflection in np.clip(reflections, -MAX_REFLECTION, MAX_REFLECTION):
        extended = np.append(taps, 0.0)
        taps = extended + reflection * extended[::-1]
    return taps
