"""Voices made of arithmetic: talk that changes as words do, hums, coughs. 16 kHz, speech at about -24 dBFS."""

import numpy as np
from scipy.signal import lfilter

RATE = 16_000
VOWELS = [
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (640, 1190, 2390),
    (440, 1020, 2240),
]


def talk(seconds: float, seed: int = 0, level_dbfs: float = -24.0) -> np.ndarray:
    """Syllables of vowels and hisses, no two neighbours alike, in a voice of the seed's pitch."""
    noise = np.random.default_rng(seed)
    pitch = noise.choice([105.0, 125.0, 190.0, 220.0])
    pieces, last = [], -1
    while sum(map(len, pieces)) < seconds * RATE:
        vowel = noise.choice([each for each in range(len(VOWELS)) if each != last])
        last = vowel
        if noise.random() < 0.4:
            pieces.append(_hiss(noise.uniform(0.03, 0.06), noise))
        pieces.append(_vowel(noise.uniform(0.09, 0.16), VOWELS[vowel], pitch * noise.uniform(0.85, 1.25), noise))
    return at_level(np.concatenate(pieces)[: round(seconds * RATE)], level_dbfs)


def hum(seconds: float = 0.4, seed: int = 0, level_dbfs: float = -30.0) -> np.ndarray:
    """mm-hm: two soft nasal syllables of one colour."""
    noise = np.random.default_rng(seed)
    pitch, half = noise.uniform(100, 230), seconds / 2
    first = _vowel(half, (250, 1100, 2200), pitch, noise, openness=0.03)
    second = _vowel(half, (250, 1100, 2200), pitch * 1.12, noise, openness=0.03)
    return at_level(np.concatenate([first, second]), level_dbfs)


def cough(seed: int = 0, level_dbfs: float = -20.0) -> np.ndarray:
    """A burst of noise that dies away, once or twice."""
    noise = np.random.default_rng(seed)
    bursts = []
    for _ in range(noise.integers(1, 3)):
        time = np.arange(round(noise.uniform(0.18, 0.3) * RATE)) / RATE
        burst = noise.standard_normal(len(time)) * np.exp(-time / noise.uniform(0.04, 0.08))
        bursts += [_resonated(burst, (600, 1500, 2800), 400), np.zeros(RATE // 8)]
    return at_level(np.concatenate(bursts), level_dbfs)


def silence(seconds: float, seed: int = 0, level_dbfs: float = -70.0) -> np.ndarray:
    """A quiet room."""
    return at_level(np.random.default_rng(seed).standard_normal(round(seconds * RATE)), level_dbfs)


def at_level(samples: np.ndarray, dbfs: float) -> np.ndarray:
    """The sound with the loud two thirds of it at a level."""
    power = np.sort(np.square(samples))[len(samples) // 3 :].mean() if len(samples) else 1.0
    return (samples * 10 ** (dbfs / 20) / np.sqrt(power + 1e-20)).astype(np.float32)


def _vowel(seconds, formants, pitch, noise, openness=1.0):
    time = np.arange(round(seconds * RATE)) / RATE
    wandering = pitch * (1 + 0.08 * np.sin(2 * np.pi * 3 * time + noise.uniform(0, 6)))
    phase = np.cumsum(wandering) / RATE
    pulses = np.diff(np.floor(phase), prepend=0.0) + 0.005 * noise.standard_normal(len(time))
    envelope = np.minimum(1.0, np.minimum(time / 0.015, (seconds - time) / 0.025))
    low = _resonated(pulses, formants[:1], 60)
    high = _resonated(low, formants[1:], 120)
    return (low * 0.2 + openness * high) * envelope


def _hiss(seconds, noise):
    hiss = np.diff(noise.standard_normal(round(seconds * RATE)), prepend=0.0)
    return 0.3 * hiss * np.hanning(len(hiss))


def _resonated(samples, formants, width):
    for formant in formants:
        radius = np.exp(-np.pi * width / RATE)
        samples = lfilter([1 - radius], [1, -2 * radius * np.cos(2 * np.pi * formant / RATE), radius**2], samples)
    return samples / (np.abs(samples).max() + 1e-9)
