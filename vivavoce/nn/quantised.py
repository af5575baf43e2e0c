"""Linear layers on quantised matrices, called as `Linear` is; `quantised_linear` picks the fastest for a device.

On CUDA small batches go through kernels that read the quantised weights directly; large batches, and devices without
such kernels, multiply by the dequantised matrix. Choices for CPUs are by measurement, see docs/quantisation.md.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.cpu_speed import has_products_in, is_int8_fast, weight_only_rows
from vivavoce.nn.linear import Linear
from vivavoce.nn.process_settings import quantised_kernels
from vivavoce.nn.quantised_weight import CASTS, InputRange, QuantisedWeight, interleaved, quantise, unpacked

SMALLEST_ROW = 1e-20
# int8 products on x86: FBGEMM is fastest for one and two rows, oneDNN from eight rows on (2.7 times at 256).
INT8_SMALL_BATCH, MANY_ROWS = "fbgemm", "onednn"
# The bare operators: the wrapper of torch.ops takes a third of the time of a small product.
int8_product: Callable[[Tensor, Any, bool], Tensor] = torch.ops.quantized.linear_dynamic.default._op
ranged_product: Callable[[Tensor, float, int, Any], Tensor] = (
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
)


class Int8Linear(nn.Module):
    """`x @ weight.T + bias` in float32, by int8 products."""

    def __init__(self, packed: Any, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias  # also in `packed`, but reading it there unpacks the whole matrix

    @classmethod
    def of(cls, linear: Linear) -> "Int8Linear":
        """A linear layer rounded to int8."""
        return cls.of_weight(linear.weight, linear.bias)

    @classmethod
    @torch.no_grad()
    def of_weight(cls, weight: Tensor, bias: Tensor | None = None, kernels: str = INT8_SMALL_BATCH) -> "Int8Linear":
        """A matrix rounded to int8, for the kernels of small or large batches.  # weight [output, input]"""
        rounded = quantise(weight, "int8")
        assert rounded.scale is not None
        return cls(prepacked(rounded.data, rounded.scale, bias, kernels), None if bias is None else bias.float())

    @property
    def weight(self) -> Tensor:
        """The dequantised matrix, float32.  # [output, input]"""
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
    """An `Int8Linear` with a calibrated range of inputs; values outside are clipped."""

    def __init__(self, packed: Any, inputs: InputRange, bias: Tensor | None = None) -> None:
        super().__init__(packed, bias)
        self.inputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return ranged_product(x.float(), self.inputs.scale, self.inputs.zero, self.packed).to(x.dtype)


def prepacked(rounded: Tensor, scale: Tensor, bias: Tensor | None = None, kernels: str = INT8_SMALL_BATCH) -> Any:
    """An int8 matrix with a scale per row, packed for the kernels.  # [output, input], [output]"""
    zeros = torch.zeros(len(rounded), dtype=torch.long)
    bias = None if bias is None else bias.float()
    with quantised_kernels.held(kernels):
        with warnings.catch_warnings():
            # Quantised tensors are deprecated, without a replacement for these kernels.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, bias)


def to_int8(module: nn.Module) -> None:
    """Round every `Linear` of a module to int8, in place. It can then not be trained or moved to another device."""
    for name, child in module.named_children():
        if type(child) is Linear:
            setattr(module, name, Int8Linear.of(child))
        else:
            to_int8(child)


MIN_INT8_ROWS = 32  # of CUDA's int8 products; fewer rows would be padded
CPU_GROUPS = (32, 64, 128, 256)
CPU_ROW_BLOCK, CPU_COLUMN_BLOCK = 16, 32  # torch's weight-only kernels overrun matrices of other sizes


