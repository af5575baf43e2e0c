"""Quantised matrices: rounding, storage and dequantisation.

int8 and float8 have a scale per row. int4 has a scale and an offset for every group of columns in a row, and two codes
per byte. float16 and bfloat16 are casts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from vivavoce.errors import InputError

Scheme = Literal["int8", "int4", "float8", "float16", "bfloat16"]
Activations = Literal["float", "dynamic", "static"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
CASTS: dict[Scheme, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LARGEST = {"int8": 127.0, "int4": 15.0, "float8": 448.0}
BITS: dict[Scheme, int] = {"int8": 8, "int4": 4, "float8": 8, "float16": 16, "bfloat16": 16}
SMALLEST_SCALE = 1e-12
GROUP = 64  # columns that share a scale in int4
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)  # candidate shares of a group's range; values outside are clipped
LARGEST_HALF, SMALLEST_HALF = 65504.0, 6.2e-5
BLOCK = 2**24  # numbers rounded in one piece
INTERLEAVED_COLUMNS = 16  # of a block


@dataclass(frozen=True)
class InputRange:
    """The calibrated range of a layer's inputs: `value ≈ (rounded - zero) * scale`, with rounded in 0…255."""

    scale: float
    zero: int


@dataclass(frozen=True)
class QuantisedWeight:
    """A rounded matrix of `outputs` rows and `inputs` columns, and how its inputs are rounded."""

    scheme: Scheme
    data: Tensor  # [output, input]; in int4 two columns per byte, the first in the lower bits
    scale: Tensor | None = None  # [output], or [output, group] in int4
    offset: Tensor | None = None  # [output, group]
    activations: Activations = "float"
    input_range: InputRange | None = None
    is_interleaved: bool = False  # columns in the order of `interleaved`, in which tensor cores take them

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        """Columns."""
        return self.data.shape[1] * (2 if self.scheme == "int4" else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.inputs if self.scale is None or self.scale.ndim == 1 else self.inputs // self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and offsets."""
        return sum(part.nbytes for part in (self.data, self.scale, self.offset) if part is not None)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float matrix.  # [output, input]"""
        if self.scheme in CASTS:
            return self.data.to(dtype)
        assert self.scale is not None
        if self.scheme == "int4":
            assert self.offset is not None
            data = deinterleaved(self.data) if self.is_interleaved else self.data
            columns = unpacked(data).unflatten(1, (-1, self.group)).float()
            # In place: a copy of MOSS-Speech's largest matrix takes 0.4 GB.
            columns.mul_(self.scale.float()[..., None]).add_(self.offset.float()[..., None])
            return columns.flatten(1).to(dtype)
        data = deinterleaved(self.data) if self.is_interleaved else self.data
        return (data.float() * self.scale[:, None]).to(dtype)

    def for_tensor_cores(self) -> "QuantisedWeight":
        """The weight with its columns interleaved, where the kernels read it so."""
        columns = self.group // 2 if self.scheme == "int4" else self.inputs
        if self.is_interleaved or self.scheme in CASTS or columns % INTERLEAVED_COLUMNS:
            return self
        return replace(self, data=interleaved(self.data), is_interleaved=True)

    def to(self, device: torch.device | str) -> "QuantisedWeight":
        """A copy on another device."""
        return self.with_parts({name: part.to(device) for name, part in self.parts().items()})

    def with_parts(self, parts: Mapping[str, Tensor]) -> "QuantisedWeight":
        """The same format with other tensors."""
        scale, offset = parts.get("scale"), parts.get("offset")
        return replace(self, data=parts["data"], scale=scale, offset=offset)

    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        named = {"data": self.data, "scale": self.scale, "offset": self.offset}
        return {name: part for name, part in named.items() if part is not None}

    @classmethod
    def joined(cls, weights: Sequence["QuantisedWeight"]) -> "QuantisedWeight | None":
        """Matrices of the same input concatenated by rows; None if their formats differ."""
        first = weights[0]
        if any(_kind(weight) != _kind(first) for weight in weights):
            return None
        named = {name: torch.cat([weight.parts()[name] for weight in weights]) for name in first.parts()}
        return first.with_parts(named)


def _kind(weight: QuantisedWeight) -> tuple[object, ...]:
    dtypes = tuple(part.dtype for part in weight.parts().values())
    inputs = weight.inputs, weight.group, weight.is_interleaved
    return weight.scheme, *inputs, weight.activations, weight.input_range, dtypes


def interleaved(data: Tensor) -> Tensor:
    """Columns reordered in blocks of 16, so that the four that a thread feeds to a tensor core are adjacent.

    A thread holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a block.  # [.., column]
    """
    return data.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4).contiguous()


