"""Kernels compiled for GPUs that are not there: launches on tensors without memory end at Triton's compiler."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from vivavoce.kernels.tiles import LARGE_SHARED_MEMORY

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that a program may have, by compute capability (CUDA C++ Programming Guide)."""


class FakeDriver:
    """A driver of Triton for a GPU of this compute capability."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._capability, self._target = capability, GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, int]]]:
    """Compile launches on `meta` tensors for a GPU of this capability; their names and bytes of shared memory."""
    import triton
    from triton.runtime.jit import KernelInterface, MockTensor

    compiled: list[tuple[str, int]] = []

    def mocked(value: object) -> object:
        return MockTensor(value.dtype, list(value.shape)) if isinstance(value, torch.Tensor) else value

    def compile_launch(self: Any, grid: object) -> Any:
        def launch(*args: object, **options: object) -> None:
            given = {name: mocked(value) for name, value in options.items()}
            kernel = self.run(*map(mocked, args), grid=grid, warmup=True, **given)
            compiled.append((self.fn.__name__, kernel.metadata.shared))

        return launch

    has_large_memory = mock.Mock(return_value=SHARED_BYTES[capability] >= LARGE_SHARED_MEMORY)
    has_dependent_launch = mock.Mock(return_value=capability >= 90)
    with (
        mock.patch.object(triton.runtime.driver, "_active", FakeDriver(capability)),
        mock.patch.object(KernelInterface, "__getitem__", compile_launch),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)),
        mock.patch("vivavoce.kernels.tiles.has_large_shared_memory", has_large_memory),
        mock.patch("vivavoce.kernels.dependent_launch.is_dependent", has_dependent_launch),
        mock.patch("vivavoce.kernels.row_linear.is_dependent", has_dependent_launch),
    ):
        yield compiled
