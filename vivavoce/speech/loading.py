"""Which text-to-speech model a folder holds, and who loads it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vivavoce import hub
from vivavoce.errors import CheckpointError, InputError
from vivavoce.speech.interface import SpeechModel


@dataclass(frozen=True)
class TTSKind:
    """A kind of model: what its folders look like, and the class whose `load(folder, device, dtype)` opens them."""

    name: str
    is_here: Callable[[Path], bool]
    loader: str
    """`module:class`, loaded when such a model is."""


def model_type(folder: Path) -> str | None:
    """What a folder's `config.json` says it is."""
    try:
        given: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf8"))
        return str(given.get("model_type"))
    except (OSError, ValueError, AttributeError):
        return None


KINDS = (
    TTSKind("moss-tts-nano", lambda folder: model_type(folder) == "moss_tts_nano", "vivavoce.speech.speaker:NanoTTS"),
    TTSKind(
        "moss-tts-nano-onnx",
        lambda folder: (folder / "moss_tts_prefill.onnx").is_file(),
        "vivavoce.speech.onnx_backend:OnnxTTS",
    ),
    TTSKind(
        "cosyvoice",
        lambda folder: any((folder / name).is_file() for name in ("cosyvoice2.yaml", "cosyvoice3.yaml")),
        "vivavoce.speech.cosyvoice_speaker:CosyVoiceTTS",
    ),
)


def open_speech_model(name: str, device: str = "auto", dtype: str = "auto") -> SpeechModel:
    """A model by its bundled name, folder or hub id."""
    folder = hub.resolve(name)
    kind = next((kind for kind in KINDS if kind.is_here(folder)), None)
    if kind is None:
        known = ", ".join(kind.name for kind in KINDS)
        raise CheckpointError(f"{folder} holds none of the text-to-speech models that are known: {known}")
    module, _, name_of_class = kind.loader.partition(":")
    opened: SpeechModel = getattr(import_module(module), name_of_class).load(str(folder), device, dtype)
    return opened


def read_text(text: str | None, file: Path | None, standard_input: Callable[[], bytes]) -> str:
    """What is to be said: given as it is, in a file, or on standard input."""
    if text is not None and file is not None:
        raise InputError("give a text or --file, not both")
    try:
        content = text.encode("utf8", "surrogateescape") if text is not None else None
        if content is None or text == "-":
            content = standard_input() if file is None else file.read_bytes()
        return content.decode("utf8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the text is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error
