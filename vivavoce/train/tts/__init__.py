"""Training of mini-tts: differentiable forward passes of codec and language model over whole sequences.

Codes are chosen by angle, so vectors are normalised in training, or their length would drift from the codebook.
Codebooks are running means of the directions assigned to them (spherical k-means); an unused code is reset to a recent
vector.
"""

import copy
import json
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig
from vivavoce.models.moss_audio_tokenizer.model import CodecStage, MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import TEXT, MossTTSNano, NanoLayer, NanoTransformer
from vivavoce.nn.attention import RotaryTable, rotate_pairs, rotation
from vivavoce.nn.vq import ProjectedCodebook, ProjectedResidualVQ, pointwise

DECAY = 0.97  # decay of the running means
MIN_SHARE = 0.02  # of the mean usage of a code: below it the code is reset


class TrainingWindow:
    """Causal windowed attention over whole sequences, in place of the streaming `Extension`."""

    def __init__(self, positions: int, window: int, device: torch.device) -> None:
        position = torch.arange(positions, device=device)
        distance = position[:, None] - position
        self.positions = position[None]
        self.mask = None if window >= positions else (distance >= 0) & (distance < window)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """# [sound, head, time, head_dim]"""
        return functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), attn_mask=self.mask, is_causal=self.mask is None
        )


