"""LayerNorm, Mish and the addition of a vector, read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin_small, chained


@triton.jit
def _norm_mish(
    x_ptr, scale_ptr, shift_ptr, added_ptr, out_ptr, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / size
    centred = tl.where(inside, x - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rate * scale + shift
    # tanh(ln(1 + e^x)) is n / (n + 2) for n = e^x (e^x + 2), and 1 in float32 long before e^x overflows
    power = tl.exp(tl.minimum(normed, 20.0))
    ratio = power * (power + 2.0)
    y = normed * ratio / (ratio + 2.0)
    if ADD:
        y += tl.load(added_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_mish(x: Tensor, scale: Tensor, shift: Tensor, eps: float, added: Tensor | None) -> Tensor:
    """`mish(layer_norm(x)) + added`. Twin: the plain half of `vivavoce.nn.layer_norm.norm_mish`."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm_mish[(x.numel() // size,)](
        x, scale, shift, x if added is None else added.contiguous(), out, size, eps,
        ADD=added is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
        **chained(x.device, x.numel() // size),
    )  # fmt: skip
    return out
