"""Prefill attention over the paged cache: causal, in tiles of rows of one sequence, in one launch for all of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.decode_attention import attended
from vivavoce.kernels.dependent_launch import begin, dependent
from vivavoce.nn.paged_kv import TILE_ROWS, RowBatch

MAX_HEADS = 4  # query heads of a program, which share the loads of keys and values
MAX_WIDE_HEADS = 2  # in float32
BLOCK, WARPS, STAGES = 64, 8, 2  # keys of a block; larger ones need more shared memory than some GPUs have


@triton.jit
def _prefill_tile(
    queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, tiles_ptr, page_table_ptr, table_width, scale,
    out_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr, FAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt have the most keys: they start first
    kv_head = tl.program_id(1)
    begin(DEPENDENT)
    first_row = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    rows = tl.load(tiles_ptr + tile * 4 + 1)
    slot = tl.load(tiles_ptr + tile * 4 + 2).to(tl.int64)
    position = tl.load(tiles_ptr + tile * 4 + 3)
    end = tl.where(rows > 0, position + rows, 0)

    member = tl.arange(0, ROWS * HEADS)
    row = member // HEADS
    head = tl.program_id(2) * HEADS + member % HEADS  # within the group
    kept = (row < rows) & (head < GROUP)
    column = tl.arange(0, DIM)
    place = ((first_row + row) * KV_HEADS + kv_head) * GROUP + head
    queries = tl.load(queries_ptr + place[:, None] * DIM + column[None, :], mask=kept[:, None], other=0.0)
    peak = tl.full([ROWS * HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS * HEADS], tl.float32)
    total = tl.zeros([ROWS * HEADS, DIM], tl.float32)
    pages_ptr = page_table_ptr + slot * table_width
    whole = tl.where(rows > 0, (position + 1) // BLOCK * BLOCK, 0)  # every row sees the blocks before
    for first in range(0, whole, BLOCK):
        index = first + tl.arange(0, BLOCK)
        page = tl.load(pages_ptr + index // PAGE).to(tl.int64)
        cell = (page * PAGE + index % PAGE) * KV_HEADS + kv_head
        every = tl.full([BLOCK], True, tl.int1)
        peak, weight, total = attended(
            queries, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, cell, column, every, every[None, :], scale,
            peak, weight, total, PRECISION, FP8, FAST,
        )  # fmt: skip
    for first in range(whole, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        page = tl.load(pages_ptr + index // PAGE, mask=inside, other=0).to(tl.int64)
        cell = (page * PAGE + index % PAGE) * KV_HEADS + kv_head
        seen = inside[None, :] & (index[None, :] <= position + row[:, None])
        peak, weight, total = attended(
            queries, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, cell, column, inside, seen, scale,
            peak, weight, total, PRECISION, FP8, FAST,
        )  # fmt: skip
    out = (total / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * DIM + column[None, :], out, mask=kept[:, None])


def paged_prefill(queries: Tensor, layer: int, batch: RowBatch, out: Tensor) -> None:
    """Write the attention of the rows in the batch's tiles. Reference: `vivavoce.nn.attention._attend_piece`.

    # queries and out [row, head, head_dim]
    """
    assert batch.tiles is not None
    queries = queries.contiguous()
    _, heads, dim = queries.shape
    keys, values, key_scales, value_scales = batch.cache.of_layer(layer)
    kv_heads, is_wide = keys.shape[2], queries.dtype == torch.float32
    group = heads // kv_heads
    together = min(MAX_WIDE_HEADS if is_wide else MAX_HEADS, triton.next_power_of_2(group))
    _prefill_tile[(batch.tiles.shape[0], kv_heads, triton.cdiv(group, together))](
        queries, keys, values, key_scales, value_scales, batch.tiles, batch.page_table, batch.page_table.shape[1],
        dim**-0.5, out,
        KV_HEADS=kv_heads, GROUP=group, HEADS=together, ROWS=TILE_ROWS, DIM=dim, PAGE=batch.cache.page_size,
        BLOCK=32 if is_wide else BLOCK, PRECISION="ieee" if is_wide else "tf32", FP8=batch.cache.is_fp8,
        FAST=queries.is_cuda, num_warps=WARPS, num_stages=STAGES, **dependent(queries.device),
    )  # fmt: skip
