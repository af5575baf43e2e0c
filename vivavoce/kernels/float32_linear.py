"""A linear layer of float32 weights for up to a few thousand rows, on tensor cores with the accuracy of float32.

Each product is three TF32 products of the operands' high and low parts. Plain float32 products of so few rows occupy
a fraction of the multiprocessors. The inputs are split over programs, whose sums are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 4096
SPLITS, MAX_SPLIT_ROWS = 4, 128  # more rows occupy the multiprocessors without a split
BLOCK_IN = 64
_INPUTS, _OUTPUTS = SPLITS * BLOCK_IN, 64  # of which the layer's sizes must be multiples


@triton.jit(do_not_specialize=["rows"])
def _partial_products(
    x_ptr, weight_ptr, out_ptr, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split, exists = tl.program_id(2), row[:, None] < rows
    EACH: tl.constexpr = INPUTS // SPLITS
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for begin in range(0, EACH, BLOCK_IN):
        column = split * EACH + begin + tl.arange(0, BLOCK_IN)
        x = tl.load(x_ptr + row[:, None] * INPUTS + column[None, :], mask=exists, other=0.0)
        weight = tl.load(weight_ptr + output[:, None] * INPUTS + column[None, :])
        total = tl.dot(x, tl.trans(weight), total, input_precision="tf32x3")
    place = (split * rows + row[:, None]) * OUTPUTS + output[None, :]
    tl.store(out_ptr + place, total, mask=exists)


def takes_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether `float32_linear` takes these: float32, few rows, and sizes that its tiles divide."""
    outputs, inputs = weight.shape
    is_float32 = x.dtype == weight.dtype == torch.float32
    return is_float32 and x.numel() <= MAX_ROWS * inputs and inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`.  # [.., input] → [.., output]"""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    rows = flat.shape[0]
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    splits = SPLITS if rows <= MAX_SPLIT_ROWS else 1
    block_out = 32 if MAX_SPLIT_ROWS >= rows > 32 else 64
    partial = x.new_empty(splits, rows, outputs)
    _partial_products[(outputs // block_out, triton.cdiv(rows, block_rows), splits)](
        flat, weight, partial, rows, inputs, outputs, splits, block_rows, block_out, BLOCK_IN, num_stages=3, num_warps=4
    )
    total = partial.sum(0) if splits > 1 else partial[0]
    return (total if bias is None else total + bias).view(*x.shape[:-1], outputs)
