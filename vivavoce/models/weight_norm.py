"""Weight norm in both published spellings, folded into plain weights while a checkpoint is read."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint

SPELLINGS = ((".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1"))


class _Pair(NamedTuple):
    weight: str
    magnitude: str
    direction: str


def folded_weight(magnitude: Tensor, direction: Tensor) -> Tensor:
    """magnitude · direction / ‖direction‖, the norm taken over the dimensions that the magnitude does not have."""
    dims = [dim for dim, size in enumerate(magnitude.shape) if size == 1]
    exact = direction.float()
    folded: Tensor = magnitude.float() * exact / torch.linalg.vector_norm(exact, dim=dims, keepdim=True)
    return folded.to(direction.dtype)


class FoldedCheckpoint(Checkpoint):
    """A checkpoint whose weight-normed pairs appear as `….weight`; each is folded when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.source = checkpoint.source
        self._stack = ExitStack()
        self._stack.callback(checkpoint.close)
        self._tensors: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in checkpoint.names():
            pair = _pair(name)
            if pair is None:
                self._add(name, checkpoint.shapes[name], partial(checkpoint.tensor, name), checkpoint.source)
            elif name == pair.direction:
                read = partial(_read_folded, checkpoint, pair)
                self._add(pair.weight, checkpoint.shapes[name], read, checkpoint.source)
            if pair is not None:
                _require(pair.magnitude, name, checkpoint)
                _require(pair.direction, name, checkpoint)


def fold_weight_norm(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain weights in place of weight-normed pairs. Closing it closes the one it was made of."""
    return FoldedCheckpoint(checkpoint)


def _read_folded(checkpoint: Checkpoint, pair: _Pair) -> Tensor:
    return folded_weight(checkpoint.tensor(pair.magnitude), checkpoint.tensor(pair.direction))


def _pair(name: str) -> _Pair | None:
    for magnitude, direction in SPELLINGS:
        for ending in (magnitude, direction):
            if name.endswith(ending):
                module = name.removesuffix(ending)
                return _Pair(module + ".weight", module + magnitude, module + direction)
    return None


def _require(partner: str, name: str, checkpoint: Checkpoint) -> None:
    if partner not in checkpoint:
        raise CheckpointError(f"{checkpoint.source} has {name} but not {partner}, its other half; fetch it again")
