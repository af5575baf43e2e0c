"""Drafts that cost no model: what followed the same rows before, and what an earlier hypothesis said."""

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import SlotDraw
from vivavoce.engine.sequence import Sequence, rows_in_common
from vivavoce.engine.speculative import NO_DRAFT, Draft, DraftSource
from vivavoce.errors import InputError
from vivavoce.models.interface import Row


class NgramLookup:
    """Goes on as the sequence, or one of the given texts, went on after the same last rows; the longest match wins.

    Of equally long matches the newest counts, and the sequence's own come before those of the texts. One source serves
    one sequence: it keeps an index of its rows, which it makes anew when they were rewound.
    """

    def __init__(self, max_match: int = 4, min_match: int = 2, texts: Iterable[Iterable[Row]] = ()) -> None:
        if not 1 <= min_match <= max_match:
            raise InputError(f"matches of {min_match} to {max_match} rows cannot be; give 1 ≤ shortest ≤ longest")
        self.sizes = range(max_match, min_match - 1, -1)
        self._texts = RowIndex(self.sizes)
        self._starts = [0]
        for text in texts:
            self._texts.extend([tuple(row) for row in text], self._starts[-1])
            self._starts.append(len(self._texts.rows))
        self._own = RowIndex(self.sizes)
        self._indexed: tuple[int, int] | None = None

    def propose(self, sequence: Sequence, max_rows: int) -> list[Row]:
        """The rows that followed, up to `most`."""
        known = (sequence.id, sequence.row_revision)
        if self._indexed != known:
            self._own, self._indexed = RowIndex(self.sizes), known
        self._own.extend(sequence.rows[len(self._own.rows) :])
        for size in self.sizes:
            tail = tuple(sequence.rows[-size:])
            if (place := self._own.followed(tail)) is not None:
                # A match that overlaps what it matches is a round, which goes on as a round.
                return list(islice(cycle(self._own.rows[place:]), max_rows))
            if (place := self._texts.followed(tail)) is not None:
                end = next(end for begin, end in pairwise(self._starts) if begin < place <= end)
                return self._texts.rows[place : min(place + max_rows, end)]
        return []


class RowIndex:
    """Rows, and where each run of a few of them was last followed by another row."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.rows: list[Row] = []
        self._sizes = tuple(sizes)
        self._followed: dict[tuple[Row, ...], int] = {}

    def extend(self, rows: Iterable[Row], begin: int = 0) -> None:
        """Add rows; runs do not reach back before row `begin`."""
        for row in rows:
            end = len(self.rows)
            for size in self._sizes:
                if end - size >= begin:
                    self._followed[tuple(self.rows[end - size : end])] = end
            self.rows.append(row)

    def followed(self, run: tuple[Row, ...]) -> int | None:
        """Where the row behind the newest such run stands."""
        return self._followed.get(run)


class EarlierHypothesis:
    """The reply as it was when less had been heard: followed row by row, and found again where the new one departs.

    After `resume` rows that also stand in the old reply, nearest to where they should, the old reply is followed from
    there. Its last `uncertain` rows are left out: what stood there was said without what follows. Rows of the reply
    that do not `count` (times, which the hypothesis lacks) are looked past. With `presumes`, a reply whose last rows
    are not found is presumed to stand where the fewest changes of the old reply would lead to it; with `branches`, in
    one of so many such places, and the draft branches.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        resume: int = 2,
        uncertain: int = 0,
        counts: Callable[[Row], bool] | None = None,
        presumes: bool = False,
        branches: int = 1,
    ) -> None:
        if resume < 1 or uncertain < 0:
            raise InputError(f"resume after {resume} rows without the last {uncertain} is nothing that can be done")
        old = [tuple(row) for row in rows]
        self.rows = old[: len(old) - uncertain] if uncertain < len(old) else []
        self.resume, self.presumes, self.branches = resume, presumes, branches
        self._counts = counts

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The rows of the old reply that should come next."""
        reply = sequence.rows[len(sequence) - sequence.generated :]
        if self._counts is not None:
            reply = [row for row in reply if self._counts(row)]
        chains = [self.rows[place : place + max_rows] for place in self._places(reply)]
        if len(chains) == 1:
            return chains[0]
        share, rows, parents = max_rows // max(1, len(chains)), list[Row](), list[int]()
        for chain in chains:
            for place, row in enumerate(chain[:share]):
                parents.append(len(rows) - 1 if place else -1)
                rows.append(row)
        return Draft(rows, parents)

    def _places(self, reply: list[Row]) -> list[int]:
        """Where in the old reply the new one may stand, the likeliest first."""
        length = len(reply)
        if reply == self.rows[:length]:
            return [length]
        if self.presumes:
            return _min_changes(reply, self.rows)[: self.branches]
        tail = reply[-self.resume :]
        ends = [end for end in range(self.resume, len(self.rows)) if self.rows[end - self.resume : end] == tail]
        return [min(ends, key=lambda end: abs(end - length))] if ends else []


def _min_changes(reply: list[Row], old: list[Row]) -> list[int]:
    """Beginnings of the old reply by how near they are to the new one, and then by how near their lengths are."""
    row = list(range(len(old) + 1))
    for count, item in enumerate(reply, start=1):
        before, row[0] = row[0], count
        for place, other in enumerate(old, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (item != other))
    return sorted(range(len(row)), key=lambda place: (row[place], abs(place - len(reply))))


class FirstGuess:
    """What the first of several sources guesses that guesses anything."""

    def __init__(self, sources: Iterable[DraftSource]) -> None:
        self.sources = tuple(sources)

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The rows of the first source that has some."""
        for source in self.sources:
            if draft := source.propose(sequence, max_rows):
                return draft
        return []


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

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """Guesses of the places ahead."""
        return self.propose_together([(sequence, max_rows)])[0]

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
        return [likeliest_tree(guesses.get(sequence.id, []), max_rows) for sequence, max_rows in wants]

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


