"""What a 32 ms window of sound is like: how loud, how voiced, how high, how bright. Cheap, and enough to tell a hum
from a word and a cough from both."""

from dataclasses import dataclass

import numpy as np

from vivavoce.audio.voice_activity import RATE, WINDOW
from vivavoce.dialogue.interface import Samples

BANDS = np.array([100, 300, 500, 800, 1200, 1700, 2400, 3400, 5000, 7500])
LOWEST_PITCH, HIGHEST_PITCH = 70, 400


@dataclass(frozen=True)
class Traits:
    """One window."""

    level_db: float
    periodicity: float
    """How well it repeats itself at a voice's pitch, 0 to 1."""
    pitch: float
    brightness: float
    """Share of its power above 1200 Hz."""
    flatness: float
    """1 is white noise, 0 a tone."""
    shape: tuple[float, ...]
    """Level of each band in dB under the whole."""


_HANN = np.hanning(WINDOW).astype(np.float32)
_FREQUENCIES = np.fft.rfftfreq(2 * WINDOW, 1 / RATE)
_EDGES = np.searchsorted(_FREQUENCIES, BANDS)


def traits(samples: Samples) -> Traits:
    """The traits of a window of 512 samples at 16 kHz."""
    level = 10.0 * float(np.log10(np.square(samples, dtype=np.float64).mean() + 1e-10))
    power = np.square(np.abs(np.fft.rfft(samples * _HANN, 2 * WINDOW))).astype(np.float64) + 1e-9
    bands = np.add.reduceat(power, _EDGES)[:-1]
    total = float(bands.sum())
    inside = power[_EDGES[0] : _EDGES[-1]]
    periodicity, pitch = _periodicity(power)
    return Traits(
        level_db=level,
        periodicity=periodicity,
        pitch=pitch,
        brightness=float(bands[4:].sum()) / total,
        flatness=float(np.exp(np.log(inside).mean()) / inside.mean()),
        shape=tuple(float(value) for value in 10.0 * np.log10(bands / total)),
    )


def change(first: Traits, second: Traits) -> float:
    """How much the sound's colour changed from one window to the next, in dB a band, loud bands counting most."""
    one, two = np.array(first.shape), np.array(second.shape)
    weight = 10.0 ** (np.maximum(one, two) / 20.0)
    return float((np.abs(np.maximum(one, -40) - np.maximum(two, -40)) * weight).sum() / weight.sum())


def _periodicity(power: np.ndarray) -> tuple[float, float]:
    correlation = np.fft.irfft(power)[:WINDOW]
    taper = np.fft.irfft(np.square(np.abs(np.fft.rfft(_HANN, 2 * WINDOW))))[:WINDOW]
    shortest, longest = RATE // HIGHEST_PITCH, RATE // LOWEST_PITCH
    normal = correlation[shortest:longest] / correlation[0] / np.maximum(taper[shortest:longest] / taper[0], 0.05)
    best = int(np.argmax(normal))
    return float(np.clip(normal[best], 0.0, 1.0)), RATE / (shortest + best)