def run_stage(stage: CodecStage, x: Tensor) -> Tensor:
    """A codec stage over whole sequences.  # [sound, time, input] → [sound, time, output]"""
    streams = TrainingWindow(x.shape[1], stage.window, x.device)
    cos, sin = rotation(streams.positions, stage.config.d_model // stage.config.num_heads, stage.config.max_period)
    x = stage.input_proj(x)
    for index, layer in enumerate(stage.transformer.layers):
        x = layer(x, index, streams, cos, sin)
    with torch.autocast(x.device.type, enabled=False):  # the last stage outputs samples, which need more than 16 bits
        return stage.output_proj(x.float() if x.dtype != torch.float64 else x)


def run_chain(chain: nn.ModuleList, x: Tensor) -> Tensor:
    """Encoder or decoder over whole sequences.  # [sound, time, channel]"""
    for module in chain:
        x = run_stage(module, x) if isinstance(module, CodecStage) else module(x)
    return x


def encode_features(codec: MossAudioTokenizerNano, sounds: Tensor) -> Tensor:
    """Quantiser inputs of audio.  # [sound, channel, sample] → [sound, frame, input]"""
    return run_chain(codec.encoder, sounds.transpose(1, 2).flatten(1)[..., None])


def decode_features(codec: MossAudioTokenizerNano, hidden: Tensor) -> Tensor:
    """Audio of quantiser outputs.  # [sound, frame, output] → [sound, channel, sample]"""
    interleaved = run_chain(codec.decoder, hidden)[..., 0]
    return interleaved.unflatten(1, (-1, codec.config.channels)).transpose(1, 2)


@torch.no_grad()
def codes_of(codec: MossAudioTokenizerNano, sounds: Tensor) -> Tensor:
    """Codes of a batch of audio.  # [sound, channel, sample] → [sound, codebook, frame]"""
    return codec.quantizer.encode(encode_features(codec, sounds))


@torch.no_grad()
def sounds_of(codec: MossAudioTokenizerNano, codes: Tensor) -> Tensor:
    """Audio of a batch of codes.  # [sound, codebook, frame] → [sound, channel, sample]"""
    return decode_features(codec, codec.quantizer.decode(codes))


class CodebookMeans(nn.Module):
    """EMA statistics of every codebook: count and sum of the vectors assigned to a code."""

    counts: Tensor
    sums: Tensor

    def __init__(self, config: MossAudioTokenizerConfig) -> None:
        super().__init__()
        size = config.quantizer
        self.register_buffer("counts", torch.zeros(size.num_quantizers, size.codebook_size))
        self.register_buffer("sums", torch.zeros(size.num_quantizers, size.codebook_size, size.codebook_dim))

    @torch.no_grad()
    def update(self, index: int, book: ProjectedCodebook, vectors: Tensor, codes: Tensor) -> None:
        """Update a codebook to the mean directions of the assigned vectors.  # vectors [.., dim], codes [..]"""
        vectors, codes = vectors.detach().flatten(0, -2), codes.flatten()
        counts, sums = self.counts[index], self.sums[index]
        counts.mul_(DECAY).index_add_(0, codes, torch.full_like(vectors[:, 0], 1 - DECAY))
        sums.mul_(DECAY).index_add_(0, codes, vectors * (1 - DECAY))
        mean_count = len(codes) / len(counts)
        is_dead = counts < MIN_SHARE * mean_count
        observed = vectors[torch.randint(0, len(vectors), (len(counts),), device=vectors.device)]
        counts.copy_(torch.where(is_dead, mean_count, counts))
        sums.copy_(torch.where(is_dead[:, None], observed * mean_count, sums))
        book.codebook.weight.copy_(functional.normalize(sums, dim=-1))

    @torch.no_grad()
    def start_from(self, quantizer: ProjectedResidualVQ, vectors: int) -> None:
        """Start from trained codebooks, with uniform counts."""
        for index, book in enumerate(quantizer.quantizers):
            assert isinstance(book, ProjectedCodebook)
            self.counts[index] = vectors / self.counts.shape[-1]
            self.sums[index] = functional.normalize(book.codebook.weight, dim=-1) * self.counts[index][:, None]

    def perplexity(self) -> Tensor:
        """Perplexity of each codebook.  # [codebook]"""
        shares = self.counts / self.counts.sum(-1, keepdim=True)
        return torch.special.entr(shares).sum(-1).exp()


@dataclass(frozen=True)
class Quantised:
    """Quantiser output and its losses."""

    hidden: Tensor  # [sound, frame, output]
    commitment: Tensor
    """Squared distance of directions from their codes."""
    leftover: Tensor
    """Mean share of the input's power left after each codebook: makes the codebooks residual."""


def quantise(
    quantizer: ProjectedResidualVQ, hidden: Tensor, used: Tensor, means: CodebookMeans | None = None
) -> Quantised:
    """Quantise by the first `used` codebooks of each row with straight-through gradients; `means` are updated by all.

    # hidden [sound, frame, input], used [sound]
    """
    residual = pointwise(quantizer.input_proj, hidden)
    power = residual.detach().square().mean().clamp(min=1e-6)
    total, commitment, leftover = torch.zeros_like(residual), residual.new_zeros(()), residual.new_zeros(())
    for index, book in enumerate(quantizer.quantizers):
        assert isinstance(book, ProjectedCodebook)
        direction = functional.normalize(pointwise(book.in_proj, residual), dim=-1)
        with torch.no_grad():
            codes = (direction @ functional.normalize(book.codebook.weight, dim=-1).T).argmax(dim=-1)
            chosen = book.codebook(codes)
        commitment = commitment + (direction - chosen).square().sum(-1).mean()
        if means is not None:
            means.update(index, book, direction, codes)
        vector = pointwise(book.out_proj, direction + (chosen - direction).detach())
        decoded = pointwise(book.out_proj, chosen)  # without the straight-through path
        leftover = leftover + functional.mse_loss(decoded, residual) / power
        total = total + vector * (index < used)[:, None, None]
        residual = residual - vector
    books = len(quantizer.quantizers)
    return Quantised(pointwise(quantizer.output_proj, total), commitment / books, leftover / books)


@torch.no_grad()
def initialise(codec: MossAudioTokenizerNano, seed: int = 0, layer_scale: float = 0.3) -> None:
    """Initial weights; all but the codebooks are trainable."""
    device = codec.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in codec.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else layer_scale if name.endswith("scale") else 1.0)
        parameter.requires_grad_("codebook" not in name)
    last = [stage for stage in codec.decoder if isinstance(stage, CodecStage)][-1]
    last.output_proj.weight.mul_(0.05)  # speech is quiet


@torch.no_grad()
def calibrate(codec: MossAudioTokenizerNano, sounds: Tensor) -> None:
    """Initialise the quantiser from data: inputs of zero mean and unit variance, each codebook removing its share.

    Only directions are coded, so `in_proj` starts with a bias as large as its input, from which the direction deviates,
    and `out_proj` as its inverse.
    """
    quantizer = codec.quantizer
    projection, hidden = quantizer.input_proj, encode_features(codec, sounds).float()
    inputs = pointwise(projection, hidden).flatten(0, 1)
    deviation = inputs.std(0, correction=0).clamp(min=1e-5)
    projection.weight.div_(deviation[:, None, None])
    _bias(projection).sub_(inputs.mean(0)).div_(deviation)
    for book in quantizer.quantizers:
        assert isinstance(book, ProjectedCodebook)
        rows = book.in_proj.weight[..., 0]
        rows.copy_(functional.normalize(rows, dim=-1))
        bias = functional.normalize(torch.randn_like(rows[:, 0]), dim=0) * rows.shape[0] ** 0.5
        _bias(book.in_proj).copy_(bias)
        book.out_proj.weight[..., 0].copy_(rows.T * (2 * rows.shape[0]) ** 0.5)
        _bias(book.out_proj).copy_(-rows.T @ bias)


