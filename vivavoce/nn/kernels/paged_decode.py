"""Attention of single rows to their pages: each row's context is split among programs and joined by a second kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin, begin_small, dependent, fetch_near
from vivavoce.nn.kernels.widening import widened
from vivavoce.nn.paged import RowBatch

PROGRAMS_WANTED = 264  # two for each of an H200's multiprocessors; more splits than that only add joining
MOST_SPLITS = 32


@triton.jit
def softened(scores, inside, peak):
    """Scores against the highest so far, exponentiated; what earlier sums shrink by; and the highest now."""
    scores = tl.where(inside[None, :], scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    return tl.exp(scores - highest[:, None]), tl.exp(peak - highest), highest


@triton.jit
def _decode_split(
    queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, slots_ptr, positions_ptr, page_table_ptr,
    table_width, scale, out_ptr, part_ptr, peak_ptr, weight_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, LINE: tl.constexpr,
    NARROW: tl.constexpr, FAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(positions_ptr + row) + 1
    slot = tl.load(slots_ptr + row).to(tl.int64)
    share = tl.cdiv(tl.cdiv(context, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, context)
    if DEPENDENT:  # most of what is read was written in earlier steps: it may come near while the last row is made
        place = start + tl.arange(0, BLOCK)
        page = tl.load(page_table_ptr + slot * table_width + place // PAGE, mask=place < end, other=0).to(tl.int64)
        offset = ((page * PAGE + place % PAGE) * KV_HEADS + kv_head) * DIM
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
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        page = tl.load(page_table_ptr + slot * table_width + place // PAGE, mask=inside, other=0).to(tl.int64)
        cell = (page * PAGE + place % PAGE) * KV_HEADS + kv_head
        keys = tl.load(keys_ptr + cell[:, None] * DIM + column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(widened(keys, queries.dtype, FAST)), input_precision=PRECISION) * scale
        if NARROW:
            scores *= tl.load(key_scale_ptr + cell, mask=inside, other=0.0)[None, :]
        chance, shrink, peak = softened(scores, inside, peak)
        values = tl.load(values_ptr + cell[:, None] * DIM + column[None, :], mask=inside[:, None], other=0.0)
        weight = weight * shrink + tl.sum(chance, axis=1)
        if NARROW:
            chance *= tl.load(value_scale_ptr + cell, mask=inside, other=0.0)[None, :]
        chance, values = chance.to(queries.dtype), widened(values, queries.dtype, FAST)
        total = total * shrink[:, None] + tl.dot(chance, values, input_precision=PRECISION)

    kept = group < GROUP
    if SPLITS == 1:
        target = out_ptr + (row * KV_HEADS * GROUP + head[:, None]) * DIM + column[None, :]
        tl.store(target, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=kept[:, None])
    else:
        place = (row * KV_HEADS * GROUP + head) * SPLITS + split
        tl.store(part_ptr + place[:, None] * DIM + column[None, :], total, mask=kept[:, None])
        tl.store(peak_ptr + place, peak, mask=kept)
        tl.store(weight_ptr + place, weight, mask=kept)


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
    """Attention of the first rows of a batch, one by one. Twin: `vivavoce.nn.attention._attend_single`."""
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
        DIM=dim, PAGE=batch.cache.page_size, SPLITS=splits, BLOCK=32 if splits > 1 or batch.cache.is_narrow else 64,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32", LINE=min(dim, 128 // keys.element_size()),
        NARROW=batch.cache.is_narrow, FAST=queries.is_cuda, num_warps=4, num_stages=3, **dependent(queries.device),
    )  # fmt: skip
    if splits > 1:
        join_splits[(rows * heads,)](
            parts, peaks, weights, out, DIM=dim, SPLITS=splits, num_warps=1, **dependent(queries.device)
        )
    return out


def splits_for(programs: int) -> int:
    """A power of two that brings the number of programs near what the chip holds."""
    wanted = max(1, PROGRAMS_WANTED // programs)
    return min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))
