"""Grouped-query attention over a paged cache, as the Qwen family has it: optional bias, optional q/k norms, RoPE."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn import kernels
from vivavoce.nn.few_rows import project
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.norm import RMSNorm
from vivavoce.nn.paged import CachePiece, RowBatch
from vivavoce.nn.rope import RotaryTable, rotate


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
            given = (packed, self._norms(), rotary.cos, rotary.sin, layer, batch, self.kv_heads)
            return project(self.o_proj, kernels.one_row_decode(*given).flatten(-2))
        queries = self._store(packed, rotary, layer, batch)
        return project(self.o_proj, attend(queries, layer, batch).flatten(-2))

    def remember(self, x: Tensor, rotary: RotaryTable, layer: int, batch: RowBatch) -> Tensor:
        """Keep the rows' keys and values; their queries.  # [row, hidden] → [row, head, head_dim]"""
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
    """Attention of one step's rows, whatever mixture they are.  # [row, head, head_dim]"""
    if batch.singles == queries.shape[0]:
        return kernels.paged_decode(queries, layer, batch)
    out = torch.empty_like(queries)
    if batch.singles:
        out[: batch.singles] = kernels.paged_decode(queries[: batch.singles], layer, batch)
    for piece in batch.pieces:
        out[piece.rows] = _attend_piece(queries[piece.rows], *batch.read(layer, piece, queries.dtype), piece)
    return out


def _attend_piece(queries: Tensor, keys: Tensor, values: Tensor, piece: CachePiece) -> Tensor:
    """Causal attention of a piece's rows to its sequence.  # queries [row, head, dim], keys [context, kv head, dim]"""
    is_half = queries.is_cuda and queries.dtype.itemsize == 2
    flash = _flash_attention() if is_half and piece.visible is None else None
    if flash is not None:
        attended: Tensor = flash(queries[None], keys[None], values[None], causal=True)[0]
        return attended
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
    """One row sees everything, so the heads of a group can stand in for query rows, and nothing is repeated."""
    grouped = query[0].unflatten(0, (keys.shape[1], -1))[None]  # [1, kv head, group, dim]
    out = functional.scaled_dot_product_attention(grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return out.flatten(1, 2)


def _visible(piece: CachePiece, device: torch.device) -> Tensor:
    """Row i of the piece sees the whole past and the piece up to itself.  # [row, context] bool"""
    columns = torch.arange(piece.context, device=device)
    rows = torch.arange(piece.position, piece.context, device=device)
    return columns[None] <= rows[:, None]


@functools.cache
def _flash_attention() -> Callable[..., Tensor] | None:
    """FlashAttention's entry point where the package is installed; it aligns the causal mask to the last row."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    function: Callable[..., Tensor] = flash_attn_func
    return function
