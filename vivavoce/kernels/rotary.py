"""Query and key norms if there are any, rotation, and the write of keys and values into their pages, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin_small, dependent
from vivavoce.nn.paged_kv import RowBatch


@triton.jit
def _keep(low, high, heads_ptr, scale_ptr, cell, column, HALF: tl.constexpr, FP8: tl.constexpr):
    """Write the halves of a head to the cache. Twin of narrowing: `vivavoce.nn.paged_kv.narrowed`."""
    if FP8:
        low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + cell, scale)
        low, high = low / scale, high / scale
    target = heads_ptr + cell * 2 * HALF
    tl.store(target + column, low.to(heads_ptr.dtype.element_ty))
    tl.store(target + HALF + column, high.to(heads_ptr.dtype.element_ty))


@triton.jit
def _norm_rotate_store(
    packed_ptr, queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # queries first, then keys, then values
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row).to(tl.int64)  # where rows go was settled before the step's first kernel
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE).to(tl.int64)
    cache_row = (page * PAGE + position % PAGE) * KV_HEADS
    begin_small(DEPENDENT)

    source = packed_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(source + column)
    second = tl.load(source + HALF + column)

    if head >= HEADS + KV_HEADS:
        cell = cache_row + head - HEADS - KV_HEADS
        _keep(first, second, values_ptr, value_scale_ptr, cell, column, HALF, FP8)
    else:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            weight_ptr = q_weight_ptr if head < HEADS else k_weight_ptr
            mean = (tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / DIM
            scale = tl.rsqrt(mean + eps)
            low_weight, high_weight = tl.load(weight_ptr + column), tl.load(weight_ptr + HALF + column)
            low = ((low * scale).to(first.dtype) * low_weight).to(tl.float32)
            high = ((high * scale).to(first.dtype) * high_weight).to(tl.float32)
        cos = tl.load(cos_ptr + position * HALF + column)
        sin = tl.load(sin_ptr + position * HALF + column)
        low, high = (low * cos - high * sin).to(first.dtype), (high * cos + low * sin).to(first.dtype)
        if head < HEADS:
            target = queries_ptr + (row * HEADS + head) * DIM
            tl.store(target + column, low)
            tl.store(target + HALF + column, high)
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
    """The rotated queries; keys and values are in the cache. Twin: the plain half of `PagedAttention._store`."""
    rows, all_heads, dim = packed.shape
    heads = all_heads - 2 * kv_heads
    q_weight, k_weight, eps = norms or (packed, packed, 0.0)  # without norms, nobody reads them
    queries = torch.empty(rows, heads, dim, dtype=packed.dtype, device=packed.device)
    keys, values, key_scales, value_scales = batch.cache.of_layer(layer)
    _norm_rotate_store[(rows, all_heads)](
        packed, queries, keys, values, key_scales, value_scales, q_weight, k_weight, cos, sin,
        batch.slots, batch.positions, batch.page_table, batch.page_table.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=batch.cache.page_size, NORMED=norms is not None,
        FP8=batch.cache.is_fp8, num_warps=1, **dependent(packed.device),
    )  # fmt: skip
    return queries


@triton.jit
def _rotate_first_head(
    query_ptr, key_ptr, cos_ptr, sin_ptr, time,
    query_row, query_time, key_row, key_time, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, moment = (place // time).to(tl.int64), place % time
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_ptr + place.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + place.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
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
    """Rotate pairs of head 0, in place. Twin: the plain half of `vivavoce.models.cosyvoice.dit.RotatedPast.attend`.

    # query and keys [row, head, time, dim] with elements of a head side by side, cos and sin [row, time, dim / 2]
    """
    rows, _, time, dim = query.shape
    half = dim // 2
    _rotate_first_head[(rows * time,)](
        query, keys, cos, sin, time, query.stride(0), query.stride(2), keys.stride(0), keys.stride(2),
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
