"""Modules that TorchScript runs."""

import sys
import threading

import torch
from torch import Tensor, nn

from vivavoce.nn.modules import scripted


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_many_threads_compile_one_class_at_once():
    """TorchScript by itself fails: "Can't redefine method: forward"."""
    modules, compiled, together = [Stack() for _ in range(8)], {}, threading.Barrier(8)

    def compile_one(place: int) -> None:
        together.wait()
        compiled[place] = scripted(modules[place])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=compile_one, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    x = torch.randn(2, 4)
    assert sorted(compiled) == list(range(8))
    for place, module in enumerate(modules):
        torch.testing.assert_close(compiled[place](x), module(x))
