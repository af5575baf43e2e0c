"""Weights made small for shipping: matrices as int8 with a scale a row, the rest as float16; widened when read.

This is about the size of files only. Models run on them in the dtype they are loaded with.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKING = "vivavoce.packing"  # key in the file's metadata
ROWS = "int8-rows"
SCALE = "::scale"
SMALLEST_MATRIX = 4096
LARGEST_HALF = 65504.0


def pack_file(source: str | Path, target: str | Path, keep: Sequence[str] = ()) -> None:
    """Write a safetensors file small. Names that match a pattern of `keep` stay float16."""
    packed: dict[str, Tensor] = {}
    for name, tensor in load_file(str(source)).items():
        packed |= _pack(name, tensor, any(re.search(pattern, name) for pattern in keep))
    save_file(packed, str(target), metadata={PACKING: ROWS})


def is_packed(folder: str | Path) -> bool:
    """Whether some weights of a folder were packed."""
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get(PACKING):
                return True
    return False


def _pack(name: str, tensor: Tensor, keep: bool) -> dict[str, Tensor]:
    if not tensor.is_floating_point():
        return {name: tensor}
    tensor = tensor.float()
    if tensor.ndim > 1 and tensor.numel() >= SMALLEST_MATRIX and not keep:
        scale = tensor.flatten(1).abs().amax(dim=1).clamp_min(1e-8) / 127
        rounded = (tensor / _beside(scale, tensor)).round().clamp(-127, 127).to(torch.int8)
        return {name: rounded.contiguous(), name + SCALE: scale}
    fits = tensor.numel() == 0 or tensor.abs().max() < LARGEST_HALF
    return {name: tensor.half().contiguous() if fits else tensor.contiguous()}


def widen(tensor: Tensor, scale: Tensor | None) -> Tensor:
    """A packed tensor as float32."""
    if scale is not None:
        return tensor.float() * _beside(scale, tensor)
    return tensor.float() if tensor.is_floating_point() else tensor


def _beside(scale: Tensor, tensor: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (tensor.ndim - 1))
