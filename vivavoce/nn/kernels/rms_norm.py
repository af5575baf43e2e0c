"""Residual addition and RMSNorm in one pass over a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin_small, dependent


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
        # Added in the stored dtype, as the plain twin does, so that both residual streams round alike.
        total = total + tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        tl.store(total_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (wide * scale).to(weight.dtype) * weight
    tl.store(normed_ptr + row + column, normed, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed sum of `x` and the residual, and the sum. Twin: `vivavoce.nn.norm.rms_norm`."""
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
