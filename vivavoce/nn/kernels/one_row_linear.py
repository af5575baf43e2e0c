"""A linear layer for one row, with the SwiGLU gate behind it if there is one: no tensor cores, products in float32.

A program has a few outputs and asks for a whole round of their weights before it needs the one before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin, dependent
from vivavoce.nn.kernels.tiles import Tile
from vivavoce.nn.kernels.widening import as_float32
from vivavoce.nn.quantised_weight import QuantisedWeight


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
    following = tl.load(start, mask=inside, other=0.0)  # weights are nobody's output, so these need not wait
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
        result = result / (1.0 + tl.exp(-result)) * factor
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=real)


def one_row_linear(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, tile: Tile, gated: bool = False
) -> Tensor:
    """`x @ weight.T + bias`, and the gate. Twins: those of `few_row_linear`.  # [1, input] → [1, output]"""
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
