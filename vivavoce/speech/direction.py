"""How a model is told to speak: in words before it speaks, or by what a listener says in between.

What a model cannot do is refused by name. Speed is everybody's; all else takes a model that can be directed.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from vivavoce.errors import InputError
from vivavoce.speech.cosyvoice_controls import DirectedStyle
from vivavoce.speech.cosyvoice_wishes import directed
from vivavoce.speech.interface import SpeakingStyle, SpeechModel

SHOWN = 60  # characters of what was asked for, in an error


@runtime_checkable
class Directable(Protocol):
    """A speech model that can be told how to speak."""

    def as_told(self, instructions: str, manner: SpeakingStyle) -> SpeakingStyle:
        """The manner that these words ask for, which may be any; what the model cannot do is refused by name."""
        ...

    def as_wished(self, said: str, manner: SpeakingStyle) -> SpeakingStyle | None:
        """The manner after what a listener said, if all of it was a wish that can be granted."""
        ...


def told(speaker: SpeechModel, instructions: str, manner: SpeakingStyle) -> SpeakingStyle:
    """How a model speaks that was given such instructions; none change nothing."""
    words = instructions.strip()
    if not words:
        return manner
    if isinstance(speaker, Directable):
        return speaker.as_told(words, manner)
    wished = _at_another_speed(words, manner)
    if wished is None:
        raise InputError(
            f"this model cannot be told how to speak, as in {words[:SHOWN]!r}, but for its speed; "
            "leave the instructions out or take CosyVoice"
        )
    return wished


def wished(speaker: SpeechModel, said: Iterable[str], manner: SpeakingStyle) -> SpeakingStyle:
    """How a model speaks after all that a listener has said, in their order; most of it asks for nothing."""
    for words in said:
        if isinstance(speaker, Directable):
            manner = speaker.as_wished(words, manner) or manner
        else:
            manner = _at_another_speed(words, manner) or manner
    return manner


def _at_another_speed(said: str, manner: SpeakingStyle) -> SpeakingStyle | None:
    asked = directed(said, DirectedStyle(speed=manner.speed))
    is_speed = asked is not None and asked == DirectedStyle(speed=asked.speed)
    return replace(manner, speed=asked.speed) if asked is not None and is_speed else None
