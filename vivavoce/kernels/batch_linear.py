"""A linear layer on 8-bit or 4-bit weights for 2 to 512 rows, with the SwiGLU gate fused if there is one.

Weights travel quantised through shared memory and are widened to bfloat16 in registers, as the left operand of the
tensor cores; rows are the right operand. Reading half or a quarter of the bytes then pays at every batch, until the
products themselves are the limit. Where a matrix has too few outputs to occupy the GPU, its inputs are split among
programs, whose float32 sums a second kernel adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin, dependent
from vivavoce.kernels.tiles import Tile
from vivavoce.kernels.widening import (
    byte_product,
    has_warpgroups,
    matched_halves,
    scale_and_offset,
    swiglu,
    widened_nibbles,
)
from vivavoce.nn.quantised_weight import QuantisedWeight

MIN_BLOCK_ROWS = 16
MAX_BLOCK_ROWS = 128
SUM_BLOCK = 1024  # outputs that a program of the second kernel adds


@triton.jit(do_not_specialize=["rows"])
def _batch_linear_of_bytes(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, WARPGROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    safe = tl.where(output < OUTPUTS, output, 0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    SHARE: tl.constexpr = INPUTS // SPLIT
    column = tl.program_id(2) * SHARE + tl.arange(0, BLOCK_IN)
    weight_place = weight_ptr + safe[:, None].to(tl.int64) * INPUTS + column[None, :]
    other_place = weight_place + OUTPUTS * INPUTS
    x_place = x_ptr + row[None, :] * INPUTS + column[:, None]
    is_row = (row < rows)[None, :]
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    second = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    begin(DEPENDENT)
    for first in tl.range(0, SHARE, BLOCK_IN, num_stages=STAGES):
        x = tl.load(x_place + first, mask=is_row, other=0.0)
        weight = tl.load(weight_place + first)
        total = byte_product(weight, x, total, FAST, PRECISION, WARPGROUP)
        if GATED:
            gated = tl.load(other_place + first)
            second = byte_product(gated, x, second, FAST, PRECISION, WARPGROUP)
    total *= tl.load(scale_ptr + safe)[:, None]
    if GATED:
        second *= tl.load(scale_ptr + OUTPUTS + safe)[:, None]
    _store(total, second, bias_ptr, out_ptr, output, row, rows, OUTPUTS, GATED, BIAS, SPLIT)


@triton.jit(do_not_specialize=["rows"])
def _batch_linear_of_nibbles(
    x_ptr, weight_ptr, pairs_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, WARPGROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`x` holds the even columns of all rows, then the odd ones; an iteration multiplies one group of columns."""
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    safe = tl.where(output < OUTPUTS, output, 0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    WIDTH: tl.constexpr = INPUTS // 2
    GROUPS: tl.constexpr = WIDTH // HALF // SPLIT
    start = tl.program_id(2) * GROUPS
    column = start * HALF + tl.arange(0, HALF)
    weight_place = weight_ptr + safe[:, None].to(tl.int64) * WIDTH + column[None, :]
    other_place = weight_place + OUTPUTS * WIDTH
    x_place = x_ptr + row[None, :] * WIDTH + column[:, None]
    odd_place = x_place + rows * WIDTH
    is_row = (row < rows)[None, :]
    LINES: tl.constexpr = OUTPUTS * (2 if GATED else 1)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    second = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    begin(DEPENDENT)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        even = tl.load(x_place + group * HALF, mask=is_row, other=0.0)
        odd = tl.load(odd_place + group * HALF, mask=is_row, other=0.0)
        pair_place = pairs_ptr + (start + group).to(tl.int64) * LINES + safe
        both, pair = tl.load(weight_place + group * HALF), tl.load(pair_place)
        total = _nibble_product(both, pair, even, odd, total, FAST, PRECISION, WARPGROUP)
        if GATED:
            both, pair = tl.load(other_place + group * HALF), tl.load(pair_place + OUTPUTS)
            second = _nibble_product(both, pair, even, odd, second, FAST, PRECISION, WARPGROUP)
    _store(total, second, bias_ptr, out_ptr, output, row, rows, OUTPUTS, GATED, BIAS, SPLIT)


@triton.jit
def _nibble_product(
    both, pair, even, odd, total, FAST: tl.constexpr, PRECISION: tl.constexpr, WARPGROUP: tl.constexpr
):  # fmt: skip
    """Add the product of a group: its codes, centred so that 16 bits represent them well, times its scale, plus offset.

    # bytes [output, column], scale and offset [output], even and odd columns of rows → [output, row]
    """
    scale, offset = scale_and_offset(pair)
    scale, middle = scale.to(even.dtype)[:, None], (offset + 8.0 * scale).to(even.dtype)[:, None]
    both, even, odd = matched_halves(both, even, odd, WARPGROUP)
    low, high = widened_nibbles(both, even.dtype, FAST)
    low = (low - 136.0).to(even.dtype) * scale + middle
    high = (high - 136.0).to(even.dtype) * scale + middle
    total = tl.dot(low, even, total, input_precision=PRECISION)
    return tl.dot(high, odd, total, input_precision=PRECISION)


@triton.jit
def _store(
    total, second, bias_ptr, out_ptr, output, row, rows,
    OUTPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Bias, gate and result; of split inputs the float32 sums, [part, half, row, output]."""
    is_real = (output < OUTPUTS)[:, None] & (row < rows)[None, :]
    place = row[None, :].to(tl.int64) * OUTPUTS + output[:, None]
    if SPLIT > 1:
        size = rows.to(tl.int64) * OUTPUTS
        out_ptr += tl.program_id(2) * size * (2 if GATED else 1)
        tl.store(out_ptr + place, total, mask=is_real)
        if GATED:
            tl.store(out_ptr + size + place, second, mask=is_real)
    else:
        if BIAS:
            total += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                second += tl.load(bias_ptr + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
            total = swiglu(total, second)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["rows"])
def _add_parts(
    parts_ptr, bias_ptr, out_ptr, rows,
    OUTPUTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = output < OUTPUTS
    row = tl.program_id(1)
    size = rows.to(tl.int64) * OUTPUTS
    place = parts_ptr + row.to(tl.int64) * OUTPUTS + output
    total = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=is_real, other=0.0).to(tl.float32)
        if GATED:
            second += tl.load(bias_ptr + OUTPUTS + output, mask=is_real, other=0.0).to(tl.float32)
    begin(DEPENDENT)
    for part in tl.static_range(SPLIT):
        if GATED:
            total += tl.load(place + 2 * part * size, mask=is_real, other=0.0)
            second += tl.load(place + (2 * part + 1) * size, mask=is_real, other=0.0)
        else:
            total += tl.load(place + part * size, mask=is_real, other=0.0)
    if GATED:
        total = swiglu(total, second)
    tl.store(out_ptr + row.to(tl.int64) * OUTPUTS + output, total.to(out_ptr.dtype.element_ty), mask=is_real)


def batch_linear(
    x: Tensor, weight: QuantisedWeight, pairs: Tensor | None, bias: Tensor | None, tile: Tile, gated: bool = False
) -> Tensor:
    """`x @ weight.T + bias`, and the gate, with a tile that `fits_batch`. Reference: `QuantisedLinear`.

    `pairs` are scale and offset of int4 groups.  # [row, input] → [row, output]
    """
    rows, inputs = x.shape
    outputs = weight.outputs // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    split = tile.split
    parts = out
    if split > 1:
        parts = torch.empty(split, 2 if gated else 1, rows, outputs, dtype=torch.float32, device=x.device)
    block_rows = min(max(MIN_BLOCK_ROWS, triton.next_power_of_2(rows)), MAX_BLOCK_ROWS)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block_rows), split)
    biased = x if bias is None else bias
    common = {
        "INPUTS": inputs, "OUTPUTS": outputs, "GATED": gated, "BIAS": bias is not None, "SPLIT": split,
        "BLOCK_ROWS": block_rows, "BLOCK_OUT": tile.outputs,
        "STAGES": tile.stages, "FAST": x.is_cuda, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "WARPGROUP": has_warpgroups(x.device), "num_warps": tile.warps,
    } | dependent(x.device)  # fmt: skip
    if pairs is None:
        _batch_linear_of_bytes[grid](
            x.contiguous(), weight.data, weight.scale, biased, parts, rows, BLOCK_IN=tile.inputs, **common,
        )  # fmt: skip
    else:
        columns = x.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()
        _batch_linear_of_nibbles[grid](
            columns, weight.data, pairs, biased, parts, rows, HALF=weight.group // 2, **common
        )
    if split > 1:
        _add_parts[(triton.cdiv(outputs, SUM_BLOCK), rows)](
            parts, biased, out, rows,
            OUTPUTS=outputs, GATED=gated, BIAS=bias is not None, SPLIT=split, BLOCK=SUM_BLOCK, **dependent(x.device),
        )  # fmt: skip
    return out
