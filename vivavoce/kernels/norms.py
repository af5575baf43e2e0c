"""Fused norms and activations: with residual add, linear, GELU, Mish, SwiGLU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import (
    LINE_BYTES,
    begin_small,
    chained,
    dependent,
    fetch_near,
    launch_next,
    wait_for_previous,
)
from vivavoce.kernels.tiles import CHAINED_ROWS, product_blocks

MANY_NORM_VALUES = 2048  # of a program with several rows


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    total = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if ADD:
        # Added in the stored dtype, as in the reference, so that both round the residual stream equally.
        total = total + tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        tl.store(total_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (wide * scale).to(weight.dtype) * weight
    tl.store(normed_ptr + row + column, normed, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed sum of `x` and the residual, and the sum. Reference: `vivavoce.nn.linear.rms_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        x, residual, weight, normed, total, size, eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
        **dependent(x.device),
    )  # fmt: skip
    return normed, total


@triton.jit
def _add_layer_norm(
    x_ptr, added_ptr, scale_ptr, shift_ptr, sum_ptr, out_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    index = tl.program_id(0).to(tl.int64) * WIDTH + column
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        wait_for_previous()
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    if ADD:
        x += tl.load(added_ptr + index, mask=inside, other=0.0)
        tl.store(sum_ptr + index, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=0) / WIDTH
    centred = tl.where(inside, wide - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    tl.store(out_ptr + index, (centred * rate * scale + shift).to(out_ptr.dtype.element_ty), mask=inside)


def add_layer_norm(x: Tensor, added: Tensor | None, norm: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor]:
    """`x + added` and its norm. Reference: the sum, and `functional.layer_norm`.  # [row, width] twice"""
    rows, width = x.shape
    scale, shift, eps = norm
    normed = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    _add_layer_norm[(rows,)](
        x, x if added is None else added, scale, shift, total, normed, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=added is not None, num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return total, normed


@triton.jit
def _modulated_norm(
    x_ptr, gate_ptr, added_ptr, scale_ptr, shift_ptr, total_ptr, normed_ptr, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x += gate * tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=0) / size
    centred = tl.where(inside, x - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rate * (1.0 + scale) + shift
    tl.store(normed_ptr + row + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def modulated_norm(
    x: Tensor, gated: tuple[Tensor, Tensor] | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`x + gate · added`, and its norm. Reference: the PyTorch path of `vivavoce.nn.linear.modulated_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if gated is None else torch.empty_like(x)
    gate, added = gated or (x, x)  # without a gate they are not read
    block = triton.next_power_of_2(size)
    _modulated_norm[(x.numel() // size,)](
        x, gate, added.contiguous(), scale, shift, total, normed, size, eps,
        ADD=gated is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return total, normed


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(
    x_ptr, scale_ptr, shift_ptr, added_ptr, out_ptr, rows, size, eps,
    MISH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < size
    real = (row < rows)[:, None] & inside[None, :]
    index = row[:, None] * size + column[None, :]
    x = tl.load(x_ptr + index, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / size
    centred = tl.where(real, x - mean[:, None], 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=1) / size + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = centred * rate[:, None] * scale[None, :] + shift[None, :]
    if MISH:
        # tanh(ln(1 + e^x)) is n / (n + 2) for n = e^x (e^x + 2), and 1 in float32 long before e^x overflows
        power = tl.exp(tl.minimum(y, 20.0))
        ratio = power * (power + 2.0)
        y = y * ratio / (ratio + 2.0)
    if ADD:
        y += tl.load(added_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=real)


def layer_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, mish: bool = False, added: Tensor | None = None
) -> Tensor:
    """`layer_norm(x)`, or `mish(layer_norm(x))`, plus `added`. Reference: the PyTorch paths in `vivavoce.nn.linear`."""
    x = x.contiguous()
    size = x.shape[-1]
    rows, block = x.numel() // size, triton.next_power_of_2(size)
    out = torch.empty_like(x)
    block_rows, warps = (1, block // 256) if rows <= CHAINED_ROWS else (MANY_NORM_VALUES // block, 4)
    _layer_norm[(triton.cdiv(rows, max(block_rows, 1)),)](
        x, scale, shift, x if added is None else added.contiguous(), out, rows, size, eps,
        MISH=mish, ADD=added is not None, BLOCK_ROWS=max(block_rows, 1), BLOCK=block,
        num_warps=min(max(warps, 1), 8), **chained(x.device, rows),
    )  # fmt: skip
    return out


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
    index = row[:, None].to(tl.int64) * OUTPUTS + output[None, :]
    real = real_row[:, None] & real_output[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + index, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=real)


def norm_linear(
    x: Tensor,  # [.., inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    gelu: bool,
    residual: Tensor | None,  # [.., outputs]
) -> Tensor:
    """`gelu(linear(norm(x))) + residual`. Reference: the PyTorch path of `vivavoce.nn.linear.norm_linear`."""
    x, weight = x.contiguous(), weight.contiguous()
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    scale, shift, eps = norm or (x, x, 0.0)
    block_rows, block_out, block_in, warps = product_blocks(x, rows)
    _norm_linear[(triton.cdiv(rows, block_rows), triton.cdiv(outputs, block_out))](
        x, scale, shift, weight, x if bias is None else bias, x if residual is None else residual.contiguous(), out,
        rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, WIDTH=triton.next_power_of_2(inputs), NORM=norm is not None,
        BIAS=bias is not None, GELU=gelu, RESIDUAL=residual is not None, BLOCK_ROWS=block_rows, BLOCK_OUT=block_out,
        BLOCK_IN=block_in, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LINE=LINE_BYTES // weight.element_size(), num_warps=warps, num_stages=3, **chained(x.device, rows),
    )  # fmt: skip
    return out


@triton.jit
def _silu_multiply(both_ptr, out_ptr, inner, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(both_ptr + row * 2 * inner + column, mask=inside, other=0.0)
    up = tl.load(both_ptr + row * 2 * inner + inner + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * inner + column, silu * up, mask=inside)


def silu_multiply(both: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last dimension. Reference: the PyTorch path of `GatedFeedForward`."""
    both = both.contiguous()
    inner = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], inner, dtype=both.dtype, device=both.device)
    block = 1024
    _silu_multiply[(both.numel() // (2 * inner), triton.cdiv(inner, block))](
        both, out, inner, BLOCK=block, num_warps=4, **dependent(both.device)
    )
    return out


BLOCK = 1024


@triton.jit(do_not_specialize=["time"])
def _snake(x_ptr, alpha_ptr, out_ptr, channels, time, row_stride, channel_stride, never_zero, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, channel = program // channels, program % channels
    moment = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = moment < time
    alpha = tl.load(alpha_ptr + channel).to(tl.float32)
    source = x_ptr + row.to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride + moment
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    wave = tl.sin(x * alpha)
    y = x + wave * wave / (alpha + never_zero)
    tl.store(out_ptr + program.to(tl.int64) * time + moment, y.to(out_ptr.dtype.element_ty), mask=inside)


def snake(x: Tensor, alpha: Tensor, never_zero: float) -> Tensor:
    """`x + sin²(αx) / (α + never_zero)`. Reference: the PyTorch path of `vivavoce.nn.vocoder.Snake`.

    # [batch, channel, time] with contiguous time; [channel] → contiguous [batch, channel, time]
    """
    batch, channels, time = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (batch * channels, triton.cdiv(time, BLOCK))
    _snake[grid](x, alpha, out, channels, time, x.stride(0), x.stride(1), never_zero, BLOCK=BLOCK, num_warps=4)
    return out
