"""Quantised matrices in safetensors files, and into modules: each keeps its published name, its scales stand beside it.

The file's metadata says how each matrix was rounded, so a file can be read without the manifest of its folder.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vivavoce.errors import CheckpointError
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.quantised import quantised_linear
from vivavoce.nn.quantised_weight import SCHEMES, InputRange, QuantisedWeight

QUANTISED = "vivavoce.quantised"  # key in the file's metadata
VERSION = 1
SCALE, OFFSET = "::scale", "::offset"
Read = Callable[[str], Tensor]
ReadQuantised = Callable[[], QuantisedWeight]


def described(weights: Mapping[str, QuantisedWeight]) -> dict[str, str]:
    """The metadata that tells how these matrices are kept."""
    tensors = {name: _entry(weight) for name, weight in weights.items()}
    return {QUANTISED: json.dumps({"version": VERSION, "tensors": tensors})}


def tensors_of(name: str, weight: QuantisedWeight) -> dict[str, Tensor]:
    """What a file holds of one matrix."""
    named = {"data": name, "scale": name + SCALE, "offset": name + OFFSET}
    return {named[part]: tensor.contiguous() for part, tensor in weight.parts().items()}


def _entry(weight: QuantisedWeight) -> dict[str, Any]:
    entry: dict[str, Any] = {"scheme": weight.scheme, "shape": [weight.outputs, weight.inputs]}
    if weight.activations != "float":
        entry["activations"] = weight.activations
    if weight.input_range is not None:
        entry["input"] = [weight.input_range.scale, weight.input_range.zero]
    return entry


class QuantisedNames:
    """Which tensors of a file are quantised matrices, and how to read them."""

    def __init__(self, metadata: Mapping[str, str], file: Path) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        if QUANTISED not in metadata:
            return
        try:
            said = json.loads(metadata[QUANTISED])
            version, self._entries = said["version"], said["tensors"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file} does not say how it was quantised ({error}); quantise the model again"
            ) from error
        if version != VERSION:
            raise CheckpointError(
                f"{file} was quantised in format {version}, and this vivavoce reads format {VERSION}: "
                "use the version that its quantisation.json names, or quantise the model again"
            )
        unknown = {entry.get("scheme") for entry in self._entries.values()} - set(SCHEMES)
        if unknown:
            raise CheckpointError(
                f"{file} holds matrices as {', '.join(map(str, unknown))}, which this vivavoce cannot"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def is_companion(self, name: str) -> bool:
        """Whether a tensor only belongs to a quantised matrix."""
        owner = name.removesuffix(SCALE).removesuffix(OFFSET)
        return owner != name and owner in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the float matrix."""
        return tuple(self._entries[name]["shape"])

    def reader(self, name: str, names: set[str], read: Read) -> ReadQuantised:
        """How to read one matrix as it is kept."""
        entry = self._entries[name]
        span = InputRange(*entry["input"]) if "input" in entry else None

        def read_quantised() -> QuantisedWeight:
            scale, offset = (read(name + part) if name + part in names else None for part in (SCALE, OFFSET))
            return QuantisedWeight(entry["scheme"], read(name), scale, offset, entry.get("activations", "float"), span)

        return read_quantised


@torch.no_grad()
def install(module: nn.Module, quantised: Mapping[str, ReadQuantised], tensor: Callable[[str], Tensor]) -> set[str]:
    """Put quantised layers in the place of those whose matrices are; which names that settles.

    `tensor` reads any other tensor by its published name. Layers that were made without memory are given some.
    """
    device = next((held.device for held in module.parameters() if not held.is_meta), torch.device("cpu"))
    settled: set[str] = set()
    widened = False
    for parent, child_name, prefix, linear in list(linears(module)):
        names = weight_names(linear, prefix)
        made = _layer(linear, names, quantised, tensor, device)
        if made is not None:
            setattr(parent, child_name, made)
            settled.update(names, _bias_names(linear, names))
        elif linear.weight.is_meta:
            _allocate(linear, device)
        widened = widened or (made is None and all(name in quantised for name in names))
    if widened:
        warnings.warn(
            f"some quantised matrices have no kernel on {device} and were widened to floats: right, but no smaller",
            stacklevel=3,
        )
    return settled


def linears(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, str, Linear | nn.Linear]]:
    """Parent, attribute, the prefix of its published names, and layer of every linear below a module."""
    for name, child in module.named_children():
        if type(child) is Linear or type(child) is nn.Linear:
            yield module, name, f"{prefix}{name}.", child
        elif type(child) is PackedLinear:
            yield module, name, prefix, child
        else:
            yield from linears(child, f"{prefix}{name}.")


def weight_names(linear: Linear | nn.Linear, prefix: str) -> list[str]:
    """The published names of the matrices a layer holds, one below another."""
    parts = [f"{part}." for part in linear.parts] if isinstance(linear, PackedLinear) else [""]
    return [f"{prefix}{part}weight" for part in parts]


def _bias_names(linear: Linear | nn.Linear, names: list[str]) -> list[str]:
    return [] if linear.bias is None else [f"{name.removesuffix('weight')}bias" for name in names]


def _layer(
    linear: Linear | nn.Linear,
    names: list[str],
    quantised: Mapping[str, ReadQuantised],
    tensor: Callable[[str], Tensor],
    device: torch.device,
) -> nn.Module | None:
    """The quantised layer; None where its parts are kept in different ways or a plain one is better."""
    if not all(name in quantised for name in names):
        return None
    weight = QuantisedWeight.joined([quantised[name]() for name in names])
    if weight is None:
        return None
    biases = [tensor(name) for name in _bias_names(linear, names)]
    bias = torch.cat(biases).to(device) if biases else None
    return quantised_linear(weight.to(device), bias, linear.weight.dtype)


