"""Snake in one pass over its input instead of five."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["time"])
def _snake(x_ptr, alpha_ptr, out_ptr, channels, time, row_stride, channel_stride, never_zero, BLOCK: tl.constexpr):
    lane = tl.program_id(0)
    row, channel = lane // channels, lane % channels
    moment = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = moment < time
    alpha = tl.load(alpha_ptr + channel).to(tl.float32)
    source = x_ptr + row.to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride + moment
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    wave = tl.sin(x * alpha)
    y = x + wave * wave / (alpha + never_zero)
    tl.store(out_ptr + lane.to(tl.int64) * time + moment, y.to(out_ptr.dtype.element_ty), mask=inside)


def snake(x: Tensor, alpha: Tensor, never_zero: float) -> Tensor:
    """`x + sin²(αx) / (α + never_zero)`. Twin: the plain half of `vivavoce.nn.snake.Snake`.

    # [batch, channel, time], of which time lies side by side; [channel] → contiguous [batch, channel, time]
    """
    batch, channels, time = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (batch * channels, triton.cdiv(time, BLOCK))
    _snake[grid](x, alpha, out, channels, time, x.stride(0), x.stride(1), never_zero, BLOCK=BLOCK, num_warps=4)
    return out
