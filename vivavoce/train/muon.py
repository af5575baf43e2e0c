"""Muon: steps for hidden matrices along the nearest orthogonal matrix of their momentum.

All directions of a matrix learn at one pace, which for a given number of steps goes further than AdamW does. Vectors,
embeddings and heads are no such matrices and stay with AdamW. Steps are scaled to the size that AdamW's have, so that
both share one learning rate.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ROUNDS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # pushes all singular values between 0 and 1 towards 1, the small ones fastest
ADAM_SIZE = 0.2  # root mean square of AdamW's usual step


class Muon:
    """Momenta of matrices and one step on all of them; nothing in it waits for the device."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float) -> None:
        self.matrices, self.weight_decay = list(matrices), weight_decay
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, matrix in enumerate(self.matrices):
            by_shape[tuple(matrix.shape)].append(index)
        self._alike = list(by_shape.values())

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """Go one step against the matrices' gradients."""
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in self.matrices]
        torch._foreach_mul_(self.momenta, MOMENTUM)
        torch._foreach_add_(self.momenta, gradients)
        torch._foreach_mul_(self.matrices, 1 - rate * self.weight_decay)
        ahead = torch._foreach_add(gradients, self.momenta, alpha=MOMENTUM)
        for indices in self._alike:
            directions = orthogonal(torch.stack([ahead[index] for index in indices]))
            size = ADAM_SIZE * max(directions.shape[1:]) ** 0.5
            changes = (directions * (-rate * size)).unbind()
            torch._foreach_add_([self.matrices[index] for index in indices], list(changes))

    def state_dict(self) -> dict[str, Any]:
        """The momenta."""
        return {"momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with kept momenta."""
        for mine, kept in zip(self.momenta, state["momenta"], strict=True):
            mine.copy_(kept)


def orthogonal(matrices: Tensor) -> Tensor:
    """Near each matrix, one whose singular values are all about 1.  # [matrix, row, column]"""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = POLYNOMIAL
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)
