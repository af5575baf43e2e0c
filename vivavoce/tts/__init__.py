"""Text to speech: `say` returns all audio of a text, `speak_stream` yields it while it is generated.

Modules that need torch are imported on first use, so that the ONNX backend works without torch.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import Sound

if TYPE_CHECKING:
    from vivavoce.tts.interface import SpeakingStyle, SpeechModel
    from vivavoce.tts.nano import NanoTTS


__all__ = [
    "NanoTTS",
    "SpeakingStyle",
    "SpeechModel",
    "StoredVoice",
    "VoiceStore",
    "say",
    "speak_stream",
    "speech_model",
]
EXPORTS = {
    "StoredVoice": "interface",
    "SpeakingStyle": "interface",
    "NanoTTS": "nano",
    "SpeechModel": "interface",
    "VoiceStore": "interface",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)


@lru_cache(maxsize=2)
def speech_model(model: str = "mini-tts", device: str = "auto") -> "SpeechModel":
    """Load a TTS model once for all calls with the same arguments."""
    from vivavoce.tts.interface import open_speech_model

    return open_speech_model(model, device)


def say(
    text: str,
    voice: str | Sound | None = None,
    model: str = "mini-tts",
    speed: float = 1.0,
    pause: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    rate: int | None = None,
) -> Sound:
    """Speak a text in the voice of this name or recording, at this sample rate or the model's."""
    from vivavoce.tts.interface import SpeakingStyle

    sound = speech_model(model, device).say(text, voice, SpeakingStyle(speed, pause, seed))
    return sound if rate is None else sound.resampled(rate)


def speak_stream(
    text: str,
    voice: str | Sound | None = None,
    model: str = "mini-tts",
    speed: float = 1.0,
    pause: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    rate: int | None = None,
) -> Iterator[NDArray[np.float32]]:
    """As `say`, but yields the audio in pieces while it is generated.  # [channel, time]"""
    from vivavoce.tts.interface import SpeakingStyle
    from vivavoce.tts.output import shaped

    tts = speech_model(model, device)
    pieces = tts.stream(text, voice, SpeakingStyle(speed, pause, seed))
    return shaped(pieces, tts.channels, tts.rate, rate or tts.rate, mono=False)
