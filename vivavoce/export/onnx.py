"""`viva export onnx`: the ONNX graphs of each model family, and the folder they are written to.

Language models, BigVGAN, XY-Tokenizer and Whisper are exported by the modules below; the codecs and MOSS-TTS-Nano have
files of their own.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.nano_onnx import nano_graphs, write_runtime_files
from vivavoce.export.onnx_codec import codec_graphs, speech_graphs
from vivavoce.export.onnx_graph import OPSET, ExportedGraph, OnnxExport, StreamCheck, export_graph
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.cosyvoice.folder import LM, CosyVoiceSizes, load_speech, version_of
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.interface import GenerativeModel
from vivavoce.models.llama import Llama
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.registry import family_of
from vivavoce.models.whisper.model import Whisper, WholeTexts, WindowMemory
from vivavoce.models.xy_tokenizer.model import LOUDEST_BIN, FourierHead, XYTokenizer
from vivavoce.nn.paged_kv import CachePiece
from vivavoce.nn.vocoder import ShortFourier

MAX_PARAMETERS = 2_000_000_000  # larger models need an engine that batches


@dataclass(frozen=True)
class DynamicPiece(CachePiece):
    """All new rows of the one sequence; its sizes are symbolic while a graph is traced."""

    @property
    def length(self) -> Any:
        return self.rows.stop


class DenseRows:
    """The batch that the layers see: one sequence whose KV cache is two plain tensors."""

    singles = 0
    tiles: Tensor | None = None
    shared_mode: int | None = None

    def __init__(self, count: int, past_keys: Tensor, past_values: Tensor) -> None:
        past = past_keys.shape[1]
        self.positions = past + torch.arange(count, device=past_keys.device)
        self.pieces = (DynamicPiece(slice(0, count), 0, past),)
        self.past_keys, self.past_values = past_keys, past_values
        self.keys: dict[int, Tensor] = {}  # by layer, in the order of computation
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append the new rows to the cache of a layer.  # each [row, head, head_dim]"""
        self.keys[layer] = torch.cat([self.past_keys[layer], keys])
        self.values[layer] = torch.cat([self.past_values[layer], values])

    def read(self, layer: int, piece: CachePiece, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Keys and values of the cached and the new rows.  # each [context, head, head_dim]"""
        return self.keys[layer], self.values[layer]


class NextRows(nn.Module):
    """Logits of every head for new rows after a KV cache, and the extended cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, past_keys: Tensor, past_values: Tensor) -> tuple[Tensor, ...]:
        """# [row, channel], each past [layer, past, head, head_dim] → [row, id] per head, past + row"""
        batch = DenseRows(rows.shape[0], past_keys, past_values)
        model: Any = self.model
        logits = model.logits(model(rows, batch))
        heads = logits if isinstance(logits, tuple) else (logits,)
        return *heads, *(torch.stack([held[layer] for layer in sorted(held)]) for held in (batch.keys, batch.values))


def lm_graphs(model: nn.Module, heads: tuple[str, ...] = ("logits",)) -> Iterator[OnnxExport]:
    """A model that the engine can run; `heads` names its logits."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_PARAMETERS:
        raise InputError(
            f"{count / 1e9:.1f} B parameters are too many for ONNX; `viva export trtllm` writes it for an engine"
        )
    generative: GenerativeModel = model  # type: ignore[assignment]
    shape, vocabularies = generative.kv_shape, generative.vocabularies

    def example(rows: int, past: int) -> dict[str, Tensor]:
        ids = torch.stack([torch.randint(0, size, (rows,)) for size in vocabularies], dim=1)
        keys, values = torch.randn(2, shape.layers, past, shape.heads, shape.head_dim)
        return {"rows": ids, "past_keys": keys, "past_values": values}

    axes = {"rows": {0: "row"}, "past_keys": {1: "past"}, "past_values": {1: "past"}}
    outputs = (*heads, "keys", "values")
    following = tuple(example(rows, 0) for rows in (1, 2, 1))
    stream = StreamCheck(example(4, 0), following, {"past_keys": "keys", "past_values": "values"})
    yield OnnxExport("lm", NextRows(model), example(5, 7), axes, outputs, (example(1, 12),), stream=stream)


SOUND_TOLERANCE = 2e-3
CODE_TOLERANCE = 0.01  # share of codes that may differ, as two may be equally near


class WholeBigVGAN(nn.Module):
    """Mel to audio, without state."""

    def __init__(self, vocoder: BigVGAN) -> None:
        super().__init__()
        self.vocoder = vocoder

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, band, frame] → [batch, frame · hop]"""
        return self.vocoder.bounded(self.vocoder.render(mel))


class RealHead(nn.Module):
    """Vocos' head without complex numbers, which ONNX lacks: the inverse transform is a convolution."""

    def __init__(self, head: FourierHead) -> None:
        super().__init__()
        self.out = head.out
        self.fourier = ShortFourier(head.istft.n_fft, head.istft.hop)
        self.margin = (head.istft.n_fft - head.istft.hop) // 2

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, frame, dim] → [batch, frame · hop]"""
        log_magnitude, phase = self.out(x).transpose(1, 2).chunk(2, dim=1)
        magnitude = log_magnitude.exp().clamp(max=LOUDEST_BIN)
        sound = self.fourier.inverse(torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=1))
        return sound[:, self.margin : -self.margin]


class XYEncoder(nn.Module):
    """A log-mel of at most 30 s, cut to whole codes, to codes."""

    def __init__(self, tokenizer: XYTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, mel, frame] of 8 frames a code → [batch, codebook, frame / 8]"""
        xy = self.tokenizer
        states = mel.shape[-1] // 2
        semantic = xy.semantic_encoder_adapter(xy.semantic_encoder(mel, states))
        mixed = xy.pre_rvq_adapter(torch.cat([semantic, xy.acoustic_encoder(mel, states)], dim=-1))
        return xy.quantizer.encode(xy.downsample(mixed).transpose(1, 2))


