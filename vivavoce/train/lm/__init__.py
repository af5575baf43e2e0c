"""Training of the miniature MOSS-Speech: its differentiable forward pass, with the engine's modules and no paged KV.

A line of a batch holds several conversations: a row attends only to its own, and positions count within it. Also the
tokenizer, and jitter of codes for augmentation.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.minis.untrained import SPECIAL_TOKENS
from vivavoce.models.moss_speech.model import AUDIO, TEXT, LayerGroup, MossSpeech
from vivavoce.nn.attention import PagedAttention
from vivavoce.nn.decoder import DecoderLayer, GatedFeedForward
from vivavoce.nn.linear import RMSNorm


@dataclass
class TrainingKVCache:
    """KV cache of a batch of growing sequences."""

    keys: Tensor  # [layer, sequence, kv head, row, head_dim]
    values: Tensor

    @classmethod
    def allocate(cls, model: MossSpeech, sequences: int, rows: int) -> "TrainingKVCache":
        shape, like = model.kv_shape, model.model.audio_embed.weight
        size = (shape.layers, sequences, shape.heads, rows, shape.head_dim)
        return cls(like.new_zeros(size), like.new_zeros(size))

    def extend(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows and return all rows of this layer.  # each [sequence, kv head, new row, head_dim]"""
        indices = positions[:, None, :, None].expand_as(keys)
        self.keys[layer].scatter_(2, indices, keys)
        self.values[layer].scatter_(2, indices, values)
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class Pass:
    """Inputs shared by all layers of a forward pass."""

    cos: Tensor  # [batch, 1, row, head_dim / 2]
    sin: Tensor
    positions: Tensor  # [batch, row]
    bias: Tensor  # [batch, 1, row, column]: 0 where a row sees a column, else -inf
    dropout: float
    past: TrainingKVCache | None


