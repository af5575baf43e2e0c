"""Finite scalar quantisation as a codebook: a lattice whose points are rows, so that the nearest row is a rounding.

Only the first few numbers of a feature choose its code: there each is squashed by tanh and rounded to 2, 3 or 4 levels.
A threshold of tanh(x) is a threshold of x, and with so few levels there are points with the thresholds half-way between
them: the same choice as that of the nearest row of a codebook that is zero elsewhere. So nothing of the ear's published
layout changes, while learning needs no clustering, no dead codes to revive and no average of rows.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vivavoce.errors import InputError

OUTER_THRESHOLD = math.atanh(2 / 3)  # of four levels: where tanh(x) · 3 passes from 1 to 3, half-way
POINTS = {
    2: (-1.0, 1.0),
    3: (-2 * math.atanh(1 / 2), 0.0, 2 * math.atanh(1 / 2)),
    4: (-1.5 * OUTER_THRESHOLD, -0.5 * OUTER_THRESHOLD, 0.5 * OUTER_THRESHOLD, 1.5 * OUTER_THRESHOLD),
}


class Lattice:
    """The codes of a product of a few levels."""

    def __init__(self, levels: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not levels or any(level not in POINTS for level in levels):
            raise InputError(f"a lattice takes 2, 3 or 4 levels a dimension, not {list(levels)}")
        self.levels = tuple(levels)
        self.size = math.prod(levels)
        self.dimensions = len(levels)
        self.spans = torch.tensor([level - 1.0 for level in levels], device=device)
        self.strides = torch.tensor([math.prod(levels[place + 1 :]) for place in range(len(levels))], device=device)

    def bounded(self, features: Tensor) -> Tensor:
        """What is rounded, each number between −1 and 1.  # [.., d_model] → [.., dimension]"""
        return features[..., : self.dimensions].float().tanh()

    def rounded(self, bounded: Tensor) -> Tensor:
        """The nearest level of each, −1 and 1 being the outermost; no gradient."""
        return self._steps(bounded) * 2 / self.spans - 1

    def straight_through(self, bounded: Tensor) -> Tensor:
        """Rounded, with the gradient of what was rounded."""
        return bounded + (self.rounded(bounded) - bounded).detach()

    def codes(self, features: Tensor) -> Tensor:
        """The code of each feature.  # [.., d_model] → [..]"""
        return (self._steps(self.bounded(features)).long() * self.strides).sum(-1)

    def values(self, codes: Tensor) -> Tensor:
        """The rounded levels that a code stands for.  # [..] → [.., dimension]"""
        steps = codes[..., None] // self.strides % (self.spans.long() + 1)
        return steps * 2 / self.spans - 1

    def codebook(self, d_model: int) -> Tensor:
        """The rows whose nearest is `codes`.  # [code, d_model]"""
        points = torch.tensor([POINTS[level] + (0.0,) * (4 - level) for level in self.levels])  # [dimension, step]
        steps = (torch.arange(self.size)[:, None] // self.strides.cpu()) % (self.spans.long().cpu() + 1)
        rows = torch.zeros(self.size, d_model)
        rows[:, : self.dimensions] = points[torch.arange(self.dimensions), steps]
        return rows

    def _steps(self, bounded: Tensor) -> Tensor:
        return ((bounded.detach() + 1) / 2 * self.spans).round()
