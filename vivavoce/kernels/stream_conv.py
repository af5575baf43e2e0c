"""A causal convolution that goes on from its context, channels last: a matrix product per tap, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin_small, chained

SMALL_BATCH_ROWS = 160


@triton.jit(do_not_specialize=["rows", "time"])
def _stream_conv(
    x_ptr, context_ptr, next_ptr, weight_ptr, bias_ptr, out_ptr, rows, time,
    context_row, context_time, next_row, next_time, weight_output, weight_channel, weight_tap,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    CONTEXT: tl.constexpr = TAPS - 1
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_IN - 1) // BLOCK_IN
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real, real_output = place < rows * time, output < OUTPUTS
    row, moment = (place // time).to(tl.int64), place % time
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for block in range(TAPS * BLOCKS):
        tap = block // BLOCKS
        channel = (block % BLOCKS) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        inside = channel < CHANNELS
        source = moment + tap - CONTEXT
        old = context_ptr + row * context_row + (source + CONTEXT) * context_time
        begin = tl.where(source >= 0, x_ptr + (row * time + source) * CHANNELS, old)
        x = tl.load(begin[:, None] + channel[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + tap * weight_tap + output[:, None] * weight_output + channel[None, :] * weight_channel,
            mask=real_output[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + place[:, None].to(tl.int64) * OUTPUTS + output[None, :],
        total.to(out_ptr.dtype.element_ty), mask=real[:, None] & real_output[None, :],
    )  # fmt: skip
    if tl.program_id(1) == 0:
        kept = moment - (time - CONTEXT)
        for block in range(BLOCKS):
            channel = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
            exists = (real & (kept >= 0))[:, None] & (channel < CHANNELS)[None, :]
            x = tl.load(x_ptr + place[:, None].to(tl.int64) * CHANNELS + channel[None, :], mask=exists, other=0.0)
            tl.store(next_ptr + (row * next_row + kept * next_time)[:, None] + channel[None, :], x, mask=exists)


def stream_conv(x: Tensor, context: Tensor, next_context: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution continued; its next context is written. Twin: `vivavoce.nn.streaming.product_over_taps`.

    Fastest where the channels of a weight lie side by side.
    # x [row, time ≥ context, channel], contexts [row, context, channel], which are not the same memory
    """
    x = x.contiguous()
    rows, time, channels = x.shape
    outputs, _, taps = weight.shape
    out = torch.empty(rows, time, outputs, dtype=x.dtype, device=x.device)
    block_rows, block_out, block_in, warps = _blocks(rows * time)
    _stream_conv[(triton.cdiv(rows * time, block_rows), triton.cdiv(outputs, block_out))](
        x, context, next_context, weight, x if bias is None else bias, out, rows, time,
        *context.stride()[:2], *next_context.stride()[:2], *weight.stride(),
        CHANNELS=channels, OUTPUTS=outputs, TAPS=taps, BIAS=bias is not None, BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=3, **chained(x.device, rows * time),
    )  # fmt: skip
    return out


def _blocks(rows: int) -> tuple[int, int, int, int]:
    """Rows, outputs and channels of a tile, and its warps."""
    return (16, 32, 256, 4) if rows <= SMALL_BATCH_ROWS else (64, 64, 64, 4)
