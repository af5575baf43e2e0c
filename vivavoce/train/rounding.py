"""Weights that learn as they will be shipped: matrices rounded to few bits in the forward pass, whole behind it.

What is learnt this way loses next to nothing when `models/packing.py` rounds it for good.
"""

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from vivavoce.models.packing import is_matrix, rounded


class Rounding:
    """The matrices of a module, rounded; what learns gets the gradient as if nothing had been."""

    def __init__(self, module: nn.Module, bits: int, wide: str | None = None) -> None:
        self.bits = bits
        named = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and is_matrix(parameter) and not (wide and re.search(wide, name))
        ]
        alike: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in named:
            # Matrices of one shape are rounded together; kernels of a convolution have rows of another kind.
            alike[tuple(parameter.shape) if parameter.ndim == 2 else (len(alike),)].append((name, parameter))
        self._alike = list(alike.values())

    def __call__(self, share: Tensor) -> dict[str, Tensor]:
        """By name, the matrices moved by this share of the way to what they are rounded to."""
        moved: dict[str, Tensor] = {}
        for group in self._alike:
            whole = torch.cat([parameter for _, parameter in group])
            changed = whole + share * (rounded(whole.detach(), self.bits) - whole.detach())
            moved.update(zip((name for name, _ in group), changed.split(len(group[0][1])), strict=True))
        return moved
