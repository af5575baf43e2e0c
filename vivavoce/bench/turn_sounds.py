"""What is heard on a line besides questions: hums, coughs, knocks, a room, a talker far off. All made of arithmetic."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import from_db, rms_dbfs

Samples = NDArray[np.float32]

RATE = 24_000  # of the wire; everything here is at this rate
SPEECH_DBFS = -23.0
FRAME = RATE // 100
VOICED_DB = 30.0  # a frame this far under the loudest one is no longer voice
FAINTEST_DBFS = -50.0
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (640, 1190, 2390))
NASAL = (250, 1100, 2200)


def voiced(samples: Samples) -> NDArray[np.bool_]:
    """Which 10 ms frames hold voice: within 30 dB of the loudest, and above -50 dBFS.  # [frame]"""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME).astype(np.float64)
    power = np.square(frames).mean(axis=1)
    return power > max(power.max(initial=0.0) * from_db(-VOICED_DB) ** 2, from_db(FAINTEST_DBFS) ** 2)


def voiced_bounds(samples: Samples) -> tuple[int, int]:
    """The first voiced sample and the one after the last; both 0 where there is no voice."""
    found = np.flatnonzero(voiced(samples))
    return (int(found[0]) * FRAME, int(found[-1] + 1) * FRAME) if found.size else (0, 0)