class XYDecoder(nn.Module):
    """Codes of at most 30 s to sound."""

    def __init__(self, tokenizer: XYTokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.head = RealHead(tokenizer.vocos.head)

    def forward(self, codes: Tensor) -> Tensor:
        """# [batch, codebook, code] → [batch, time]"""
        xy = self.tokenizer
        states = xy.upsample(xy.post_rvq_adapter(xy.quantizer.decode(codes).transpose(1, 2)))
        sound: Tensor = self.head(xy.vocos.backbone(xy.acoustic_decoder(states)))
        return sound


def bigvgan_graphs(vocoder: BigVGAN) -> Iterator[OnnxExport]:
    """mel → sound."""
    bands = vocoder.config.num_mels
    mels = [{"mel": torch.randn(batch, bands, frames)} for batch, frames in ((3, 11), (1, 7), (2, 24))]
    axes = {"mel": {0: "batch", 2: "frame"}}
    yield OnnxExport("vocoder", WholeBigVGAN(vocoder), mels[0], axes, ("sound",), tuple(mels[1:]), SOUND_TOLERANCE)


def xy_graphs(tokenizer: XYTokenizer) -> Iterator[OnnxExport]:
    """mel → codes, and codes → sound."""
    config, per_code = tokenizer.config, 2 * tokenizer.config.pooling
    sizes = ((3, 11), (1, 3), (2, 20))
    mels = [{"mel": torch.randn(batch, config.mel_bins, codes * per_code)} for batch, codes in sizes]
    axes = {"mel": {0: "batch", 2: f"{per_code}*code"}}
    yield OnnxExport("encoder", XYEncoder(tokenizer), mels[0], axes, ("codes",), tuple(mels[1:]), CODE_TOLERANCE)
    books, entries = config.codebooks, config.codebook_entries
    codes = [{"codes": torch.randint(0, entries, (batch, books, count))} for batch, count in sizes]
    axes = {"codes": {0: "batch", 2: "code"}}
    yield OnnxExport("decoder", XYDecoder(tokenizer), codes[0], axes, ("sound",), tuple(codes[1:]), SOUND_TOLERANCE)


MEMORY = ("memory_keys", "memory_values")
PAST = ("past_keys", "past_values")


class WhisperEncoderGraph(nn.Module):
    """Log-mel windows to encoder states and the cross-attention keys and values of every decoder layer."""

    def __init__(self, whisper: Whisper) -> None:
        super().__init__()
        self.whisper = whisper

    def forward(self, mel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """# [window, mel, frame] → [window, position, d_model], twice [layer, window, head, position, head_dim]"""
        states = self.whisper.encoder(mel)
        memory = self.whisper.decoder.cross_kv(states)
        return states, memory.keys, memory.values


class GrowingTexts(WholeTexts):
    """Attention of new tokens, with the KV cache as input and output."""

    def __init__(self, memory: WindowMemory, past_keys: Tensor, past_values: Tensor, new: int) -> None:
        super().__init__(memory)
        self.past = past_keys, past_values
        self.positions = past_keys.shape[3] + torch.arange(new, device=past_keys.device)
        self.visible = torch.arange(past_keys.shape[3] + new, device=past_keys.device) <= self.positions[:, None]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention to the cached and the new tokens."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        self.keys.append(torch.cat([self.past[0][layer], key], dim=2))
        self.values.append(torch.cat([self.past[1][layer], value], dim=2))
        mixed = functional.scaled_dot_product_attention(query, self.keys[-1], self.values[-1], attn_mask=self.visible)
        return mixed.transpose(1, 2)


class TokenDecoder(nn.Module):
    """Logits of the next tokens of each window's text, after its cached tokens."""

    def __init__(self, whisper: Whisper) -> None:
        super().__init__()
        self.decoder = whisper.decoder

    def forward(
        self, tokens: Tensor, past_keys: Tensor, past_values: Tensor, memory_keys: Tensor, memory_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, and the cache extended by these tokens.

        # [window, token], each past [layer, window, head, past, head_dim] → [window, token, id], past + token
        """
        memory = WindowMemory(memory_keys, memory_values)
        attention = GrowingTexts(memory, past_keys, past_values, tokens.shape[1])
        decoder = self.decoder
        x = decoder.embed_tokens(tokens) + decoder.embed_positions(attention.positions)
        logits = decoder.logits(decoder.run(x, attention))
        return logits, torch.stack(attention.keys), torch.stack(attention.values)


def whisper_graphs(whisper: Whisper) -> Iterator[OnnxExport]:
    """Encoder and decoder."""
    config = whisper.config
    mels = [{"mel": torch.randn(batch, config.num_mel_bins, frames)} for batch, frames in ((3, 61), (1, 30), (2, 100))]
    axes = {"mel": {0: "window", 2: "frame"}}
    yield OnnxExport("encoder", WhisperEncoderGraph(whisper), mels[0], axes, ("states", *MEMORY), tuple(mels[1:]))
    layers, heads = config.decoder_layers, config.decoder_attention_heads
    head_dim = config.d_model // heads

    def example(windows: int, tokens: int, past: int, positions: int) -> dict[str, Tensor]:
        given = {"tokens": torch.randint(0, config.vocab_size, (windows, tokens))}
        sizes = dict.fromkeys(PAST, past) | dict.fromkeys(MEMORY, positions)
        return given | {name: torch.randn(layers, windows, heads, size, head_dim) for name, size in sizes.items()}

    cache_axes = {name: {1: "window", 3: "past" if name in PAST else "position"} for name in (*PAST, *MEMORY)}
    axes = {"tokens": {0: "window", 1: "token"}, **cache_axes}
    outputs = ("logits", "keys", "values")
    following = tuple(example(1, tokens, 0, 9) for tokens in (1, 2, 1))
    stream = StreamCheck(example(1, 4, 0, 9), following, dict(zip(PAST, outputs[1:], strict=True)))
    checks = (example(2, 1, 12, 50),)
    yield OnnxExport("decoder", TokenDecoder(whisper), example(3, 5, 7, 31), axes, outputs, checks, stream=stream)


MANIFEST = "export.json"


@dataclass(frozen=True)
class OnnxKind:
    """A model family's graphs."""

    name: str
    graphs: Callable[[Path], Iterator[OnnxExport]]
    write_files: Callable[[Path, Path], None] | None = None
    """Writes further files that a runtime needs, from the model's folder into the new one."""


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
        OnnxKind("moss-tts-nano", nano_graphs, write_runtime_files),
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
    """Write the graphs of a model (or those named by `parts`), each compared with torch, and a manifest of them."""
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
    if kind.write_files is not None:
        kind.write_files(source, out)
    return written


def _write_manifest(file: Path, kind: OnnxKind, written: Sequence[ExportedGraph]) -> None:
    graphs = [vars(graph) | {"file": graph.file.name} for graph in written]
    file.write_text(json.dumps({"kind": kind.name, "graphs": graphs}, indent=2, default=str), encoding="utf8")
