"""Linear layers with int8 weights for CPUs: a quarter of the memory traffic, which is what one row at a time waits for.

Weights have a scale a row; inputs are rounded on the way, with one scale for all rows of a call. So a row's result
differs slightly with the rows beside it, and from float32's by about a hundredth of its size.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.nn.linear import Linear

KERNELS = "fbgemm"  # int8 products of x86 processors
LARGEST = 127
# The operator itself: what torch.ops wraps around it takes a third of a small product's time.
int8_product: Callable[[Tensor, Any, bool], Tensor] = torch.ops.quantized.linear_dynamic.default._op


def int8_is_fast_here() -> bool:
    """Whether this machine has the kernels, and instructions that add up products of int8 without overflow."""
    return KERNELS in torch.backends.quantized.supported_engines and bool(torch.cpu._is_vnni_supported())


class Int8Linear(nn.Module):
    """`x @ weight.T + bias` in float32, by int8 products."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.packed = packed

    @classmethod
    def of(cls, linear: Linear) -> "Int8Linear":
        """The same projection, rounded."""
        return cls.of_weight(linear.weight, linear.bias)

    @classmethod
    @torch.no_grad()
    def of_weight(cls, weight: Tensor, bias: Tensor | None = None) -> "Int8Linear":
        """The projection by a matrix, rounded.  # weight [output, input]"""
        weight = weight.float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-8).double() / LARGEST
        rounded = (weight / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors are to go; their kernels have no heir yet
            quantised = torch._make_per_channel_quantized_tensor(rounded, scale, zeros, 0)
        bias = None if bias is None else bias.float()
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = KERNELS
        try:
            return cls(torch.ops.quantized.linear_prepack(quantised, bias))
        finally:
            torch.backends.quantized.engine = before

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return int8_product(x, self.packed, False)


def to_int8(module: nn.Module) -> None:
    """Round every `Linear` below a module, in place. Nothing is left to train or to move to another device."""
    for name, child in module.named_children():
        if type(child) is Linear:
            setattr(module, name, Int8Linear.of(child))
        else:
            to_int8(child)