class QuantisedLinear(nn.Module):
    """Multiplies by the dequantised matrix; the base of the faster ones."""

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.like, self.dtype = quantised.to("meta"), dtype
        for name, part in quantised.parts().items():
            self.register_buffer(name, part, persistent=False)
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias is None else bias.to(dtype), persistent=False)

    @property
    def quantised(self) -> QuantisedWeight:
        """The quantised matrix, on the module's device."""
        return self.like.with_parts({name: getattr(self, name) for name in self.like.parts()})

    @property
    def weight(self) -> Tensor:
        """The dequantised matrix.  # [output, input]"""
        return self.quantised.dequantised(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        weight = self.quantised
        if weight.scale is None or weight.scale.ndim > 1 or x.dtype == torch.float16:
            return functional.linear(x, weight.dequantised(x.dtype), self._bias(x))
        # Scaling results instead of weights avoids a float32 copy of the matrix; in float16, sums could overflow.
        ordered = interleaved(x) if weight.is_interleaved else x
        out = functional.linear(ordered, weight.data.to(x.dtype)).float() * weight.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _bias(self, x: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias.to(x.dtype)


class CastLinear(QuantisedLinear):
    """A 16-bit product inside a float32 model."""

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        data: Tensor = self.data  # type: ignore[assignment]
        return functional.linear(x.to(data.dtype), data, self._bias(data)).to(x.dtype)


class CudaLinear(QuantisedLinear):
    """Quantised weights read by Triton kernels for small batches, dequantised for large ones."""

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(_with_pairs(quantised).for_tensor_cores(), bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        flat, weight, is_usable = x.flatten(0, -2), self.quantised, kernels.usable(x)
        tile = kernels.tile_for(weight, flat, gated=False) if is_usable else None
        if tile is not None:
            return kernels.small_batch_linear(flat, weight, self._bias(x), tile).unflatten(0, x.shape[:-1])
        if self.like.activations != "float" and flat.shape[0] >= MIN_INT8_ROWS and self.like.inputs % 16 == 0:
            return self._integer_product(x)
        if is_usable and kernels.is_supported(weight):
            return kernels.dequantised_linear(x, weight, self._bias(x))
        return super().forward(x)

    def _integer_product(self, x: Tensor) -> Tensor:
        """The product of rows rounded to int8, with a scale per row, by the int8 weights."""
        weight = self.quantised
        assert weight.scale is not None
        flat = (interleaved(x) if weight.is_interleaved else x).flatten(0, -2).float()
        scale = flat.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
        product = torch._int_mm((flat / scale).round().to(torch.int8), weight.data.T)
        out = (product.float() * scale * weight.scale).to(x.dtype).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias.to(x.dtype)


class CpuInt8WeightLinear(QuantisedLinear):
    """int8 weights and bfloat16 inputs."""

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(quantised, bias, dtype)
        # The kernel's scales are bfloat16, an error of up to 0.2 % per row; the true scales are applied afterwards.
        self.register_buffer("ones", torch.ones(quantised.outputs, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        flat = x.flatten(0, -2)
        if flat.shape[0] > weight_only_rows():
            return super().forward(x)
        out = torch._weight_int8pack_mm(flat.bfloat16().contiguous(), self.data, self.ones)  # type: ignore[arg-type]
        return _finished(out * self.scale, x, self.bias)  # type: ignore[operator]


class CpuInt4WeightLinear(QuantisedLinear):
    """int4 weights and bfloat16 inputs."""

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(quantised, bias, dtype)
        assert quantised.scale is not None
        assert quantised.offset is not None
        codes = unpacked(quantised.data).int()
        middle = quantised.offset.float() + 8 * quantised.scale.float()  # the value of code 8
        both = torch.stack([quantised.scale.float(), middle], dim=-1).transpose(0, 1).contiguous()
        self.register_buffer("packed_weight", torch._convert_weight_to_int4pack_for_cpu(codes, 1), persistent=False)
        self.register_buffer("scales_and_middles", both.bfloat16(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        flat = x.flatten(0, -2)
        if flat.shape[0] > weight_only_rows():
            return super().forward(x)
        out = torch._weight_int4pack_mm_for_cpu(
            flat.bfloat16().contiguous(),
            self.packed_weight,  # type: ignore[arg-type]
            self.like.group,
            self.scales_and_middles,  # type: ignore[arg-type]
        )
        return _finished(out, x, self.bias)


def _with_pairs(weight: QuantisedWeight) -> QuantisedWeight:
    """The weight with scales and offsets interleaved, as the kernels read them."""
    if weight.scale is None or weight.offset is None:
        return weight
    scale, offset = torch.stack([weight.scale.T, weight.offset.T], dim=-1).transpose(0, 1).unbind(-1)
    return weight.with_parts({"data": weight.data, "scale": scale, "offset": offset})


def _finished(out: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    shaped = out.to(x.dtype).view(*x.shape[:-1], -1)
    return shaped if bias is None else shaped + bias.to(x.dtype)


def quantised_linear(weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
    """The fastest layer for a matrix on its device; None where a `Linear` on the dequantised matrix is faster."""
    device = weight.data.device.type
    if weight.scheme in CASTS:
        stored = CASTS[weight.scheme]
        is_widened = dtype == stored or (device == "cpu" and not has_products_in(stored))
        return None if is_widened else CastLinear(weight, bias, dtype)
    if device == "cuda":
        return CudaLinear(weight, bias, dtype)
    return _cpu_linear(weight, bias, dtype) if device == "cpu" else None


def _cpu_linear(weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> nn.Module | None:
    if weight.scheme == "int8" and weight.activations != "float":
        return _integer_linear(weight, bias)
    is_even = weight.outputs % CPU_ROW_BLOCK == 0 and weight.inputs % CPU_COLUMN_BLOCK == 0
    if weight.scheme == "int8":
        return (CpuInt8WeightLinear if is_even else QuantisedLinear)(weight, bias, dtype)
    if weight.scheme == "int4" and weight.group in CPU_GROUPS and is_even:
        return CpuInt4WeightLinear(weight, bias, dtype)
    return None


def _integer_linear(weight: QuantisedWeight, bias: Tensor | None) -> nn.Module | None:
    if not is_int8_fast():
        return None
    assert weight.scale is not None
    packed = prepacked(weight.data, weight.scale, bias)
    bias = None if bias is None else bias.float()
    return (
        Int8Linear(packed, bias) if weight.input_range is None else RangedInt8Linear(packed, weight.input_range, bias)
    )


def project(linear: nn.Module, x: Tensor, gated: bool = False) -> Tensor:
    """`linear(x)`; gated, `silu(first half) * second half` of it.  # [row, input] → [row, output]"""
    weight = _weight(linear, x)
    tile = None if weight is None else kernels.tile_for(weight, x, gated)
    if weight is not None and tile is not None:
        return kernels.small_batch_linear(x, weight, linear.bias, tile, gated)  # type: ignore[arg-type]
    out: Tensor = linear(x)
    return _gate(out) if gated else out


def _weight(linear: nn.Module, x: Tensor) -> Tensor | QuantisedWeight | None:
    """The matrix for a kernel to read instead of calling the layer; None: it has hooks or needs a gradient."""
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
