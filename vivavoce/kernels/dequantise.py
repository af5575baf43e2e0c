"""Quantised matrices as floats, for products of many rows, which cuBLAS computes best.

One pass: codes are read once, scaled, and written in their stored order of columns, to which the rows are reordered.
The float matrix is temporary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from vivavoce.kernels.small_batch_linear import pairs_of
from vivavoce.kernels.widening import as_float32, scale_and_offset
from vivavoce.nn.quantised_weight import QuantisedWeight, interleaved

BLOCK_OUT, BLOCK_BYTES = 8, 512
WARPS = 4


@triton.jit
def _float_bytes(
    data_ptr, scale_ptr, out_ptr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, FAST: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    inside = (output < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
    place = output[:, None].to(tl.int64) * INPUTS + column[None, :]
    code = as_float32(tl.load(data_ptr + place, mask=inside, other=0.0), FAST)
    scale = tl.load(scale_ptr + output, mask=output < OUTPUTS, other=0.0)
    tl.store(out_ptr + place, (code * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _float_nibbles(
    data_ptr, pairs_ptr, out_ptr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """WIDTH: bytes of a row; HALF: bytes of a group."""
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    inside = (output < OUTPUTS)[:, None] & (column < WIDTH)[None, :]
    row = output[:, None].to(tl.int64) * WIDTH
    both = tl.load(data_ptr + row + column[None, :], mask=inside, other=0)
    group = (column // HALF)[None, :].to(tl.int64)
    scale, offset = scale_and_offset(tl.load(pairs_ptr + group * OUTPUTS + output[:, None], mask=inside, other=0))
    low = (both & 15).to(tl.float32) * scale + offset
    high = (both >> 4).to(tl.float32) * scale + offset
    pairs = tl.interleave(low.to(out_ptr.dtype.element_ty), high.to(out_ptr.dtype.element_ty))
    twice = tl.program_id(1) * 2 * BLOCK_BYTES + tl.arange(0, 2 * BLOCK_BYTES)
    place = out_ptr + 2 * row + twice[None, :]
    tl.store(place, pairs, mask=(output < OUTPUTS)[:, None] & (twice < 2 * WIDTH)[None, :])


def dequantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of a weight that `is_supported`. Reference: `QuantisedLinear`.

    # [.., input] → [.., output]
    """
    return functional.linear(in_stored_order(x, weight), dequantised(weight, x.dtype), bias)


def in_stored_order(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Rows in the order of a matrix's interleaved columns; in int4 pairs of columns are interleaved."""
    if weight.scheme == "int4":
        return x.unflatten(-1, (-1, 2, 4, 2, 2)).transpose(-4, -3).flatten(-5)
    return interleaved(x)


def dequantised(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """The float matrix with its columns as they are stored.  # [output, input]"""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.data.device)
    width = weight.data.shape[1]
    grid = (triton.cdiv(weight.outputs, BLOCK_OUT), triton.cdiv(width, BLOCK_BYTES))
    sizes = {"OUTPUTS": weight.outputs, "BLOCK_OUT": BLOCK_OUT, "BLOCK_BYTES": BLOCK_BYTES, "num_warps": WARPS}
    if weight.scheme == "int4":
        _float_nibbles[grid](weight.data, pairs_of(weight), out, WIDTH=width, HALF=weight.group // 2, **sizes)
    else:
        _float_bytes[grid](weight.data, weight.scale, out, INPUTS=width, FAST=out.is_cuda, **sizes)
    return out
