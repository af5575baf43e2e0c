"""Something like a voice, for trying things out where no recording is at hand."""

import numpy as np

from vivavoce.audio.sound import Sound

HARMONICS = 20


def buzz(seconds: float, rate: int, seed: int = 0) -> Sound:
    """A buzz whose pitch wanders around 120 Hz, in four syllables a second."""
    noise = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time + noise.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time + noise.uniform(0, 6))
    voiced = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, HARMONICS))
    return Sound((0.1 * syllables * voiced).astype(np.float32), rate)