def deinterleaved(data: Tensor) -> Tensor:
    """The columns of `interleaved` in their first order.  # [.., column]"""
    return data.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4).contiguous()


def quantise(
    weight: Tensor,
    scheme: Scheme,
    group: int = GROUP,
    activations: Activations = "float",
    input_range: InputRange | None = None,
) -> QuantisedWeight:
    """Round a matrix.  # [output, input]"""
    weight = weight.detach().float()
    if not torch.isfinite(weight).all():
        raise InputError("the matrix holds NaN or infinite values; it cannot be quantised")
    if scheme in CASTS:
        if scheme == "float16" and weight.abs().max() > LARGEST_HALF:
            raise InputError(f"the matrix holds {weight.abs().max():.3g}, more than float16 can hold; use bf16")
        return QuantisedWeight(scheme, weight.to(CASTS[scheme]))
    if scheme == "int4":
        return _int4(weight, group_of(weight.shape[1], group))
    scale = row_scale(weight, LARGEST[scheme])
    scaled = weight / scale[:, None]
    if scheme == "float8":
        return QuantisedWeight(scheme, scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale)
    rounded = scaled.round().clamp(-127, 127).to(torch.int8)
    return QuantisedWeight(scheme, rounded, scale, activations=activations, input_range=input_range)


def from_integers(
    numbers: Tensor, scale: Tensor, scheme: Scheme, activations: Activations = "float", span: InputRange | None = None
) -> QuantisedWeight | None:
    """A matrix of integers with a scale per row, stored exactly; None if the scheme cannot.

    # numbers [output, input] int8, scale [output]
    """
    if scheme == "int8":
        return QuantisedWeight(scheme, numbers, scale, activations=activations, input_range=span)
    if scheme == "float8":
        data = numbers.float().to(torch.float8_e4m3fn)
        return QuantisedWeight(scheme, data, scale) if torch.equal(data.float(), numbers.float()) else None
    return None


def row_scale(weight: Tensor, largest: float) -> Tensor:
    """The quantisation step of each row.  # [output, ..] → [output]"""
    return weight.flatten(1).abs().amax(dim=1).clamp_min(SMALLEST_SCALE * largest) / largest


def group_of(inputs: int, wanted: int = GROUP) -> int:
    """The largest even number of columns, at most `wanted`, that divides a row."""
    fitting = [size for size in range(2, min(wanted, inputs) + 1, 2) if inputs % size == 0]
    if not fitting:
        raise InputError(f"a matrix of {inputs} columns cannot be stored in int4, which needs an even number; use int8")
    return fitting[-1]


def _int4(weight: Tensor, group: int) -> QuantisedWeight:
    columns = weight.unflatten(1, (-1, group))  # [output, group, column]
    dtype = _dtype_for(columns.amax(-1) - columns.amin(-1), columns.abs().amax())
    rows = max(1, BLOCK // weight.shape[1])
    blocks = [_int4_rows(block, dtype) for block in columns.split(rows)]
    codes, scale, offset = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return QuantisedWeight("int4", codes, scale, offset)


def _int4_rows(columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets: each group covers its range, or a smaller one if the error is smaller."""
    low, high = columns.amin(-1), columns.amax(-1)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.ones_like(low), torch.zeros_like(low)
    for share in SHRUNK:
        middle, half = (low + high) / 2, (high - low) / 2 * share
        scale = torch.where(high > low, 2 * half / LARGEST["int4"], 1.0).to(dtype).float()
        offset = (middle - half).to(dtype).float()
        error = (_on_grid(columns, scale, offset) * scale[..., None] + offset[..., None] - columns).square().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    codes = _on_grid(columns, best_scale, best_offset).flatten(1).to(torch.uint8)
    return packed(codes), best_scale.to(dtype), best_offset.to(dtype)


def _on_grid(columns: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((columns - offset[..., None]) / scale[..., None]).round().clamp(0, LARGEST["int4"])


def _dtype_for(ranges: Tensor, largest: Tensor) -> torch.dtype:
    """float16 if it represents the steps and offsets precisely enough, else float32."""
    steps = ranges[ranges > 0] * (SHRUNK[-1] / LARGEST["int4"])
    fits = not len(steps) or (bool(steps.min() >= SMALLEST_HALF) and bool(largest < LARGEST_HALF))
    return torch.float16 if fits else torch.float32


def packed(codes: Tensor) -> Tensor:
    """Pairs of 4-bit codes as bytes.  # [output, input] → [output, input / 2]"""
    pairs = codes.unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpacked(data: Tensor) -> Tensor:
    """The codes of bytes.  # [output, input / 2] → [output, input]"""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(1)
