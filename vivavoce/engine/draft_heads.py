"""Drafts by Medusa-type heads: small blocks that turn the model's newest state into those it will have some rows on.

A head here is the residual block of Medusa (a linear layer and SiLU, zero at first), in front of the model's own way to
draw a row. So it has no vocabulary of its own, obeys the model's rules, draws with the noise of the place it guesses,
and before any training guesses that the state stays as it is. Heads make a chain: one guess per place.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.engine.engine import Engine
from vivavoce.engine.sequence import Sequence
from vivavoce.errors import InputError
from vivavoce.models.interface import Row


class MedusaHeads(nn.Module):
    """One residual block per place ahead; a model with a state per channel has a block per channel."""

    def __init__(self, hidden: int, places: int, channels: int = 1) -> None:
        super().__init__()
        if places < 1:
            raise InputError(f"heads look at least 1 row ahead, not {places}")
        self.weight = nn.Parameter(torch.zeros(places, channels, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(places, channels, hidden))

    @property
    def places(self) -> int:
        """How many rows ahead the heads look."""
        return int(self.weight.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        """The state of each place ahead.  # [sequence, (channel,) hidden] → [sequence, place, (channel,) hidden]"""
        x = hidden if hidden.dim() == 3 else hidden[:, None]
        changed = torch.einsum("sch,pcoh->spco", x, self.weight) + self.bias
        states = x[:, None] + functional.silu(changed)
        return states if hidden.dim() == 3 else states[:, :, 0]


class HeadDrafts:
    """Drafts of heads on the states an engine keeps; a `Speculation` with it must say `reads_hidden`."""

    def __init__(self, heads: MedusaHeads, engine: Engine) -> None:
        self.heads, self.engine = heads, engine

    def propose(self, sequence: Sequence, most: int) -> list[Row]:
        """One guess per place ahead."""
        return self.propose_together([(sequence, most)])[0]

    @torch.inference_mode()
    def propose_together(self, wants: list[tuple[Sequence, int]]) -> list[list[Row]]:
        """One guess per place ahead, for all sequences in one pass."""
        known = [(sequence, sequence.hidden) for sequence, _ in wants if sequence.hidden is not None]
        if not known:
            return [[] for _ in wants]
        states = self.heads(torch.stack([hidden for _, hidden in known]))
        rows = self.engine.runner.guess([sequence for sequence, _ in known], states)
        guesses = {sequence.id: guess for (sequence, _), guess in zip(known, rows, strict=True)}
        return [guesses.get(sequence.id, [])[:most] for sequence, most in wants]
