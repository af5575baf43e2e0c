"""Two arithmetic voices with a soft whistle of their own each, and an embedding that tells them apart by it."""

import numpy as np

from tests.dialogue.voices import RATE, talk

MARKS = (5000.0, 6500.0)
MARK_LEVEL = 0.004


def by_mark(sound):
    """A unit vector of how much of each voice is in the sound."""
    phases = 2j * np.pi * np.outer(MARKS, np.arange(len(sound)) / RATE)
    present = np.abs(np.exp(-phases) @ sound) + 1e-9
    return (present / np.linalg.norm(present)).astype(np.float32)


def voice(seconds, is_user=True):
    """Talk of the user or of another speaker."""
    sound = talk(seconds, seed=5 if is_user else 11)
    time = np.arange(len(sound)) / RATE
    return (sound + MARK_LEVEL * np.sin(2 * np.pi * MARKS[0 if is_user else 1] * time)).astype(np.float32)
