"""CPU implementations of MOSS-Speech's language model and codec, on the weights of the plain ones.

The arithmetic is that of `model.py` and `codec.py`, and tests hold rows, keys and values equal. What changes: the row
layout of a step is computed once for all layers, sequences that decode one row attend in one call, and TorchScript
runs all layers without holding the GIL, which the event loop needs. Prompts of sequences that are only written may be
multiplied in bfloat16, where the CPU has tiles for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow.cpu import CpuFlow
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.hift.cpu import CpuHiFT
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import TEXT, LayerGroup, MossSpeech, Trunk
from vivavoce.nn.decoder import DecoderLayer
from vivavoce.nn.linear import Linear, RMSNorm
from vivavoce.nn.modules import scripted
from vivavoce.nn.paged_kv import CachePiece, RowBatch

LONG_PIECE = 16  # rows of a written sequence from which on a pass of their own costs less than the audio tail does


class AttentionGroup(NamedTuple):
    """Rows of a step that attend in one call, and the KV pages they attend to."""

    rows: Tensor
    pages: Tensor  # of all streams, one after another
    streams: int
    context: int  # slots read of each stream's pages
    bias: Tensor | None  # −inf where masked; None: no mask


class StepLayout(NamedTuple):
    """Row layout of a step, shared by all layers."""

    slots: Tensor  # [row]: the KV-cache slot each row is written to
    cos: Tensor  # [row, 1, head_dim]
    sin: Tensor  # [row, 1, head_dim], its first half negated
    groups: list[AttentionGroup]


class FusedRMSNorm(nn.Module):
    """RMS norm in few calls; with several norms, one per head."""

    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        weights = torch.stack([norm.weight.detach() for norm in norms])
        size = weights.shape[-1]
        self.weight: Tensor = (weights if len(norms) > 1 else weights[0]) * math.sqrt(size)
        self.eps = float(norms[0].eps * size)

    def forward(self, x: Tensor) -> Tensor:
        """# [row, hidden], or [row, head, head_dim]"""
        return (x * (x * x).sum(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(self.weight)


class CpuMossLayer(nn.Module):
    """A decoder layer that multiplies in `dtype`; residual stream, norms, keys and values stay in that of the weights.

    Where both are the same, residual adds are fused into the output projections.
    """

    def __init__(self, layer: DecoderLayer, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        attention = layer.self_attn
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        self.layer_index, self.dtype = layer_index, dtype
        self.kv_heads, self.heads, self.head_dim = attention.kv_heads, attention.heads, attention.head_dim
        self.norm_1, self.norm_2 = FusedRMSNorm([layer.input_layernorm]), FusedRMSNorm([layer.post_attention_layernorm])
        self.head_norm = FusedRMSNorm([attention.q_norm] * self.heads + [attention.k_norm] * self.kv_heads)
        self.qkv: Tensor = attention.qkv_proj.weight.detach().to(dtype)
        self.out: Tensor = attention.o_proj.weight.detach().to(dtype).T
        self.gate_up: Tensor = layer.mlp.gate_up_proj.weight.detach().to(dtype)
        self.down: Tensor = layer.mlp.down_proj.weight.detach().to(dtype).T

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, layout: StepLayout) -> Tensor:
        """The residual stream after this layer.  # [row, hidden]"""
        return self.mix(x, self.store_kv(x, keys, values, layout), keys, values, layout.groups)

    def store_kv(self, x: Tensor, all_keys: Tensor, all_values: Tensor, layout: StepLayout) -> Tensor:
        """Store the rows' keys and values; their queries.  # [row, hidden] → [row, head, dim]"""
        keys, values = all_keys[self.layer_index], all_values[self.layer_index]
        packed = functional.linear(self.norm_1(x).to(self.dtype), self.qkv).to(x.dtype)
        packed = packed.view(x.size(0), -1, self.head_dim)
        rotated = self.head_norm(packed[:, : self.heads + self.kv_heads])
        rotated = torch.addcmul(rotated * layout.cos, rotated.roll(self.head_dim // 2, -1), layout.sin)
        keys.flatten(0, 1).index_copy_(0, layout.slots, rotated[:, self.heads :])
        values.flatten(0, 1).index_copy_(0, layout.slots, packed[:, self.heads + self.kv_heads :])
        return rotated[:, : self.heads].to(self.dtype)

    def mix(
        self, x: Tensor, queries: Tensor, all_keys: Tensor, all_values: Tensor, groups: list[AttentionGroup]
    ) -> Tensor:
        """Attention and feed-forward of rows whose keys and values are stored.  # [row, hidden]"""
        mixed = self.attend(queries, all_keys[self.layer_index], all_values[self.layer_index], groups)
        x = self.add_product(x, mixed.reshape(x.size(0), -1), self.out)
        gate, up = functional.linear(self.norm_2(x).to(self.dtype), self.gate_up).chunk(2, dim=-1)
        return self.add_product(x, functional.silu(gate).mul_(up), self.down)

    def add_product(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """# [row, hidden] + [row, input] @ [input, hidden]"""
        return torch.addmm(x, y, weight) if x.dtype == y.dtype else x + torch.mm(y, weight)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, groups: list[AttentionGroup]) -> Tensor:
        """# queries [row, head, dim], keys [page, slot of the page, kv head, dim]"""
        if len(groups) == 1:
            return self.attend_group(queries, keys, values, groups[0])
        mixed = torch.empty_like(queries)
        for group in groups:
            mixed[group.rows] = self.attend_group(queries[group.rows], keys, values, group)
        return mixed

    def attend_group(self, queries: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup) -> Tensor:
        """Attention of one group in one call."""
        keys, values = self.gather(keys, group), self.gather(values, group)
        # Query heads that share a key head become rows, so that keys are not repeated.
        # [stream, kv head, row, group, dim]
        rows, heads = queries.size(0) // group.streams, self.heads // self.kv_heads
        grouped = queries.reshape(group.streams, rows, self.kv_heads, heads, self.head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=group.bias)
        mixed = mixed.view(group.streams, self.kv_heads, rows, heads, self.head_dim).transpose(1, 2)
        return mixed.reshape(queries.size(0), self.heads, self.head_dim)

    def gather(self, cached: Tensor, group: AttentionGroup) -> Tensor:
        """# → [stream, kv head, context, dim]"""
        gathered = cached.index_select(0, group.pages).view(group.streams, -1, self.kv_heads, self.head_dim)
        return gathered[:, : group.context].to(self.dtype).transpose(1, 2)


class CpuTrunk(nn.Module):
    """Shared layers and both tails, compiled as one TorchScript module."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        dtype = trunk.text_norm.weight.dtype
        self.shared, self.text, self.audio = (
            _cpu_layers(block, dtype) for block in (trunk.shared_block, trunk.text_block, trunk.audio_block)
        )
        self.text_norm, self.audio_norm = FusedRMSNorm([trunk.text_norm]), FusedRMSNorm([trunk.audio_norm])

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, layout: StepLayout) -> Tensor:
        """Both tails' states of every row.  # [row, hidden] → [row, 2, hidden]"""
        for layer in self.shared:
            x = layer(x, keys, values, layout)
        text = audio = x
        for layer in self.text:
            text = layer(text, keys, values, layout)
        for layer in self.audio:
            audio = layer(audio, keys, values, layout)
        return torch.stack([self.text_norm(text), self.audio_norm(audio)], dim=1)


class CpuTextTrunk(nn.Module):
    """Shared layers and text tail, the last layer's output for some rows only; compiled as one TorchScript module."""

    def __init__(self, trunk: Trunk, dtype: torch.dtype) -> None:
        super().__init__()
        *before, last = [*_cpu_layers(trunk.shared_block, dtype), *_cpu_layers(trunk.text_block, dtype)]
        self.before, self.last = nn.ModuleList(before), cast(CpuMossLayer, last)
        self.norm = FusedRMSNorm([trunk.text_norm])

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: StepLayout,
        drawn: Tensor,
        drawn_groups: list[AttentionGroup],
    ) -> Tensor:
        """The text tail's states of the rows `drawn`.  # [row, hidden] → [drawn, hidden]"""
        for layer in self.before:
            x = layer(x, keys, values, layout)
        queries = self.last.store_kv(x, keys, values, layout)
        if drawn.numel() == 0:
            return x[drawn]
        states: Tensor = self.norm(self.last.mix(x[drawn], queries[drawn], keys, values, drawn_groups))
        return states


class CpuMossSpeech(MossSpeech):
    """CPU implementation of `MossSpeech` on its weights.

    Prompts of sequences in which only text is drawn pass the text tail alone, and are multiplied in `text_dtype`; None:
    in the dtype of the weights.
    """

    def __init__(self, model: MossSpeech, text_dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.config, self.vocabularies = model.config, model.vocabularies
        self.context_limit, self.kv_shape = model.context_limit, model.kv_shape
        self.model, self.text_lm_head, self.audio_lm_head = model.model, model.text_lm_head, model.audio_lm_head
        trunk = model.model
        self._text_dtype = text_dtype or trunk.text_norm.weight.dtype
        self._cpu_layers, self._text_layers = scripted(CpuTrunk(trunk)), scripted(CpuTextTrunk(trunk, self._text_dtype))
        like, cos, sin = trunk.text_norm.weight, trunk.rotary.cos, trunk.rotary.sin
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(like)
        self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(like)
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads

    @staticmethod
    def suits(model: MossSpeech) -> bool:
        """Whether all weights are unquantised float32 or float64 ones on a CPU."""
        weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
        wide = (torch.float32, torch.float64)
        plain = all(weight.device.type == "cpu" and weight.dtype in wide for weight in weights)
        layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
        return plain and len(weights) == 4 * len(layers) + 2

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Both tails' states of every row.  # [row, 2] → [row, 2, hidden]"""
        if batch.cache.is_fp8:
            return super().forward(rows, batch)
        x = self.model.embed(rows)
        written = [piece for piece in batch.pieces if _is_written(piece)]
        if not written:
            return self._run(x, batch)
        states = x.new_zeros(x.size(0), 2, x.size(1))
        for piece in written:
            drawn = slice(piece.rows.stop - piece.draws, piece.rows.stop)
            states[drawn, TEXT] = self._write(x[piece.rows], batch, piece)
        others = [piece for piece in batch.pieces if not _is_written(piece)]
        if others:
            rows, part = _part_of(batch, others)
            states[rows] = self._run(x[rows], part)
        return states

    def _run(self, x: Tensor, batch: RowBatch) -> Tensor:
        """Both tails' states of every row.  # [row, hidden] → [row, 2, hidden]"""
        states: Tensor = self._cpu_layers(x, batch.cache.keys, batch.cache.values, self._layout(batch, x.dtype))
        return states

    def _write(self, x: Tensor, batch: RowBatch, piece: CachePiece) -> Tensor:
        """The text tail's states of the rows of a piece that draw.  # [row, hidden] → [draw, hidden]"""
        first = piece.length - piece.draws
        drawing = replace(
            piece,
            rows=slice(piece.rows.start + first, piece.rows.stop),
            position=piece.position + first,
            visible=None if piece.visible is None else piece.visible[first:],
        )
        groups = self._layout(_part_of(batch, [drawing])[1], self._text_dtype).groups if piece.draws else []
        layout, cache = self._layout(_part_of(batch, [piece])[1], self._text_dtype), batch.cache
        states: Tensor = self._text_layers(
            x, cache.keys, cache.values, layout, torch.arange(first, piece.length), groups
        )
        return states

    def _layout(self, batch: RowBatch, dtype: torch.dtype) -> StepLayout:
        size, positions = batch.cache.page_size, batch.positions.long()
        stored = positions if batch.cache_positions is None else batch.cache_positions.long()
        pages = batch.page_table[batch.slots.long(), stored // size].long()
        groups = [self._prefill_group(batch, piece, dtype) for piece in batch.pieces if piece.length > 1]
        singles = [piece for piece in batch.pieces if piece.length == 1]
        if singles:
            groups.append(self._decode_group(batch, singles, dtype))
        return StepLayout(pages * size + stored % size, self._cos[positions], self._sin[positions], groups)

    def _decode_group(self, batch: RowBatch, pieces: list[CachePiece], dtype: torch.dtype) -> AttentionGroup:
        """Sequences that decode one row each, padded to the longest context."""
        size, max_context = batch.cache.page_size, max(piece.context for piece in pieces)
        pages = batch.page_table[[piece.slot for piece in pieces], : -(-max_context // size)].long()
        rows = torch.tensor([piece.rows.start for piece in pieces])
        if len(pieces) == 1:
            return AttentionGroup(rows, pages.flatten(), 1, max_context, None)
        ends = torch.tensor([piece.context for piece in pieces])
        bias = _bias(torch.arange(max_context) < ends[:, None], dtype)[:, None, None]
        return AttentionGroup(rows, pages.flatten(), len(pieces), max_context, bias)

    def _prefill_group(self, batch: RowBatch, piece: CachePiece, dtype: torch.dtype) -> AttentionGroup:
        """Consecutive rows of one sequence under a causal mask, or under the mask of the piece."""
        pages = batch.page_table[piece.slot, : -(-piece.context // batch.cache.page_size)].long()
        seen = piece.visible
        if seen is None:
            seen = torch.arange(piece.context) <= torch.arange(piece.position, piece.context)[:, None]
        bias = _bias(seen.repeat_interleave(self._group, dim=0), dtype)[None, None]
        rows = torch.arange(piece.rows.start, piece.rows.stop)
        return AttentionGroup(rows, pages, 1, piece.context, bias)


def _cpu_layers(block: LayerGroup, dtype: torch.dtype) -> nn.ModuleList:
    return nn.ModuleList(
        CpuMossLayer(cast(DecoderLayer, layer), layer_index, dtype)
        for layer_index, layer in enumerate(block.layers, block.first)
    )


def _is_written(piece: CachePiece) -> bool:
    """Whether only the text tail is ever read of its sequence, and the piece is long enough for a pass of its own."""
    return piece.lone_mode == TEXT and piece.length >= LONG_PIECE


def _part_of(batch: RowBatch, pieces: list[CachePiece]) -> tuple[Tensor, RowBatch]:
    """The rows of some pieces of a step, and a step of these alone."""
    rows = torch.cat([torch.arange(piece.rows.start, piece.rows.stop) for piece in pieces])
    begins = accumulate((piece.length for piece in pieces), initial=0)
    moved = tuple(
        replace(piece, rows=slice(begin, begin + piece.length)) for begin, piece in zip(begins, pieces, strict=False)
    )
    stored = None if batch.cache_positions is None else batch.cache_positions[rows]
    part = replace(
        batch, slots=batch.slots[rows], positions=batch.positions[rows], pieces=moved, cache_positions=stored
    )
    return rows, part


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


class CpuCodec(MossSpeechCodec):
    """CPU implementation of the codec on the weights of a plain one; in float32 its sound is equal up to rounding.

    Flow and vocoder multiply in `dtype`: bfloat16 where the CPU has tiles for it. On the bundled weights the error of
    the flow's mel, and of the vocoder's sound for the same mel, is then 50 dB below the signal; on random weights 44
    and 30 dB. The waveform of a whole reply agrees less (13 dB), because the phase of the excitation integrates small
    differences in pitch. Its log spectrum differs by 1 dB on average.
    """

    def __init__(self, codec: MossSpeechCodec, dtype: torch.dtype = torch.float32) -> None:
        self.speech_encoder, self.speaker, self.mel = codec.speech_encoder, codec.speaker, codec.mel
        self.named = codec.named
        self.ready: dict[str, FlowVoice] = {}
        self.flow = CpuFlow(codec.flow, dtype) if CpuFlow.suits(codec.flow) else codec.flow
        vocoder = codec.vocoder.hift
        fast = CpuHiFT(vocoder, dtype) if CpuHiFT.suits(vocoder) else vocoder
        self.vocoder = HiFTStream(fast, codec.vocoder.delay_frames)