def _bias(conv: nn.Conv1d) -> Tensor:
    assert conv.bias is not None
    return conv.bias


def run_transformer(transformer: NanoTransformer, rotary: RotaryTable, x: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal transformer over whole sequences.  # [sequence, time, hidden]"""
    cos, sin = rotary.cos[: x.shape[1]], rotary.sin[: x.shape[1]]

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys = (rotate_pairs(each, cos, sin).transpose(1, 2) for each in (queries, keys))
        mixed = functional.scaled_dot_product_attention(queries, keys, values.transpose(1, 2), is_causal=True)
        return mixed.transpose(1, 2)

    for layer in transformer.h:
        assert isinstance(layer, NanoLayer)
        x = x + functional.dropout(layer.attn(layer.ln_1(x), attend), dropout)
        x = x + functional.dropout(layer.mlp(layer.ln_2(x)), dropout)
    normed: Tensor = transformer.ln_f(x)
    return normed


def global_states(model: MossTTSNano, rows: Tensor, dropout: float = 0.0) -> Tensor:
    """Global transformer states.  # [sequence, row, channel] → [sequence, row, hidden]"""
    embedded = model.embed(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    return run_transformer(model.transformer, model.rotary, functional.dropout(embedded, dropout), dropout)


def frame_logits(model: MossTTSNano, hidden: Tensor, codes: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits of stopping, and of every code given the earlier ones of its frame.

    # hidden [frame, hidden], codes [frame, codebook] → [frame, 2], [frame, codebook, code]
    """
    tables = model.audio_embeddings.weight
    slot = model.transformer.wte.weight[model.config.audio_assistant_slot_token_id]
    books, entries, _ = tables.shape
    first = torch.arange(0, (books - 1) * entries, entries, device=codes.device)
    previous = functional.embedding(codes[:, :-1] + first, tables.flatten(0, 1))
    inputs = torch.cat([hidden[:, None], slot.expand_as(hidden)[:, None], previous], dim=1)
    states = run_transformer(model.local_transformer, model.rotary, inputs, dropout)
    logits = torch.einsum("fbh,bch->fbc", states[:, 1:], tables)
    return model.stop_logits(states[:, 0]), logits.float()


def corrupt(rows: Tensor, max_share: float, entries: int) -> Tensor:
    """Replace up to this share of each sequence's codes at random.

    In inference the model reads its own output, errors included.  # [sequence, row, channel]
    """
    codes = rows[..., TEXT + 1 :]
    share = torch.rand(len(rows), 1, 1, device=rows.device) * max_share
    is_wrong = (torch.rand(codes.shape, device=rows.device) < share) & (codes < entries)
    corrupted = torch.where(is_wrong, torch.randint_like(codes, entries), codes)
    return torch.cat([rows[..., : TEXT + 1], corrupted], dim=-1)


@torch.no_grad()
def initialise_lm(model: MossTTSNano, seed: int = 0, deviation: float = 0.02) -> None:
    """GPT-2 initialisation."""
    device = model.transformer.wte.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    depth = {"transformer": len(model.transformer.h), "local_transformer": len(model.local_transformer.h)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            into_residual = name.endswith(("c_proj.weight", "fc_out.weight"))
            shrink = (2 * depth[name.partition(".")[0]]) ** -0.5 if into_residual else 1.0
            parameter.normal_(0.0, deviation * shrink, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        parameter.requires_grad_(True)


PAUSE = 0.4  # seconds between two samples


def save_half(module: nn.Module, folder: Path) -> None:
    """Write `model.safetensors` in float16 under the published names."""
    save_weights(copy.deepcopy(module).half(), folder)


def write_samples(folder: Path, samples: Sequence[tuple[str, NDArray[np.float32]]], rate: int) -> None:
    """Write `samples.wav`, and `samples.json` with the name, start and end of each."""
    pieces: list[NDArray[np.int16]] = []
    entries = []
    position = 0
    for name, sound in samples:
        pcm = (np.clip(sound, -1, 1) * 32767).astype(np.int16)
        entries.append({"name": name, "start": position, "end": position + len(pcm)})
        pieces += [pcm, np.zeros(int(PAUSE * rate), np.int16)]
        position += len(pieces[-2]) + len(pieces[-1])
    with wave.open(str(folder / "samples.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.concatenate(pieces).astype("<i2").tobytes() if pieces else b"")
    (folder / "samples.json").write_text(json.dumps({"rate": rate, "samples": entries}, indent=1), encoding="utf8")
