"""Sources of drafts: n-gram lookup, an earlier hypothesis, heads on hidden states (Medusa), and a small model."""

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
    """Prompt lookup: the rows that followed the same last rows earlier in the sequence, or in one of the texts.

    The longest match wins; of equally long ones the newest, and one in the sequence before one in a text. One source
    serves one sequence: it indexes its rows, again after a rewind.
    """

    def __init__(self, max_match: int = 4, min_match: int = 2, texts: Iterable[Iterable[Row]] = ()) -> None:
        if not 1 <= min_match <= max_match:
            raise InputError(
                f"matches of {min_match} to {max_match} rows are impossible; give 1 ≤ min_match ≤ max_match"
            )
        self.sizes = range(max_match, min_match - 1, -1)
        self._texts = RowIndex(self.sizes)
        self._starts = [0]
        for text in texts:
            self._texts.extend([tuple(row) for row in text], self._starts[-1])
            self._starts.append(len(self._texts.rows))
        self._own = RowIndex(self.sizes)
        self._indexed: tuple[int, int] | None = None

    def propose(self, sequence: Sequence, max_rows: int) -> list[Row]:
        """The rows that followed the match, up to `max_rows`."""
        known = (sequence.id, sequence.row_revision)
        if self._indexed != known:
            self._own, self._indexed = RowIndex(self.sizes), known
        self._own.extend(sequence.rows[len(self._own.rows) :])
        for size in self.sizes:
            tail = tuple(sequence.rows[-size:])
            if (index := self._own.followed(tail)) is not None:
                # A match that overlaps the tail is a loop, which is continued as a loop.
                return list(islice(cycle(self._own.rows[index:]), max_rows))
            if (index := self._texts.followed(tail)) is not None:
                end = next(end for begin, end in pairwise(self._starts) if begin < index <= end)
                return self._texts.rows[index : min(index + max_rows, end)]
        return []


class RowIndex:
    """Rows, and an index from n-grams to the row after their last occurrence."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.rows: list[Row] = []
        self._sizes = tuple(sizes)
        self._followed: dict[tuple[Row, ...], int] = {}

    def extend(self, rows: Iterable[Row], begin: int = 0) -> None:
        """Add rows; n-grams do not reach back before row `begin`."""
        for row in rows:
            end = len(self.rows)
            for size in self._sizes:
                if end - size >= begin:
                    self._followed[tuple(self.rows[end - size : end])] = end
            self.rows.append(row)

    def followed(self, run: tuple[Row, ...]) -> int | None:
        """Index of the row after the last occurrence of an n-gram."""
        return self._followed.get(run)


class EarlierHypothesis:
    """Drafts from an earlier reply to a shorter input, followed row by row and aligned again where the new one departs.

    Where the last `resume` rows also occur in the old reply, the occurrence nearest to their position is followed. The
    last `uncertain` rows of the old reply are not used: the input after them was missing. Rows for which `counts` is
    false (timestamps, which the hypothesis lacks) are skipped. With `presumes`, a reply whose last rows do not occur
    is aligned by edit distance; with `branches`, the draft has that many of the best alignments.
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
            raise InputError(f"resume must be at least 1 and uncertain at least 0, not {resume} and {uncertain}")
        old = [tuple(row) for row in rows]
        self.rows = old[: len(old) - uncertain] if uncertain < len(old) else []
        self.resume, self.presumes, self.branches = resume, presumes, branches
        self._counts = counts

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The rows of the old reply after the aligned position."""
        reply = sequence.rows[len(sequence) - sequence.generated :]
        if self._counts is not None:
            reply = [row for row in reply if self._counts(row)]
        chains = [self.rows[start : start + max_rows] for start in self._alignments(reply)]
        if len(chains) == 1:
            return chains[0]
        share, rows, parents = max_rows // max(1, len(chains)), list[Row](), list[int]()
        for chain in chains:
            for index, row in enumerate(chain[:share]):
                parents.append(len(rows) - 1 if index else -1)
                rows.append(row)
        return Draft(rows, parents)

    def _alignments(self, reply: list[Row]) -> list[int]:
        """Positions in the old reply that the end of the new one may correspond to, the likeliest first."""
        length = len(reply)
        if reply == self.rows[:length]:
            return [length]
        if self.presumes:
            return _by_edit_distance(reply, self.rows)[: self.branches]
        tail = reply[-self.resume :]
        ends = [end for end in range(self.resume, len(self.rows)) if self.rows[end - self.resume : end] == tail]
        return [min(ends, key=lambda end: abs(end - length))] if ends else []


def _by_edit_distance(reply: list[Row], old: list[Row]) -> list[int]:
    """Lengths of prefixes of the old reply by edit distance to the new one, then by difference of length."""
    costs = list(range(len(old) + 1))
    for count, item in enumerate(reply, start=1):
        diagonal, costs[0] = costs[0], count
        for index, other in enumerate(old, start=1):
            cost = min(costs[index] + 1, costs[index - 1] + 1, diagonal + (item != other))
            diagonal, costs[index] = costs[index], cost
    return sorted(range(len(costs)), key=lambda length: (costs[length], abs(length - len(reply))))


class FirstGuess:
    """The draft of the first of several sources that has one."""

    def __init__(self, sources: Iterable[DraftSource]) -> None:
        self.sources = tuple(sources)

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The rows of the first source that proposes any."""
        for source in self.sources:
            if draft := source.propose(sequence, max_rows):
                return draft
        return []


