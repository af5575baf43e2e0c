"""Linear layers with int8 weights for CPUs: a quarter of the memory traffic, which is what one row at a time waits for.

Weights have a scale a row; inputs are rounded on the way, each row by its own size: the kernel has one scale for all
rows of a call, and a single row of outliers, such as a sequence's first, would leave the others a few steps only. A
result differs from float32's by about a hundredth of its size. Where calibration has found the range of the inputs, it
need not be looked for in every call.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.nn.linear import Linear
from vivavoce.nn.process_settings import quantised_kernels
from vivavoce.nn.quantised_weight import InputRange, quantise

SMALLEST_ROW = 1e-20
# int8 products of x86 processors: FBGEMM's are soonest for one row and two, oneDNN's from eight on (at 256 by 2.7).
FEW_ROWS, MANY_ROWS = "fbgemm", "onednn"
# The operators themselves: what torch.ops wraps around them takes a third of a small product's time.
int8_product: Callable[[Tensor, Any, bool], Tensor] = torch.ops.quantized.linear_dynamic.default._op
ranged_product: Callable[[Tensor, float, int, Any], Tensor] = (
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
)


class Int8Linear(nn.Module):
    """`x @ weight.T + bias` in float32, by int8 products."""

    def __init__(self, packed: Any, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias  # which is in `packed` too, but asking there unpacks the whole matrix

    @classmethod
    def of(cls, linear: Linear) -> "Int8Linear":
        """The same projection, rounded."""
        return cls.of_weight(linear.weight, linear.bias)

    @classmethod
    @torch.no_grad()
    def of_weight(cls, weight: Tensor, bias: Tensor | None = None, kernels: str = FEW_ROWS) -> "Int8Linear":
        """The projection by a matrix, rounded, for few rows at a time or many.  # weight [output, input]"""
        rounded = quantise(weight, "int8")
        assert rounded.scale is not None
        return cls(prepacked(rounded.data, rounded.scale, bias, kernels), None if bias is None else bias.float())

    @property
    def weight(self) -> Tensor:
        """The matrix as float32, made anew.  # [output, input]"""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self.packed.unpack()[0].dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        wide = x.float()
        if x.numel() == x.shape[-1]:
            return int8_product(wide, self.packed, False).to(x.dtype)
        size = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_ROW)
        out, bias = int8_product(wide / size, self.packed, False), self.bias
        return (out * size if bias is None else (out - bias).mul_(size).add_(bias)).to(x.dtype)


class RangedInt8Linear(Int8Linear):
    """An `Int8Linear` that knows the range of its inputs; what lies outside is clipped."""

    def __init__(self, packed: Any, inputs: InputRange, bias: Tensor | None = None) -> None:
        super().__init__(packed, bias)
        self.inputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return ranged_product(x.float(), self.inputs.scale, self.inputs.zero, self.packed).to(x.dtype)


def prepacked(rounded: Tensor, scale: Tensor, bias: Tensor | None = None, kernels: str = FEW_ROWS) -> Any:
    """An int8 matrix and its scale a row, laid out for the kernels.  # [output, input], [output]"""
    zeros = torch.zeros(len(rounded), dtype=torch.long)
    bias = None if bias is None else bias.float()
    with quantised_kernels.held(kernels):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors are to go; their kernels have no heir yet
            quantised = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, bias)


def to_int8(module: nn.Module) -> None:
    """Round every `Linear` below a module, in place. Nothing is left to train or to move to another device."""
    for name, child in module.named_children():
        if type(child) is Linear:
            setattr(module, name, Int8Linear.of(child))
        else:
            to_int8(child)
