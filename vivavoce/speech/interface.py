"""What every text-to-speech model can do, whatever is inside."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.sound import Sound
from vivavoce.errors import InputError
from vivavoce.speech.voices import StoredVoice, VoiceStore

Samples = NDArray[np.float32]
LONGEST_PAUSE = 10.0


@dataclass(frozen=True)
class SpeakingStyle:
    """How a text is said."""

    speed: float = 1.0
    """0.5 to 2, at the voice's own pitch."""
    pause: float = 1.0
    """Times the usual silence between sentences that are said apart."""
    seed: int = 0
    greedy: bool = False
    """Always the likeliest code: the same whatever the seed, and duller."""
    clean: bool = True
    """Whether markup and the like are taken out of the text first."""
    continues: bool = False
    """Whether to go on from the voice's recording, whose words must be known, rather than only to sound like it."""

    def __post_init__(self) -> None:
        if not 0 <= self.pause <= LONGEST_PAUSE:
            raise InputError(f"pause must be 0 to {LONGEST_PAUSE:.0f} times the usual, not {self.pause}")


class SpeechModel(Protocol):
    """Text in, sound out. May be asked from several threads."""

    shelf: VoiceStore

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        ...

    @property
    def channels(self) -> int:
        """Of what comes out."""
        ...

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        manner: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [channel, time]

        `voice` is a name, or a recording to sound like; none is the model's own. Without a clock nobody waits for the
        sound, and its last bits are the same each time.
        """
        ...

    def say(self, text: str, voice: str | Sound | None = None, manner: SpeakingStyle | None = None) -> Sound:
        """The whole sound of a text."""
        ...

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Keep a voice on this machine under a name, from a recording and, where known, its words."""
        ...
