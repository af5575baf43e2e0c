"""Weights made small for shipping: matrices as int8 or fewer bits with scales, the rest as float16; widened when read.

This is about the size of files only. Models run on them in the dtype they are loaded with.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKING = "vivavoce.packing"  # key in the file's metadata
NARROW = "vivavoce.packing.narrow"  # and where fewer bits than eight are used, which, and of what shape
ROWS = "int8-rows"
SCALE = "::scale"
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
    return {name: rounded.contiguous(), name + SCALE: scale}


def _in_bits(name: str, tensor: Tensor, bits: int) -> dict[str, Tensor]:
    """Rows with float16 scales, their numbers, made positive, one behind the other without gaps."""
    numbers, scale = _rounded_rows(tensor, bits)
    spread = np.unpackbits((numbers + _largest(bits)).to(torch.uint8).numpy().reshape(-1, 1), axis=1)[:, 8 - bits :]
    return {name: torch.from_numpy(np.packbits(spread)), name + SCALE: scale}


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
