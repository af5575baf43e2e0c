"""`viva export onnx`: which graphs a model has, by what its files say it is, and where they are written."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.nano_onnx import nano_graphs, write_beside
from vivavoce.export.onnx_codec import codec_graphs, speech_graphs
from vivavoce.export.onnx_graph import OPSET, ExportedGraph, OnnxExport, export_graph
from vivavoce.export.onnx_models import bigvgan_graphs, lm_graphs, whisper_graphs, xy_graphs
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.cosyvoice.folder import LM, CosyVoiceSizes, load_speech, version_of
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.llama import Llama
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.registry import family_of
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.xy_tokenizer.model import XYTokenizer

MANIFEST = "export.json"


@dataclass(frozen=True)
class OnnxKind:
    """A model family's graphs."""

    name: str
    graphs: Callable[[Path], Iterator[OnnxExport]]
    beside: Callable[[Path, Path], None] | None = None
    """Writes what a runtime needs besides the graphs, from the model's folder into the new one."""


def _moss_speech(folder: Path) -> Iterator[OnnxExport]:
    yield from lm_graphs(MossSpeech.load(folder), ("text_logits", "audio_logits"))
    if (folder / "codec").is_dir():
        yield from codec_graphs(MossSpeechCodec.load(folder / "codec"))


def _cosyvoice(folder: Path) -> Iterator[OnnxExport]:
    version = version_of(folder)
    assert version is not None
    sizes = CosyVoiceSizes.of_folder(folder, version)
    yield from lm_graphs(CosyVoiceLM.load(folder / LM, sizes.lm))
    yield from speech_graphs(load_speech(folder, sizes, "cpu", torch.float32))


KINDS = {
    kind.name: kind
    for kind in (
        OnnxKind("moss-speech", _moss_speech),
        OnnxKind("moss-tts-nano", nano_graphs, write_beside),
        OnnxKind("moss-speech-codec", lambda source: codec_graphs(MossSpeechCodec.load(source))),
        OnnxKind("whisper", lambda source: whisper_graphs(Whisper.load(source))),
        OnnxKind("cosyvoice", _cosyvoice),
        OnnxKind("cosyvoice-lm", lambda source: lm_graphs(CosyVoiceLM.load(source))),
        OnnxKind("llama", lambda source: lm_graphs(Llama.load(source)[0])),
        OnnxKind("bigvgan", lambda source: bigvgan_graphs(BigVGAN.load(source))),
        OnnxKind("xy-tokenizer", lambda source: xy_graphs(XYTokenizer.load(source))),
    )
}


def kind_of(source: Path) -> OnnxKind:
    """The graphs of the family that a folder or file holds."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give the folder or file of a model")
    family = family_of(source)
    if family is None or family.name not in KINDS:
        raise InputError(f"{source} is not a model that can be exported to ONNX; supported are {', '.join(KINDS)}")
    return KINDS[family.name]


def export_onnx(
    source: Path, out: Path, parts: Sequence[str] = (), opset: int = OPSET, check: bool = True
) -> list[ExportedGraph]:
    """Write the graphs of a model, or some of them by name, each compared with torch, and a list of them."""
    kind = kind_of(source)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a folder to write the graphs into")
    out.mkdir(parents=True, exist_ok=True)
    written, names = [], []
    for graph in kind.graphs(source):
        names.append(graph.name)
        if not parts or graph.name in parts:
            written.append(export_graph(graph, out, opset, check))
    unknown = sorted(set(parts) - set(names))
    if unknown:
        raise InputError(f"{kind.name} has no part {', '.join(unknown)}; it has {', '.join(names)}")
    _write_manifest(out / MANIFEST, kind, written)
    if kind.beside is not None:
        kind.beside(source, out)
    return written


def _write_manifest(file: Path, kind: OnnxKind, written: Sequence[ExportedGraph]) -> None:
    graphs = [vars(graph) | {"file": graph.file.name} for graph in written]
    file.write_text(json.dumps({"kind": kind.name, "graphs": graphs}, indent=2, default=str), encoding="utf8")
