"""`viva export trtllm`: which checkpoint folders a model becomes, and writing them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm import moss_speech
from vivavoce.export.trtllm import whisper as cosyvoice
from vivavoce.export.trtllm.decoder import Shard
from vivavoce.export.trtllm.folder import CheckpointFolder, write_build_script, write_export
from vivavoce.export.trtllm.moss_speech import write_torch_backend
from vivavoce.export.trtllm.options import LAST_ENGINES, TrtLlmOptions
from vivavoce.export.trtllm.rounding import activation_peaks, read_rows
from vivavoce.export.trtllm.whisper import whisper_folders
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.registry import family_of, model_type
from vivavoce.models.whisper.config import open_whisper

EXPORTED = ("moss-speech", "cosyvoice-lm", "whisper")


def export_trtllm(source: Path, out: Path, options: TrtLlmOptions, part: str = "whole") -> dict[str, Any]:
    """Write a checkpoint with its build script (or, for newer versions, what their PyTorch backend needs)."""
    kind = kind_of(source)
    chosen = {name: value for name, value in vars(options).items() if name != "peaks"}
    about = {"kind": kind, "part": part, "source": source.name, "options": chosen}
    if not options.format.has_engines:
        return write_export(out, [_torch_backend(kind, source, options)], about | {"backend": "pytorch"})
    checkpoint, folders = _folders(kind, source, options, part)
    with checkpoint:
        for folder in folders:
            for rank in range(options.tp):
                folder.plan(Shard(rank, options.tp))  # so that every complaint comes before the first byte
        writers: list[Callable[[Path], None]] = [_writer(folder, options) for folder in folders]
        writers.append(lambda place: write_build_script(place, folders, options))
        return write_export(out, writers, about | {"backend": "tensorrt"})


def calibrate(source: Path, rows: Path) -> dict[str, float]:
    """What fp8 needs to know of a model: it is loaded, and run on the rows of a JSON file."""
    kind = kind_of(source)
    if kind == "whisper":
        raise InputError("Whisper engines need no calibration: they take --quantise int8, int4 or none")
    if kind == "moss-speech":
        speech = MossSpeech.load(source)
        return activation_peaks(speech, moss_speech.module_names(speech.config), read_rows(rows, speech.vocabularies))
    model = CosyVoiceLM.load(source)
    names = cosyvoice.module_names(model.config.num_hidden_layers)
    return activation_peaks(model, names, read_rows(rows, model.vocabularies))


def kind_of(source: Path) -> str:
    """moss-speech, cosyvoice-lm or whisper."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give the folder or file of a model")
    family = family_of(source)
    if family is None or family.name not in EXPORTED:
        said = model_type(source) or "nothing that says what it is"
        raise InputError(
            f"{source} holds {said}; MOSS-Speech, Whisper and CosyVoice's llm.pt can be exported to TensorRT-LLM"
        )
    return family.name


def _folders(
    kind: str, source: Path, options: TrtLlmOptions, part: str
) -> tuple[Checkpoint, Sequence[CheckpointFolder]]:
    if kind == "whisper":
        config, checkpoint = open_whisper(source)
        return checkpoint, whisper_folders(config, checkpoint, options, part)
    checkpoint = Checkpoint(source)
    if kind == "cosyvoice-lm":
        return checkpoint, [cosyvoice.cosyvoice_folder(checkpoint, options, part)]
    return checkpoint, [moss_speech.moss_speech_folder(source, checkpoint, options, part)]


def _writer(folder: CheckpointFolder, options: TrtLlmOptions) -> Callable[[Path], None]:
    return lambda place: folder.write(place / folder.name, options.tp)


def _torch_backend(kind: str, source: Path, options: TrtLlmOptions) -> Callable[[Path], None]:
    if kind == "whisper":
        raise InputError(
            f"TensorRT-LLM {options.version} reads Whisper's own folder: LLM(model={str(source)!r}); nothing to export"
        )
    if kind == "cosyvoice-lm":
        raise InputError(
            f"TensorRT-LLM builds no engines after {LAST_ENGINES}, and CosyVoice's LM needs one; take an older version"
        )
    if options.quantise != "none" or options.kv_cache != "none":
        raise InputError(
            f"TensorRT-LLM {options.version} has the PyTorch backend alone, for which weights stay as published; leave "
            "--quantise and --kv-cache out"
        )
    return partial(write_torch_backend, source, options)