def hidden_states(
    model: MossSpeech,
    rows: Tensor,
    positions: Tensor,
    visible: Tensor,
    dropout: float = 0.0,
    past: TrainingKVCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised states of the text and audio branches.  # [batch, row, 2] → [batch, row, hidden] twice

    `visible` is the attention mask over the rows of the batch, or with a `past` over all cached rows.
    """
    trunk = model.model
    x = functional.dropout(_embed(model, rows), dropout)
    masked = torch.finfo(_compute_dtype(x)).min
    bias = torch.zeros((), dtype=_compute_dtype(x), device=x.device).masked_fill(~visible, masked)[:, None]
    cos, sin = trunk.rotary.cos[positions][:, None], trunk.rotary.sin[positions][:, None]
    shared = Pass(cos, sin, positions, bias, dropout, past)
    with _attention_backend(x):
        x = _block(trunk.shared_block, x, shared)
        text = _block(trunk.text_block, x, shared)
        audio = _block(trunk.audio_block, x, shared)
    return _norm(trunk.text_norm, text), _norm(trunk.audio_norm, audio)


def within_segments(segments: Tensor) -> Tensor:
    """Causal mask within segments.  # [batch, row] → [batch, row, column] bool"""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (segments[:, :, None] == segments[:, None, :]) & causal


def _attention_backend(x: Tensor) -> AbstractContextManager[Any]:
    """On CUDA a kernel that takes any mask and can be captured; elsewhere the default."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if x.is_cuda else nullcontext()


def _embed(model: MossSpeech, rows: Tensor) -> Tensor:
    trunk = model.model
    is_audio = (rows[..., TEXT] == trunk.modality_pad)[..., None]
    return torch.where(is_audio, trunk.audio_embed(rows[..., AUDIO]), trunk.embed_tokens(rows[..., TEXT]))


def _block(block: LayerGroup, x: Tensor, shared: Pass) -> Tensor:
    for index, layer in enumerate(block.layers, start=block.first):
        assert isinstance(layer, DecoderLayer)
        x = x + functional.dropout(_attend(layer, index, x, shared), shared.dropout)
        x = x + functional.dropout(_feed_forward(layer.mlp, _norm(layer.post_attention_layernorm, x)), shared.dropout)
    return x


def _attend(layer: DecoderLayer, index: int, x: Tensor, shared: Pass) -> Tensor:
    attention = layer.self_attn
    packed = attention.qkv_proj(_norm(layer.input_layernorm, x)).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    queries, keys, values = packed.split([attention.heads, attention.kv_heads, attention.kv_heads], dim=1)
    queries = _rotate(_normed_heads(attention.q_norm, queries), shared).to(values.dtype)
    keys = _rotate(_normed_heads(attention.k_norm, keys), shared).to(values.dtype)
    if shared.past is not None:
        keys, values = shared.past.extend(index, shared.positions, keys, values)
    keys, values = _repeat_kv(keys, attention), _repeat_kv(values, attention)
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=shared.bias.to(queries.dtype))
    return attention.o_proj(out.transpose(1, 2).flatten(-2))


def _normed_heads(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else _norm(norm, x)


def _repeat_kv(x: Tensor, attention: PagedAttention) -> Tensor:
    return x.repeat_interleave(attention.heads // attention.kv_heads, dim=1)


def _rotate(x: Tensor, shared: Pass) -> Tensor:
    """Rotary embedding of split halves.  # [batch, head, row, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    cos, sin = shared.cos, shared.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _feed_forward(feed: GatedFeedForward, x: Tensor) -> Tensor:
    gate, up = feed.gate_up_proj(x).chunk(2, dim=-1)
    return feed.down_proj(functional.silu(gate) * up)


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """RMS norm without the fused kernel, which has no gradient."""
    wide = x.to(torch.promote_types(x.dtype, norm.weight.dtype))
    return functional.rms_norm(wide, norm.weight.shape, norm.weight, norm.eps)


def _compute_dtype(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


PAD, TURN_START, TURN_END, SPEECH_START, MODALITY_PAD = SPECIAL_TOKENS
SPARE = 8 - len(SPECIAL_TOKENS)  # spare embedding rows after the last special token


def train_tokenizer(sentences: Iterable[str], entries: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` with special tokens last; deterministic."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingDependencyError("a tokenizer needs the tokenizers package: pip install tokenizers") from error
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if entries < len(alphabet) + len(SPECIAL_TOKENS):
        raise InputError(
            f"a byte-level vocabulary has {len(alphabet) + len(SPECIAL_TOKENS)} entries or more, not {entries}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(sorted(sentences), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


class CodeJitter:
    """Moves lattice codes to neighbours: independently per row, and consistently per line, like a voice."""

    def __init__(self, levels: Sequence[int], device: torch.device | str) -> None:
        self.size = math.prod(levels)
        self.levels = torch.tensor(list(levels), device=device)
        self.strides = torch.tensor([math.prod(levels[index + 1 :]) for index in range(len(levels))], device=device)

    def __call__(self, codes: Tensor, probability: Tensor) -> Tensor:
        """Each dimension of a code moves one step with the line's probability, per row and again per (line, code).

        # [line, row], [line, 1] → [line, row]
        """
        lines, dimensions = codes.shape[0], len(self.levels)
        steps = codes[..., None] // self.strides % self.levels
        drawn = torch.rand((*codes.shape, dimensions), device=codes.device)
        of_voice = torch.rand((lines, self.size, dimensions), device=codes.device)
        of_voice = of_voice.gather(1, codes[..., None].expand(-1, -1, dimensions))
        probability = probability[..., None]
        moved = steps + _step(drawn, probability) + _step(of_voice, probability)
        return (moved.clamp(min=0).minimum(self.levels - 1) * self.strides).sum(-1)


def _step(drawn: Tensor, probability: Tensor) -> Tensor:
    return (drawn > 1 - probability / 2).long() - (drawn < probability / 2).long()
