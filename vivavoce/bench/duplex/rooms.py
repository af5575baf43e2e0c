"""Rooms, loudspeaker echo and the telephone band, by arithmetic and a seed."""

import numpy as np

from vivavoce.bench.turn_sounds import RATE, SPEECH_DBFS, Samples, at_level
from vivavoce.evaluation.room_acoustics import Room, impulse_response

BAND = (300.0, 3400.0)
MU = 255.0


ROOMS = (
    Room("car", (2.4, 1.5, 1.2), 0.45),
    Room("study", (3.1, 2.6, 2.4), 0.6),
    Room("office", (4.7, 3.6, 2.7), 0.65),
    Room("kitchen", (3.9, 3.2, 2.5), 0.78),
    Room("living room", (6.2, 4.4, 2.6), 0.7),
    Room("hall", (9.5, 6.8, 3.4), 0.75),
)


def in_room(samples: Samples, room: Room, distance: float, seed: int = 0) -> Samples:
    """The sound as the microphone hears it at this distance, at speech level."""
    return at_level(_convolved(samples, impulse_response(room, distance, seed, RATE)), SPEECH_DBFS)


def echo_response(room: Room, seed: int = 0) -> Samples:
    """Impulse response of a loudspeaker half a metre away, of unit energy, so that a level is that of the echo."""
    response = impulse_response(room, 0.5, seed, RATE)
    return (response / np.linalg.norm(response)).astype(np.float32)


def by_telephone(samples: Samples) -> Samples:
    """300 to 3400 Hz in µ-law steps."""
    spectrum = np.fft.rfft(samples)
    frequency = np.fft.rfftfreq(len(samples), 1 / RATE)
    passed = 1 / (1 + np.exp(-(frequency - BAND[0]) / 25)) / (1 + np.exp((frequency - BAND[1]) / 60))
    band = np.clip(np.fft.irfft(spectrum * passed, len(samples)), -1, 1)
    coded = np.round(np.sign(band) * np.log1p(MU * np.abs(band)) / np.log1p(MU) * 127) / 127
    return (np.sign(coded) * np.expm1(np.abs(coded) * np.log1p(MU)) / MU).astype(np.float32)


def _convolved(samples: Samples, response: Samples) -> Samples:
    size = len(samples) + len(response)
    product = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    return np.fft.irfft(product, size)[: len(samples) + len(response) - 1].astype(np.float32)
