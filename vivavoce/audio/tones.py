"""Tones of the telephone network: key tones, ringback, busy and congestion, special information tones."""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import from_db

Samples = NDArray[np.float32]
Region = Literal["us", "europe", "uk"]

DIGIT_ROWS: Final = (697, 770, 852, 941)  # ITU-T Q.23
DIGIT_COLUMNS: Final = (1209, 1336, 1477, 1633)
DIGIT_KEYS: Final = ("123A", "456B", "789C", "*0#D")
TONE_SECONDS, PAUSE_SECONDS = 0.1, 0.06
RAMP_SECONDS = 0.002  # at both ends, against clicks
LEVEL_DB = -10.0  # of each frequency, in dB of a full-scale sine

Frequencies = tuple[float, ...]
Part = tuple[Frequencies, float]
"""Frequencies that sound together (none: silence), and seconds."""

CALL_PROGRESS: Final[dict[Region, dict[str, Sequence[Part]]]] = {  # one period of each, as ITU-T E.180 lists them
    "us": {
        "ringback": [((440, 480), 2.0), ((), 4.0)],
        "busy": [((480, 620), 0.5), ((), 0.5)],
        "congestion": [((480, 620), 0.25), ((), 0.25)],
    },
    "europe": {
        "ringback": [((425,), 1.0), ((), 4.0)],
        "busy": [((425,), 0.5), ((), 0.5)],
        "congestion": [((425,), 0.25), ((), 0.25)],
    },
    "uk": {
        "ringback": [((400, 450), 0.4), ((), 0.2), ((400, 450), 0.4), ((), 2.0)],
        "busy": [((400,), 0.375), ((), 0.375)],
        "congestion": [((400,), 0.25), ((), 0.25)],
    },
}
SPECIAL_INFORMATION: Final[Sequence[Part]] = [((950,), 0.33), ((1400,), 0.33), ((1800,), 0.33), ((), 1.0)]


def tone(frequencies: Frequencies, seconds: float, rate: int, level_db: float = LEVEL_DB) -> Samples:
    """Sines together, each of a level, with short ramps at both ends; silence without frequencies."""
    count = round(seconds * rate)
    time = np.arange(count) / rate
    samples = sum((np.sin(2 * np.pi * each * time) for each in frequencies), np.zeros(count)) * from_db(level_db)
    ramp = np.clip(np.minimum(np.arange(count), np.arange(count)[::-1]) / (RAMP_SECONDS * rate), 0, 1)
    return (samples * ramp).astype(np.float32)


def cadence(parts: Sequence[Part], seconds: float, rate: int, level_db: float = LEVEL_DB) -> Samples:
    """A period repeated for so many seconds."""
    period = np.concatenate([tone(frequencies, length, rate, level_db) for frequencies, length in parts])
    return np.resize(period, round(seconds * rate))


def digit_frequencies(key: str) -> Frequencies:
    """The two frequencies of a telephone key."""
    row = next(index for index, keys in enumerate(DIGIT_KEYS) if key in keys)
    return DIGIT_ROWS[row], DIGIT_COLUMNS[DIGIT_KEYS[row].index(key)]


def digit_tones(keys: str, rate: int, level_db: float = LEVEL_DB) -> Samples:
    """The tones of telephone keys, 100 ms each with pauses of 60 ms."""
    pause = np.zeros(round(PAUSE_SECONDS * rate), np.float32)
    pieces = [np.zeros(0, np.float32)]
    for key in keys:
        pieces += [tone(digit_frequencies(key), TONE_SECONDS, rate, level_db), pause]
    return np.concatenate(pieces)