Heads = Callable[[Tensor, Tensor], Tensor]
"""From the states that the newest rows were drawn from, and these rows, the states of the following positions.

# [sequence, (channel,) hidden], [sequence, channel] → [sequence, place, (channel,) hidden]
"""
Guess = tuple[Row, float]  # a row and its probability


class MedusaHeads(nn.Module):
    """One residual block for each of the next positions, and for each channel if the model has a state per channel."""

    def __init__(self, hidden: int, places: int, channels: int = 1) -> None:
        super().__init__()
        if places < 1:
            raise InputError(f"heads look at least 1 row ahead, not {places}")
        self.weight = nn.Parameter(torch.zeros(places, channels, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(places, channels, hidden))

    @property
    def places(self) -> int:
        """Number of following positions."""
        return int(self.weight.shape[0])

    def forward(self, hidden: Tensor, newest: Tensor | None = None) -> Tensor:
        """States of the next positions.  # [sequence, (channel,) hidden] → [sequence, place, (channel,) hidden]"""
        x = hidden if hidden.dim() == 3 else hidden[:, None]
        projected = torch.einsum("sch,pcoh->spco", x, self.weight) + self.bias
        states = x[:, None] + functional.silu(projected)
        return states if hidden.dim() == 3 else states[:, :, 0]


@dataclass
class RankedDraw(SlotDraw):
    """A draw that also records, for one channel, the likeliest other ids and their probabilities."""

    channel: int = 0
    width: int = 2
    ids: Tensor = field(default_factory=lambda: torch.zeros(0))  # [sequence, rank]: the drawn one, then the likeliest
    probabilities: Tensor = field(default_factory=lambda: torch.zeros(0))

    def sample(self, channel: int, logits: Tensor) -> Tensor:
        """One id per sequence.  # [sequence, vocabulary] float → [sequence] int64"""
        drawn = super().sample(channel, logits)
        if channel == self.channel:
            probabilities = logits.float().softmax(-1)
            taken = drawn[:, None]
            others, ids = probabilities.scatter(-1, taken, -1.0).topk(min(self.width, logits.shape[-1]) - 1, dim=-1)
            self.ids = torch.cat([taken, ids], dim=1)
            self.probabilities = torch.cat([probabilities.gather(-1, taken), others], dim=1)
        return drawn


class HeadDrafts:
    """Drafts of heads on the hidden states of an engine's sequences; its `Speculation` must set `reads_hidden`.

    With a `width` above 1, that many ids of `channel` are considered at every position, and the draft branches.
    """

    def __init__(self, heads: Heads, engine: Engine, width: int = 1, channel: int = 0) -> None:
        self.heads, self.engine, self.width, self.channel = heads, engine, width, channel

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The draft of one sequence."""
        return self.propose_together([(sequence, max_rows)])[0]

    @torch.inference_mode()
    def propose_together(self, wants: Many[tuple[Sequence, int]]) -> list[Many[Row]]:
        """Drafts of all sequences in one pass."""
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
        """For every sequence and following position, rows with their probabilities, the drawn one first."""
        count = states.shape[1]
        draw = self.engine.runner.draw_ahead(sequences, count)
        ranked = RankedDraw(**vars(draw), channel=self.channel, width=self.width) if self.width > 1 else None
        drawn = self.engine.model.next_rows(states.flatten(0, 1), ranked or draw).tolist()
        if ranked is None:
            single = [[(tuple(row), 1.0)] for row in drawn]
            return [single[first : first + count] for first in range(0, len(single), count)]
        guesses = []
        for row, ids, probabilities in zip(drawn, ranked.ids.tolist(), ranked.probabilities.tolist(), strict=True):
            rows = [(*row[: self.channel], id_, *row[self.channel + 1 :]) for id_ in ids]
            guesses.append(list(zip(rows, probabilities, strict=True)))
        return [guesses[first : first + count] for first in range(0, len(guesses), count)]


def likeliest_tree(guesses: Many[Many[Guess]], max_rows: int, min_probability: float = 0.0) -> Draft:
    """A draft of the `max_rows` likeliest rows, from guesses that are independent from one position to the next.

    Rows whose branch is less likely than `min_probability` are left out.
    """
    rows, parents = list[Row](), list[int]()
    heap = [(-probability, rank, -1, 0) for rank, (_, probability) in enumerate(guesses[0])] if guesses else []
    heapq.heapify(heap)
    while heap and len(rows) < max_rows:
        negative, rank, parent, depth = heapq.heappop(heap)
        if -negative < min_probability:
            break
        rows.append(guesses[depth][rank][0])
        parents.append(parent)
        if depth + 1 < len(guesses):
            index = len(rows) - 1
            for next_rank, (_, probability) in enumerate(guesses[depth + 1]):
                heapq.heappush(heap, (negative * probability, next_rank, index, depth + 1))
    return Draft(rows, parents)


class DraftModel:
    """A small model in an engine of its own continues each sequence with the same settings, seed and positions.

    It draws with the noise of the large model, so two models that nearly agree nearly always draw the same row. One
    source serves any number of sequences; their drafts are generated in the same steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._drafts: dict[int, tuple[Sequence, Sequence]] = {}

    @classmethod
    def of(cls, engine: Engine, target: Engine) -> "DraftModel":
        """A source for the target's sequences; InputError if the vocabularies differ."""
        if engine.model.vocabularies != target.model.vocabularies:
            raise InputError(
                f"the draft has vocabularies {engine.model.vocabularies}, and the model {target.model.vocabularies}"
            )
        return cls(engine)

    def propose(self, sequence: Sequence, max_rows: int) -> Many[Row]:
        """The rows that the small model draws next."""
        return self.propose_together([(sequence, max_rows)])[0]

    def propose_together(self, wants: Many[tuple[Sequence, int]]) -> list[Many[Row]]:
        """The rows that the small model draws next, for all sequences in the same steps."""
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
        """Close all draft sequences."""
        for _, draft in self._drafts.values():
            self.engine.close(draft)
        self._drafts.clear()

    def _start(self, sequence: Sequence, max_rows: int) -> Sequence:
        """The draft sequence of a sequence, brought to the same rows and generating."""
        assert sequence.generation is not None
        if sequence.id not in self._drafts:
            self._drafts[sequence.id] = (sequence, self.engine.open())
        _, draft = self._drafts[sequence.id]
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
        for key in [key for key, (sequence, _) in self._drafts.items() if not sequence.is_open]:
            self.engine.close(self._drafts.pop(key)[1])
