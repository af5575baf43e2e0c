"""A gated addition to the residual stream and the LayerNorm behind it, scaled and shifted: one pass over a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """`x + gate · added`, and its norm. Twin: the plain half of `vivavoce.nn.layer_norm.modulated_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if gated is None else torch.empty_like(x)
    gate, added = gated or (x, x)  # without one, nobody reads them
    block = triton.next_power_of_2(size)
    _modulated_norm[(x.numel() // size,)](
        x, gate, added.contiguous(), scale, shift, total, normed, size, eps,
        ADD=gated is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return total, normed
