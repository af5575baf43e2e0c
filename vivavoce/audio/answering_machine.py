"""Whether a person or a machine has answered an outgoing call, by the length of the greeting and by a beep."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.tone_detection import BeepDetector

Samples = NDArray[np.float32]
Answer = Literal["person", "machine", "beep", "silence"]


@dataclass(frozen=True)
class AnswerLimits:
    """Seconds that tell greetings apart."""

    max_greeting: float = 2.4
    """A person says hello in less; what lasts longer is a recording."""
    end_silence: float = 0.8
    """After a short greeting, a person waits for an answer."""
    max_silence: float = 5.0
    """Without any speech."""
    min_speech: float = 0.1
    """Less is a click."""


class AnsweringMachineDetector:
    """Reports `person`, `machine` or `silence` once, and `beep` where a beep follows speech.

    A guess from lengths, as telephone switches make it: a person with a long greeting is taken for a machine, a
    recording of one word for a person, and music for a machine. Speech is what is 12 dB above the background.
    """

    BLOCK_SECONDS = 0.02
    MIN_SPEECH_DB, ABOVE_BACKGROUND_DB = -45.0, 12.0
    RISE_DB = 0.06  # of the background for each block, 3 dB a second

    def __init__(self, rate: int, limits: AnswerLimits | None = None) -> None:
        self._limits = limits or AnswerLimits()
        self._size = round(self.BLOCK_SECONDS * rate)
        self._held: Samples = np.zeros(0, np.float32)
        self._beeps = BeepDetector(rate)
        self._background_db = -60.0
        self._speech = self._greeting = self._silence = 0.0
        self._is_decided = False

    @property
    def has_heard_speech(self) -> bool:
        """Whether something that may be speech has begun."""
        return self._speech >= self._limits.min_speech

    def step(self, samples: Samples) -> list[Answer]:
        """What these samples show."""
        self._held = np.concatenate([self._held, samples])
        count = len(self._held) // self._size
        blocks = self._held[: count * self._size].reshape(count, self._size).astype(np.float64)
        self._held = self._held[count * self._size :]
        found: list[Answer] = []
        for level in 10 * np.log10(np.square(blocks).mean(axis=1) + 1e-12):
            found += self._follow(float(level))
        for beep in self._beeps.step(samples):
            if self._speech - beep.seconds >= self._limits.min_speech:
                self._is_decided = True
                found.append("beep")
        return found

    def _follow(self, level_db: float) -> list[Answer]:
        self._background_db = max(min(level_db, self._background_db + self.RISE_DB), -80.0)
        is_speech = level_db > max(self.MIN_SPEECH_DB, self._background_db + self.ABOVE_BACKGROUND_DB)
        if is_speech:
            self._speech += self.BLOCK_SECONDS
            self._greeting += self._silence * (self._greeting > 0) + self.BLOCK_SECONDS
            self._silence = 0.0
        else:
            self._silence += self.BLOCK_SECONDS
        answer = None if self._is_decided else self._answer()
        self._is_decided = self._is_decided or answer is not None
        return [answer] if answer else []

    def _answer(self) -> Answer | None:
        limits = self._limits
        if self._greeting > limits.max_greeting:
            return "machine"
        if self._silence < limits.end_silence:
            return None
        if self._speech >= limits.min_speech:
            return "person"
        self._greeting = self._speech = 0.0  # a click
        return "silence" if self._silence >= limits.max_silence else None
