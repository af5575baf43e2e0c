"""A linear layer with what stands around it, in one launch: a norm before it, an activation and a residual after it.

For the few dozen rows of a streaming step, launching costs more than computing: each program norms its rows again.
With many rows that no longer pays.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import LINE_BYTES, chained, fetch_near, launch_next, wait_for_previous

FEW_ROWS = 160  # of which a tile has few


@triton.jit(do_not_specialize=["rows"])
def _norm_linear(
    x_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, rows, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, PRECISION: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row, real_output = row < rows, output < OUTPUTS
    if DEPENDENT:
        launch_next()
        if WIDTH == INPUTS and INPUTS % LINE == 0:
            fetch_near(weight_ptr + tl.where(real_output, output, 0)[:, None] * INPUTS, INPUTS, LINE)
        wait_for_previous()
    x_row = x_ptr + row[:, None].to(tl.int64) * INPUTS
    if NORM:
        everywhere = tl.arange(0, WIDTH)
        exists = real_row[:, None] & (everywhere[None, :] < INPUTS)
        whole = tl.load(x_row + everywhere[None, :], mask=exists, other=0.0).to(tl.float32)
        mean = tl.sum(whole, axis=1) / INPUTS
        centred = tl.where(exists, whole - mean[:, None], 0.0)
        rate = tl.rsqrt(tl.sum(centred * centred, axis=1) / INPUTS + eps)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in range(0, INPUTS, BLOCK_IN):
        column = first + tl.arange(0, BLOCK_IN)
        inside = column < INPUTS
        x = tl.load(x_row + column[None, :], mask=real_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + output[:, None] * INPUTS + column[None, :],
            mask=real_output[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        if NORM:
            scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
            shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = ((x.to(tl.float32) - mean[:, None]) * rate[:, None] * scale + shift).to(weight.dtype)
        total += tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)
    if GELU:
        total = 0.5 * total * (1 + tl.erf(total * 0.7071067811865476))
    place = row[:, None].to(tl.int64) * OUTPUTS + output[None, :]
    real = real_row[:, None] & real_output[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=real)


def norm_linear(
    x: Tensor,  # [.., inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    gelu: bool,
    residual: Tensor | None,  # [.., outputs]
) -> Tensor:
    """`gelu(linear(norm(x))) + residual`. Twin: the plain half of `vivavoce.nn.layer_norm.norm_linear`."""
    x, weight = x.contiguous(), weight.contiguous()
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    scale, shift, eps = norm or (x, x, 0.0)
    block_rows, block_out, block_in, warps = _blocks(rows)
    _norm_linear[(triton.cdiv(rows, block_rows), triton.cdiv(outputs, block_out))](
        x, scale, shift, weight, x if bias is None else bias, x if residual is None else residual.contiguous(), out,
        rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, WIDTH=triton.next_power_of_2(inputs), NORM=norm is not None,
        BIAS=bias is not None, GELU=gelu, RESIDUAL=residual is not None, BLOCK_ROWS=block_rows, BLOCK_OUT=block_out,
        BLOCK_IN=block_in, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LINE=LINE_BYTES // weight.element_size(), num_warps=warps, num_stages=3, **chained(x.device, rows),
    )  # fmt: skip
    return out


def _blocks(rows: int) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs of a tile, and its warps: many small tiles for few rows, so that all processors help."""
    return (16, 32, 256, 4) if rows <= FEW_ROWS else (64, 64, 64, 4)