def _allocate(linear: Linear | nn.Linear, device: torch.device) -> None:
    for name, empty in list(linear.named_parameters()):
        made = torch.empty(empty.shape, dtype=empty.dtype, device=device)
        setattr(linear, name, nn.Parameter(made, requires_grad=False))


PACKING = "vivavoce.packing"  # key in the file's metadata
NARROW = "vivavoce.packing.narrow"  # and where fewer bits than eight are used, which, and of what shape
ROWS = "int8-rows"
PACKED_SCALE = "::scale"
SMALLEST_MATRIX = 4096
LARGEST_HALF = 65504.0
SHORTEST_ROW = 64  # a last axis as long as this has scales of its own when bits are few


class PackedMatrix(NamedTuple):
    """A matrix of fewer bits, as a row of bytes."""

    bits: int
    shape: tuple[int, ...]


def pack_file(
    source: str | Path, target: str | Path, keep: Sequence[str] = (), narrow: Mapping[str, int] | None = None
) -> None:
    """Write a safetensors file small: float16 where a pattern of `keep` is in the name, else bits by pattern, or 8."""
    packed: dict[str, Tensor] = {}
    fewer: dict[str, PackedMatrix] = {}
    for name, tensor in load_file(str(source)).items():
        bits = next((bits for pattern, bits in (narrow or {}).items() if re.search(pattern, name)), 8)
        if not is_matrix(tensor) or any(re.search(pattern, name) for pattern in keep):
            packed[name] = _halved(tensor)
        elif bits == 8:
            packed |= _in_bytes(name, tensor.float())
        else:
            packed |= _in_bits(name, tensor.float(), bits)
            fewer[name] = PackedMatrix(bits, tuple(tensor.shape))
    metadata = {PACKING: ROWS} | ({NARROW: json.dumps(fewer)} if fewer else {})
    save_file(packed, str(target), metadata=metadata)


def is_packed(folder: str | Path) -> bool:
    """Whether some weights of a folder were packed."""
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get(PACKING):
                return True
    return False


def narrow_matrices(metadata: Mapping[str, str]) -> dict[str, PackedMatrix]:
    """What a file has in fewer bits than eight, by name."""
    return {
        name: PackedMatrix(bits, tuple(shape)) for name, (bits, shape) in json.loads(metadata.get(NARROW, "{}")).items()
    }


def widen(tensor: Tensor, scale: Tensor | None, narrow: PackedMatrix | None = None) -> Tensor:
    """A packed tensor as float32."""
    if narrow is not None:
        assert scale is not None
        whole = _from_bits(tensor, narrow).view(len(scale), -1).float()
        return (whole * scale.float()[:, None]).view(narrow.shape)
    if scale is not None:
        return tensor.float() * _beside(scale, tensor)
    return tensor.float() if tensor.is_floating_point() else tensor


def whole_numbers(
    tensor: Tensor, scale: Tensor | None, narrow: PackedMatrix | None = None
) -> tuple[Tensor, Tensor] | None:
    """The int8 numbers and the scale a row that a packed matrix is the product of; None where it is no such product.

    # [output, input], [output]
    """
    shape = tensor.shape if narrow is None else narrow.shape
    if scale is None or len(shape) != 2 or len(scale) != shape[0] or not torch.isfinite(scale).all():
        return None
    numbers = tensor if narrow is None else _from_bits(tensor, narrow).view(shape).to(torch.int8)
    return numbers, scale.float()


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is large enough to be rounded."""
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor.numel() >= SMALLEST_MATRIX


def _halved(tensor: Tensor) -> Tensor:
    fits = tensor.is_floating_point() and (tensor.numel() == 0 or tensor.abs().max() < LARGEST_HALF)
    return tensor.half().contiguous() if fits else tensor.contiguous()


def _in_bytes(name: str, tensor: Tensor) -> dict[str, Tensor]:
    scale = tensor.flatten(1).abs().amax(dim=1).clamp_min(1e-8) / 127
    rounded = (tensor / _beside(scale, tensor)).round().clamp(-127, 127).to(torch.int8)
    return {name: rounded.contiguous(), name + PACKED_SCALE: scale}


def _in_bits(name: str, tensor: Tensor, bits: int) -> dict[str, Tensor]:
    """Rows with float16 scales, their numbers, made positive, one behind the other without gaps."""
    numbers, scale = _rounded_rows(tensor, bits)
    spread = np.unpackbits((numbers + _largest(bits)).to(torch.uint8).numpy().reshape(-1, 1), axis=1)[:, 8 - bits :]
    return {name: torch.from_numpy(np.packbits(spread)), name + PACKED_SCALE: scale}


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """A matrix as it comes back from so many bits, fewer than eight."""
    numbers, scale = _rounded_rows(tensor, bits)
    return (numbers * scale.float()[:, None]).view(tensor.shape)


def _rounded_rows(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers of so many bits, and the scale of each row.  # [row, place], [row] float16"""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] >= SHORTEST_ROW else tensor.flatten(1)
    largest = _largest(bits)
    scale = (rows.abs().amax(dim=1) / largest).clamp(1e-6, LARGEST_HALF).half()
    return (rows / scale.float()[:, None]).round().clamp(-largest, largest), scale


def _largest(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _from_bits(tensor: Tensor, narrow: PackedMatrix) -> Tensor:
    bits, count = narrow.bits, math.prod(narrow.shape)
    spread = np.unpackbits(tensor.numpy(), count=count * bits).reshape(-1, bits)
    numbers = np.packbits(spread, axis=1)[:, 0] >> (8 - bits)
    return torch.from_numpy(numbers.astype(np.int16) - _largest(bits))


def _beside(scale: Tensor, tensor: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (tensor.ndim - 1))
