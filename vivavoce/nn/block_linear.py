"""Linear layers and embeddings whose weights stay in the block formats of GGUF files.

On CPUs the products are those of `vivavoce.kernels.cpu`, with inputs rounded to int8. Elsewhere the weights are
dequantised first.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import speed_ratio
from vivavoce.kernels import cpu
from vivavoce.nn.block_formats import FORMATS, BlockFormat, q5_0_as_q8_0

Q5_0, Q8_0 = 6, 8  # numbers of formats
BYTES_WORTH = 1.25  # speedup from which Q8_0 is worth half as much memory again


@dataclass(frozen=True)
class BlockMatrix:
    """A packed matrix."""

    data: Tensor  # [output, byte] uint8
    format: BlockFormat

    @property
    def inputs(self) -> int:
        """Weights in a row."""
        return self.data.shape[1] // self.format.bytes * self.format.weights

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.data.shape[0]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights.  # [output, input]"""
        return self.format.dequantised(self.data).to(dtype)

    def rows(self, indices: Tensor) -> "BlockMatrix":
        """Some rows, in this order."""
        return BlockMatrix(self.data[indices], self.format)


def fastest_on_cpu(matrix: BlockMatrix) -> BlockMatrix:
    """The same numbers in the format that this CPU multiplies fastest: Q5_0 as Q8_0 where that pays for its memory."""
    if matrix.format.number != Q5_0 or not cpu.is_available() or q8_0_speedup() < BYTES_WORTH:
        return matrix
    return BlockMatrix(q5_0_as_q8_0(matrix.data), FORMATS[Q8_0])


@cache
def q8_0_speedup() -> float:
    """Speedup of Q8_0 over Q5_0 on this CPU for one row, of matrices that leave the inner caches."""
    row, outputs, inputs = torch.ones(1, 1024), 2048, 1024
    packed, plain = (
        BlockLinear([BlockMatrix(torch.zeros(outputs, kind.row_bytes(inputs), dtype=torch.uint8), kind)])
        for kind in (FORMATS[Q5_0], FORMATS[Q8_0])
    )
    return speed_ratio(lambda: packed(row), lambda: plain(row))


class BlockLinear(nn.Module):
    """`x @ weight.T + bias`; several matrices of the same input, which may differ in format, are one layer."""

    bias: Tensor | None

    def __init__(self, matrices: Sequence[BlockMatrix], bias: Tensor | None = None) -> None:
        super().__init__()
        self.inputs = matrices[0].inputs
        self.formats = [matrix.format for matrix in matrices]
        for index, matrix in enumerate(matrices):
            self.register_buffer(f"data_{index}", matrix.data, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.outputs = sum(matrix.outputs for matrix in matrices)
        self._entries: ctypes.Array[cpu.Matrix] | None = None

    @property
    def matrices(self) -> list[BlockMatrix]:
        """The packed matrices."""
        return [BlockMatrix(getattr(self, f"data_{index}"), each) for index, each in enumerate(self.formats)]

    @property
    def weight(self) -> Tensor:
        """The dequantised matrix, float32.  # [output, input]"""
        return torch.cat([matrix.dequantised() for matrix in self.matrices])

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(matrix.data.nbytes for matrix in self.matrices)

    @property
    def entries(self) -> "ctypes.Array[cpu.Matrix]":
        """The matrices as the compiled kernels take them; they have the addresses of the weights."""
        if self._entries is None:
            self._entries = _entries(self.matrices, self.bias)
        return self._entries

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        if x.device.type == "cpu" and cpu.is_available():
            compiled = cpu.library()
            assert compiled is not None
            flat = x.reshape(-1, self.inputs).float().contiguous()
            rows, entries = flat.shape[0], self.entries
            out = torch.empty(rows, self.outputs)
            scratch = torch.empty(compiled.block_linear_scratch(self.inputs, rows), dtype=torch.uint8)
            addresses = flat.data_ptr(), self.inputs, rows, out.data_ptr(), scratch.data_ptr()
            compiled.block_linear(entries, len(entries), *addresses, torch.get_num_threads())
            return out.view(*x.shape[:-1], self.outputs).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entries": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._entries = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _entries(matrices: Sequence[BlockMatrix], bias: Tensor | None) -> "ctypes.Array[cpu.Matrix]":
    biases = [None] * len(matrices) if bias is None else bias.float().split([matrix.outputs for matrix in matrices])
    held = [(matrix.data.contiguous(), part) for matrix, part in zip(matrices, biases, strict=True)]
    entries = [
        cpu.Matrix(data.data_ptr(), None if part is None else part.data_ptr(), matrix.outputs, matrix.format.number)
        for (data, part), matrix in zip(held, matrices, strict=True)
    ]
    array = (cpu.Matrix * len(entries))(*entries)
    array._held = held  # type: ignore[attr-defined]  # what the addresses point to
    return array


class BlockEmbedding(nn.Module):
    """A packed table of vectors."""

    data: Tensor

    def __init__(self, matrix: BlockMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.dtype = matrix.format, dtype
        self.register_buffer("data", matrix.data, persistent=False)

    @property
    def matrix(self) -> BlockMatrix:
        """The packed table."""
        return BlockMatrix(self.data, self.format)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of these ids."""
        return self.format.dequantised(self.data[ids]).to(self.dtype)
