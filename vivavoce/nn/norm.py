"""Root-mean-square norm, alone or fused with the residual addition before it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn import kernels


class RMSNorm(nn.Module):
    """Scale by the root mean square, in float32, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normed input."""
        if kernels.usable(x):
            return kernels.add_rms_norm(x, None, self.weight, self.eps)[0]
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normed sum of `x` and the residual stream, and that sum: the new residual stream."""
        if kernels.usable(x):
            return kernels.add_rms_norm(x, residual, self.weight, self.eps)
        total = x if residual is None else x + residual
        return rms_norm(total, self.weight, self.eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain twin of the fused kernel. Statistics in float32 (or better), as the published models have it."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
