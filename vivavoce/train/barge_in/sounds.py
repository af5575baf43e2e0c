"""Sounds that are no words, for training: recorded coughs, and coughs, sneezes, laughs, knocks, keys by arithmetic.

Everything depends on a seed alone. The recordings are those of a folder of sound files, such as the CC0 ones of
github.com/covid19-cough/dataset.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import read
from vivavoce.errors import InputError
from vivavoce.train.voices import RATE

Samples = NDArray[np.float32]
MAX_SECONDS = 2.5
ENDINGS = {".wav", ".mp3", ".flac", ".ogg", ".opus"}
QUIET_DB = -30.0  # relative to the loudest frame
FRAME = RATE // 100


def recorded(folder: Path, count: int) -> list[Samples]:
    """Up to `count` recordings of a folder, evenly spread over their names, from their first loud frame on."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        raise InputError(f"{folder} holds no sound files")
    chosen = paths[:: max(1, len(paths) // count)][:count]
    found = []
    for path in chosen:
        try:
            found.append(loud_part(read(path, rate=RATE).mono().samples[0]))
        except InputError as error:  # some of them are empty
            print(json.dumps({"left out": path.name, "error": str(error)}), flush=True)
    return [sound for sound in found if len(sound) >= 8 * FRAME]


def loud_part(sound: Samples) -> Samples:
    """A sound from its first loud frame on, at most `MAX_SECONDS` of it."""
    frames = sound[: len(sound) // FRAME * FRAME].reshape(-1, FRAME)
    level = np.sqrt(np.square(frames).mean(axis=1))
    loud = np.flatnonzero(level > 10 ** (QUIET_DB / 20) * level.max(initial=0.0))
    if not loud.size:
        return sound[:0]
    begin = max(0, int(loud[0]) * FRAME - FRAME)
    return sound[begin : (int(loud[-1]) + 2) * FRAME][: round(MAX_SECONDS * RATE)]


def cough(source: np.random.Generator) -> Samples:
    """One to three bursts of shaped noise, often with a voiced part after the burst."""
    parts: list[NDArray[np.float64]] = []
    for _ in range(int(source.integers(1, 4))):
        seconds = source.uniform(0.12, 0.45)
        time = np.arange(round(seconds * RATE)) / RATE
        burst = _shaped(source, len(time), _formants(source), source.uniform(150, 700))
        burst *= np.exp(-time / source.uniform(0.03, 0.15)) * np.minimum(1, time / source.uniform(0.002, 0.03))
        if source.random() < 0.5:
            begin = round(source.uniform(0.0, 0.5) * len(time))
            voice = _voice(source, (len(time) - begin) / RATE, source.uniform(110, 420), jitter=0.08)
            burst[begin : begin + len(voice)] += source.uniform(0.2, 1.2) * voice[: len(time) - begin] * _peak(burst)
        parts += [burst, np.zeros(round(source.uniform(0.05, 0.3) * RATE))]
    return np.concatenate(parts).astype(np.float32)


def sneeze(source: np.random.Generator) -> Samples:
    """A breath in, perhaps voiced, then a bright burst."""
    inhale = round(source.uniform(0.1, 0.5) * RATE)
    breath = _shaped(source, inhale, (1200, 2600, 4000), 900) * np.linspace(0.05, 0.5, inhale)
    if source.random() < 0.5:
        voice = _voice(source, inhale / RATE, source.uniform(150, 400), jitter=0.1)
        breath[: len(voice)] += voice * np.linspace(0.1, 0.8, len(voice)) * source.uniform(0.3, 1.0)
    time = np.arange(round(source.uniform(0.2, 0.6) * RATE)) / RATE
    burst = _shaped(source, len(time), (2500, 4500, 6500), 1500) * np.exp(-time / source.uniform(0.06, 0.2))
    if source.random() < 0.5:
        voice = _voice(source, len(time) / RATE, source.uniform(180, 500), jitter=0.1)
        burst[: len(voice)] += source.uniform(0.3, 1.0) * voice * np.exp(-time[: len(voice)] / 0.12)
    return np.concatenate([breath, burst]).astype(np.float32)


def laugh(source: np.random.Generator) -> Samples:
    """Breathy vowels at a steady rate with a falling pitch."""
    pitch, rate = source.uniform(130, 480), source.uniform(3.5, 6.5)
    vowel = _formants(source)
    parts: list[NDArray[np.float64]] = []
    for _ in range(int(source.integers(3, 9))):
        pitch *= source.uniform(0.9, 1.04)
        voiced = round(source.uniform(0.35, 0.6) / rate * RATE)
        syllable = _voice(source, voiced / RATE, pitch, vowel, jitter=0.05)
        syllable += source.uniform(0.05, 0.5) * _shaped(source, len(syllable), vowel, 500)
        syllable *= np.hanning(len(syllable) + 2)[1:-1]
        gap = max(1, round(RATE / rate * source.uniform(0.9, 1.1)) - voiced)
        breath = source.uniform(0.02, 0.3) * _shaped(source, gap, (1500, 2500, 4000), 1200) * np.hanning(gap + 2)[1:-1]
        parts += [syllable, breath]
    return np.concatenate(parts).astype(np.float32)


def knock(source: np.random.Generator) -> Samples:
    """Up to six hits on wood: damped resonances and a click."""
    modes = source.uniform(80, 1800, int(source.integers(2, 6)))
    decays = source.uniform(0.005, 0.06, len(modes))
    parts: list[NDArray[np.float64]] = []
    for _ in range(int(source.integers(1, 7))):
        time = np.arange(round(source.uniform(0.08, 0.2) * RATE)) / RATE
        hit = sum(
            np.sin(2 * np.pi * mode * time) * np.exp(-time / decay) for mode, decay in zip(modes, decays, strict=True)
        )
        click = source.standard_normal(len(time)) * np.exp(-time / source.uniform(0.001, 0.01))
        parts += [hit + source.uniform(0.2, 2) * click, np.zeros(round(source.uniform(0.02, 0.3) * RATE))]
    return np.concatenate(parts).astype(np.float32)


def keys(source: np.random.Generator) -> Samples:
    """Keys of a keyboard, clicks of a mouse, steps: short bright bursts at uneven times."""
    sound = np.zeros(round(source.uniform(0.3, MAX_SECONDS) * RATE))
    moment = 0.0
    while moment < len(sound) / RATE - 0.06:
        time = np.arange(round(0.05 * RATE)) / RATE
        centre = source.uniform(800, 5000)
        hit = _shaped(source, len(time), (centre, centre * 1.4, centre * 0.5), 900) * np.exp(
            -time / source.uniform(0.002, 0.02)
        )
        begin = round(moment * RATE)
        sound[begin : begin + len(hit)] += source.uniform(0.2, 1) * hit
        moment += source.uniform(0.03, 0.35)
    return sound.astype(np.float32)


def creak(source: np.random.Generator) -> Samples:
    """A door: a train of resonant pulses whose rate glides, or a thud with rattle."""
    seconds = source.uniform(0.3, 1.6)
    rate = np.linspace(source.uniform(20, 250), source.uniform(20, 250), round(seconds * RATE))
    pulses = np.diff(np.floor(np.cumsum(rate * (1 + 0.2 * source.standard_normal(len(rate)))) / RATE), prepend=0.0)
    pulses = pulses * source.uniform(0.2, 1.0, len(pulses)) + 0.002 * source.standard_normal(len(pulses))
    modes = source.uniform(200, 3500, 4)
    return (_filtered(pulses, tuple(modes), source.uniform(60, 250)) * np.hanning(len(pulses))).astype(np.float32)


def syllables(source: np.random.Generator) -> Samples:
    """Vowels and hisses one after the other, as in talk."""
    pitch = source.uniform(90, 260)
    parts: list[NDArray[np.float64]] = []
    for _ in range(int(source.integers(5, 16))):
        if source.random() < 0.4:
            size = round(source.uniform(0.03, 0.06) * RATE)
            parts.append(0.2 * _shaped(source, size, (3000, 4500, 6000), 1500) * np.hanning(size))
        vowel = _voice(source, source.uniform(0.09, 0.16), pitch * source.uniform(0.85, 1.25))
        parts.append(vowel * np.minimum(1, 8 * np.hanning(len(vowel))))
    return np.concatenate(parts).astype(np.float32)


MADE: tuple[Callable[[np.random.Generator], Samples], ...] = (cough, sneeze, laugh, knock, keys, creak)


def _formants(source: np.random.Generator) -> tuple[float, ...]:
    return (source.uniform(350, 900), source.uniform(900, 2200), source.uniform(2300, 3200))


def _peak(samples: NDArray[np.float64]) -> float:
    return float(np.abs(samples).max(initial=1e-9))


def _filtered(samples: NDArray[np.float64], centres: tuple[float, ...], width: float) -> NDArray[np.float64]:
    frequency = np.fft.rfftfreq(len(samples), 1 / RATE)
    response = sum(1 / (1 + ((frequency - centre) / width) ** 2) for centre in centres)
    made = np.fft.irfft(np.fft.rfft(samples) * response, len(samples))
    return made / max(1e-9, float(np.abs(made).max(initial=0.0)))


def _shaped(source: np.random.Generator, size: int, centres: tuple[float, ...], width: float) -> NDArray[np.float64]:
    """Noise with resonances, of unit peak."""
    return _filtered(source.standard_normal(max(2, size)), centres, width)[:size]


def _voice(
    source: np.random.Generator,
    seconds: float,
    pitch: float,
    formants: tuple[float, ...] | None = None,
    jitter: float = 0.03,
) -> NDArray[np.float64]:
    """A pulse train with formants, of unit peak; a jitter makes it rough."""
    size = max(2, round(seconds * RATE))
    glide = np.linspace(1, source.uniform(0.7, 1.2), size)
    rough = 1 + jitter * np.repeat(source.standard_normal(size // 80 + 1), 80)[:size]
    phase = np.cumsum(pitch * glide * rough) / RATE
    pulses = np.diff(np.floor(phase), prepend=0.0)
    return _filtered(pulses, formants or _formants(source), source.uniform(80, 250))
