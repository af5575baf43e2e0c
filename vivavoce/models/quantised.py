"""Quantised matrices in safetensors files: two formats, both described in the file's metadata.

*Quantised* files (`viva quantize`) store each matrix under its published name, with separate tensors for scales and
offsets, and are loaded as quantised layers. *Packed* files (bundled checkpoints) store matrices as int8 or fewer bits
with a scale per row, and are converted to floats on loading.
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
    """The file metadata that describes these matrices."""
    tensors = {name: _entry(weight) for name, weight in weights.items()}
    return {QUANTISED: json.dumps({"version": VERSION, "tensors": tensors})}


def tensors_of(name: str, weight: QuantisedWeight) -> dict[str, Tensor]:
    """The stored tensors of one matrix."""
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
    """The quantised matrices of a file and how to read them."""

    def __init__(self, metadata: Mapping[str, str], file: Path) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        if QUANTISED not in metadata:
            return
        try:
            manifest = json.loads(metadata[QUANTISED])
            version, self._entries = manifest["version"], manifest["tensors"]
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
                f"{file} has matrices as {', '.join(map(str, unknown))}, which this vivavoce cannot read"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def is_companion(self, name: str) -> bool:
        """Whether a tensor is a scale or offset of a quantised matrix."""
        owner = name.removesuffix(SCALE).removesuffix(OFFSET)
        return owner != name and owner in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the float matrix."""
        return tuple(self._entries[name]["shape"])

    def reader(self, name: str, names: set[str], read: Read) -> ReadQuantised:
        """A function that reads one matrix as stored."""
        entry = self._entries[name]
        span = InputRange(*entry["input"]) if "input" in entry else None

        def read_quantised() -> QuantisedWeight:
            scale, offset = (read(name + part) if name + part in names else None for part in (SCALE, OFFSET))
            return QuantisedWeight(entry["scheme"], read(name), scale, offset, entry.get("activations", "float"), span)

        return read_quantised


@torch.no_grad()
def install(module: nn.Module, quantised: Mapping[str, ReadQuantised], tensor: Callable[[str], Tensor]) -> set[str]:
    """Replace linear layers whose matrices are quantised; returns the published names of the tensors that were used.

    `tensor` reads any other tensor by its published name. Other layers created without memory are allocated.
    """
    device = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), torch.device("cpu"))
    installed: set[str] = set()
    widened = False
    for parent, child_name, prefix, linear in list(linears(module)):
        names = weight_names(linear, prefix)
        layer = _layer(linear, names, quantised, tensor, device)
        if layer is not None:
            setattr(parent, child_name, layer)
            installed.update(names, _bias_names(linear, names))
        elif linear.weight.is_meta:
            _allocate(linear, device)
        widened = widened or (layer is None and all(name in quantised for name in names))
    if widened:
        warnings.warn(
            f"some quantised matrices have no kernel on {device} and were converted to floats: they use full memory",
            stacklevel=3,
        )
    return installed


def linears(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, str, Linear | nn.Linear]]:
    """Parent, attribute, prefix of the published names, and layer of every linear below a module."""
    for name, child in module.named_children():
        if type(child) is Linear or type(child) is nn.Linear:
            yield module, name, f"{prefix}{name}.", child
        elif type(child) is PackedLinear:
            yield module, name, prefix, child
        else:
            yield from linears(child, f"{prefix}{name}.")


def weight_names(linear: Linear | nn.Linear, prefix: str) -> list[str]:
    """The published names of the matrices that a layer stacks."""
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
    """The quantised layer; None if its parts are stored differently or a plain layer is better."""
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
        layer = torch.empty(empty.shape, dtype=empty.dtype, device=device)
        setattr(linear, name, nn.Parameter(layer, requires_grad=False))


PACKING = "vivavoce.packing"  # key in the file's metadata
LOW_BITS = "vivavoce.packing.narrow"  # bits and shapes of matrices with fewer than eight bits
ROWS = "int8-rows"
PACKED_SCALE = "::scale"
MIN_MATRIX_SIZE = 4096
MAX_FLOAT16 = 65504.0
MIN_ROW_LENGTH = 64  # of a last axis with its own scales at fewer than eight bits


class PackedMatrix(NamedTuple):
    """Bits and shape of a matrix stored as a bit string."""

    bits: int
    shape: tuple[int, ...]


