"""A small-batch linear layer fused with its norm, GELU and residual, in one launch that prefetches its weights.

With programmatic dependent launch, the programs of the next layer start as soon as those of this one have, load their
weights into registers, and wait for the rows. A program is a single warp, so there is no synchronisation within it. A
step is then bound by the reading of weights, not by launches.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.decode_attention import Pages, cached_at
from vivavoce.kernels.dependent_launch import (
    LINE_BYTES,
    dependent,
    fetch_lines,
    is_dependent,
    launch_next,
    wait_for_previous,
)
from vivavoce.kernels.tiles import Tile, fits, tile_around, two_powers


@triton.jit
def _read(ptr, place, row, exists, INPUTS: tl.constexpr):
    """Columns of all rows.  # [part, 1, column] → [part, row, column]"""
    return tl.load(ptr + row * INPUTS + place, mask=exists, other=0.0)


@triton.jit
def _moments(x):
    """Sums of numbers and of their squares for each row.  # [part, row, column] → [row] twice"""
    wide = x.to(tl.float32)
    return tl.sum(tl.sum(wide, axis=2), axis=0), tl.sum(tl.sum(wide * wide, axis=2), axis=0)


@triton.jit
def _normed(x, mean, rate, scale, shift):
    wide = (x.to(tl.float32) - mean[None, :, None]) * rate[None, :, None]
    return (wide * scale.to(tl.float32) + shift.to(tl.float32)).to(x.dtype)


@triton.jit
def _add_product(total, weight, x, EACH: tl.constexpr, PRECISION: tl.constexpr):
    """Products by part.  # [part, output, column] × [part, row, column] → [part, output, row]"""
    if x.shape[1] < EACH:
        x = tl.broadcast_to(x, [x.shape[0], EACH, x.shape[2]])
    return tl.dot(weight, tl.permute(x, (0, 2, 1)), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["next_lines"])
