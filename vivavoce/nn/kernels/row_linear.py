"""A linear layer of a few rows with what stands around it, in one launch that loads its weights before it waits.

Launches follow one another with programmatic dependence: programs of the next launch start as soon as those of this one
have, take their part of the weights into registers, and wait there for the rows they multiply. A program is a single
warp, so nothing in it waits for another. So a step is bound by the reading of its weights and not by its launches.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import dependent, launch_next, wait_for_previous
from vivavoce.nn.kernels.row_pages import Pages, cached_at
from vivavoce.nn.kernels.row_tile_linear import row_tile_linear
from vivavoce.nn.kernels.tiles import fits, tile_around

MOST_ROWS = 4
WEIGHTS_A_PROGRAM = 5120  # what the registers of a warp hold


@triton.jit
def _normed(weight, rest_weight, scale_ptr, shift_ptr, column, rest, more):
    """Weights for rows that are yet to be normed, and what can be added up before they are there.

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
def _row_linear(  # noqa: PLR0912 - half of the branches are settled when it is compiled
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
        weight, rest_weight, shifted, shared = _normed(weight, rest_weight, scale_ptr, shift_ptr, column, rest, more)
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
            here = tl.sum(tl.where(every == row, cached, 0), axis=0)
            if first < THIRD:
                target = out_ptr + row * THIRD
            elif first < 2 * THIRD:
                target = keys_ptr + here - THIRD
            else:
                target = values_ptr + here - 2 * THIRD
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
    """`gelu(linear(norm(x))) + residual` of rows that it `takes`. Twin: `vivavoce.nn.layer_norm.norm_linear`.

    With `pages`, the outputs are queries, keys and values side by side: the queries are returned, the others stored.
    None of the launches since the last one of another kind may write weights, slots, positions or page table.
    `following` is the matrix that is multiplied next.
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
    """Whether layers of these matrices are best computed here: of very few rows always, of more by measured tiles."""
    return rows <= MOST_ROWS or all(tile_around(weight, rows) is not None for weight in weights)


def _outputs_a_program(inputs: int) -> int:
    """The largest power of two of which a warp can hold the weights, or what divides the width of any model."""
    return min(8, 1 << max(0, (WEIGHTS_A_PROGRAM // inputs).bit_length() - 1))
