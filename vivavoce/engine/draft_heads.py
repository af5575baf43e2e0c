"""Drafts by Medusa-type heads: small blocks that turn the model's newest state into those it will have some rows on.

A head here is the residual block of Medusa (a linear layer and SiLU, zero at first), in front of the model's own way to
draw a row. So it has no vocabulary of its own, obeys the model's rules, draws with the noise of the place it guesses,
and before any training guesses that the state stays as it is. One guess per place makes a chain; with more, the
likeliest combinations of them make a tree.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import SlotDraw
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import NO_DRAFT, Draft
from vivavoce.errors import InputError
from vivavoce.models.interface import Row

Heads = Callable[[Tensor, Tensor], Tensor]
"""From the states the newest rows were drawn of, and these rows, the states of places ahead.

# [sequence, (channel,) hidden], [sequence, channel] → [sequence, place, (channel,) hidden]
"""
Guess = tuple[Row, float]  # a row and how likely it is


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

    def forward(self, hidden: Tensor, newest: Tensor | None = None) -> Tensor:
        """The state of each place ahead.  # [sequence, (channel,) hidden] → [sequence, place, (channel,) hidden]"""
        x = hidden if hidden.dim() == 3 else hidden[:, None]
        changed = torch.einsum("sch,pcoh->spco", x, self.weight) + self.bias
        states = x[:, None] + functional.silu(changed)
        return states if hidden.dim() == 3 else states[:, :, 0]


@dataclass
class RankedDraw(SlotDraw):
    """A draw that also keeps, for one channel, the likeliest other ids and how likely each is."""

    channel: int = 0
    width: int = 2
    ids: Tensor = field(default_factory=lambda: torch.zeros(0))  # [sequence, rank]: what is drawn, then the likeliest
    chances: Tensor = field(default_factory=lambda: torch.zeros(0))

    def sample(self, channel: int, logits: Tensor) -> Tensor:
        """One id per sequence.  # [sequence, vocabulary] float → [sequence] int64"""
        drawn = super().sample(channel, logits)
        if channel == self.channel:
            chances = logits.float().softmax(-1)
            taken = drawn[:, None]
            others, ids = chances.scatter(-1, taken, -1.0).topk(min(self.width, logits.shape[-1]) - 1, dim=-1)
            self.ids = torch.cat([taken, ids], dim=1)
            self.chances = torch.cat([chances.gather(-1, taken), others], dim=1)
        return drawn


class HeadDrafts:
    """Drafts of heads on the states an engine keeps; a `Speculation` with it must say `reads_hidden`.

    With a `width` above 1, so many ids of `channel` are considered at every place, and the draft branches.
    """

    def __init__(self, heads: Heads, engine: Engine, width: int = 1, channel: int = 0) -> None:
        self.heads, self.engine, self.width, self.channel = heads, engine, width, channel

    def propose(self, sequence: Sequence, most: int) -> Many[Row]:
        """Guesses of the places ahead."""
        return self.propose_together([(sequence, most)])[0]

    @torch.inference_mode()
    def propose_together(self, wants: Many[tuple[Sequence, int]]) -> list[Many[Row]]:
        """Guesses of the places ahead, for all sequences in one pass."""
        known = [(sequence, sequence.hidden) for sequence, _ in wants if sequence.hidden is not None]
        known = [(sequence, hidden) for sequence, hidden in known if self.engine.runner.knows(sequence)]
        if not known:
            return [NO_DRAFT for _ in wants]
        sequences = [sequence for sequence, _ in known]
        device = self.engine.runner.device
        newest = torch.tensor([sequence.rows[-1] for sequence in sequences], device=device)
        states = self.heads(torch.stack([hidden for _, hidden in known]), newest)
        guesses = dict(zip((sequence.id for sequence in sequences), self._guesses(sequences, states), strict=True))
        return [likeliest_tree(guesses.get(sequence.id, []), most) for sequence, most in wants]

    def _guesses(self, sequences: list[Sequence], states: Tensor) -> list[list[list[Guess]]]:
        """For every sequence and place ahead, rows with their chances, what would be drawn first."""
        places = states.shape[1]
        draw = self.engine.runner.draw_ahead(sequences, places)
        ranked = RankedDraw(**vars(draw), channel=self.channel, width=self.width) if self.width > 1 else None
        made = self.engine.model.next_rows(states.flatten(0, 1), ranked or draw).tolist()
        if ranked is None:
            alone = [[(tuple(row), 1.0)] for row in made]
            return [alone[first : first + places] for first in range(0, len(alone), places)]
        by_place = []
        for row, ids, chances in zip(made, ranked.ids.tolist(), ranked.chances.tolist(), strict=True):
            rows = [(*row[: self.channel], id_, *row[self.channel + 1 :]) for id_ in ids]
            by_place.append(list(zip(rows, chances, strict=True)))
        return [by_place[first : first + places] for first in range(0, len(by_place), places)]


def likeliest_tree(guesses: Many[Many[Guess]], most: int, least: float = 0.0) -> Draft:
    """The `most` likeliest branches of guesses that do not know of one another, each beginning with the first place.

    What would be drawn (the first guess of a place) comes before all else at its place. Rows that are less likely than
    `least` are left out.
    """
    rows, parents = list[Row](), list[int]()
    waiting = [(-chance, place, -1, 0) for place, (_, chance) in enumerate(guesses[0])] if guesses else []
    heapq.heapify(waiting)
    while waiting and len(rows) < most:
        negative, rank, parent, depth = heapq.heappop(waiting)
        if -negative < least:
            break
        rows.append(guesses[depth][rank][0])
        parents.append(parent)
        if depth + 1 < len(guesses):
            here = len(rows) - 1
            for next_rank, (_, chance) in enumerate(guesses[depth + 1]):
                heapq.heappush(waiting, (negative * chance, next_rank, here, depth + 1))
    return Draft(rows, parents)
