"""Audio of scripted calls: synthetic backchannels, coughs, knocks, noise and talkers, and recorded questions."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce import minis
from vivavoce.audio.io import Sound, read
from vivavoce.audio.level import from_db, normalise_speech, rms_dbfs
from vivavoce.errors import InputError

Samples = NDArray[np.float32]

RATE = 24_000  # of the wire, and of all audio here
SPEECH_DBFS = -23.0
FRAME = RATE // 100
VOICED_DB = 30.0  # frames this far below the loudest one are unvoiced
MIN_VOICED_DBFS = -50.0
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (640, 1190, 2390))
NASAL = (250, 1100, 2200)


def voiced(samples: Samples) -> NDArray[np.bool_]:
    """Which 10 ms frames hold voice: within 30 dB of the loudest, and above -50 dBFS.  # [frame]"""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME).astype(np.float64)
    power = np.square(frames).mean(axis=1)
    return power > max(power.max(initial=0.0) * from_db(-VOICED_DB) ** 2, from_db(MIN_VOICED_DBFS) ** 2)


def voiced_bounds(samples: Samples) -> tuple[int, int]:
    """The first voiced sample and the one after the last; both 0 where there is no voice."""
    found = np.flatnonzero(voiced(samples))
    return (int(found[0]) * FRAME, int(found[-1] + 1) * FRAME) if found.size else (0, 0)


