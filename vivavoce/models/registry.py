"""Every model family that is known here: how its files are recognised, and what loads it. A new model is one line.

Loaders are named as `module:callable` and imported when used, so that looking at a folder needs no model's code.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

Task = Literal["s2s", "tts", "asr", "codec", "lm"]
COSYVOICE_VERSIONS = {2: "cosyvoice2.yaml", 3: "cosyvoice3.yaml"}
COSYVOICE_LMS = ("llm.pt", "llm.rl.pt")
XY_TOKENIZER_FILES = ("xy_tokenizer.ckpt", "MOSS_TTSD_tokenizer")


def import_entry(entry: str) -> Any:
    """What a `module:name` or `module:Class.method` names."""
    module, _, names = entry.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def read_model_config(source: Path) -> dict[str, Any]:
    """What a folder's `config.json` says; empty where there is none, or none that can be read."""
    try:
        content: Any = json.loads((source / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def model_type(source: Path) -> str | None:
    """What a folder's `config.json` says it is; None where it does not say."""
    kind = read_model_config(source).get("model_type")
    return kind if isinstance(kind, str) else None


@dataclass(frozen=True)
class Family:
    """A kind of model. `loader` is called with a name, folder or file, and a device's name; a codec's, with a folder
    and a torch device.
    """

    name: str
    task: Task
    matches: Callable[[Path], bool]
    loader: str

    def load(self, *args: Any, **options: Any) -> Any:
        """Call the loader."""
        return import_entry(self.loader)(*args, **options)


def _typed(kind: str) -> Callable[[Path], bool]:
    return lambda source: model_type(source) == kind


def _has_any(*names: str) -> Callable[[Path], bool]:
    return lambda source: any((source / name).is_file() for name in names)


def _is_whisper(source: Path) -> bool:
    return model_type(source) == "whisper" or (source.suffix == ".pt" and source.name not in COSYVOICE_LMS)


def _is_bigvgan(source: Path) -> bool:
    return "upsample_rates" in read_model_config(source)


def _is_xy_tokenizer(source: Path) -> bool:
    return source.suffix == ".ckpt" or _has_any(*XY_TOKENIZER_FILES)(source)


# The first that matches is taken.
FAMILIES = (
    Family("moss-speech", "s2s", _typed("moss_speech"), "vivavoce.s2s.moss_speech:load_speech"),
    Family("moss-tts-nano", "tts", _typed("moss_tts_nano"), "vivavoce.tts.nano:NanoTTS.load"),
    Family("moss-tts-nano-onnx", "tts", _has_any("moss_tts_prefill.onnx"), "vivavoce.tts.onnx:OnnxTTS.load"),
    Family("moss-speech-codec", "codec", lambda s: (s / "flow").is_dir(), "vivavoce.models.codecs:load_moss_speech"),
    Family("whisper", "asr", _is_whisper, "vivavoce.asr:load_transcriber"),
    Family("cosyvoice", "tts", _has_any(*COSYVOICE_VERSIONS.values()), "vivavoce.tts.cosyvoice:CosyVoiceTTS.load"),
    Family("cosyvoice-lm", "lm", lambda s: s.name in COSYVOICE_LMS, "vivavoce.models.cosyvoice.lm:CosyVoiceLM.load"),
    Family("llama", "lm", lambda s: s.suffix == ".gguf" or _typed("llama")(s), "vivavoce.models.llama:Llama.load"),
    Family(
        "bigvgan", "codec", lambda s: "upsample_rates" in read_model_config(s), "vivavoce.models.codecs:load_bigvgan"
    ),
    Family("xy-tokenizer", "codec", _is_xy_tokenizer, "vivavoce.models.codecs:load_xy_tokenizer"),
)


def family_of(source: Path, *tasks: Task) -> Family | None:
    """The family of a folder or file, among those of these tasks (none: all); None where it is of none."""
    return next((family for family in FAMILIES if (not tasks or family.task in tasks) and family.matches(source)), None)


def family_names(*tasks: Task) -> list[str]:
    """The known families of these tasks."""
    return [family.name for family in FAMILIES if family.task in tasks]