def _row_tile_linear(  # noqa: PLR0912, PLR0915 - the branches are resolved at compile time
    x_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    keys_ptr, values_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, next_ptr, next_lines, eps,
    ROWS: tl.constexpr, EACH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROUND: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, STORE: tl.constexpr, PAGE: tl.constexpr, BLOCK_OUT: tl.constexpr,
    FETCH: tl.constexpr, LINE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    first = tl.program_id(0) * BLOCK_OUT
    output = first + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    safe = tl.where(real, output, 0)
    line = weight_ptr + safe.to(tl.int64)[None, :, None] * INPUTS
    part = tl.arange(0, PARTS)[:, None, None]
    MAIN_PART: tl.constexpr = MAIN // PARTS
    REST_PART: tl.constexpr = REST // PARTS
    main = part * MAIN_PART + tl.arange(0, MAIN_PART)[None, None, :]  # the columns of an iteration as two powers of two
    weight = tl.load(line + main)
    if REST:
        rest = MAIN + part * REST_PART + tl.arange(0, REST_PART)[None, None, :]
        rest_weight = tl.load(line + rest)
    bias = tl.zeros([BLOCK_OUT], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + safe).to(tl.float32)
    if NORM:
        scale, shift = tl.load(scale_ptr + main), tl.load(shift_ptr + main)
        if REST:
            rest_scale, rest_shift = tl.load(scale_ptr + rest), tl.load(shift_ptr + rest)
    every = tl.arange(0, EACH)
    HELD: tl.constexpr = EACH if ROWS > 1 else 1
    if STORE:
        THIRD: tl.constexpr = OUTPUTS // 3
        cached = cached_at(slots_ptr, positions_ptr, page_table_ptr, table_width, every, every < ROWS, THIRD, PAGE)
    if FETCH:
        fetch_lines(next_ptr, next_lines, LINE)
    if DEPENDENT:
        wait_for_previous()
    row = tl.arange(0, HELD)[None, :, None]
    exists = row < ROWS
    place = every[None, :] * OUTPUTS + output[:, None]
    kept = (every < ROWS)[None, :] & real[:, None]
    residual = tl.zeros([BLOCK_OUT, EACH], tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=kept, other=0.0).to(tl.float32)
    total = tl.zeros([PARTS, BLOCK_OUT, EACH], tl.float32)
    for index in tl.static_range(INPUTS // ROUND):
        x = _read(x_ptr, index * ROUND + main, row, exists, INPUTS)
        if REST:
            rest_x = _read(x_ptr, index * ROUND + rest, row, exists, INPUTS)
        following = weight
        if (index + 1) * ROUND < INPUTS:
            following = tl.load(line + (index + 1) * ROUND + main)
        if REST:
            rest_following = rest_weight
            if (index + 1) * ROUND < INPUTS:
                rest_following = tl.load(line + (index + 1) * ROUND + rest)
        if NORM:
            mean, square = _moments(x)
            if REST:
                rest_mean, rest_square = _moments(rest_x)
                mean, square = mean + rest_mean, square + rest_square
            mean = mean / INPUTS
            rate = tl.rsqrt(tl.maximum(square / INPUTS - mean * mean, 0.0) + eps)
            x = _normed(x, mean, rate, scale, shift)
            if REST:
                rest_x = _normed(rest_x, mean, rate, rest_scale, rest_shift)
        total = _add_product(total, weight, x, EACH, PRECISION)
        weight = following
        if REST:
            total = _add_product(total, rest_weight, rest_x, EACH, PRECISION)
            rest_weight = rest_following
    y = tl.sum(total, axis=0) + bias[:, None]
    if GELU:
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    y += residual
    if STORE:  # queries to `out`, keys and values to their page
        made = y.to(keys_ptr.dtype.element_ty)
        if first < THIRD:
            tl.store(out_ptr + every[None, :] * THIRD + output[:, None], made, mask=kept)
        elif first < 2 * THIRD:
            tl.store(keys_ptr + cached[None, :] + (output - THIRD)[:, None], made, mask=kept)
        else:
            tl.store(values_ptr + cached[None, :] + (output - 2 * THIRD)[:, None], made, mask=kept)
    else:
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=kept)


def row_tile_linear(
    x: Tensor,  # [row, inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,
    tile: Tile,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,  # [row, outputs]
    pages: Pages | None = None,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    """As `row_linear`, for up to 16 rows with a tile that `fits`; an `early` tile prefetches `following`."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert fits(tile, inputs, norm is not None)
    out = torch.empty(rows, outputs // 3 if pages else outputs, dtype=dtype or x.dtype, device=x.device)
    scale, shift, eps = norm or (x, x, 0.0)
    where, page = pages.given() if pages else ((out,) * 5, 1)
    main, rest = two_powers(tile.inputs)
    grid = triton.cdiv(outputs, tile.outputs)
    lines = 0
    if following is not None and tile.early and is_dependent(x.device):
        lines = triton.cdiv(following.nbytes, LINE_BYTES)
    _row_tile_linear[(grid,)](
        x, scale, shift, weight, x if bias is None else bias, x if residual is None else residual, out,
        *where, where[-1].shape[-1], weight if following is None else following, lines, eps,
        ROWS=rows, EACH=8 if rows <= 8 else 16, INPUTS=inputs, OUTPUTS=outputs, ROUND=tile.inputs, MAIN=main, REST=rest,
        PARTS=tile.warps, NORM=norm is not None, BIAS=bias is not None, GELU=gelu, RESIDUAL=residual is not None,
        STORE=pages is not None, PAGE=page, BLOCK_OUT=tile.outputs, FETCH=lines > 0,
        LINE=LINE_BYTES // weight.element_size(), PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, **dependent(x.device),
    )  # fmt: skip
    return out


MAX_UNTILED_ROWS = 4
WEIGHTS_A_PROGRAM = 5120  # that the registers of a warp hold


@triton.jit
def _row_normed(weight, rest_weight, scale_ptr, shift_ptr, column, rest, more):
    """Weights for rows before their norm, and the sums that do not depend on the rows.

    W·((x - mean)·rate·scale + shift) is (W·scale·x - mean·W·scale)·rate + W·shift.
    """
    wide, rest_wide = weight.to(tl.float32), rest_weight.to(tl.float32)
    rest_shift = tl.load(shift_ptr + rest, mask=more, other=0.0).to(tl.float32)
    shifted = tl.sum(wide * tl.load(shift_ptr + column).to(tl.float32), axis=1) + tl.sum(rest_wide * rest_shift, axis=1)
    scaled = (wide * tl.load(scale_ptr + column).to(tl.float32)).to(weight.dtype)
    rest_scale = tl.load(scale_ptr + rest, mask=more, other=0.0).to(tl.float32)
    rest_scaled = (rest_wide * rest_scale).to(weight.dtype)
    shared = tl.sum(scaled.to(tl.float32), axis=1) + tl.sum(rest_scaled.to(tl.float32), axis=1)
    return scaled, rest_scaled, shifted, shared


@triton.jit
def _row_linear(  # noqa: PLR0912 - half of the branches are resolved at compile time
    x_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    keys_ptr, values_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, eps,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
    STORE: tl.constexpr, PAGE: tl.constexpr, BLOCK_OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    first = tl.program_id(0) * BLOCK_OUT
    output = first + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    column, rest = tl.arange(0, MAIN)[None, :], MAIN + tl.arange(0, REST)[None, :]  # inputs as two powers of two
    more = rest < INPUTS
    line = weight_ptr + output[:, None].to(tl.int64) * INPUTS
    weight = tl.load(line + column, mask=real[:, None], other=0.0)
    rest_weight = tl.load(line + rest, mask=real[:, None] & more, other=0.0)
    bias = tl.zeros([BLOCK_OUT], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=real, other=0.0).to(tl.float32)
    if NORM:
        weight, rest_weight, shifted, shared = _row_normed(
            weight, rest_weight, scale_ptr, shift_ptr, column, rest, more
        )
        bias += shifted
    if STORE:
        THIRD: tl.constexpr = OUTPUTS // 3
        every = tl.arange(0, ROWS_PAD)
        cached = cached_at(slots_ptr, positions_ptr, page_table_ptr, table_width, every, every < ROWS, THIRD, PAGE)
    if DEPENDENT:
        wait_for_previous()
    for row in range(ROWS):
        x = tl.load(x_ptr + row * INPUTS + column).to(tl.float32)
        rest_x = tl.load(x_ptr + row * INPUTS + rest, mask=more, other=0.0).to(tl.float32)
        residual = tl.zeros([BLOCK_OUT], tl.float32)
        if RESIDUAL:
            residual = tl.load(residual_ptr + row * OUTPUTS + output, mask=real, other=0.0).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x, axis=1) + tl.sum(rest_weight.to(tl.float32) * rest_x, axis=1)
        if NORM:
            mean = (tl.sum(x, axis=1) + tl.sum(rest_x, axis=1)) / INPUTS
            x, rest_x = x - mean[:, None], tl.where(more, rest_x - mean[:, None], 0.0)
            rate = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(rest_x * rest_x, axis=1)) / INPUTS + eps)
            y = (y - mean * shared) * rate
        y += bias
        if GELU:
            y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
        y += residual
        if STORE:  # queries to `out`, keys and values to their page
            address = tl.sum(tl.where(every == row, cached, 0), axis=0)
            if first < THIRD:
                target = out_ptr + row * THIRD
            elif first < 2 * THIRD:
                target = keys_ptr + address - THIRD
            else:
                target = values_ptr + address - 2 * THIRD
            tl.store(target + output, y.to(keys_ptr.dtype.element_ty), mask=real)
        else:
            tl.store(out_ptr + row * OUTPUTS + output, y.to(out_ptr.dtype.element_ty), mask=real)


def row_linear(
    x: Tensor,  # [row, inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,  # [row, outputs]
    pages: Pages | None = None,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    """`gelu(linear(norm(x))) + residual` of rows that it `takes`. Reference: `vivavoce.nn.linear.norm_linear`.

    With `pages`, the outputs are queries, keys and values: the queries are returned, the others stored in the pages.
    No launch since the last one that is not dependent may write weights, slots, positions or the page table.
    `following` is the matrix of the next layer, to be prefetched.
    """
    tile = tile_around(weight, x.shape[0])
    if tile is not None and fits(tile, x.shape[1], norm is not None):
        return row_tile_linear(x, weight, bias, tile, norm, gelu, residual, pages, dtype, following)
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs // 3 if pages else outputs, dtype=dtype or x.dtype, device=x.device)
    scale, shift, eps = norm or (x, x, 0.0)
    where, page = pages.given() if pages else ((out,) * 5, 1)
    main = 1 << (inputs.bit_length() - 1)
    block = _outputs_a_program(inputs)
    _row_linear[(triton.cdiv(outputs, block),)](
        x, scale, shift, weight, x if bias is None else bias, x if residual is None else residual, out,
        *where, where[-1].shape[-1], eps,
        ROWS=rows, ROWS_PAD=triton.next_power_of_2(rows), INPUTS=inputs, OUTPUTS=outputs, MAIN=main,
        REST=triton.next_power_of_2(max(1, inputs - main)), NORM=norm is not None, BIAS=bias is not None, GELU=gelu,
        RESIDUAL=residual is not None,
        STORE=pages is not None, PAGE=page, BLOCK_OUT=block, num_warps=1, **dependent(x.device),
    )  # fmt: skip
    return out


def takes(weights: Iterable[Tensor], rows: int) -> bool:
    """Whether these kernels are the fastest for layers of these matrices; beyond a few rows by measurement."""
    return rows <= MAX_UNTILED_ROWS or all(tile_around(weight, rows) is not None for weight in weights)


def _outputs_a_program(inputs: int) -> int:
    """Outputs of a program: the largest power of two, up to 8, whose weights fit into the registers of a warp."""
    return min(8, 1 << max(0, (WEIGHTS_A_PROGRAM // inputs).bit_length() - 1))
