"""A linear layer for the small batch of a decode step, with the SwiGLU gate fused if there is one.

It is bound by memory, so weights are pipelined through shared memory several tiles ahead, and quantised ones converted
on their way to the tensor cores. The matrix is the left operand: 16 outputs per product, and up to 8 rows cost no more
than one.

With few rows, the idle columns of the product are used to split the inputs: the parts of the weights are stacked as if
they were more outputs, the parts of the rows as if they were more rows, and the products of matching parts are summed.
More warps then share an output without synchronisation.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.batch_linear import batch_linear
from vivavoce.kernels.byte_linear import byte_row_linear, takes_byte_row
from vivavoce.kernels.dependent_launch import begin, dependent
from vivavoce.kernels.tiles import Tile
from vivavoce.kernels.widening import (
    as_float32,
    byte_product,
    has_warpgroups,
    matched_halves,
    scale_and_offset,
    swiglu,
    widened,
    widened_nibbles,
)
from vivavoce.nn.quantised_weight import QuantisedWeight, interleaved


@triton.jit
def _one_row_linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    safe = tl.where(real, output, 0)
    column = tl.arange(0, BLOCK_IN)[None, :]
    start = weight_ptr + safe[:, None].to(tl.int64) * INPUTS + column
    other = start + OUTPUTS * INPUTS
    inside = column < INPUTS
    following = tl.load(start, mask=inside, other=0.0)  # no kernel writes weights: no need to wait
    following_gated = following
    if GATED:
        following_gated = tl.load(other, mask=inside, other=0.0)
    begin(DEPENDENT)
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    second = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for index in tl.static_range(ROUNDS):
        weight, gated = following, following_gated
        x = tl.load(x_ptr + index * BLOCK_IN + column, mask=index * BLOCK_IN + column < INPUTS, other=0.0)
        if index + 1 < ROUNDS:
            ahead = (index + 1) * BLOCK_IN
            following = tl.load(start + ahead, mask=ahead + column < INPUTS, other=0.0)
            if GATED:
                following_gated = tl.load(other + ahead, mask=ahead + column < INPUTS, other=0.0)
        x = x.to(tl.float32)
        total += as_float32(weight, FAST) * x
        if GATED:
            second += as_float32(gated, FAST) * x
    result = tl.sum(total, axis=1)
    if SCALED:
        result *= tl.load(scale_ptr + safe)
    if BIAS:
        result += tl.load(bias_ptr + safe).to(tl.float32)
    if GATED:
        factor = tl.sum(second, axis=1)
        if SCALED:
            factor *= tl.load(scale_ptr + OUTPUTS + safe)
        if BIAS:
            factor += tl.load(bias_ptr + OUTPUTS + safe).to(tl.float32)
        result = swiglu(result, factor)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=real)


def one_row_linear(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, tile: Tile, gated: bool = False
) -> Tensor:
    """`x @ weight.T + bias`, and the gate. Reference: that of `small_batch_linear`.  # [1, input] → [1, output]"""
    quantised = weight if isinstance(weight, QuantisedWeight) else None
    data = weight.data if isinstance(weight, QuantisedWeight) else weight
    outputs = data.shape[0] // (2 if gated else 1)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    block = min(tile.inputs, triton.next_power_of_2(x.shape[1]))
    _one_row_linear[(triton.cdiv(outputs, tile.outputs),)](
        x, data, x if quantised is None else quantised.scale, x if bias is None else bias, out,
        INPUTS=x.shape[1], OUTPUTS=outputs, SCALED=quantised is not None, FAST=x.is_cuda, GATED=gated,
        BIAS=bias is not None, ROUNDS=triton.cdiv(x.shape[1], block), BLOCK_OUT=tile.outputs, BLOCK_IN=block,
        num_warps=tile.warps, **dependent(x.device),
    )  # fmt: skip
    return out


MIN_ROWS = 8  # columns of the smallest product of the tensor cores
MAX_COLUMNS = 64


