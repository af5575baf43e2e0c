"""Decode attention over the paged cache: split-KV with a merging kernel, Whisper's variant, and one-row fusion."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin, begin_small, dependent, fetch_near, launch_next, wait_for_previous
from vivavoce.kernels.widening import widened
from vivavoce.nn.paged_kv import RowBatch

PROGRAMS_WANTED = 264  # two per multiprocessor of an H200; more splits only add merging
MAX_SPLITS = 32


@triton.jit
def softened(scores, inside, peak):
    """Online softmax: exponentials of the scores, the factor of earlier sums, and the new maximum."""
    scores = tl.where(inside, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    return tl.exp(scores - highest[:, None]), tl.exp(peak - highest), highest


@triton.jit
def attended(
    queries, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, cell, column, inside, seen, scale,
    peak, weight, total, PRECISION: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of an online softmax after a block of cells of the cache.

    # queries and total [query, dim], cell and inside [block], seen [query or 1, block], peak and weight [query]
    """
    place = cell[:, None] * queries.shape[1] + column[None, :]
    keys = tl.load(keys_ptr + place, mask=inside[:, None], other=0.0)
    scores = tl.dot(queries, tl.trans(widened(keys, queries.dtype, FAST)), input_precision=PRECISION) * scale
    if FP8:
        scores *= tl.load(key_scale_ptr + cell, mask=inside, other=0.0)[None, :]
    prob, shrink, peak = softened(scores, seen, peak)
    values = tl.load(values_ptr + place, mask=inside[:, None], other=0.0)
    weight = weight * shrink + tl.sum(prob, axis=1)
    if FP8:
        prob *= tl.load(value_scale_ptr + cell, mask=inside, other=0.0)[None, :]
    prob, values = prob.to(queries.dtype), widened(values, queries.dtype, FAST)
    return peak, weight, total * shrink[:, None] + tl.dot(prob, values, input_precision=PRECISION)


