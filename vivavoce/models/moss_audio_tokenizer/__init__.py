"""MOSS-Audio-Tokenizer-Nano: 48 kHz stereo sound to sixteen codes every 80 ms and back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig as MossAudioTokenizerConfig
    from vivavoce.models.moss_audio_tokenizer.cuda import SlotDecoder as SlotDecoder
    from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano as MossAudioTokenizerNano

_MODULES = {  # loaded on first use: prompts and configurations must work without torch
    "MossAudioTokenizerConfig": "config",
    "MossAudioTokenizerNano": "model",
    "SlotDecoder": "cuda",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