@triton.jit
def _read(weight_ptr, place, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(weight_ptr + place)
    else:
        return tl.load(weight_ptr + place, mask=inside, other=0.0)


@triton.jit
def _add_product(
    total, weight, x,
    FAST: tl.constexpr, PRECISION: tl.constexpr, INTERLEAVED: tl.constexpr, WARPGROUP: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        return byte_product(weight, x, total, FAST, PRECISION, WARPGROUP)
    else:
        return tl.dot(widened(weight, x.dtype, FAST), x, total, input_precision=PRECISION)


@triton.jit
def _outputs(OUTPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr):
    """Output and part of each line of the left operand; lines beyond the last output repeat the first."""
    line = tl.arange(0, BLOCK_OUT * PARTS)
    output = tl.program_id(0) * BLOCK_OUT + line % BLOCK_OUT
    return tl.where(output < OUTPUTS, output, 0), line // BLOCK_OUT


@triton.jit
def _summed(
    total, part, ROWS: tl.constexpr, EACH: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Sums over the parts of each output.  # [part × output, part × row] → [output, row]"""
    matching = part[:, None] == (tl.arange(0, ROWS) // EACH)[None, :]
    own = tl.where(matching, total, 0.0)
    if EACH == 1:
        return tl.sum(tl.reshape(tl.sum(own, axis=1), [PARTS, BLOCK_OUT]), axis=0)[:, None]
    else:
        own = tl.sum(tl.reshape(own, [PARTS, BLOCK_OUT, ROWS // EACH, EACH]), axis=2)
        return tl.sum(own, axis=0)


@triton.jit
def _finish(
    total, second, part, scale_ptr, bias_ptr, out_ptr, rows,
    OUTPUTS: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    EACH: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum over parts, scale, bias, gate, and the store."""
    COUNT: tl.constexpr = ROWS if PARTS == 1 else EACH
    row = tl.arange(0, COUNT)
    if PARTS > 1:
        total = _summed(total, part, ROWS, EACH, BLOCK_OUT, PARTS)
        second = _summed(second, part, ROWS, EACH, BLOCK_OUT, PARTS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    safe = tl.where(real, output, 0)
    if SCALED:
        total *= tl.load(scale_ptr + safe)[:, None]
        if GATED:
            second *= tl.load(scale_ptr + OUTPUTS + safe)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + safe)[:, None].to(tl.float32)
        if GATED:
            second += tl.load(bias_ptr + OUTPUTS + safe)[:, None].to(tl.float32)
    if GATED:
        total = swiglu(total, second)
    place = row[None, :] * OUTPUTS + output[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=real[:, None] & (row[None, :] < rows))


@triton.jit(do_not_specialize=["rows"])
def _small_batch_linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr,
    BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    INTERLEAVED: tl.constexpr, WARPGROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = INPUTS // PARTS
    output, part = _outputs(OUTPUTS, BLOCK_OUT, PARTS)
    start = output[:, None].to(tl.int64) * INPUTS + part[:, None] * PART
    other = start + OUTPUTS * INPUTS
    within = tl.arange(0, BLOCK_IN)[None, :]
    row, of_part = tl.arange(0, ROWS)[:, None] % EACH, tl.arange(0, ROWS)[:, None] // EACH
    x_place = x_ptr + row * INPUTS + of_part * PART + within
    real_row = (row < rows) & (of_part < PARTS)
    total = tl.zeros([BLOCK_OUT * PARTS, ROWS], tl.float32)
    second = tl.zeros([BLOCK_OUT * PARTS, ROWS], tl.float32)
    if EARLY:  # no kernel writes weights: the first need not wait
        weight = _read(weight_ptr, start + within, within < PART, EVEN)
        if GATED:
            gated = _read(weight_ptr, other + within, within < PART, EVEN)
    begin(DEPENDENT)
    if EARLY:
        x = tl.trans(tl.load(x_place, mask=real_row & (within < PART), other=0.0))
        total = _add_product(total, weight, x, FAST, PRECISION, INTERLEAVED, WARPGROUP)
        if GATED:
            second = _add_product(second, gated, x, FAST, PRECISION, INTERLEAVED, WARPGROUP)
    for first in tl.range(BLOCK_IN if EARLY else 0, PART, BLOCK_IN, num_stages=STAGES):
        column = first + within
        inside = column < PART
        x = tl.trans(tl.load(x_place + first, mask=real_row & inside, other=0.0))
        weight = _read(weight_ptr, start + column, inside, EVEN)
        total = _add_product(total, weight, x, FAST, PRECISION, INTERLEAVED, WARPGROUP)
        if GATED:
            gated = _read(weight_ptr, other + column, inside, EVEN)
            second = _add_product(second, gated, x, FAST, PRECISION, INTERLEAVED, WARPGROUP)
    _finish(
        total,
        second,
        part,
        scale_ptr,
        bias_ptr,
        out_ptr,
        rows,
        OUTPUTS,
        SCALED,
        GATED,
        BIAS,
        ROWS,
        EACH,
        BLOCK_OUT,
        PARTS,
    )


@triton.jit
def _group_product(
    total, even, odd, sums, weight_ptr, pairs_ptr, output, group, HALF_INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, WARPGROUP: tl.constexpr,
):  # fmt: skip
    """Add the product of one group of columns; codes are 128 too high, which the offset corrects."""
    first = output.to(tl.int64) * HALF_INPUTS + group * HALF
    both = tl.load(weight_ptr + first[:, None] + tl.arange(0, HALF)[None, :])
    pair = tl.load(pairs_ptr + group * OUTPUTS + output)
    scale, offset = scale_and_offset(pair)
    offset -= 128.0 * scale
    both, even, odd = matched_halves(both, even, odd, WARPGROUP)
    low, high = widened_nibbles(both, even.dtype, FAST)
    product = tl.dot(low, even, input_precision=PRECISION)
    product = tl.dot(high, odd, product, input_precision=PRECISION)
    return total + product * scale[:, None] + offset[:, None] * sums[None, :]


@triton.jit(do_not_specialize=["rows"])
def _small_batch_linear_of_groups(
    x_ptr, weight_ptr, pairs_ptr, bias_ptr, out_ptr, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr, WARPGROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    ALL: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    HALF: tl.constexpr = GROUP // 2
    PART: tl.constexpr = INPUTS // PARTS
    output, part = _outputs(OUTPUTS, BLOCK_OUT, PARTS)
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_OUT * PARTS, ROWS], tl.float32)
    second = tl.zeros([BLOCK_OUT * PARTS, ROWS], tl.float32)
    for first in tl.range(0, PART // GROUP, GROUPS, num_stages=STAGES):
        for step in tl.static_range(GROUPS):
            column = (first + step) * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(x_ptr + row[:, None] * PART + column, mask=row[:, None] < rows * PARTS, other=0.0)
            group = part * (PART // GROUP) + first + step
            sums = tl.sum(x.to(tl.float32), axis=1)
            even, odd = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
            even, odd = tl.trans(even), tl.trans(odd)
            total = _group_product(
                total,
                even,
                odd,
                sums,
                weight_ptr,
                pairs_ptr,
                output,
                group,
                INPUTS // 2,
                ALL,
                HALF,
                FAST,
                PRECISION,
                WARPGROUP,
            )
            if GATED:
                second = _group_product(
                    second, even, odd, sums, weight_ptr, pairs_ptr, output + OUTPUTS, group,
                    INPUTS // 2, ALL, HALF, FAST, PRECISION, WARPGROUP,
                )  # fmt: skip
    _finish(
        total,
        second,
        part,
        pairs_ptr,
        bias_ptr,
        out_ptr,
        rows,
        OUTPUTS,
        False,
        GATED,
        BIAS,
        ROWS,
        1,
        BLOCK_OUT,
        PARTS,
    )


def small_batch_linear(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, tile: Tile, gated: bool = False
) -> Tensor:
    """`x @ weight.T + bias`, and the gate. References: `Linear`, `QuantisedLinear`, and `nn.quantised.project`.

    # [row, input] → [row, output]
    """
    x = x.contiguous()
    if tile.split and isinstance(weight, QuantisedWeight):
        return batch_linear(x, weight, pairs_of(weight) if weight.scheme == "int4" else None, bias, tile, gated)
    if tile.stages == 0 and isinstance(weight, QuantisedWeight) and takes_byte_row(x, weight):
        return byte_row_linear(x, weight, bias, tile, gated)
    if tile.stages == 0:
        is_interleaved = isinstance(weight, QuantisedWeight) and weight.is_interleaved
        return one_row_linear(interleaved(x) if is_interleaved else x, weight, bias, tile, gated)
    rows, inputs = x.shape
    quantised = weight if isinstance(weight, QuantisedWeight) else None
    data = weight.data if isinstance(weight, QuantisedWeight) else weight
    outputs = data.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    each = triton.next_power_of_2(rows)
    is_grouped = quantised is not None and quantised.scheme == "int4"
    max_parts = 1 if is_grouped and rows > 1 else MAX_COLUMNS // each
    parts = tile.parts if tile.parts <= max_parts and inputs % (tile.parts * 16) == 0 else 1
    common: dict[str, Any] = {
        "INPUTS": inputs, "OUTPUTS": outputs, "FAST": x.is_cuda, "GATED": gated, "BIAS": bias is not None,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "ROWS": max(MIN_ROWS, each * (1 if is_grouped else parts)), "BLOCK_OUT": tile.outputs, "PARTS": parts,
        "STAGES": tile.stages, "WARPGROUP": has_warpgroups(x.device), "num_warps": tile.warps,
    } | dependent(x.device)  # fmt: skip
    grid = (triton.cdiv(outputs, tile.outputs),)
    biased = x if bias is None else bias
    if quantised is not None and is_grouped:
        parts = math.gcd(parts, inputs // quantised.group)
        common["PARTS"] = parts
        groups = math.gcd(max(1, tile.inputs // quantised.group), inputs // parts // quantised.group)
        _small_batch_linear_of_groups[grid](
            x, data, pairs_of(quantised), biased, out, rows, GROUP=quantised.group, GROUPS=groups, **common
        )
        return out
    _small_batch_linear[grid](
        x, data, x if quantised is None else quantised.scale, biased, out, rows,
        SCALED=quantised is not None, EVEN=inputs % (parts * tile.inputs) == 0, BLOCK_IN=tile.inputs, EARLY=tile.early,
        EACH=each, INTERLEAVED=quantised is not None and quantised.is_interleaved, **common,
    )  # fmt: skip
    return out


def pairs_of(quantised: QuantisedWeight) -> Tensor:
    """Scale and offset of each group and output as one 32-bit number, without a copy.  # [group, output] int32"""
    assert quantised.scale is not None
    scale = quantised.scale.T
    return torch.as_strided(scale, (*scale.shape, 2), (*scale.stride(), 1)).view(torch.int32)[..., 0]