@triton.jit
def _decode_split(
    queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, positions_ptr, page_table_ptr,
    table_width, scale, out_ptr, part_ptr, peak_ptr, weight_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, LINE: tl.constexpr,
    FP8: tl.constexpr, FAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(positions_ptr + row) + 1
    slot = tl.load(slots_ptr + row).to(tl.int64)
    share = tl.cdiv(tl.cdiv(context, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, context)
    if DEPENDENT:  # most keys were written in earlier steps: they are prefetched while the previous kernel runs
        index = start + tl.arange(0, BLOCK)
        page = tl.load(page_table_ptr + slot * table_width + index // PAGE, mask=index < end, other=0).to(tl.int64)
        offset = ((page * PAGE + index % PAGE) * KV_HEADS + kv_head) * DIM
        fetch_near(keys_ptr + offset[:, None], DIM, LINE)
        fetch_near(values_ptr + offset[:, None], DIM, LINE)
    begin(DEPENDENT)

    group = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, DIM)
    head = kv_head * GROUP + group
    queries = tl.load(
        queries_ptr + (row * KV_HEADS * GROUP + head[:, None]) * DIM + column[None, :],
        mask=group[:, None] < GROUP, other=0.0,
    )  # fmt: skip
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for first in range(start, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        page = tl.load(page_table_ptr + slot * table_width + index // PAGE, mask=inside, other=0).to(tl.int64)
        cell = (page * PAGE + index % PAGE) * KV_HEADS + kv_head
        peak, weight, total = attended(
            queries, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, cell, column, inside, inside[None, :], scale,
            peak, weight, total, PRECISION, FP8, FAST,
        )  # fmt: skip

    kept = group < GROUP
    if SPLITS == 1:
        target = out_ptr + (row * KV_HEADS * GROUP + head[:, None]) * DIM + column[None, :]
        tl.store(target, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=kept[:, None])
    else:
        index = (row * KV_HEADS * GROUP + head) * SPLITS + split
        tl.store(part_ptr + index[:, None] * DIM + column[None, :], total, mask=kept[:, None])
        tl.store(peak_ptr + index, peak, mask=kept)
        tl.store(weight_ptr + index, weight, mask=kept)


@triton.jit
def join_splits(
    part_ptr, peak_ptr, weight_ptr, out_ptr, DIM: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr
):
    begin_small(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)  # row × head
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    peak = tl.load(peak_ptr + head * SPLITS + split)
    factor = tl.exp(peak - tl.max(peak, axis=0))  # an empty split has peak −inf, so factor 0
    weight = tl.sum(tl.load(weight_ptr + head * SPLITS + split) * factor, axis=0)
    parts = tl.load(part_ptr + (head * SPLITS + split[:, None]) * DIM + column[None, :])
    joined = tl.sum(parts * factor[:, None], axis=0) / weight
    tl.store(out_ptr + head * DIM + column, joined.to(out_ptr.dtype.element_ty))


def paged_decode(queries: Tensor, layer: int, batch: RowBatch) -> Tensor:
    """Attention of single rows, the first of a batch. Reference: `vivavoce.nn.attention._attend_single`."""
    queries = queries.contiguous()
    rows, heads, dim = queries.shape
    keys, values, key_scales, value_scales = batch.cache.of_layer(layer)
    kv_heads = keys.shape[2]
    splits = splits_for(rows * kv_heads)
    out = torch.empty_like(queries)
    parts, peaks, weights = out, out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=queries.device)
        peaks = torch.empty(rows, heads, splits, dtype=torch.float32, device=queries.device)
        weights = torch.empty_like(peaks)
    _decode_split[(rows, kv_heads, splits)](
        queries, keys, values, key_scales, value_scales, batch.slots, batch.positions, batch.page_table,
        batch.page_table.shape[1], dim**-0.5, out, parts, peaks, weights,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim, PAGE=batch.cache.page_size, SPLITS=splits, BLOCK=32 if splits > 1 or batch.cache.is_fp8 else 64,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32", LINE=min(dim, 128 // keys.element_size()),
        FP8=batch.cache.is_fp8, FAST=queries.is_cuda, num_warps=4, num_stages=3, **dependent(queries.device),
    )  # fmt: skip
    if splits > 1:
        join_splits[(rows * heads,)](
            parts, peaks, weights, out, DIM=dim, SPLITS=splits, num_warps=1, **dependent(queries.device)
        )
    return out


def splits_for(programs: int) -> int:
    """A power of two that brings the number of programs near `PROGRAMS_WANTED`."""
    wanted = max(1, PROGRAMS_WANTED // programs)
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


SMALL_BATCH_ROWS = 8
BLOCK, WARPS = 128, 4  # positions per iteration; with more rows, small programs finish sooner
SMALL_BLOCK, SMALL_WARPS = 32, 1
STORED = 1024  # columns that a program stores


@triton.jit
def _page_attention(
    queries_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, stride, scale, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DIM)
    context = tl.load(positions_ptr + row) + 1
    table = page_table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_width
    index = tl.arange(0, BLOCK)
    page = tl.load(table + index // PAGE, mask=index < context, other=0)
    if DEPENDENT:
        wait_for_previous()
    query = tl.load(queries_ptr + row * stride + head * DIM + column).to(tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, context, BLOCK):
        inside = index < context
        offset = ((page.to(tl.int64) * PAGE + index % PAGE) * HEADS + head)[:, None] * DIM + column[None, :]
        keys = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
        values = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=0))
        shrink = tl.exp(peak - new_peak)
        prob = tl.exp(scores - new_peak)
        total = total * shrink + tl.sum(values * prob[:, None], axis=0)
        weight = weight * shrink + tl.sum(prob, axis=0)
        peak = new_peak
        index = first + BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + index // PAGE, mask=index < context, other=0)
    out = (total / weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * HEADS + head) * DIM + column, out)


@triton.jit
def _store_rows(
    packed_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE).to(tl.int64)
    cached = (page * PAGE + position % PAGE) * WIDTH
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if DEPENDENT:
        wait_for_previous()
    packed = packed_ptr + row * 3 * WIDTH + column
    tl.store(keys_ptr + cached + column, tl.load(packed + WIDTH, mask=inside), mask=inside)
    tl.store(values_ptr + cached + column, tl.load(packed + 2 * WIDTH, mask=inside), mask=inside)


def store_rows(packed: Tensor, layer: int, batch: RowBatch) -> None:
    """Store keys and values of rows in their pages. Reference: `RowBatch.write`.  # [row, query | key | value]"""
    rows, width = packed.shape[0], packed.shape[1] // 3
    _store_rows[(rows, triton.cdiv(width, STORED))](
        packed, batch.cache.keys[layer], batch.cache.values[layer], batch.slots, batch.positions, batch.page_table,
        batch.page_table.shape[1], WIDTH=width, PAGE=batch.cache.page_size, BLOCK=STORED, num_warps=4,
        **dependent(packed.device),
    )  # fmt: skip


def page_attention(queries: Tensor, layer: int, batch: RowBatch) -> Tensor:
    """Causal self-attention of rows. Reference: `vivavoce.nn.attention._attend_single`.

    # queries [row, head, head_dim], as many heads as the keys; the previous launch must not write slots or positions
    """
    rows, heads, dim = queries.shape
    assert queries.stride()[1:] == (dim, 1)
    out = torch.empty(rows, heads, dim, dtype=queries.dtype, device=queries.device)
    block, warps = (BLOCK, WARPS) if rows <= SMALL_BATCH_ROWS else (SMALL_BLOCK, SMALL_WARPS)
    _page_attention[(heads, rows)](
        queries, batch.cache.keys[layer], batch.cache.values[layer], batch.slots, batch.positions, batch.page_table,
        batch.page_table.shape[1], queries.stride(0), dim**-0.5, out,
        HEADS=heads, DIM=dim, PAGE=batch.cache.page_size, BLOCK=block, num_warps=warps,
        **dependent(queries.device),
    )  # fmt: skip
    return out


MIN_HEAD_DIM = 32  # both halves of a head must fill the smallest product of the tensor cores


@triton.jit
def _rotated(low, high, weight_ptr, cos, sin, eps, column, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Halves of heads, normed and rotated.  # [head, head_dim / 2]"""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        low = ((low * scale).to(dtype) * tl.load(weight_ptr + column)[None, :]).to(tl.float32)
        high = ((high * scale).to(dtype) * tl.load(weight_ptr + HALF + column)[None, :]).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def _one_row_decode(  # noqa: PLR0915
    packed_ptr, keys_ptr, values_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr,
    page_table_ptr, table_width, scale, eps, part_ptr, peak_ptr, weight_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, NORMED: tl.constexpr, LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    position = tl.load(positions_ptr).to(tl.int64)
    pages_ptr = page_table_ptr + tl.load(slots_ptr).to(tl.int64) * table_width
    share = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, position)
    half = tl.arange(0, HALF)
    column = tl.arange(0, DIM)
    cos, sin = tl.load(cos_ptr + position * HALF + half)[None, :], tl.load(sin_ptr + position * HALF + half)[None, :]
    if DEPENDENT:
        index = start + tl.arange(0, BLOCK)
        page = tl.load(pages_ptr + index // PAGE, mask=index < end, other=0).to(tl.int64)
        offset = ((page * PAGE + index % PAGE) * KV_HEADS + kv_head) * DIM
        fetch_near(keys_ptr + offset[:, None], DIM, LINE)
        fetch_near(values_ptr + offset[:, None], DIM, LINE)
    begin_small(DEPENDENT)

    group = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + group
    mine = packed_ptr + head[:, None] * DIM + half[None, :]
    kept = group[:, None] < GROUP
    low, high = tl.load(mine, mask=kept, other=0.0), tl.load(mine + HALF, mask=kept, other=0.0)
    q_low, q_high = _rotated(low, high, q_weight_ptr, cos, sin, eps, half, HALF, NORMED)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for first in range(start, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        page = tl.load(pages_ptr + index // PAGE, mask=inside, other=0).to(tl.int64)
        past = (((page * PAGE + index % PAGE) * KV_HEADS + kv_head) * DIM)[:, None]
        k_low = tl.load(keys_ptr + past + half[None, :], mask=inside[:, None], other=0.0)
        k_high = tl.load(keys_ptr + past + HALF + half[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION) * scale
        prob, shrink, peak = softened(scores, inside[None, :], peak)
        values = tl.load(values_ptr + past + column[None, :], mask=inside[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(prob.to(values.dtype), values, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(prob, axis=1)

    if split == 0:
        key = packed_ptr + (KV_HEADS * GROUP + kv_head) * DIM + half[None, :]
        new_low, new_high = tl.load(key), tl.load(key + HALF)
        new_low, new_high = _rotated(new_low, new_high, k_weight_ptr, cos, sin, eps, half, HALF, NORMED)
        value = tl.load(packed_ptr + (KV_HEADS * GROUP + KV_HEADS + kv_head) * DIM + column)
        own_page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
        target = ((own_page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM
        tl.store(keys_ptr + target + half[None, :], new_low)
        tl.store(keys_ptr + target + HALF + half[None, :], new_high)
        tl.store(values_ptr + target + column, value)
        products = q_low.to(tl.float32) * new_low.to(tl.float32) + q_high.to(tl.float32) * new_high.to(tl.float32)
        score = tl.sum(products, axis=1) * scale
        level = tl.maximum(peak, score)
        faded, share_of_new = tl.exp(peak - level), tl.exp(score - level)
        total = total * faded[:, None] + share_of_new[:, None] * value.to(tl.float32)[None, :]
        weight = weight * faded + share_of_new
        peak = level

    index = head * SPLITS + split
    tl.store(part_ptr + index[:, None] * DIM + column[None, :], total, mask=kept)
    tl.store(peak_ptr + index, peak, mask=group < GROUP)
    tl.store(weight_ptr + index, weight, mask=group < GROUP)


def takes_one_row(packed: Tensor, batch: RowBatch, kv_heads: int) -> bool:
    """Whether a step has exactly one row, and a head size that the kernel supports."""
    rows, _, dim = packed.shape
    is_lone = rows == 1 and batch.singles == 1 and batch.cache_positions is None and not batch.cache.is_fp8
    return is_lone and dim >= MIN_HEAD_DIM and dim & (dim - 1) == 0 and splits_for(kv_heads) > 1


def one_row_decode(
    packed: Tensor,  # [1, heads + 2 kv heads, dim]
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    batch: RowBatch,
    kv_heads: int,
) -> Tensor:
    """Attention of one row; stores its key and value. Reference: `PagedAttention` without kernels.  # [1, head, dim]"""
    _, all_heads, dim = packed.shape
    heads, splits = all_heads - 2 * kv_heads, splits_for(kv_heads)
    q_weight, k_weight, eps = norms or (packed, packed, 0.0)  # without norms they are not read
    packed = packed.contiguous()
    out = torch.empty(1, heads, dim, dtype=packed.dtype, device=packed.device)
    parts = torch.empty(heads, splits, dim, dtype=torch.float32, device=packed.device)
    peaks = torch.empty(heads, splits, dtype=torch.float32, device=packed.device)
    weights = torch.empty_like(peaks)
    _one_row_decode[(kv_heads, splits)](
        packed, batch.cache.keys[layer], batch.cache.values[layer], q_weight, k_weight, cos, sin,
        batch.slots, batch.positions, batch.page_table, batch.page_table.shape[1], dim**-0.5, eps,
        parts, peaks, weights,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim, PAGE=batch.cache.page_size, SPLITS=splits, BLOCK=32,
        PRECISION="ieee" if packed.dtype == torch.float32 else "tf32", NORMED=norms is not None,
        LINE=min(dim, 128 // packed.element_size()),
        num_warps=4, num_stages=3, **dependent(packed.device),
    )  # fmt: skip
    join_splits[(heads,)](parts, peaks, weights, out, DIM=dim, SPLITS=splits, num_warps=1, **dependent(packed.device))
    return out


@dataclass(frozen=True)
class Pages:
    """The pages of a layer, and the rows written to them."""

    batch: RowBatch
    layer: int

    def given(self) -> tuple[tuple[Tensor, ...], int]:
        """Arguments of kernels: keys, values, slots, positions and page table; and the page size."""
        batch, cache = self.batch, self.batch.cache
        tensors = cache.keys[self.layer], cache.values[self.layer], batch.slots, batch.positions, batch.page_table
        return tensors, cache.page_size


@triton.jit
def cached_at(
    slots_ptr, positions_ptr, page_table_ptr, table_width, row, exists, WIDTH: tl.constexpr, PAGE: tl.constexpr
):
    """Offsets of the keys of rows in the pages of a layer."""
    slot = tl.load(slots_ptr + row, mask=exists, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=exists, other=0)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE, mask=exists, other=0)
    return (page.to(tl.int64) * PAGE + position % PAGE) * WIDTH
