"""Keys and values of rows into their pages, and attention to short texts there, of hundreds of rows, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import dependent, launch_next, wait_for_previous
from vivavoce.nn.paged import RowBatch

FEW_ROWS = 8
BLOCK, WARPS = 128, 4  # positions at a time; of more rows, many small programs are done sooner than few large ones
SMALL_BLOCK, SMALL_WARPS = 32, 1
STORED = 1024  # columns a program stores


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
    place = tl.arange(0, BLOCK)
    page = tl.load(table + place // PAGE, mask=place < context, other=0)
    if DEPENDENT:
        wait_for_previous()
    query = tl.load(queries_ptr + row * stride + head * DIM + column).to(tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, context, BLOCK):
        inside = place < context
        offset = ((page.to(tl.int64) * PAGE + place % PAGE) * HEADS + head)[:, None] * DIM + column[None, :]
        keys = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
        values = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=0))
        shrink = tl.exp(peak - new_peak)
        chance = tl.exp(scores - new_peak)
        total = total * shrink + tl.sum(values * chance[:, None], axis=0)
        weight = weight * shrink + tl.sum(chance, axis=0)
        peak = new_peak
        place = first + BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + place // PAGE, mask=place < context, other=0)
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
    """Keys and values of rows to their pages. Twin: `RowBatch.write`.  # [row, query and key and value side by side]"""
    rows, width = packed.shape[0], packed.shape[1] // 3
    _store_rows[(rows, triton.cdiv(width, STORED))](
        packed, batch.cache.keys[layer], batch.cache.values[layer], batch.slots, batch.positions, batch.page_table,
        batch.page_table.shape[1], WIDTH=width, PAGE=batch.cache.page_size, BLOCK=STORED, num_warps=4,
        **dependent(packed.device),
    )  # fmt: skip


def page_attention(queries: Tensor, layer: int, batch: RowBatch) -> Tensor:
    """What each row finds in its text up to itself. Twin: `vivavoce.nn.attention._attend_single`.

    # queries [row, head, head_dim], as many heads as keys have; the launch before must not write slots or positions
    """
    rows, heads, dim = queries.shape
    assert queries.stride()[1:] == (dim, 1)
    out = torch.empty(rows, heads, dim, dtype=queries.dtype, device=queries.device)
    block, warps = (BLOCK, WARPS) if rows <= FEW_ROWS else (SMALL_BLOCK, SMALL_WARPS)
    _page_attention[(heads, rows)](
        queries, batch.cache.keys[layer], batch.cache.values[layer], batch.slots, batch.positions, batch.page_table,
        batch.page_table.shape[1], queries.stride(0), dim**-0.5, out,
        HEADS=heads, DIM=dim, PAGE=batch.cache.page_size, BLOCK=block, num_warps=warps,
        **dependent(queries.device),
    )  # fmt: skip
    return out