def pack_file(
    source: str | Path, target: str | Path, keep: Sequence[str] = (), low_bits: Mapping[str, int] | None = None
) -> None:
    """Pack a safetensors file: float16 where a pattern of `keep` matches, else bits by pattern, else 8."""
    packed: dict[str, Tensor] = {}
    low_bit: dict[str, PackedMatrix] = {}
    for name, tensor in load_file(str(source)).items():
        bits = next((bits for pattern, bits in (low_bits or {}).items() if re.search(pattern, name)), 8)
        if not is_matrix(tensor) or any(re.search(pattern, name) for pattern in keep):
            packed[name] = _to_float16(tensor)
        elif bits == 8:
            packed |= _pack_int8(name, tensor.float())
        else:
            packed |= _pack_low_bits(name, tensor.float(), bits)
            low_bit[name] = PackedMatrix(bits, tuple(tensor.shape))
    metadata = {PACKING: ROWS} | ({LOW_BITS: json.dumps(low_bit)} if low_bit else {})
    save_file(packed, str(target), metadata=metadata)


def is_packed(folder: str | Path) -> bool:
    """Whether a folder has packed weights."""
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get(PACKING):
                return True
    return False


def low_bit_matrices(metadata: Mapping[str, str]) -> dict[str, PackedMatrix]:
    """Matrices of a file with fewer than eight bits, by name."""
    return {
        name: PackedMatrix(bits, tuple(shape))
        for name, (bits, shape) in json.loads(metadata.get(LOW_BITS, "{}")).items()
    }


def widen(tensor: Tensor, scale: Tensor | None, low_bits: PackedMatrix | None = None) -> Tensor:
    """A packed tensor as float32."""
    if low_bits is not None:
        assert scale is not None
        whole = _unpack_low_bits(tensor, low_bits).view(len(scale), -1).float()
        return (whole * scale.float()[:, None]).view(low_bits.shape)
    if scale is not None:
        return tensor.float() * _broadcast_scale(scale, tensor)
    return tensor.float() if tensor.is_floating_point() else tensor


def whole_numbers(
    tensor: Tensor, scale: Tensor | None, low_bits: PackedMatrix | None = None
) -> tuple[Tensor, Tensor] | None:
    """The int8 levels and per-row scales of a packed matrix; None if it has no such form.

    # [output, input], [output]
    """
    shape = tensor.shape if low_bits is None else low_bits.shape
    if scale is None or len(shape) != 2 or len(scale) != shape[0] or not torch.isfinite(scale).all():
        return None
    numbers = tensor if low_bits is None else _unpack_low_bits(tensor, low_bits).view(shape).to(torch.int8)
    return numbers, scale.float()


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix large enough to quantise."""
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor.numel() >= MIN_MATRIX_SIZE


def _to_float16(tensor: Tensor) -> Tensor:
    fits = tensor.is_floating_point() and (tensor.numel() == 0 or tensor.abs().max() < MAX_FLOAT16)
    return tensor.half().contiguous() if fits else tensor.contiguous()


def _pack_int8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    scale = tensor.flatten(1).abs().amax(dim=1).clamp_min(1e-8) / 127
    rounded = (tensor / _broadcast_scale(scale, tensor)).round().clamp(-127, 127).to(torch.int8)
    return {name: rounded.contiguous(), name + PACKED_SCALE: scale}


def _pack_low_bits(name: str, tensor: Tensor, bits: int) -> dict[str, Tensor]:
    """Unsigned levels as a gapless bit string, with float16 scales per row."""
    numbers, scale = _rounded_rows(tensor, bits)
    bits_of_levels = np.unpackbits((numbers + _max_level(bits)).to(torch.uint8).numpy().reshape(-1, 1), axis=1)[
        :, 8 - bits :
    ]
    return {name: torch.from_numpy(np.packbits(bits_of_levels)), name + PACKED_SCALE: scale}


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """A matrix rounded to fewer than eight bits, as `widen` returns it."""
    numbers, scale = _rounded_rows(tensor, bits)
    return (numbers * scale.float()[:, None]).view(tensor.shape)


def _rounded_rows(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integer levels and the scale of each row.  # [row, column], [row] float16"""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] >= MIN_ROW_LENGTH else tensor.flatten(1)
    max_level = _max_level(bits)
    scale = (rows.abs().amax(dim=1) / max_level).clamp(1e-6, MAX_FLOAT16).half()
    return (rows / scale.float()[:, None]).round().clamp(-max_level, max_level), scale


def _max_level(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _unpack_low_bits(tensor: Tensor, low_bits: PackedMatrix) -> Tensor:
    bits, count = low_bits.bits, math.prod(low_bits.shape)
    bits_of_levels = np.unpackbits(tensor.numpy(), count=count * bits).reshape(-1, bits)
    numbers = np.packbits(bits_of_levels, axis=1)[:, 0] >> (8 - bits)
    return torch.from_numpy(numbers.astype(np.int16) - _max_level(bits))


def _broadcast_scale(scale: Tensor, tensor: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (tensor.ndim - 1))
