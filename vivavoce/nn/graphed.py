"""A function of tensors whose kernels are launched as one: captured once per key as a CUDA graph, then replayed."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vivavoce.nn.ahead import is_compiling_ahead
from vivavoce.nn.graph_capture import GraphCapture, Replayed

Key = TypeVar("Key", bound=Hashable)
Function = Callable[[Key, Sequence[Tensor]], tuple[Tensor, ...]]


class Graphed(Generic[Key]):
    """Calls of equal key must have tensors of equal shapes. The function may not wait for the device.

    The first call of a key runs it a few times and captures it, which takes some tenths of a second: serve one of each
    before anybody waits. Not on CUDA, or where capturing fails, the function is called as it is. Captures share their
    memory, so calls must follow one another on one stream.
    """

    def __init__(self, function: Function[Key]) -> None:
        self.function = function
        self._captured: dict[Key, tuple[Replayed, list[Tensor], tuple[Tensor, ...]]] = {}
        self.blank: dict[Key, tuple[Tensor, ...]] = {}
        """What keys give while kernels are only compiled: of these, all that is slow at first is done."""
        self._capture = GraphCapture()  # the same for all: memory is shared by what is on one stream

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    @property
    def captured(self) -> int:
        """How many keys have their graph."""
        return len(self._captured)

    def __call__(self, key: Key, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the function gives, in memory of the caller's own."""
        if not tensors[0].is_cuda:
            return self.function(key, tensors)
        if is_compiling_ahead():
            return self._compiled(key, tensors)
        if key not in self._captured:
            self.capture(key, tensors)
        graph, inputs, outputs = self._captured[key]
        for held, tensor in zip(inputs, tensors, strict=True):
            held.copy_(tensor)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def capture(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Make the graph of a key. If the function writes anywhere but to what it gives, it does so a few times."""
        if is_compiling_ahead():
            return
        with torch.inference_mode(False), torch.no_grad():  # whoever calls later may be in that mode or not
            inputs = [tensor.clone() for tensor in tensors]
        graph, outputs = self._capture(lambda: self.function(key, inputs))
        self._captured[key] = (graph, inputs, outputs)

    def _compiled(self, key: Key, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Zeros of the function's shapes, its kernels being compiled."""
        if key not in self.blank:
            self.blank[key] = tuple(torch.zeros_like(output) for output in self.function(key, tensors))
        return self.blank[key]
