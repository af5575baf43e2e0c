"""Silence around the pieces of a reply: synthesisers begin and end each text with up to a second of it."""

import numpy as np

from vivavoce.cascade.sentences import CLOSERS, ENDS, PAUSES
from vivavoce.dialogue.items import Samples

QUIET = 10 ** (-50 / 20)
ONSET_SECONDS = 0.03  # kept before the first sample above it, for soft consonants
SENTENCE_PAUSE, CLAUSE_PAUSE, WORD_PAUSE = 0.4, 0.15, 0.05  # seconds


class SilenceTrimmer:
    """Removes the silence that the sound of a text begins with, and shortens that at its end.

    What is emitted does not depend on how the sound is cut into pieces.
    """

    def __init__(self, rate: int) -> None:
        self._onset = round(ONSET_SECONDS * rate)
        self._rate = rate
        self._has_begun = False
        self._held: Samples = np.zeros(0, np.float32)  # silence that may be the last

    def push(self, samples: Samples) -> Samples:
        """What can be played of the sound so far; may be empty."""
        sound = np.concatenate([self._held, samples])
        loud = np.flatnonzero(np.abs(sound) > QUIET)
        if not len(loud):
            self._held = sound if self._has_begun else sound[max(0, len(sound) - self._onset) :]
            return sound[:0]
        first = 0 if self._has_begun else max(0, int(loud[0]) - self._onset)
        end = int(loud[-1]) + 1
        self._has_begun, self._held = True, sound[end:]
        return sound[first:end]

    def flush(self, text: str) -> Samples:
        """The pause after this text."""
        last = text.rstrip()[-1:]
        pause = CLAUSE_PAUSE if last in PAUSES else SENTENCE_PAUSE if last in ENDS + CLOSERS else WORD_PAUSE
        return self._held[: round(pause * self._rate)] if self._has_begun else self._held[:0]