def at_level(samples: Samples, dbfs: float) -> Samples:
    """Scale so that the voiced part has this level."""
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
    """One or two decaying noise bursts, voiced for odd seeds."""
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
    """Up to three knocks on a table."""
    source = np.random.default_rng(seed)
    time = np.arange(RATE // 10) / RATE
    hit = np.sin(2 * np.pi * source.uniform(120, 300) * time) + 0.5 * source.standard_normal(len(time))
    hit = (hit * np.exp(-time / 0.015)).astype(np.float32)
    gap = np.zeros(round(source.uniform(0.05, 0.15) * RATE), np.float32)
    return at_level(np.concatenate([hit, gap] * int(source.integers(1, 4))), SPEECH_DBFS + 3)


def talk(seconds: float, seed: int = 0) -> Samples:
    """Speech-like syllables, for machines without recordings or a synthesizer."""
    source = np.random.default_rng(seed)
    pitch = source.choice([105.0, 125.0, 190.0, 220.0])
    pieces: list[Samples] = []
    vowel = 0
    while sum(map(len, pieces)) < seconds * RATE:
        vowel = (vowel + int(source.integers(1, len(VOWELS)))) % len(VOWELS)
        if source.random() < 0.4:
            hiss = np.diff(source.standard_normal(round(source.uniform(0.03, 0.06) * RATE)), prepend=0.0)
            pieces.append((0.1 * hiss * np.hanning(len(hiss))).astype(np.float32))
        shifted_pitch = pitch * source.uniform(0.85, 1.25)
        pieces.append(_vowel(source.uniform(0.09, 0.16), VOWELS[vowel], shifted_pitch, source))
    return at_level(np.concatenate(pieces)[: round(seconds * RATE)], SPEECH_DBFS)


def distant_talker(samples: Samples) -> Samples:
    """A talker across the room: 18 dB softer, low-passed, with early reflections."""
    spectrum = np.fft.rfft(samples, len(samples) + RATE // 2)
    frequency = np.fft.rfftfreq(len(samples) + RATE // 2, 1 / RATE)
    dull = np.fft.irfft(spectrum / (1 + (frequency / 1500) ** 2))
    for delay, gain in ((0.031, 0.5), (0.053, 0.35), (0.087, 0.25)):
        dull[round(delay * RATE) :] += gain * dull[: -round(delay * RATE)]
    return at_level(dull.astype(np.float32), SPEECH_DBFS - 18)


@lru_cache(maxsize=32)
def room_noise(seconds: float, dbfs: float, seed: int = 0) -> Samples:
    """Stationary noise falling with frequency, as of traffic and fans; loopable and read-only."""
    source = np.random.default_rng(seed)
    size = round(seconds * RATE)
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    spectrum = np.fft.rfft(source.standard_normal(size)) / np.sqrt(np.maximum(frequency, 50.0))
    noise = np.fft.irfft(spectrum, size)
    levelled = (noise * from_db(dbfs - rms_dbfs(noise.astype(np.float32)))).astype(np.float32)
    levelled.flags.writeable = False
    return levelled


def with_pause(samples: Samples, seconds: float) -> tuple[Samples, int]:
    """Insert a pause at the quietest point of the middle third; also its first sample."""
    first, last = voiced_bounds(samples)
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    power = np.convolve(np.square(frames).mean(axis=1), np.ones(3) / 3, mode="same")
    begin, end = (first + (last - first) // 3) // FRAME, (first + 2 * (last - first) // 3) // FRAME
    cut = (begin + int(np.argmin(power[begin : max(end, begin + 1)]))) * FRAME
    ramp = np.linspace(1, 0, FRAME, dtype=np.float32)
    first_part, rest = samples[:cut].copy(), samples[cut:].copy()
    first_part[-FRAME:] *= ramp[-len(first_part) :]
    rest[:FRAME] *= ramp[::-1][: len(rest)]
    return np.concatenate([first_part, np.zeros(round(seconds * RATE), np.float32), rest]), cut


def _vowel(
    seconds: float, formants: tuple[int, ...], pitch: float, source: np.random.Generator, brightness: float = 1.0
) -> Samples:
    """Harmonics shaped by formants; `brightness` weighs the higher formants."""
    time = np.arange(round(seconds * RATE)) / RATE
    instantaneous_pitch = pitch * (1 + 0.05 * np.sin(2 * np.pi * 3 * time + source.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(instantaneous_pitch) / RATE
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


BUNDLED = Path(minis.__file__).parent / "questions"
ENDINGS = {".wav", ".flac", ".opus", ".ogg", ".mp3"}
MARGIN = RATE // 20  # silence kept around the voice
HUMS = 12
TEXTS = (
    "What time do you open tomorrow?",
    "Can I bring my dog with me?",
    "How far is it to the railway station?",
    "Is breakfast included in the price?",
    "Could you book a table for two at seven?",
    "Where can I leave my car overnight?",
    "Do you have a room with a view of the garden?",
    "What is the weather like this weekend?",
    "How do I connect to the wireless network?",
    "Which museum would you recommend?",
    "Can I pay with a credit card?",
    "At what time must I leave the room?",
)
BACKCHANNELS = ("mm-hm", "yeah", "okay", "right", "uh huh", "I see")


@dataclass(frozen=True)
class SpokenQuestion:
    """A question at the wire's rate; `reply` is the expected answer, if known."""

    text: str
    sound: Samples = field(repr=False)
    voice: str = ""
    reply: str | None = None


@dataclass(frozen=True)
class Material:
    """Questions and backchannels of a script."""

    questions: tuple[SpokenQuestion, ...]
    backchannels: tuple[Samples, ...]
    source: str
    """Description of where the questions come from."""


def gather(speech: Path | None = None) -> Material:
    """Recordings in `speech` (and in its folder `backchannels`), else the bundled ones, else synthesised ones."""
    if speech is not None:
        if not speech.is_dir():
            raise InputError(f"{speech} is not a folder of recorded questions")
        return Material(recorded(speech), _backchannels(speech), f"recordings in {speech}")
    if (BUNDLED / "questions.json").is_file():
        return Material(recorded(BUNDLED), _backchannels(BUNDLED), "bundled recordings")
    program = next((name for name in ("flite", "espeak-ng") if shutil.which(name)), None)
    if program is not None and find_spec("scipy") is not None:  # needed to resample the synthesizers' output
        spoken = [question.sound for question in synthesised(program, BACKCHANNELS)]
        softer = [at_level(sound, SPEECH_DBFS - 6) for sound in spoken]
        mixed = [each for pair in zip(softer, _backchannels(None), strict=False) for each in pair]
        return Material(synthesised(program), tuple(mixed), f"synthesised by {program}")
    asked = tuple(SpokenQuestion(f"syllables {seed}", talk(1.6, seed), f"made-up {seed}") for seed in range(len(TEXTS)))
    return Material(asked, _backchannels(None), "made-up syllables")


def recorded(folder: Path) -> tuple[SpokenQuestion, ...]:
    """The questions of a folder, by its `questions.json`, else every sound file with its name as text."""
    index = folder / "questions.json"
    if index.is_file():
        entries = _entries(index)
    else:
        files = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
        entries = [{"file": name, "text": Path(name).stem.replace("_", " ")} for name in files]
    if not entries:
        raise InputError(f"{folder} holds no recorded questions; it needs sound files, or questions.json naming them")
    return tuple(
        SpokenQuestion(
            entry.get("text", ""), _prepared(folder / entry["file"]), entry.get("voice", ""), entry.get("reply")
        )
        for entry in entries
    )


def synthesised(program: str, texts: Sequence[str] = TEXTS) -> tuple[SpokenQuestion, ...]:
    """The texts in a few voices of an installed synthesizer."""
    from vivavoce.train.voices import VOICES, programs, speak

    every = [voice for voice in VOICES if voice.program == program]
    voices = every[:: max(1, len(every) // 4)]
    spoken = []
    for number, text in enumerate(texts):
        voice = voices[number % len(voices)]
        spoken.append(SpokenQuestion(text, _level(Sound(speak(voice, text, programs()), 16_000)), voice.name))
    return tuple(spoken)


def _entries(index: Path) -> list[dict[str, str]]:
    try:
        entries = json.loads(index.read_text(encoding="utf8"))
    except ValueError as error:
        raise InputError(f"{index} is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "file" in entry for entry in entries):
        raise InputError(f'{index} must be a list of {{"file": …, "text": …}}')
    return entries


def _backchannels(folder: Path | None) -> tuple[Samples, ...]:
    path = None if folder is None else folder / "backchannels"
    if path is not None and path.is_dir():
        files = sorted(path for path in path.iterdir() if path.suffix.lower() in ENDINGS)
        if files:
            return tuple(at_level(_prepared(path), SPEECH_DBFS - 6) for path in files)
    return tuple(mm_hm(seed) for seed in range(HUMS))


def _prepared(path: Path) -> Samples:
    return _level(read(path))


def _level(sound: Sound) -> Samples:
    """Resample, normalise the level, and trim to a short silence on both sides."""
    samples = normalise_speech(sound.mono().resampled(RATE), SPEECH_DBFS).samples[0]
    first, last = voiced_bounds(samples)
    if last == 0:
        raise InputError("a recorded question is silent")
    return samples[max(0, first - MARGIN) : last + MARGIN].copy()
