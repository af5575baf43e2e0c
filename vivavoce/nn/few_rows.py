"""Linear layers met by the few rows of a decoding step: by a kernel where it was measured to be faster."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn import kernels
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised_linear import CudaLinear
from vivavoce.nn.quantised_weight import QuantisedWeight


def project(linear: nn.Module, x: Tensor, gated: bool = False) -> Tensor:
    """`linear(x)`; gated, `silu(first half) * second half` of it.  # [row, input] → [row, output]"""
    weight = _weight(linear, x)
    tile = None if weight is None else kernels.tile_for(weight, x, gated)
    if weight is not None and tile is not None:
        return kernels.few_row_linear(x, weight, linear.bias, tile, gated)  # type: ignore[arg-type]
    out: Tensor = linear(x)
    return _gate(out) if gated else out


def _weight(linear: nn.Module, x: Tensor) -> Tensor | QuantisedWeight | None:
    """The matrix a kernel may read in place of calling the layer: nobody listens to the call or wants gradients."""
    if not kernels.usable(x) or x.ndim != 2 or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    if isinstance(linear, CudaLinear):
        return linear.quantised
    if not isinstance(linear, Linear) or (linear.weight.requires_grad and torch.is_grad_enabled()):
        return None
    return linear.weight if linear.weight.dtype == x.dtype else None


def _gate(both: Tensor) -> Tensor:
    if kernels.usable(both):
        return kernels.silu_multiply(both)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
