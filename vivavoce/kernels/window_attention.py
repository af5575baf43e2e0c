"""Cross-attention of rows to encoded windows: consecutive rows of one window share the reading of its keys and values.

A window is split among programs, and the last one to finish merges the partial results. With few rows, each program
loads its share before it waits for the queries; with many, each program pipelines its loads through a longer share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import dependent, launch_next, wait_for_previous
from vivavoce.kernels.tiles import Tile, tiles, window_attention_name

BLOCK = 128  # positions of a share
GROUP = 16  # rows of a program at most, all in one aligned group of as many
LONG_BLOCK, LONG_STAGES = 128, 2  # of programs with long shares: positions per iteration, and pipeline stages
ENOUGH = 512  # programs that keep all multiprocessors busy


@triton.jit
def _joined(part_ptr, peak_ptr, weight_ptr, mine, kept, DIM: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr):
    """The merged partial results of all programs of some rows."""
    column = tl.arange(0, DIM)
    highest = tl.full([GROUP], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        peak = tl.load(peak_ptr + mine + split, mask=kept, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(highest, peak)
    total = tl.zeros([GROUP, DIM], tl.float32)
    shares = tl.zeros([GROUP], tl.float32)
    for split in tl.static_range(SPLITS):
        peak = tl.load(peak_ptr + mine + split, mask=kept, other=0.0, cache_modifier=".cg")
        weight = tl.load(weight_ptr + mine + split, mask=kept, other=1.0, cache_modifier=".cg")
        index = (mine + split)[:, None] * DIM + column[None, :]
        part = tl.load(part_ptr + index, mask=kept[:, None], other=0.0, cache_modifier=".cg")
        total += part * tl.exp(peak - highest)[:, None]
        shares += weight * tl.exp(peak - highest)
    return total / shares[:, None]


@triton.jit
def _asked(windows_ptr, GROUP: tl.constexpr):
    """Share, head and row of a program, the row's window, and the window of the previous row if it is in the group."""
    row = tl.program_id(2)
    window = tl.load(windows_ptr + row)
    before = tl.load(windows_ptr + row - 1, mask=row % GROUP > 0, other=-1)
    return tl.program_id(0), tl.program_id(1), row, window, before


