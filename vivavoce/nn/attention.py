"""Attention: rotary embedding, grouped-query attention over the paged cache, chunk masks, and relative positions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.nn.linear import Linear, PackedLinear, RMSNorm
from vivavoce.nn.paged_kv import CachePiece, RowBatch
from vivavoce.nn.quantised import project
from vivavoce.nn.streaming import Past


class RotaryTable(nn.Module):
    """Cosines and sines of every position a model may reach, in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, factors: Tensor | None = None) -> None:
        """`factors` divide the frequencies, e.g. those of Llama 3.  # [head_dim / 2]"""
        super().__init__()
        cos, sin = rotation(torch.arange(positions), head_dim, theta, factors)
        self.register_buffer("cos", cos, persistent=False)  # [position, head_dim / 2]
        self.register_buffer("sin", sin, persistent=False)


def rotation(positions: Tensor, head_dim: int, theta: float, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, in float32.  # [..] → [.., head_dim / 2] twice"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = theta**-exponents if factors is None else theta**-exponents / factors
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of each head against the second.  # x [row, head, dim], cos and sin [row, dim / 2]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each even element of a head against the next.  # x [.., head, dim], cos and sin [.., dim / 2]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    even, odd = wide.unbind(-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def pair_rotation(cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    """`rotate_pairs` by these angles, as one complex product where the device supports it: a third of the calls."""
    if cos.device.type not in ("cpu", "cuda"):
        return lambda x: rotate_pairs(x, cos, sin)
    factors = torch.complex(cos, sin)[..., None, :]

    def rotate_all(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(wide) * factors).flatten(-2).to(x.dtype)

    return rotate_all


def sinusoids(positions: int, channels: int, max_wavelength: float = 10_000.0) -> Tensor:
    """Sines in the first half of the channels, cosines in the second, wavelengths from 2π to 2π `max_wavelength`."""
    steps = torch.log(torch.tensor(max_wavelength)) / (channels // 2 - 1)
    rates = torch.exp(-steps * torch.arange(channels // 2))
    angles = torch.arange(positions)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class PagedAttention(nn.Module):
    """Self-attention whose keys and values live in the pages of a `RowBatch`."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        bias: bool = False,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.qkv_proj = PackedLinear(hidden, parts, bias)
        self.o_proj = Linear(heads * head_dim, hidden)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def forward(self, x: Tensor, rotary: RotaryTable, layer: int, batch: RowBatch) -> Tensor:
        """Attend each row to its sequence's past and itself.  # [row, hidden] → [row, hidden]"""
        packed = self._packed(x)
        if kernels.usable(packed) and kernels.takes_one_row(packed, batch, self.kv_heads):
            arguments = (packed, self._norms(), rotary.cos, rotary.sin, layer, batch, self.kv_heads)
            return project(self.o_proj, kernels.one_row_decode(*arguments).flatten(-2))
        queries = self._store(packed, rotary, layer, batch)
        return project(self.o_proj, attend(queries, layer, batch).flatten(-2))

    def store_kv(self, x: Tensor, rotary: RotaryTable, layer: int, batch: RowBatch) -> Tensor:
        """Store the rows' keys and values and return their queries.  # [row, hidden] → [row, head, head_dim]"""
        return self._store(self._packed(x), rotary, layer, batch)

    def _packed(self, x: Tensor) -> Tensor:
        """Queries, keys and values.  # [row, hidden] → [row, heads + 2 kv_heads, head_dim]"""
        return project(self.qkv_proj, x).unflatten(-1, (-1, self.head_dim))

    def _norms(self) -> tuple[Tensor, Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def _store(self, packed: Tensor, rotary: RotaryTable, layer: int, batch: RowBatch) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, return the queries."""
        if kernels.usable(packed):
            return kernels.norm_rotate_store(packed, self._norms(), rotary.cos, rotary.sin, layer, batch, self.kv_heads)
        queries, keys, values = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        positions = batch.positions.long()
        cos, sin = rotary.cos[positions], rotary.sin[positions]
        batch.write(layer, rotate(keys, cos, sin), values)
        return rotate(queries, cos, sin)


def attend(queries: Tensor, layer: int, batch: RowBatch) -> Tensor:
    """Attention of one step's rows: single rows and tiles by kernels, other pieces by SDPA.  # [row, head, head_dim]"""
    if batch.singles == queries.shape[0]:
        return kernels.paged_decode(queries, layer, batch)
    if batch.tiles is None:
        out = torch.empty_like(queries)
    else:
        out = torch.zeros_like(queries)  # rows of padding are in no tile
        kernels.paged_prefill(queries, layer, batch, out)
    if batch.singles:
        out[: batch.singles] = kernels.paged_decode(queries[: batch.singles], layer, batch)
    for piece in batch.pieces:
        out[piece.rows] = _attend_piece(queries[piece.rows], *batch.read(layer, piece, queries.dtype), piece)
    return out


def _attend_piece(queries: Tensor, keys: Tensor, values: Tensor, piece: CachePiece) -> Tensor:
    """Causal attention of a piece's rows to its sequence.  # queries [row, head, dim], keys [context, kv head, dim]"""
    if piece.length == 1:
        return _attend_single(queries, keys, values)
    visible = piece.visible
    if visible is None and piece.position > 0:
        visible = _visible(piece, queries.device)
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible,
        is_causal=visible is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _attend_single(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A single row needs no mask, so the heads of a group become query rows and no key is repeated."""
    grouped = query[0].unflatten(0, (keys.shape[1], -1))[None]  # [1, kv head, group, dim]
    out = functional.scaled_dot_product_attention(grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return out.flatten(1, 2)


def _visible(piece: CachePiece, device: torch.device) -> Tensor:
    """Row i of the piece sees the whole past and the piece up to itself.  # [row, context] bool"""
    columns = torch.arange(piece.context, device=device)
    rows = torch.arange(piece.position, piece.context, device=device)
    return columns[None] <= rows[:, None]


EMPTY = -1
BIAS_ALIGNMENT = 16  # of the rows of a bias, for fused attention kernels


@dataclass(frozen=True)
class KeySpan:
    """The positions of one pass: a prefix, a window, and `time` new positions per stream from `starts` on.

    The first `sinks` positions of each stream stay visible for ever. In a stream the prefix slots hold them; offline
    there are no prefix slots and no window, and all positions are new. New positions from `ends` on are padding.
    """

    starts: Tensor  # [stream]
    time: int
    sinks: Tensor  # [stream]
    prefix_slots: int = 0
    window_slots: int = 0
    ends: Tensor | None = None  # [stream]; None: no padding

    def scaled(self, ratio: int) -> "KeySpan":
        """The same pass at `ratio` times the rate of positions."""
        return replace(
            self,
            starts=self.starts * ratio,
            time=self.time * ratio,
            sinks=self.sinks * ratio,
            prefix_slots=self.prefix_slots * ratio,
            window_slots=self.window_slots * ratio,
            ends=None if self.ends is None else self.ends * ratio,
        )

    def query_positions(self) -> Tensor:
        """Absolute position of each new element.  # [stream, time]"""
        return self.starts[:, None] + torch.arange(self.time, device=self.starts.device)

    def key_positions(self) -> Tensor:
        """Absolute position of each key slot, or EMPTY.  # [stream, prefix + window + time]"""
        sinks = self.sinks[:, None]
        prefix = torch.arange(self.prefix_slots, device=sinks.device).expand(len(sinks), -1)
        window = self.starts[:, None] + torch.arange(-self.window_slots, 0, device=sinks.device)
        prefix = torch.where(prefix < sinks, prefix, EMPTY)
        window = torch.where(window >= sinks, window, EMPTY)
        return torch.cat([prefix, window, self.query_positions()], dim=1)


def visible(span: KeySpan, chunk: int, left_chunks: int | None) -> Tensor:
    """Which key each new position may look at.  # bool [stream, time, key]

    A position sees its whole chunk, the `left_chunks` chunks before it (None: all), and the sinks. Chunks are counted
    from position 0, so the mask does not depend on how the stream was split.
    """
    queries = span.query_positions()[:, :, None]
    keys = span.key_positions()[:, None, :]
    query_chunks = queries.div(chunk, rounding_mode="floor")
    key_chunks = keys.div(chunk, rounding_mode="floor")
    seen = (key_chunks <= query_chunks) & (keys != EMPTY)
    if span.ends is not None:
        seen &= keys < span.ends[:, None, None]
    if left_chunks is not None:
        seen &= (key_chunks >= query_chunks - left_chunks) | (keys < span.sinks[:, None, None])
    return seen


def visible_slots(span: KeySpan, chunk: int, left_chunks: int) -> tuple[Tensor, Tensor]:
    """`visible` as ranges: the first and the end of the slots of window and new keys that each new position sees.

    All of the prefix is visible.  # int32 [stream, time] each
    """
    queries, starts = span.query_positions(), span.starts[:, None]
    query_chunks = queries.div(chunk, rounding_mode="floor")
    first = torch.maximum((query_chunks - left_chunks) * chunk, span.sinks[:, None])
    end = torch.minimum((query_chunks + 1) * chunk, starts + span.time if span.ends is None else span.ends[:, None])
    slots = span.window_slots + span.time
    first, end = ((edge - starts + span.window_slots).clamp(0, slots).int() for edge in (first, end))
    return first, end


def attention_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive bias of a mask: 0 or −inf.  # [stream, 1, time, key]"""
    streams, time, keys = seen.shape
    aligned = -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = torch.zeros(streams, 1, time, aligned, dtype=dtype, device=seen.device)[..., :keys]
    return bias.masked_fill_(~seen[:, None], float("-inf"))


MAX_WAVELENGTH = 10_000.0


def distance_encoding(distances: Tensor, dim: int) -> Tensor:
    """Sinusoids of signed distances, sine and cosine interleaved, in float32.  # [..] → [.., dim]"""
    rates = torch.exp(torch.arange(0, dim, 2, device=distances.device) * (-math.log(MAX_WAVELENGTH) / dim))
    angles = distances.float()[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def segment_distances(offsets: Tensor, queries: int, keys: int) -> Tensor:
    """All distances between contiguous queries and contiguous keys, longest first.  # [stream] → [stream, q + k − 1]

    `offsets` is the position of the first query less that of the first key.
    """
    return offsets[:, None] + queries - 1 - torch.arange(queries + keys - 1, device=offsets.device)


def relative_shift(scores: Tensor) -> Tensor:
    """Scores by distance, longest first → scores by key: row q starts at column `queries − 1 − q`.

    # [.., queries, queries + keys − 1] → [.., queries, keys]
    """
    scores = scores.contiguous()
    queries, distances = scores.shape[-2:]
    return scores.as_strided(
        (*scores.shape[:-1], distances - queries + 1),
        (*scores.stride()[:-2], distances - 1, 1),
        scores.storage_offset() + queries - 1,
    )


class RelativeAttention(nn.Module):
    """Relative-position attention over a `Past`, with learned biases for content (u) and distance (v)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed = PackedLinear(dim, {"linear_q": dim, "linear_k": dim, "linear_v": dim}, bias=True)
        self.linear_out = nn.Linear(dim, dim)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, dim // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, dim // heads))

    def forward(self, x: Tensor, encodings: Sequence[Tensor], bias: Tensor | None, past: Past) -> Tensor:
        """Attend to the past and to x; `encodings` are those of the distances to each segment of keys, in their order.

        # x [row, time, dim], encodings [row or 1, time + keys of the segment − 1, dim], bias [row, 1, time, key]
        """
        query_key_value = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query = query_key_value[0]
        to_distance = query + self.pos_bias_v[:, None]
        runs = [self.linear_pos(encoding).unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1) for encoding in encodings]
        scores = torch.cat([relative_shift(to_distance @ run) for run in runs], dim=-1)
        scores = scores / math.sqrt(query.shape[-1])
        mask = scores if bias is None else scores + bias
        y = past.attend(query + self.pos_bias_u[:, None], query_key_value[1:], mask)
        out: Tensor = self.linear_out(y.transpose(1, 2).flatten(2))
        return out
