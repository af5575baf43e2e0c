"""The registry of model families: how the files of each are recognised, and which loader opens them.

Loaders are named as `module:callable` and imported on use, so that recognising a folder imports no model code.
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
MOONSHINE_ENCODER, MOONSHINE_DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
MOONSHINE_FOLDERS = ("", "dist/model/base/quantized", "package/dist/model/base/quantized")  # also of its npm package
CONVERTED_WHISPER = "model.bin"  # of CTranslate2
CONVERTED_SPEC = b"WhisperSpec"
OPENAI_WHISPERS = tuple(
    f"{size}.pt"
    for size in (
        *("tiny", "tiny.en", "base", "base.en", "small", "small.en", "medium", "medium.en"),
        *("large", "large-v1", "large-v2", "large-v3", "turbo", "large-v3-turbo"),
    )
)
KOKORO_FILES = ("kokoro-v1_0.pth", "kokoro-v1_1-zh.pth", "model.onnx", "onnx/model.onnx", "model_quantized.onnx")
XY_TOKENIZER_FILES = ("xy_tokenizer.ckpt", "MOSS_TTSD_tokenizer")


def import_entry(entry: str) -> Any:
    """Import the object named by `module:name` or `module:Class.method`."""
    module, _, names = entry.partition(":")
    target: Any = import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
    return target


def read_model_config(source: Path) -> dict[str, Any]:
    """The `config.json` of a folder; empty if it is missing or cannot be read."""
    try:
        content: Any = json.loads((source / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def model_type(source: Path) -> str | None:
    """The `model_type` in a folder's `config.json`; None if there is none."""
    kind = read_model_config(source).get("model_type")
    return kind if isinstance(kind, str) else None


@dataclass(frozen=True)
class Family:
    """A model family. `loader` is called with a name, folder or file and the name of a device; the loader of a codec
    with a folder and a torch device.
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


def openai_whisper_file(folder: Path) -> Path | None:
    """The Whisper file of OpenAI in a folder; None if there is none, or if it has a `config.json`."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    return next((folder / name for name in OPENAI_WHISPERS if (folder / name).is_file()), None)


def is_converted_whisper(folder: Path) -> bool:
    """Whether a folder holds a Whisper in CTranslate2's format."""
    file = folder / CONVERTED_WHISPER
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return CONVERTED_SPEC in stream.read(32)


def moonshine_folder(folder: Path) -> Path | None:
    """The subfolder with Moonshine's files; None if there is none."""
    candidates = [folder / inner for inner in MOONSHINE_FOLDERS]
    return next((each for each in candidates if (each / MOONSHINE_ENCODER).is_file()), None)


def _is_moonshine(source: Path) -> bool:
    return moonshine_folder(source) is not None


def _is_whisper(source: Path) -> bool:
    if source.is_dir():
        is_published = openai_whisper_file(source) is not None or is_converted_whisper(source)
        return is_published or model_type(source) == "whisper"
    return source.suffix == ".pt" and source.name not in COSYVOICE_LMS


def _is_chat_model(source: Path) -> bool:
    is_gguf = source.suffix == ".gguf" or (source.is_dir() and any(source.glob("*.gguf")))
    return is_gguf or model_type(source) in ("llama", "qwen2", "qwen3")


def _is_bigvgan(source: Path) -> bool:
    return "upsample_rates" in read_model_config(source)


def _is_xy_tokenizer(source: Path) -> bool:
    return source.suffix == ".ckpt" or _has_any(*XY_TOKENIZER_FILES)(source)


def _is_kokoro(source: Path) -> bool:
    return (source / "voices").is_dir() and _has_any(*KOKORO_FILES)(source)


# The first that matches is taken.
FAMILIES = (
    Family("moss-speech", "s2s", _typed("moss_speech"), "vivavoce.s2s.moss_speech:load_speech"),
    Family("moss-tts-nano", "tts", _typed("moss_tts_nano"), "vivavoce.tts.nano:NanoTTS.load"),
    Family("moss-tts-nano-onnx", "tts", _has_any("moss_tts_prefill.onnx"), "vivavoce.tts.onnx:OnnxTTS.load"),
    Family("moss-speech-codec", "codec", lambda s: (s / "flow").is_dir(), "vivavoce.models.codecs:load_moss_speech"),
    Family("whisper", "asr", _is_whisper, "vivavoce.asr:load_transcriber"),
    Family("moonshine", "asr", _is_moonshine, "vivavoce.asr.backends.moonshine:load_moonshine"),
    Family("cosyvoice", "tts", _has_any(*COSYVOICE_VERSIONS.values()), "vivavoce.tts.cosyvoice:CosyVoiceTTS.load"),
    Family("kokoro", "tts", _is_kokoro, "vivavoce.tts.kokoro:KokoroTTS.load"),
    Family("cosyvoice-lm", "lm", lambda s: s.name in COSYVOICE_LMS, "vivavoce.models.cosyvoice.lm:CosyVoiceLM.load"),
    Family("llama", "lm", _is_chat_model, "vivavoce.models.llama:Llama.load"),
    Family("bigvgan", "codec", _is_bigvgan, "vivavoce.models.codecs:load_bigvgan"),
    Family("xy-tokenizer", "codec", _is_xy_tokenizer, "vivavoce.models.codecs:load_xy_tokenizer"),
)


def family_of(source: Path, *tasks: Task) -> Family | None:
    """The family of a folder or file, among those of `tasks` (all if empty); None if it is not recognised."""
    return next((family for family in FAMILIES if (not tasks or family.task in tasks) and family.matches(source)), None)


def family_names(*tasks: Task) -> list[str]:
    """The known families of these tasks."""
    return [family.name for family in FAMILIES if family.task in tasks]
