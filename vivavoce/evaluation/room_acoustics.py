"""Impulse responses of boxes by image sources, from arithmetic and a seed."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

SOUND_SPEED = 343.0
ORDER = 6
"""Reflections of each pair of walls."""
RESPONSE_SECONDS = 0.2


@dataclass(frozen=True)
class Room:
    """A box with walls of one reflectivity; lengths in metres."""

    name: str
    size: tuple[float, float, float]
    reflectivity: float


@lru_cache(maxsize=64)
def impulse_response(room: Room, distance: float, seed: int, rate: int) -> Samples:
    """From a source at this distance to the microphone, by image sources; the direct sound is its first sample."""
    source = np.random.default_rng(seed)
    size = np.array(room.size)
    microphone = size * source.uniform(0.3, 0.7, 3)
    direction = source.standard_normal(3)
    talker = np.clip(microphone + distance * direction / np.linalg.norm(direction), 0.1, size - 0.1)
    direct = float(np.linalg.norm(talker - microphone))
    cells = np.stack(np.meshgrid(*[np.arange(-ORDER, ORDER + 1)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    mirrored = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(1, -1, 3)
    images = 2 * size * cells + np.where(mirrored, -talker, talker)  # [cell, mirror, axis]
    lengths = np.linalg.norm(images - microphone, axis=-1).ravel()
    bounces = np.abs(2 * cells - mirrored).sum(axis=-1).ravel()
    levels = room.reflectivity**bounces * direct / np.maximum(lengths, 1e-3)
    moments = np.maximum(0.0, lengths - direct) / SOUND_SPEED * rate
    whole = moments.astype(int)
    response = np.zeros(whole.max() + 2)
    np.add.at(response, whole, levels * (1 - (moments - whole)))  # a reflection is spread over two samples
    np.add.at(response, whole + 1, levels * (moments - whole))
    found = response[: round(RESPONSE_SECONDS * rate)].astype(np.float32)
    found.flags.writeable = False
    return found
