"""Linear layers that allocate without initialising, and one that packs several published matrices into one product."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_is_postponed = ContextVar("_is_postponed", default=False)


@contextmanager
def postponed() -> Iterator[None]:
    """`Linear`s made inside have no memory: a quantised checkpoint brings what takes their place."""
    before = _is_postponed.set(True)
    try:
        yield
    finally:
        _is_postponed.reset(before)


class Linear(nn.Module):
    """`x @ weight.T + bias`, its memory left unset until a checkpoint fills it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        place = "meta" if _is_postponed.get() else None
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=place), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, device=place), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Several published projections of the same input as one matrix, e.g. q, k and v, or gate and up."""

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = dict(parts)

    def published_tensors(self) -> dict[str, Tensor]:
        """`q_proj.weight` and so on, each a view of its rows in the packed matrix."""
        named: dict[str, Tensor] = {}
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                views = tensor.split(list(self.parts.values()))
                named |= {f"{part}.{kind}": view for part, view in zip(self.parts, views, strict=True)}
        return named


class Embedding(nn.Module):
    """A table of vectors, its memory left unset until a checkpoint fills it."""

    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of these ids."""
        return functional.embedding(ids, self.weight)
