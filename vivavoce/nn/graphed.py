"""A function of tensors whose kernels are launched as one: captured once per key as a CUDA graph, then replayed."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Function = Callable[[Key, Sequence[Tensor]], tuple[Tensor, ...]]


class Graphed(Generic[Key]):
    """Calls of equal key must have tensors of equal shapes. The function may not wait for the device.

    The first call of a key runs it a few times and captures it, which takes some tenths of a second: serve one of each
    before anybody waits. Not on CUDA, the function is called as it is.
    """

    def __init__(self, function: Function[Key]) -> None:
        self.function = function
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, key: Key, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the function gives, in memory of the caller's own."""
        if not tensors[0].is_cuda:
            return self.function(key, tensors)
        if key not in self._captured:
            self._captured[key] = self._capture(key, [tensor.clone() for tensor in tensors])
        graph, inputs, outputs = self._captured[key]
        for held, tensor in zip(inputs, tensors, strict=True):
            held.copy_(tensor)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def _capture(self, key: Key, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # libraries choose their kernels and workspaces in the first calls
                self.function(key, inputs)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self.function(key, inputs)
        return graph, inputs, outputs
