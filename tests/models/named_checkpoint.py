"""A published checkpoint whose tensors are made from their names, one at a time, when they are asked for."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.golden import weights
from vivavoce.models.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"


class NamedCheckpoint(Checkpoint):
    """The names and shapes of a key list; what is a constant and not a weight comes from `constant(name, shape)`."""

    def __init__(self, keys: str, seed: int, constant: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        self.source = GOLDEN / "keys" / keys
        self._stack = ExitStack()
        self.shapes = weights.shapes(self.source)
        self._tensors = {
            name: partial(constant if weights.is_constant(name) else partial(_made, seed), name, shape)
            for name, shape in self.shapes.items()
        }


def _made(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(weights.tensor(name, shape, seed))
