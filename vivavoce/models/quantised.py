"""Quantised matrices in safetensors files, and into modules: each keeps its published name, its scales stand beside it.

The file's metadata says how each matrix was rounded, so a file can be read without the manifest of its folder.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.quantised_linear import quantised_linear
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
