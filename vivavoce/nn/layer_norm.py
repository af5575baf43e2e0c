"""LayerNorm with what stands before and after it, in one launch where the kernels run."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn import kernels

FEW_ROWS = 160  # up to here a norm is cheaper done again by every program of the product than launched
MOST_ROWS = 4096  # from here on the libraries' products are faster, whatever stands around them


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
    if norm is not None and not (kernels.usable(x) and rows <= FEW_ROWS):
        x, norm = norm(x), None
    if kernels.usable(x) and rows <= MOST_ROWS and (norm is not None or gelu or residual is not None):
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
    """`x` with what a gate lets through added, and the norm of that without weights of its own, scaled and shifted."""
    if kernels.usable(x):
        return kernels.modulated_norm(x, gated, scale, shift, eps)
    if gated is not None:
        x = torch.addcmul(x, *gated)
    normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
    return x, torch.addcmul(shift, normed, 1 + scale)
