"""Tones of the telephone network: key tones, ringback, busy and congestion, special information tones."""

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import from_db

Samples = NDArray[np.float32]

DIGIT_ROWS, DIGIT_COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477, 1633)  # ITU-T Q.23
DIGIT_KEYS = ("123A", "456B", "789C", "*0#D")
TONE_SECONDS, PAUSE_SECONDS = 0.1, 0.06
RAMP_SECONDS = 0.002  # at both ends, against clicks
LEVEL_DB = -10.0  # of each frequency, in dB of a full-scale sine


def tone(frequencies: tuple[float, ...], seconds: float, rate: int, level_db: float = LEVEL_DB) -> Samples:
    """Sines together, each of a level; a few milliseconds fade in and out."""
    count = round(seconds * rate)
    time = np.arange(count) / rate
    samples = sum((np.sin(2 * np.pi * each * time) for each in frequencies), np.zeros(count)) * from_db(level_db)
    ramp = np.clip(np.minimum(np.arange(count), np.arange(count)[::-1]) / (RAMP_SECONDS * rate), 0, 1)
    return (samples * ramp).astype(np.float32)


def digit_tones(keys: str, rate: int) -> Samples:
    """The tones of telephone keys, 100 ms each with pauses of 60 ms."""
    pieces = [np.zeros(0, np.float32)]
    pause = np.zeros(round(PAUSE_SECONDS * rate), np.float32)
    for key in keys:
        row = next(index for index, row in enumerate(DIGIT_KEYS) if key in row)
        column = DIGIT_KEYS[row].index(key)
        pieces += [tone((DIGIT_ROWS[row], DIGIT_COLUMNS[column]), TONE_SECONDS, rate), pause]
    return np.concatenate(pieces)
