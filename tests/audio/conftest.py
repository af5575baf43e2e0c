"""A made-up voice to test with: gliding harmonics under moving formants, hissing consonants, pauses."""

import numpy as np
import pytest
from scipy.signal import butter, sosfilt


def voice(rate: int, seconds: float, seed: int = 0) -> np.ndarray:
    """Speech-like float32 samples that peak at 0.5, with syllables at about 4 Hz.  # [time]"""
    random = np.random.default_rng(seed)
    time = np.arange(round(rate * seconds)) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = (500 + 200 * np.sin(2 * np.pi * 1.3 * time), 1500 + 500 * np.sin(2 * np.pi * 0.9 * time), 2600.0)
    voiced = np.zeros_like(time)
    for harmonic in range(1, 30):
        frequency = harmonic * pitch
        if frequency.max() < 0.45 * rate:
            voiced += sum(np.exp(-(((frequency - f) / 180) ** 2)) for f in formants) * np.sin(harmonic * phase)
    hiss = sosfilt(butter(4, 0.5, "highpass", output="sos"), random.standard_normal(time.size))
    syllables = np.clip(np.sin(2 * np.pi * 4 * time), 0, 1) * (np.sin(2 * np.pi * 0.5 * time + 1) > -0.7)
    consonants = 0.05 * np.clip(-np.sin(2 * np.pi * 4 * time), 0, 1) ** 4
    samples = voiced * syllables + hiss * consonants + 1e-4 * random.standard_normal(time.size)
    return (0.5 * samples / np.abs(samples).max()).astype(np.float32)


def pieces(samples: np.ndarray, seed: int = 0, largest: int = 1500) -> list[np.ndarray]:
    """The samples cut along their last axis into pieces of random sizes, some empty."""
    random = np.random.default_rng(seed)
    cuts = np.cumsum(random.integers(0, largest, size=1 + 4 * samples.shape[-1] // largest))
    return np.split(samples, cuts[cuts < samples.shape[-1]], axis=-1)


@pytest.fixture(scope="session")
def make_voice():
    return voice


@pytest.fixture(scope="session")
def cut():
    return pieces
