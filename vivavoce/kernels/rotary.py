"""Rotary embedding: fused with the norms of queries and keys and the page write, and of pairs in place."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin_small, dependent
from vivavoce.nn.paged_kv import RowBatch

SPREAD_ROWS = 64  # up to which a program has one head
MAX_HEADS = 8  # of a program


@triton.jit
def _keep(low, high, heads_ptr, scale_ptr, cell, column, HALF: tl.constexpr, FP8: tl.constexpr):
    """Write the halves of heads to the cache, in float8 if FP8. Reference: `vivavoce.nn.paged_kv.to_fp8`.

    # low and high [head, half], cell [head], column [1, half]
    """
    if FP8:
        low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + cell, scale)
        low, high = low / scale[:, None], high / scale[:, None]
    target = heads_ptr + cell[:, None] * 2 * HALF
    tl.store(target + column, low.to(heads_ptr.dtype.element_ty))
    tl.store(target + HALF + column, high.to(heads_ptr.dtype.element_ty))


@triton.jit
def _norm_rotate_store(
    packed_ptr, queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK  # queries first, then keys, then values; a program has one kind
    HALF: tl.constexpr = DIM // 2
    head = first_head + tl.arange(0, BLOCK)
    column = tl.arange(0, HALF)[None, :]
    position = tl.load(positions_ptr + row).to(tl.int64)  # written before the first kernel of the step: no need to wait
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE).to(tl.int64)
    cache_row = (page * PAGE + position % PAGE) * KV_HEADS
    begin_small(DEPENDENT)

    source = packed_ptr + (row * (HEADS + 2 * KV_HEADS) + head[:, None]) * DIM + column
    first = tl.load(source)
    second = tl.load(source + HALF)

    if first_head >= HEADS + KV_HEADS:
        cell = cache_row + head - HEADS - KV_HEADS
        _keep(first, second, values_ptr, value_scale_ptr, cell, column, HALF, FP8)
    else:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            weight_ptr = q_weight_ptr if first_head < HEADS else k_weight_ptr
            mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM
            scale = tl.rsqrt(mean + eps)[:, None]
            low_weight, high_weight = tl.load(weight_ptr + column), tl.load(weight_ptr + HALF + column)
            low = ((low * scale).to(first.dtype) * low_weight).to(tl.float32)
            high = ((high * scale).to(first.dtype) * high_weight).to(tl.float32)
        cos = tl.load(cos_ptr + position * HALF + column)
        sin = tl.load(sin_ptr + position * HALF + column)
        low, high = (low * cos - high * sin).to(first.dtype), (high * cos + low * sin).to(first.dtype)
        if first_head < HEADS:
            target = queries_ptr + (row * HEADS + head[:, None]) * DIM + column
            tl.store(target, low)
            tl.store(target + HALF, high)
        else:
            cell = cache_row + head - HEADS
            _keep(low, high, keys_ptr, key_scale_ptr, cell, column, HALF, FP8)


def norm_rotate_store(
    packed: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    batch: RowBatch,
    kv_heads: int,
) -> Tensor:
    """The rotated queries; writes keys and values to the cache. Reference: PyTorch path of `PagedAttention._store`."""
    rows, all_heads, dim = packed.shape
    heads = all_heads - 2 * kv_heads
    q_weight, k_weight, eps = norms or (packed, packed, 0.0)  # without norms they are not read
    queries = torch.empty(rows, heads, dim, dtype=packed.dtype, device=packed.device)
    keys, values, key_scales, value_scales = batch.cache.of_layer(layer)
    # Few rows are spread over the GPU head by head; with many, launching as many programs would take most of the time.
    together = 1 if rows <= SPREAD_ROWS else math.gcd(heads, kv_heads, MAX_HEADS)
    _norm_rotate_store[(rows, all_heads // together)](
        packed, queries, keys, values, key_scales, value_scales, q_weight, k_weight, cos, sin,
        batch.slots, batch.positions, batch.page_table, batch.page_table.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=batch.cache.page_size, BLOCK=together,
        NORMED=norms is not None, FP8=batch.cache.is_fp8, num_warps=1 if together == 1 else 2,
        **dependent(packed.device),
    )  # fmt: skip
    return queries


@triton.jit
def _rotate_first_head(
    query_ptr, key_ptr, cos_ptr, sin_ptr, time,
    query_row, query_time, key_row, key_time, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row, moment = (index // time).to(tl.int64), index % time
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_ptr + index.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + index.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    element = query_ptr.dtype.element_ty
    even = query_ptr + row * query_row + moment * query_time + 2 * pair
    first = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(even, (first * cos - second * sin).to(element), mask=inside)
    tl.store(even + 1, (second * cos + first * sin).to(element), mask=inside)
    even = key_ptr + row * key_row + moment * key_time + 2 * pair
    first = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(even, (first * cos - second * sin).to(element), mask=inside)
    tl.store(even + 1, (second * cos + first * sin).to(element), mask=inside)


def rotate_first_head(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs of head 0, in place. Reference: PyTorch path of `vivavoce.models.cosyvoice.dit.RotatedPast.attend`.

    # query and keys [row, head, time, dim] with contiguous elements of a head, cos and sin [row, time, dim / 2]
    """
    rows, _, time, dim = query.shape
    half = dim // 2
    _rotate_first_head[(rows * time,)](
        query, keys, cos, sin, time, query.stride(0), query.stride(2), keys.stride(0), keys.stride(2),
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
