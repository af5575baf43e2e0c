"""`viva export trtllm`: the checkpoint folders of a model, and calibration of activation ranges for fp8."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm import moss_speech
from vivavoce.export.trtllm import whisper as cosyvoice
from vivavoce.export.trtllm.decoder import Shard
from vivavoce.export.trtllm.folder import CheckpointFolder, write_build_script, write_export
from vivavoce.export.trtllm.moss_speech import write_torch_backend
from vivavoce.export.trtllm.options import LAST_ENGINES, TrtLlmOptions
from vivavoce.export.trtllm.whisper import whisper_folders
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.registry import family_of, model_type
from vivavoce.models.whisper.files import open_whisper
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

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
                folder.plan(Shard(rank, options.tp))  # raises before anything is written
        writers: list[Callable[[Path], None]] = [_writer(folder, options) for folder in folders]
        writers.append(lambda folder_path: write_build_script(folder_path, folders, options))
        return write_export(out, writers, about | {"backend": "tensorrt"})


def calibrate(source: Path, rows: Path) -> dict[str, float]:
    """Activation ranges for fp8: run the model on the rows of a JSON file."""
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
    """The kind of model: moss-speech, cosyvoice-lm or whisper."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give the folder or file of a model")
    family = family_of(source)
    if family is None or family.name not in EXPORTED:
        found = model_type(source) or "no known model type"
        raise InputError(
            f"{source} holds {found}; MOSS-Speech, Whisper and CosyVoice's llm.pt can be exported to TensorRT-LLM"
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
    return lambda folder_path: folder.write(folder_path / folder.name, options.tp)


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


PAGE = 64


@dataclass
class PeakTrackingBatch(RowBatch):
    """A batch that records the largest key or value of each layer."""

    peaks: dict[int, float] = field(default_factory=dict)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        largest = float(torch.maximum(keys.abs().max(), values.abs().max()))
        self.peaks[layer] = max(self.peaks.get(layer, 0.0), largest)
        super().write(layer, keys, values)


@torch.no_grad()
def activation_peaks(
    model: nn.Module, names: Mapping[str, Sequence[str]], sequences: Iterable[Sequence[Row]]
) -> dict[str, float]:
    """The largest input of each linear of a checkpoint, and `….attention.kv` of each layer's cache.

    `names` maps the model's modules to the checkpoint's linears with the same input.
    """
    peaks: dict[str, float] = {}
    modules = dict(model.named_modules())

    def hook_for(theirs: Sequence[str]) -> Any:
        def record_peak(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest = float(inputs[0].abs().max())
            peaks.update({name: max(peaks.get(name, 0.0), largest) for name in theirs})

        return record_peak

    hooks = [modules[ours].register_forward_pre_hook(hook_for(theirs)) for ours, theirs in names.items()]
    written: dict[int, float] = {}
    try:
        for rows in sequences:
            batch = whole_batch(model, len(rows))
            batch.peaks = written
            model(torch.tensor(rows), batch)
    finally:
        for hook in hooks:
            hook.remove()
    return peaks | {f"transformer.layers.{layer}.attention.kv": peak for layer, peak in written.items()}


def whole_batch(model: Any, rows: int) -> PeakTrackingBatch:
    """All rows of one sequence, with a KV cache of its own."""
    weight = next(model.parameters())
    pages = -(-rows // PAGE)
    cache = PagedCache.allocate(model.kv_shape, pages, PAGE, weight.dtype, weight.device)
    table = torch.arange(pages, dtype=torch.int32)[None]
    positions = torch.arange(rows, dtype=torch.int32)
    piece = CachePiece(slice(0, rows), slot=0, position=0)
    return PeakTrackingBatch(cache, table, torch.zeros_like(positions), positions, 0, (piece,))


def read_rows(file: Path, vocabularies: Sequence[int]) -> list[list[Row]]:
    """Sequences of rows from JSON: a list of sequences, each a list of rows, each one id per channel."""
    try:
        given = json.loads(file.read_text(encoding="utf8"))
        sequences = [[tuple(int(number) for number in row) for row in rows] for rows in given]
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} holds no sequences of rows such as [[[5, 0], [7, 0]]] ({error})") from error
    rows = [row for sequence in sequences for row in sequence]
    if not rows or not all(sequences):
        raise InputError(f"{file} holds an empty sequence; give some rows to calibrate on")
    for row in rows:
        if len(row) != len(vocabularies) or not all(0 <= i < n for i, n in zip(row, vocabularies, strict=True)):
            raise InputError(f"{file} has the row {list(row)}; rows have ids below {list(vocabularies)}")
    return sequences