def likeliest_tree(guesses: Many[Many[Guess]], max_rows: int, min_probability: float = 0.0) -> Draft:
    """The `most` likeliest branches of guesses that do not know of one another, each beginning with the first place.

    What would be drawn (the first guess of a place) comes before all else at its place. Rows that are less likely than
    `least` are left out.
    """
    rows, parents = list[Row](), list[int]()
    waiting = [(-chance, place, -1, 0) for place, (_, chance) in enumerate(guesses[0])] if guesses else []
    heapq.heapify(waiting)
    while waiting and len(rows) < max_rows:
        negative, rank, parent, depth = heapq.heappop(waiting)
        if -negative < min_probability:
            break
        rows.append(guesses[depth][rank][0])
        parents.append(parent)
        if depth + 1 < len(guesses):
            length = len(rows) - 1
            for next_rank, (_, chance) in enumerate(guesses[depth + 1]):
                heapq.heappush(waiting, (negative * chance, next_rank, length, depth + 1))
    return Draft(rows, parents)


class DraftModel:
    """Lets the small model go on from where each sequence is, with the sequence's own settings, seed and place.

    So it draws with the noise the large model draws with, and two models that nearly agree draw the same row nearly
    always. One source serves any number of sequences; their drafts are made in the same steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._fast_implementations: dict[int, tuple[Sequence, Sequence]] = {}

    @classmethod
    def of(cls, engine: Engine, target: Engine) -> "DraftModel":
        """A source for this target's sequences, refused if the two models do not share their ids."""
        if engine.model.vocabularies != target.model.vocabularies:
            raise InputError(
                f"the draft's vocabularies {engine.model.vocabularies} are not the model's {target.model.vocabularies}"
            )
        return cls(engine)

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """What the small model would say next."""
        return self.propose_together([(sequence, max_rows)])[0]

    def propose_together(self, wants: Many[tuple[Sequence, int]]) -> list[Many[Row]]:
        """What the small model would say next in each of these, made side by side."""
        self._forget_closed()
        drafting = [self._start(sequence, max_rows) for sequence, max_rows in wants]
        try:
            while any(draft.is_generating for draft in drafting):
                self.engine.step()
        finally:
            for draft in drafting:
                self.engine.stop(draft)
        return [draft.rows[len(sequence) :] for draft, (sequence, _) in zip(drafting, wants, strict=True)]

    def close(self) -> None:
        """Forget all sequences that were followed."""
        for _, draft in self._fast_implementations.values():
            self.engine.close(draft)
        self._fast_implementations.clear()

    def _start(self, sequence: Sequence, max_rows: int) -> Sequence:
        """The sequence's twin, brought to the same rows and set to go on from them."""
        assert sequence.generation is not None
        if sequence.id not in self._fast_implementations:
            self._fast_implementations[sequence.id] = (sequence, self.engine.open())
        _, draft = self._fast_implementations[sequence.id]
        same = rows_in_common(draft.rows, sequence.rows)
        if same < len(draft):
            self.engine.rewind(draft, same)
        max_rows = min(max_rows, self.engine.capacity - len(sequence))
        if max_rows > 0:
            self.engine.append(draft, sequence.rows[same:])
            self.engine.generate(draft, replace(sequence.generation, max_new_rows=sequence.generated + max_rows))
            draft.mode, draft.generated = sequence.mode, sequence.generated
        return draft

    def _forget_closed(self) -> None:
        for key in [key for key, (sequence, _) in self._fast_implementations.items() if not sequence.is_open]:
            self.engine.close(self._fast_implementations.pop(key)[1])
