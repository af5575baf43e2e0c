"""MOSS-Speech's language model on a CPU, with as little around the products as can be.

A small model's step is mostly the calls around its products. Here what all layers need to know of a step's rows is
found out once, sequences that go on by one row attend together, and TorchScript runs all layers without Python between
them, for which an event loop would have to wait, and they for it. Keys, values and rows are those of `MossSpeech`, on
whose weights it runs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.flow.cpu import CpuFlow
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.hift.cpu import CpuHiFT
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import LayerGroup, MossSpeech, Trunk
from vivavoce.nn.decoder import DecoderLayer
from vivavoce.nn.linear import Linear
from vivavoce.nn.modules import scripted
from vivavoce.nn.norm import RMSNorm
from vivavoce.nn.paged_kv import CachePiece, RowBatch


class Looking(NamedTuple):
    """Some rows of a step that attend in one call, and where what they may see is kept."""

    rows: Tensor
    pages: Tensor  # of all of them, one sequence after another
    streams: int
    context: int  # slots that are looked at of each stream's pages
    bias: Tensor | None  # −inf where a row may not look; None: everywhere it may


class StepPlaces(NamedTuple):
    """What every layer must know of a step's rows."""

    written: Tensor  # [row]: the slot of the cache each row goes to
    cos: Tensor  # [row, 1, head_dim]
    sin: Tensor  # the same, its first half negated
    looking: list[Looking]


