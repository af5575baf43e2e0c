"""Norms, fused with what stands around them where there is a kernel: residual add, linear, GELU, Mish, modulation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels


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
    """The reference of the fused kernel. Statistics in float32 or float64, as in the published models."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


SMALL_BATCH_ROWS = 160  # up to here a norm is cheaper done again by every program of the product than launched
MAX_FUSED_ROWS = 4096  # from here on the libraries' products are faster, whatever stands around them


def norm_linear(
    x: Tensor,  # [.., inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None = None,
    norm: nn.LayerNorm | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,  # [.., outputs]
) -> Tensor:
    """`gelu(linear(norm(x))) + residual`, each but the linear only if asked for.  # [.., outputs]"""
    rows = x.numel() // x.shape[-1]
    if norm is not None and not (kernels.usable(x) and rows <= SMALL_BATCH_ROWS):
        x, norm = norm(x), None
    if kernels.usable(x) and rows <= MAX_FUSED_ROWS and (norm is not None or gelu or residual is not None):
        scale_shift_eps = None if norm is None else (norm.weight, norm.bias, norm.eps)
        return kernels.norm_linear(x, weight, bias, scale_shift_eps, gelu, residual)
    y = functional.linear(x, weight, bias)
    if gelu:
        y = functional.gelu(y)
    return y if residual is None else y + residual


def norm_mish(x: Tensor, norm: nn.LayerNorm, added: Tensor | None = None) -> Tensor:
    """`mish(norm(x)) + added`.  # [.., channel], [channel]"""
    if kernels.usable(x):
        return kernels.norm_mish(x, norm.weight, norm.bias, norm.eps, added)
    y = functional.mish(norm(x))
    return y if added is None else y + added


def modulated_norm(
    x: Tensor,  # [.., channel]
    gated: tuple[Tensor, Tensor] | None,  # [channel], [.., channel]
    scale: Tensor,  # [channel]
    shift: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`x + gate * added`, and its layer norm without affine weights, scaled and shifted (adaLN)."""
    if kernels.usable(x):
        return kernels.modulated_norm(x, gated, scale, shift, eps)
    if gated is not None:
        x = torch.addcmul(x, *gated)
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    return x, torch.addcmul(shift, normed, 1 + scale)
