"""A linear layer on int8, int4 or float8 weights for a few rows of floats: the small weights are read once, widened in
registers and never stored.

Up to `LOOPED_ROWS` rows, each program adds up products of its outputs' weights with every row, with enough bytes asked
for at once to keep memory busy. More rows go through the tensor cores.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.quantised_weight import QuantisedWeight

LOOPED_ROWS = 1
LANE = 16  # weights of one load of a thread, added up before anything else
SMALLEST_DOT = 16
X_BYTES = 16_384  # of inputs that a round of the tensor cores' kernel holds


@dataclass(frozen=True)
class Tile:
    """Outputs and inputs of one round of a program, and its warps."""

    outputs: int
    inputs: int
    warps: int


# Found by `viva bench linear --sweep`; the first fits any shape.
LOOPED_TILES = {
    "int8": Tile(4, 2048, 4),
    "float8": Tile(4, 2048, 4),
    "int4": Tile(4, 4096, 4),
}
DOT_TILES = {
    "int8": Tile(16, 512, 4),
    "float8": Tile(16, 512, 4),
    "int4": Tile(16, 512, 4),
}


@triton.jit
def _rows_of_eight_bits(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    row_start = tl.where(real, output, 0)[:, None].to(tl.int64) * INPUTS
    for row in tl.static_range(ROWS):
        total = tl.zeros([BLOCK_OUT, BLOCK_IN // LANE], tl.float32)
        for first in range(0, INPUTS, BLOCK_IN):
            column = first + tl.arange(0, BLOCK_IN)[None, :]
            if EVEN:
                weight = tl.load(weight_ptr + row_start + column)
                x = tl.load(x_ptr + row * INPUTS + column)
            else:
                inside = column < INPUTS
                weight = tl.load(weight_ptr + row_start + column, mask=inside, other=0.0)
                x = tl.load(x_ptr + row * INPUTS + column, mask=inside, other=0.0)
            product = weight.to(tl.float32) * x.to(tl.float32)
            total += tl.sum(tl.reshape(product, [BLOCK_OUT, BLOCK_IN // LANE, LANE]), axis=2)
        result = tl.sum(total, axis=1) * tl.load(scale_ptr + output, mask=real, other=0.0)
        if BIAS:
            result += tl.load(bias_ptr + output, mask=real, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * OUTPUTS + output, result.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _rows_of_four_bits(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    safe = tl.where(real, output, 0)[:, None].to(tl.int64)
    HALF: tl.constexpr = BLOCK_IN // 2
    GROUPS: tl.constexpr = BLOCK_IN // GROUP
    for row in tl.static_range(ROWS):
        total = tl.zeros([BLOCK_OUT, GROUPS], tl.float32)
        for first in range(0, INPUTS, BLOCK_IN):
            pair = tl.arange(0, HALF)[None, :]
            group = first // GROUP + tl.arange(0, GROUPS)[None, :]
            inside = first // 2 + pair < INPUTS // 2
            if EVEN:
                both = tl.load(weight_ptr + safe * (INPUTS // 2) + first // 2 + pair)
            else:
                both = tl.load(weight_ptr + safe * (INPUTS // 2) + first // 2 + pair, mask=inside, other=0)
            even = tl.load(x_ptr + row * INPUTS + first + 2 * pair, mask=inside, other=0.0).to(tl.float32)
            odd = tl.load(x_ptr + row * INPUTS + first + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
            product = (both & 15).to(tl.float32) * even + (both >> 4).to(tl.float32) * odd
            summed = tl.sum(tl.reshape(product, [BLOCK_OUT, GROUPS, GROUP // 2]), axis=2)
            inputs = tl.sum(tl.reshape(even + odd, [1, GROUPS, GROUP // 2]), axis=2)
            exists = group < INPUTS // GROUP
            place = safe * (INPUTS // GROUP) + group
            scale = tl.load(scale_ptr + place, mask=exists, other=0.0).to(tl.float32)
            offset = tl.load(offset_ptr + place, mask=exists, other=0.0).to(tl.float32)
            total += summed * scale + inputs * offset
        result = tl.sum(total, axis=1)
        if BIAS:
            result += tl.load(bias_ptr + output, mask=real, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * OUTPUTS + output, result.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _dot_of_eight_bits(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row, real_output = row < rows, output < OUTPUTS
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in range(0, INPUTS, BLOCK_IN):
        column = first + tl.arange(0, BLOCK_IN)
        inside = column < INPUTS
        x = tl.load(
            x_ptr + row[:, None] * INPUTS + column[None, :], mask=real_row[:, None] & inside[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + output[:, None].to(tl.int64) * INPUTS + column[None, :],
            mask=real_output[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION)
    total = total * tl.load(scale_ptr + output, mask=real_output, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * OUTPUTS + output[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & real_output[None, :])


@triton.jit(do_not_specialize=["rows"])
def _dot_of_four_bits(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row, real_output = row < rows, output < OUTPUTS
    safe = tl.where(real_output, output, 0)[:, None].to(tl.int64)
    HALF: tl.constexpr = BLOCK_IN // 2
    GROUPS: tl.constexpr = BLOCK_IN // GROUP
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    pair = tl.arange(0, HALF)[None, :]
    for first in range(0, INPUTS, BLOCK_IN):
        inside = first // 2 + pair < INPUTS // 2
        x_place = x_ptr + row[:, None] * INPUTS + first + 2 * pair
        even = tl.load(x_place, mask=real_row[:, None] & inside, other=0.0)
        odd = tl.load(x_place + 1, mask=real_row[:, None] & inside, other=0.0)
        both = tl.load(weight_ptr + safe * (INPUTS // 2) + first // 2 + pair, mask=inside, other=0)
        group = first // GROUP + tl.arange(0, GROUPS)[None, :]
        exists = group < INPUTS // GROUP
        place = safe * (INPUTS // GROUP) + group
        scale = tl.load(scale_ptr + place, mask=exists, other=0.0).to(tl.float32)
        offset = tl.load(offset_ptr + place, mask=exists, other=0.0).to(tl.float32)
        wide_scale = tl.broadcast_to(scale[:, :, None], [BLOCK_OUT, GROUPS, GROUP // 2])
        wide_offset = tl.broadcast_to(offset[:, :, None], [BLOCK_OUT, GROUPS, GROUP // 2])
        wide_scale = tl.reshape(wide_scale, [BLOCK_OUT, HALF])
        wide_offset = tl.reshape(wide_offset, [BLOCK_OUT, HALF])
        low = ((both & 15).to(tl.float32) * wide_scale + wide_offset).to(even.dtype)
        high = ((both >> 4).to(tl.float32) * wide_scale + wide_offset).to(even.dtype)
        total += tl.dot(even, tl.trans(low), input_precision=PRECISION)
        total += tl.dot(odd, tl.trans(high), input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * OUTPUTS + output[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=real_row[:, None] & real_output[None, :])


def takes(weight: QuantisedWeight) -> bool:
    """Whether there is a kernel for a matrix: groups must be powers of two, and the processor must have float8."""
    if weight.scheme == "float8" and weight.data.is_cuda:
        return torch.cuda.get_device_capability(weight.data.device) >= (8, 9)
    return weight.scheme != "int4" or (weight.group >= LANE and weight.group & (weight.group - 1) == 0)


def weight_only_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """`x @ weight.T + bias`. Twin: `QuantisedLinear.forward`, which widens the matrix first.  # [.., input]"""
    x = x.contiguous()
    rows = x.numel() // weight.inputs
    out = torch.empty(*x.shape[:-1], weight.outputs, dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    if rows <= LOOPED_ROWS:
        _loop(x.view(rows, -1), weight, bias, out.view(rows, -1), tile or LOOPED_TILES[weight.scheme])
    else:
        _dot(x, weight, bias, out, rows, tile or DOT_TILES[weight.scheme])
    return out


def _loop(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor, tile: Tile) -> None:
    grid = (triton.cdiv(weight.outputs, tile.outputs),)
    common = {
        "INPUTS": weight.inputs, "OUTPUTS": weight.outputs, "ROWS": len(x), "BIAS": bias is not None,
        "BLOCK_OUT": tile.outputs, "num_warps": tile.warps,
    }  # fmt: skip
    given = x if bias is None else bias
    if weight.scheme == "int4":
        block = _whole_groups(tile.inputs, weight)
        even = weight.inputs % block == 0
        _rows_of_four_bits[grid](
            x, weight.data, weight.scale, weight.offset, given, out,
            EVEN=even, BLOCK_IN=block, GROUP=weight.group, **common,
        )  # fmt: skip
        return
    block = min(tile.inputs, triton.next_power_of_2(weight.inputs))
    even, lane = weight.inputs % block == 0, min(LANE, block)
    _rows_of_eight_bits[grid](
        x, weight.data, weight.scale, given, out, EVEN=even, BLOCK_IN=block, LANE=lane, **common
    )  # fmt: skip


def _dot(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor, rows: int, tile: Tile) -> None:
    block_rows = min(64, max(SMALLEST_DOT, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(weight.outputs, tile.outputs), triton.cdiv(rows, block_rows))
    common = {
        "INPUTS": weight.inputs, "OUTPUTS": weight.outputs, "BIAS": bias is not None, "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": tile.outputs, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps, "num_stages": 3,
    }  # fmt: skip
    given = x if bias is None else bias
    block = min(tile.inputs, X_BYTES // (block_rows * x.dtype.itemsize), triton.next_power_of_2(weight.inputs))
    block = max(2 * SMALLEST_DOT, block)
    if weight.scheme == "int4":
        block = max(block, weight.group)
        _dot_of_four_bits[grid](
            x, weight.data, weight.scale, weight.offset, given, out, rows, BLOCK_IN=block, GROUP=weight.group, **common
        )  # fmt: skip
    else:
        _dot_of_eight_bits[grid](x, weight.data, weight.scale, given, out, rows, BLOCK_IN=block, **common)


def _whole_groups(inputs: int, weight: QuantisedWeight) -> int:
    """Columns of a round: a power of two of groups, at most a row."""
    groups = min(inputs // weight.group, triton.next_power_of_2(weight.inputs // weight.group))
    return weight.group * max(1, 1 << (groups.bit_length() - 1))
