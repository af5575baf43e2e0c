"""A safetensors file written tensor by tensor, so that no more than one linear layer is ever in memory."""

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
}


@dataclass(frozen=True)
class Stored:
    """A tensor as the file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenTensor:
    """Tensors that are made together (codes and their scales), and how, once it is their turn to be written."""

    stored: tuple[Stored, ...]
    make: Callable[[], Sequence[Tensor]]


def write_tensor_file(file: Path, parts: Sequence[WrittenTensor]) -> int:
    """Write them in order and say how many bytes the file has."""
    header = _header(stored for part in parts for stored in part.stored)
    with file.open("wb") as opened:
        opened.write(header)
        for part in parts:
            for stored, tensor in zip(part.stored, part.make(), strict=True):
                if tuple(tensor.shape) != stored.shape or tensor.dtype != stored.dtype:
                    raise AssertionError(f"{stored} was made as {tuple(tensor.shape)} {tensor.dtype}")
                opened.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())
        return opened.tell()


def _header(tensors: Iterable[Stored]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for stored in tensors:
        if stored.name in described or offset % stored.dtype.itemsize:
            raise AssertionError(f"{stored} is there twice or would stand at the odd place {offset}")
        end = offset + stored.nbytes
        described[stored.name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
