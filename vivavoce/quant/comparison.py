"""How far one version of a model is from another on the same lessons: what it thinks of the same replies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vivavoce.quant.subjects import CalibrationBatch, QuantSubject


@dataclass(frozen=True)
class Closeness:
    """Over all places of all replies: divergence in nats, and how often the likeliest id is the same."""

    divergence: float
    agreement: float
    places: int

    @property
    def drop(self) -> float:
        """The share of places where another id is likeliest."""
        return 1 - self.agreement


@torch.no_grad()
def opinions(subject: QuantSubject, model: nn.Module, lessons: Sequence[CalibrationBatch]) -> list[Tensor]:
    """Log-probabilities at every place of every reply.  # [place, id] each"""
    return [subject.logits(model, lesson).float().log_softmax(-1) for lesson in lessons]


def closeness(exact: Sequence[Tensor], other: Sequence[Tensor]) -> Closeness:
    """How far `other` is from `exact`."""
    divergence = same = places = 0.0
    for one, two in zip(exact, other, strict=True):
        divergence += float((one.exp() * (one - two)).sum())
        same += float((one.argmax(-1) == two.argmax(-1)).sum())
        places += len(one)
    return Closeness(divergence / places, same / places, int(places))
