"""Viva Voce: a real-time speech engine.

import vivavoce

vivavoce.transcribe("question.wav").text                 # speech to text
with vivavoce.converse() as talk:                        # speech to speech
    answer = talk.ask("What time is breakfast?")
vivavoce.say("Good evening.", model="path/to/a/model")   # text to speech
vivavoce.load("mini-speech")                             # any model, as an object of its class
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vivavoce import _deprecated

if TYPE_CHECKING:
    from vivavoce.api import converse as converse
    from vivavoce.api import load as load
    from vivavoce.asr import transcribe as transcribe
    from vivavoce.tts import say as say

__version__ = "0.1.0"

_HOMES = {  # imported on first use: importing the package is cheap
    "converse": "vivavoce.api",
    "load": "vivavoce.api",
    "say": "vivavoce.tts",
    "transcribe": "vivavoce.asr",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


_deprecated.install()
