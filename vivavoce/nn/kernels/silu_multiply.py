"""The gate of a SwiGLU feed-forward: silu(gate) * up, read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin_small, dependent


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
    """`silu(first half) * second half` of the last dimension. Twin: the plain half of `GatedFeedForward`."""
    both = both.contiguous()
    inner = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], inner, dtype=both.dtype, device=both.device)
    block = 1024
    _silu_multiply[(both.numel() // (2 * inner), triton.cdiv(inner, block))](
        both, out, inner, BLOCK=block, num_warps=4, **dependent(both.device)
    )
    return out