def at_level(samples: Samples, dbfs: float) -> Samples:
    """The sound with its voiced part at this level."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    return (samples * np.float32(from_db(dbfs - rms_dbfs(frames[voiced(samples)])))).astype(np.float32)


def mm_hm(seed: int = 0) -> Samples:
    """A backchannel: two soft nasal syllables, the second higher."""
    source = np.random.default_rng(seed)
    pitch = source.uniform(100, 220)
    first, second = source.uniform(0.14, 0.2), source.uniform(0.16, 0.24)
    syllables = [
        _vowel(first, NASAL, pitch, source, brightness=0.03),
        np.zeros(RATE // 40, np.float32),
        _vowel(second, NASAL, pitch * source.uniform(1.1, 1.25), source, brightness=0.03),
    ]
    return at_level(np.concatenate(syllables), SPEECH_DBFS - 6)


def cough(seed: int = 0) -> Samples:
    """One or two bursts of breath that die away, every other time with voice in them."""
    source = np.random.default_rng(seed)
    bursts: list[Samples] = []
    for _ in range(int(source.integers(1, 3))):
        time = np.arange(round(source.uniform(0.18, 0.3) * RATE)) / RATE
        breath = _coloured(source.standard_normal(len(time)), (600, 1500, 2800), 400)
        burst = (breath * np.exp(-time / source.uniform(0.04, 0.08))).astype(np.float32)
        if seed % 2:
            voice = _vowel(len(time) / RATE - 0.05, VOWELS[4], source.uniform(140, 260), source)
            burst[-len(voice) :] += voice * np.float32(0.7 * np.abs(burst).max() / np.abs(voice).max())
        bursts += [burst, np.zeros(RATE // 8, np.float32)]
    return at_level(np.concatenate(bursts), SPEECH_DBFS + 3)


def knock(seed: int = 0) -> Samples:
    """Something set down on a table, a few times."""
    source = np.random.default_rng(seed)
    time = np.arange(RATE // 10) / RATE
    hit = np.sin(2 * np.pi * source.uniform(120, 300) * time) + 0.5 * source.standard_normal(len(time))
    hit = (hit * np.exp(-time / 0.015)).astype(np.float32)
    gap = np.zeros(round(source.uniform(0.05, 0.15) * RATE), np.float32)
    return at_level(np.concatenate([hit, gap] * int(source.integers(1, 4))), SPEECH_DBFS + 3)


def talk(seconds: float, seed: int = 0) -> Samples:
    """Syllables that change as words do, for machines without a recording or a synthesizer."""
    source = np.random.default_rng(seed)
    pitch = source.choice([105.0, 125.0, 190.0, 220.0])
    pieces: list[Samples] = []
    vowel = 0
    while sum(map(len, pieces)) < seconds * RATE:
        vowel = (vowel + int(source.integers(1, len(VOWELS)))) % len(VOWELS)
        if source.random() < 0.4:
            hiss = np.diff(source.standard_normal(round(source.uniform(0.03, 0.06) * RATE)), prepend=0.0)
            pieces.append((0.1 * hiss * np.hanning(len(hiss))).astype(np.float32))
        moved = pitch * source.uniform(0.85, 1.25)
        pieces.append(_vowel(source.uniform(0.09, 0.16), VOWELS[vowel], moved, source))
    return at_level(np.concatenate(pieces)[: round(seconds * RATE)], SPEECH_DBFS)


def far_off(samples: Samples) -> Samples:
    """A talker on the other side of the room: 18 dB softer, dull, with a little of the room."""
    spectrum = np.fft.rfft(samples, len(samples) + RATE // 2)
    frequency = np.fft.rfftfreq(len(samples) + RATE // 2, 1 / RATE)
    dull = np.fft.irfft(spectrum / (1 + (frequency / 1500) ** 2))
    for delay, gain in ((0.031, 0.5), (0.053, 0.35), (0.087, 0.25)):
        dull[round(delay * RATE) :] += gain * dull[: -round(delay * RATE)]
    return at_level(dull.astype(np.float32), SPEECH_DBFS - 18)


@lru_cache(maxsize=32)
def room_noise(seconds: float, dbfs: float, seed: int = 0) -> Samples:
    """Steady noise that falls with frequency as traffic and fans do; it can be looped, and is not to be written to."""
    source = np.random.default_rng(seed)
    size = round(seconds * RATE)
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    spectrum = np.fft.rfft(source.standard_normal(size)) / np.sqrt(np.maximum(frequency, 50.0))
    noise = np.fft.irfft(spectrum, size)
    levelled = (noise * from_db(dbfs - rms_dbfs(noise.astype(np.float32)))).astype(np.float32)
    levelled.flags.writeable = False
    return levelled


def hesitated(samples: Samples, seconds: float) -> tuple[Samples, int]:
    """The sound with a pause of this length where its middle is quietest, and the sample at which the pause begins."""
    first, last = voiced_bounds(samples)
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    power = np.convolve(np.square(frames).mean(axis=1), np.ones(3) / 3, mode="same")
    begin, end = (first + (last - first) // 3) // FRAME, (first + 2 * (last - first) // 3) // FRAME
    cut = (begin + int(np.argmin(power[begin : max(end, begin + 1)]))) * FRAME
    ramp = np.linspace(1, 0, FRAME, dtype=np.float32)
    before, after = samples[:cut].copy(), samples[cut:].copy()
    before[-FRAME:] *= ramp[-len(before) :]
    after[:FRAME] *= ramp[::-1][: len(after)]
    return np.concatenate([before, np.zeros(round(seconds * RATE), np.float32), after]), cut


def _vowel(
    seconds: float, formants: tuple[int, ...], pitch: float, source: np.random.Generator, brightness: float = 1.0
) -> Samples:
    """Harmonics under resonances; `brightness` weighs what lies above the first of them."""
    time = np.arange(round(seconds * RATE)) / RATE
    wandering = pitch * (1 + 0.05 * np.sin(2 * np.pi * 3 * time + source.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(wandering) / RATE
    sound = np.zeros(len(time))
    for harmonic in range(1, int(4000 / pitch)):
        frequency = harmonic * pitch
        first = 1 / (1 + ((frequency - formants[0]) / 90) ** 2)
        higher = sum(1 / (1 + ((frequency - formant) / 140) ** 2) for formant in formants[1:])
        sound += (
            (first + brightness * higher + 0.01) / np.sqrt(harmonic) * np.sin(harmonic * phase + source.uniform(0, 6))
        )
    envelope = np.minimum(1.0, np.minimum(time / 0.02, (seconds - time) / 0.03))
    return (0.1 * sound * envelope).astype(np.float32)


def _coloured(samples: NDArray[np.float64], formants: tuple[int, ...], width: float) -> NDArray[np.float64]:
    frequency = np.fft.rfftfreq(len(samples), 1 / RATE)
    response = sum(1 / (1 + ((frequency - formant) / width) ** 2) for formant in formants)
    return np.fft.irfft(np.fft.rfft(samples) * response, len(samples))