class FlatNorm(nn.Module):
    """A root-mean-square norm in few calls, or several side by side, one for each head."""

    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        weights = torch.stack([norm.weight.detach() for norm in norms])
        size = weights.shape[-1]
        self.weight: Tensor = (weights if len(norms) > 1 else weights[0]) * math.sqrt(size)
        self.eps = float(norms[0].eps * size)

    def forward(self, x: Tensor) -> Tensor:
        """# [row, hidden], or [row, head, head_dim]"""
        return (x * (x * x).sum(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(self.weight)


class FlatMossLayer(nn.Module):
    """A decoder layer; the residual stream is added to as it goes."""

    def __init__(self, layer: DecoderLayer, place: int) -> None:
        super().__init__()
        attention = layer.self_attn
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        self.place = place
        self.kv_heads, self.heads, self.head_dim = attention.kv_heads, attention.heads, attention.head_dim
        self.norm_1, self.norm_2 = FlatNorm([layer.input_layernorm]), FlatNorm([layer.post_attention_layernorm])
        self.head_norm = FlatNorm([attention.q_norm] * self.heads + [attention.k_norm] * self.kv_heads)
        self.qkv: Tensor = attention.qkv_proj.weight.detach()
        self.out: Tensor = attention.o_proj.weight.detach().T
        self.gate_up: Tensor = layer.mlp.gate_up_proj.weight.detach()
        self.down: Tensor = layer.mlp.down_proj.weight.detach().T

    def forward(self, x: Tensor, all_keys: Tensor, all_values: Tensor, places: StepPlaces) -> Tensor:
        """The residual stream after this layer.  # [row, hidden]"""
        keys, values = all_keys[self.place], all_values[self.place]
        packed = functional.linear(self.norm_1(x), self.qkv).view(x.size(0), -1, self.head_dim)
        turned = self.head_norm(packed[:, : self.heads + self.kv_heads])
        turned = torch.addcmul(turned * places.cos, turned.roll(self.head_dim // 2, -1), places.sin)
        keys.flatten(0, 1).index_copy_(0, places.written, turned[:, self.heads :])
        values.flatten(0, 1).index_copy_(0, places.written, packed[:, self.heads + self.kv_heads :])
        mixed = self.attended(turned[:, : self.heads], keys, values, places.looking)
        x = torch.addmm(x, mixed.reshape(x.size(0), -1), self.out)
        gate, up = functional.linear(self.norm_2(x), self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, functional.silu(gate).mul_(up), self.down)

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, looking: list[Looking]) -> Tensor:
        """# queries [row, head, dim], keys [page, row of the page, kv head, dim]"""
        if len(looking) == 1:
            return self.attend(queries, keys, values, looking[0])
        mixed = torch.empty_like(queries)
        for group in looking:
            mixed[group.rows] = self.attend(queries[group.rows], keys, values, group)
        return mixed

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, group: Looking) -> Tensor:
        """The rows of a group, all in one call."""
        keys, values = self.seen(keys, group), self.seen(values, group)
        # Heads that share a key stand in for rows, so that nothing is repeated.  # [stream, kv head, row, group, dim]
        rows, heads = queries.size(0) // group.streams, self.heads // self.kv_heads
        asked = queries.reshape(group.streams, rows, self.kv_heads, heads, self.head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(asked.flatten(2, 3), keys, values, attn_mask=group.bias)
        mixed = mixed.view(group.streams, self.kv_heads, rows, heads, self.head_dim).transpose(1, 2)
        return mixed.reshape(queries.size(0), self.heads, self.head_dim)

    def seen(self, cached: Tensor, group: Looking) -> Tensor:
        """# → [stream, kv head, context, dim]"""
        held = cached.index_select(0, group.pages).view(group.streams, -1, self.kv_heads, self.head_dim)
        return held[:, : group.context].transpose(1, 2)


class FlatTrunk(nn.Module):
    """All layers."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.shared, self.text, self.audio = (
            _flat(block) for block in (trunk.shared_block, trunk.text_block, trunk.audio_block)
        )
        self.text_norm, self.audio_norm = FlatNorm([trunk.text_norm]), FlatNorm([trunk.audio_norm])

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, places: StepPlaces) -> Tensor:
        """Both tails' states of every row.  # [row, hidden] → [row, 2, hidden]"""
        for layer in self.shared:
            x = layer(x, keys, values, places)
        text = audio = x
        for layer in self.text:
            text = layer(text, keys, values, places)
        for layer in self.audio:
            audio = layer(audio, keys, values, places)
        return torch.stack([self.text_norm(text), self.audio_norm(audio)], dim=1)


class CpuMossSpeech(MossSpeech):
    """The model on the weights of another; the engine runs it in its place."""

    def __init__(self, model: MossSpeech) -> None:
        nn.Module.__init__(self)
        self.config, self.vocabularies = model.config, model.vocabularies
        self.context_limit, self.kv_shape = model.context_limit, model.kv_shape
        self.model, self.text_lm_head, self.audio_lm_head = model.model, model.text_lm_head, model.audio_lm_head
        trunk = model.model
        self._flat = scripted(FlatTrunk(trunk))
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
        states: Tensor = self._flat(self.model.embed(rows), batch.cache.keys, batch.cache.values, self._places(batch))
        return states

    def _places(self, batch: RowBatch) -> StepPlaces:
        size, positions = batch.cache.page_size, batch.positions.long()
        stored = positions if batch.places is None else batch.places.long()
        pages = batch.page_table[batch.slots.long(), stored // size].long()
        looking = [self._looking_ahead(batch, piece) for piece in batch.pieces if piece.length > 1]
        singles = [piece for piece in batch.pieces if piece.length == 1]
        if singles:
            looking.append(self._looking_once(batch, singles))
        return StepPlaces(pages * size + stored % size, self._cos[positions], self._sin[positions], looking)

    def _looking_once(self, batch: RowBatch, pieces: list[CachePiece]) -> Looking:
        """Rows that are the next of their sequences: padded to the longest, all in one call."""
        size, longest = batch.cache.page_size, max(piece.context for piece in pieces)
        pages = batch.page_table[[piece.slot for piece in pieces], : -(-longest // size)].long()
        rows = torch.tensor([piece.rows.start for piece in pieces])
        if len(pieces) == 1:
            return Looking(rows, pages.flatten(), 1, longest, None)
        ends = torch.tensor([piece.context for piece in pieces])
        bias = _bias(torch.arange(longest) < ends[:, None], batch)[:, None, None]
        return Looking(rows, pages.flatten(), len(pieces), longest, bias)

    def _looking_ahead(self, batch: RowBatch, piece: CachePiece) -> Looking:
        """Consecutive rows of one sequence: each sees the past and the rows up to itself, or what the piece says."""
        pages = batch.page_table[piece.slot, : -(-piece.context // batch.cache.page_size)].long()
        seen = piece.visible
        if seen is None:
            seen = torch.arange(piece.context) <= torch.arange(piece.position, piece.context)[:, None]
        bias = _bias(seen.repeat_interleave(self._group, dim=0), batch)[None, None]
        rows = torch.arange(piece.rows.start, piece.rows.stop)
        return Looking(rows, pages, 1, piece.context, bias)


def _flat(block: LayerGroup) -> nn.ModuleList:
    return nn.ModuleList(
        FlatMossLayer(cast(DecoderLayer, layer), place) for place, layer in enumerate(block.layers, block.first)
    )


def _bias(seen: Tensor, batch: RowBatch) -> Tensor:
    return torch.zeros(seen.shape, dtype=batch.cache.keys.dtype).masked_fill_(~seen, -torch.inf)


class CpuCodec(MossSpeechCodec):
    """A codec, on the weights of another, that speaks sooner; its sound is that of the other but for rounding.

    The voice multiplies in `dtype`: bfloat16 where the CPU has tiles for it. On the bundled weights the rounding error
    of the flow's mel and of the vocoder's sound of one mel is then 50 dB below the signal, on random weights 44 and
    30 dB. The waveform of a whole reply agrees less (13 dB): a mel that differs slightly has a pitch that differs
    slightly, and the excitation's phase adds that up. Its log spectrum differs by 1 dB on average.
    """

    def __init__(self, codec: MossSpeechCodec, dtype: torch.dtype = torch.float32) -> None:
        self.ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.named = codec.named
        self.ready: dict[str, FlowVoice] = {}
        self.flow = CpuFlow(codec.flow, dtype) if CpuFlow.suits(codec.flow) else codec.flow
        vocoder = codec.vocoder.hift
        flat = CpuHiFT(vocoder, dtype) if CpuHiFT.suits(vocoder) else vocoder
        self.vocoder = HiFTStream(flat, codec.vocoder.delay_frames)