@triton.jit
def _stop(windows_ptr, window, row, rows, GROUP: tl.constexpr):
    """The first row after this one that has another window or is in another group."""
    aligned = row // GROUP * GROUP + tl.arange(0, GROUP)
    theirs = tl.load(windows_ptr + aligned, mask=aligned < rows, other=-1)
    return tl.min(tl.where((aligned > row) & (theirs != window), aligned, row // GROUP * GROUP + GROUP), axis=0)


@triton.jit
def _hand_in(
    total, peak, weight, row, head, kept, out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a program's partial result; the last program of a row and head merges them."""
    split = tl.program_id(0)
    column = tl.arange(0, DIM)
    member = (row + tl.arange(0, GROUP)).to(tl.int64)
    target = (member * HEADS + head)[:, None] * DIM + column[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + target, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=kept[:, None])
    else:
        mine = (member * HEADS + head) * SPLITS
        tl.store(part_ptr + (mine + split)[:, None] * DIM + column[None, :], total, mask=kept[:, None])
        tl.store(peak_ptr + mine + split, peak, mask=kept)
        tl.store(weight_ptr + mine + split, weight, mask=kept)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + row * HEADS + head, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + row * HEADS + head, 0)
            out = _joined(part_ptr, peak_ptr, weight_ptr, mine, kept, DIM, GROUP, SPLITS)
            tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=kept[:, None])


@triton.jit(do_not_specialize=["rows"])
def _window_attention(
    queries_ptr, keys_ptr, values_ptr, windows_ptr, lengths_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
    rows, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, POSITIONS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    split, head, row, window, before = _asked(windows_ptr, GROUP)
    if before != window:  # otherwise the program of the previous row includes it
        group = tl.arange(0, GROUP)
        column = tl.arange(0, DIM)
        stop = _stop(windows_ptr, window, row, rows, GROUP)
        length = tl.load(lengths_ptr + window)
        index = split * BLOCK + tl.arange(0, BLOCK)
        inside = index < length
        origin = (window.to(tl.int64) * HEADS + head) * POSITIONS
        offset = (origin + index)[:, None] * DIM + column[None, :]
        keys = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0)
        values = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0)
        if DEPENDENT:
            wait_for_previous()
        member = (row + group).to(tl.int64)
        kept = row + group < stop
        target = (member * HEADS + head)[:, None] * DIM + column[None, :]
        queries = tl.load(queries_ptr + target, mask=kept[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        peak = tl.max(scores, axis=1)
        prob = tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        weight = tl.sum(prob, axis=1)
        total = tl.dot(prob.to(values.dtype), values, input_precision=PRECISION)
        _hand_in(
            total, peak, weight, row, head, kept, out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
            HEADS, DIM, GROUP, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _long_window_attention(
    queries_ptr, keys_ptr, values_ptr, windows_ptr, lengths_ptr, out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
    rows, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, POSITIONS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    split, head, row, window, before = _asked(windows_ptr, GROUP)
    if DEPENDENT:
        wait_for_previous()
    if before != window:
        group = tl.arange(0, GROUP)
        column = tl.arange(0, DIM)
        stop = _stop(windows_ptr, window, row, rows, GROUP)
        length = tl.load(lengths_ptr + window)
        member = (row + group).to(tl.int64)
        kept = row + group < stop
        target = (member * HEADS + head)[:, None] * DIM + column[None, :]
        queries = tl.load(queries_ptr + target, mask=kept[:, None], other=0.0)
        origin = (window.to(tl.int64) * HEADS + head) * POSITIONS
        peak = tl.full([GROUP], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP], tl.float32)
        total = tl.zeros([GROUP, DIM], tl.float32)
        for first in tl.range(split * SHARE, tl.minimum(length, split * SHARE + SHARE), BLOCK, num_stages=STAGES):
            index = first + tl.arange(0, BLOCK)
            inside = index < length
            offset = (origin + index)[:, None] * DIM + column[None, :]
            keys = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0)
            values = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            shrink = tl.exp(peak - higher)
            prob = tl.exp(scores - higher[:, None])
            weight = weight * shrink + tl.sum(prob, axis=1)
            total = total * shrink[:, None]
            total = tl.dot(prob.to(values.dtype), values, total, input_precision=PRECISION)
            peak = higher
        _hand_in(
            total, peak, weight, row, head, kept, out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
            HEADS, DIM, GROUP, SPLITS,
        )  # fmt: skip


def window_attention(
    queries: Tensor,  # [row, head, head_dim]
    keys: Tensor,  # [window, head, position, head_dim]
    values: Tensor,
    windows: Tensor,  # [row] int32
    lengths: Tensor,  # [window] int32
    arrived: Tensor,  # [row × head or more] int32, zero before and after
) -> Tensor:
    """Cross-attention of rows to their windows. Reference: `vivavoce.models.whisper.engine.WhisperWriter._mixed`.

    The previous launch must not write keys, values, windows or lengths.
    """
    rows, heads, dim = queries.shape
    positions = keys.shape[2]
    share = _share(rows, heads, dim, queries.device)
    long = share.stages > 0
    splits = share.parts if long else triton.cdiv(positions, share.inputs)
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    parts, peaks, weights = out, out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=queries.device)
        peaks = torch.empty(rows, heads, splits, dtype=torch.float32, device=queries.device)
        weights = torch.empty_like(peaks)
    given = (queries.contiguous(), keys, values, windows, lengths, out, parts, peaks, weights, arrived, rows, dim**-0.5)
    precision = "ieee" if queries.dtype == torch.float32 else "tf32"
    sizes = {"HEADS": heads, "DIM": dim, "POSITIONS": positions, "GROUP": GROUP, "SPLITS": splits}
    if long:
        length = triton.cdiv(triton.cdiv(positions, splits), share.inputs) * share.inputs
        _long_window_attention[(splits, heads, rows)](
            *given, **sizes, SHARE=length, BLOCK=share.inputs, STAGES=share.stages, PRECISION=precision,
            num_warps=share.warps, **dependent(queries.device),
        )  # fmt: skip
    else:
        _window_attention[(splits, heads, rows)](
            *given, **sizes, BLOCK=share.inputs, PRECISION=precision, num_warps=share.warps, **dependent(queries.device)
        )
    return out


def _share(rows: int, heads: int, dim: int, device: torch.device) -> Tile:
    """The share of a program: `inputs` positions per iteration, and for long shares `stages` of pipelining and `parts`.

    By measurement, or else the best of an H200.
    """
    measured = tiles(device).get(window_attention_name(rows, heads, dim))
    if measured is not None:
        return measured
    if rows * heads >= ENOUGH // 2:
        return Tile(0, LONG_BLOCK, LONG_STAGES, 4, parts=max(1, ENOUGH // (rows * heads)))
    return Tile(0, BLOCK, 0, 4)
