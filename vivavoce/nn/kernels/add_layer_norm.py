"""What a sublayer adds to the residual stream, and the LayerNorm of the sum, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import dependent, launch_next, wait_for_previous


@triton.jit
def _add_layer_norm(
    x_ptr, added_ptr, scale_ptr, shift_ptr, sum_ptr, out_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        wait_for_previous()
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    if ADD:
        x += tl.load(added_ptr + place, mask=inside, other=0.0)
        tl.store(sum_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=0) / WIDTH
    centred = tl.where(inside, wide - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    tl.store(out_ptr + place, (centred * rate * scale + shift).to(out_ptr.dtype.element_ty), mask=inside)


def add_layer_norm(x: Tensor, added: Tensor | None, norm: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor]:
    """`x + added` and its norm. Twin: the sum, and `functional.layer_norm`.  # [row, width] twice"""
    rows, width = x.shape
    scale, shift, eps = norm
    normed = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    _add_layer_norm[(rows,)](
        x, x if added is None else added, scale, shift, total, normed, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=added is not None, num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return total, normed
