"""MOSS-Speech's language model on a CPU, with as little around the products as can be.

A small model's step is mostly the calls around its products. Here what all layers need to know of a step's rows is
found out once, sequences that go on by one row attend together, and a layer is a list of functions. Keys, values and
rows are those of `MossSpeech`, on whose weights it runs.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.moss_speech import Block, MossSpeech
from vivavoce.nn.decoder_layer import DecoderLayer
from vivavoce.nn.linear import Linear
from vivavoce.nn.norm import RMSNorm
from vivavoce.nn.paged import Piece, RowBatch


@dataclass(frozen=True)
class Looking:
    """Some rows of a step that attend in one call, and where what they may see is kept."""

    rows: slice | Tensor
    pages: Tensor  # of all of them, one sequence after another
    streams: int
    context: int  # slots that are looked at of each stream's pages
    bias: Tensor | None  # −inf where a row may not look; None: everywhere it may


@dataclass(frozen=True)
class StepPlaces:
    """What every layer must know of a step's rows."""

    written: Tensor  # [row]: the slot of the cache each row goes to
    cos: Tensor  # [row, 1, head_dim]
    sin: Tensor  # the same, its first half negated
    looking: tuple[Looking, ...]


class FlatNorm:
    """A root-mean-square norm in few calls, or several side by side, one for each head."""

    def __init__(self, *norms: RMSNorm) -> None:
        weights = torch.stack([norm.weight for norm in norms])
        self.size = weights.shape[-1]
        self.weight = (weights if len(norms) > 1 else weights[0]) * math.sqrt(self.size)
        self.eps = norms[0].eps * self.size

    def __call__(self, x: Tensor) -> Tensor:
        """# [row, hidden], or [row, head, head_dim]"""
        return (x * (x * x).sum(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(self.weight)


class FlatLayer:
    """A decoder layer's functions, found once; the residual stream is added to as it goes."""

    def __init__(self, layer: DecoderLayer, place: int) -> None:
        attention = layer.self_attn
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        self.place = place
        self.kv_heads, self.heads, self.head_dim = attention.kv_heads, attention.heads, attention.head_dim
        self.norm_1, self.norm_2 = FlatNorm(layer.input_layernorm), FlatNorm(layer.post_attention_layernorm)
        self.qkv, self.out = attention.qkv_proj.weight, attention.o_proj.weight.T
        self.gate_up, self.down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight.T
        self.head_norm = FlatNorm(*[attention.q_norm] * self.heads, *[attention.k_norm] * self.kv_heads)

    def __call__(self, x: Tensor, batch: RowBatch, places: StepPlaces) -> Tensor:
        """The residual stream after this layer.  # [row, hidden]"""
        packed = functional.linear(self.norm_1(x), self.qkv).view(len(x), -1, self.head_dim)
        turned = self.head_norm(packed[:, : self.heads + self.kv_heads])
        turned = torch.addcmul(turned * places.cos, turned.roll(self.head_dim // 2, -1), places.sin)
        keys, values = batch.cache.keys[self.place], batch.cache.values[self.place]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, places.written, turned[:, self.heads :])
        values.view(-1, *values.shape[2:]).index_copy_(0, places.written, packed[:, self.heads + self.kv_heads :])
        mixed = self._attended(turned[:, : self.heads], keys, values, places.looking)
        x = torch.addmm(x, mixed.view(len(x), -1), self.out)
        gate, up = functional.linear(self.norm_2(x), self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, functional.silu(gate).mul_(up), self.down)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, looking: tuple[Looking, ...]) -> Tensor:
        if len(looking) == 1:
            return self._attend(queries, keys, values, looking[0])
        mixed = torch.empty_like(queries)
        for group in looking:
            mixed[group.rows] = self._attend(queries[group.rows], keys, values, group)
        return mixed

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, group: Looking) -> Tensor:
        """# queries [row, head, dim], keys [page, row of the page, kv head, dim]"""
        keys, values = self._seen(keys, group), self._seen(values, group)
        # Heads that share a key stand in for rows, so that nothing is repeated.  # [stream, kv head, row, group, dim]
        asked = queries.unflatten(0, (group.streams, -1)).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        rows, heads = asked.shape[2:4]
        mixed = functional.scaled_dot_product_attention(asked.flatten(2, 3), keys, values, attn_mask=group.bias)
        return mixed.unflatten(2, (rows, heads)).transpose(1, 2).reshape(len(queries), self.heads, self.head_dim)

    def _seen(self, cached: Tensor, group: Looking) -> Tensor:
        """# → [stream, kv head, context, dim]"""
        held = cached.index_select(0, group.pages).view(group.streams, -1, self.kv_heads, self.head_dim)
        return held[:, : group.context].transpose(1, 2)


class CpuMossSpeech(MossSpeech):
    """The model on the weights of another; the engine runs it in its place."""

    def __init__(self, model: MossSpeech) -> None:
        nn.Module.__init__(self)
        self.config, self.vocabularies = model.config, model.vocabularies
        self.context_limit, self.kv_shape = model.context_limit, model.kv_shape
        self.model, self.text_lm_head, self.audio_lm_head = model.model, model.text_lm_head, model.audio_lm_head
        trunk = model.model
        self._shared_layers, self._text_layers, self._audio_layers = (
            _flat(block) for block in (trunk.shared_block, trunk.text_block, trunk.audio_block)
        )
        self._text_norm, self._audio_norm = FlatNorm(trunk.text_norm), FlatNorm(trunk.audio_norm)
        like, cos, sin = trunk.text_norm.weight, trunk.rotary.cos, trunk.rotary.sin
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(like)
        self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(like)
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads

    @staticmethod
    def suits(model: MossSpeech) -> bool:
        """Whether the weights are plain ones on a CPU, and wide enough for its arithmetic."""
        weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
        wide = (torch.float32, torch.float64)
        plain = all(weight.device.type == "cpu" and weight.dtype in wide for weight in weights)
        layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
        return plain and len(weights) == 4 * len(layers) + 2

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Both tails' states of every row.  # [row, 2] → [row, 2, hidden]"""
        if batch.cache.is_narrow:
            return super().forward(rows, batch)
        places = self._places(batch)
        x = self.model.embed(rows)
        for layer in self._shared_layers:
            x = layer(x, batch, places)
        text = audio = x
        for layer in self._text_layers:
            text = layer(text, batch, places)
        for layer in self._audio_layers:
            audio = layer(audio, batch, places)
        return torch.stack([self._text_norm(text), self._audio_norm(audio)], dim=1)

    def _places(self, batch: RowBatch) -> StepPlaces:
        size, positions = batch.cache.page_size, batch.positions.long()
        stored = positions if batch.places is None else batch.places.long()
        pages = batch.page_table[batch.slots.long(), stored // size].long()
        looking = [self._looking_ahead(batch, piece) for piece in batch.pieces if piece.length > 1]
        singles = [piece for piece in batch.pieces if piece.length == 1]
        if singles:
            looking.append(self._looking_once(batch, singles))
        return StepPlaces(pages * size + stored % size, self._cos[positions], self._sin[positions], tuple(looking))

    def _looking_once(self, batch: RowBatch, pieces: list[Piece]) -> Looking:
        """Rows that are the next of their sequences: padded to the longest, all in one call."""
        size, longest = batch.cache.page_size, max(piece.context for piece in pieces)
        pages = batch.page_table[[piece.slot for piece in pieces], : -(-longest // size)].long()
        rows: slice | Tensor = torch.tensor([piece.rows.start for piece in pieces])
        if len(pieces) == 1:
            return Looking(pieces[0].rows, pages.flatten(), 1, longest, None)
        ends = torch.tensor([piece.context for piece in pieces])
        bias = _bias(torch.arange(longest) < ends[:, None], batch)[:, None, None]
        return Looking(rows, pages.flatten(), len(pieces), longest, bias)

    def _looking_ahead(self, batch: RowBatch, piece: Piece) -> Looking:
        """Consecutive rows of one sequence: each sees the past and the rows up to itself, or what the piece says."""
        pages = batch.page_table[piece.slot, : -(-piece.context // batch.cache.page_size)].long()
        seen = piece.visible
        if seen is None:
            seen = torch.arange(piece.context) <= torch.arange(piece.position, piece.context)[:, None]
        bias = _bias(seen.repeat_interleave(self._group, dim=0), batch)[None, None]
        return Looking(piece.rows, pages, 1, piece.context, bias)


def _flat(block: Block) -> list[FlatLayer]:
    return [FlatLayer(cast(DecoderLayer, layer), place) for place, layer in enumerate(block.layers, block.first)]


def _bias(seen: Tensor, batch: RowBatch) -> Tensor:
    return torch.zeros(seen.shape, dtype=batch.cache.keys.dtype).masked_fill_(~seen, -torch.inf)
