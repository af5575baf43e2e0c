"""MOSS-TTS-Nano: text and a reference voice to sixteen speech codes every 80 ms."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivavoce.models.moss_tts_nano.model import MossTTSNano as MossTTSNano
    from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig as MossTTSNanoConfig
    from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt as MossTTSNanoPrompt
    from vivavoce.models.moss_tts_nano.prompt import NanoSampling as NanoSampling

_MODULES = {  # loaded on first use: prompts and configurations must work without torch
    "MossTTSNano": "model",
    "MossTTSNanoConfig": "prompt",
    "MossTTSNanoPrompt": "prompt",
    "NanoSampling": "prompt",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
