"""Codes as another voice or a noise would have them: an ear that errs mostly says a code next to the right one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Straying:
    """Moves codes of a lattice to others near them: by chance, and as a voice does, which always errs alike."""

    def __init__(self, levels: Sequence[int], device: torch.device | str) -> None:
        self.size = math.prod(levels)
        self.levels = torch.tensor(list(levels), device=device)
        self.strides = torch.tensor([math.prod(levels[place + 1 :]) for place in range(len(levels))], device=device)

    def __call__(self, codes: Tensor, chance: Tensor) -> Tensor:
        """Each number of a code moves by a step at a chance of its line, and again wherever its line's voice has it so.

        # [line, row], [line, 1] → [line, row]
        """
        lines, dimensions = codes.shape[0], len(self.levels)
        steps = codes[..., None] // self.strides % self.levels
        here = torch.rand((*codes.shape, dimensions), device=codes.device)
        of_voice = torch.rand((lines, self.size, dimensions), device=codes.device)
        of_voice = of_voice.gather(1, codes[..., None].expand(-1, -1, dimensions))
        chance = chance[..., None]
        moved = steps + _step(here, chance) + _step(of_voice, chance)
        return (moved.clamp(min=0).minimum(self.levels - 1) * self.strides).sum(-1)


def _step(drawn: Tensor, chance: Tensor) -> Tensor:
    return (drawn > 1 - chance / 2).long() - (drawn < chance / 2).long()
