"""Drafts that cost no model: what followed the same rows before, and what an earlier hypothesis said."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import cycle, islice, pairwise

from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft, DraftSource
from vivavoce.errors import InputError
from vivavoce.models.interface import Row


class NgramLookup:
    """Goes on as the sequence, or one of the given texts, went on after the same last rows; the longest match wins.

    Of equally long matches the newest counts, and the sequence's own come before those of the texts. One source serves
    one sequence: it keeps an index of its rows, which it makes anew when they were rewound.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, texts: Iterable[Iterable[Row]] = ()) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"matches of {shortest} to {longest} rows cannot be; give 1 ≤ shortest ≤ longest")
        self.sizes = range(longest, shortest - 1, -1)
        self._texts = RowIndex(self.sizes)
        self._starts = [0]
        for text in texts:
            self._texts.extend([tuple(row) for row in text], self._starts[-1])
            self._starts.append(len(self._texts.rows))
        self._own = RowIndex(self.sizes)
        self._indexed: tuple[int, int] | None = None

    def propose(self, sequence: Sequence, most: int) -> list[Row]:
        """The rows that followed, up to `most`."""
        known = (sequence.id, sequence.row_revision)
        if self._indexed != known:
            self._own, self._indexed = RowIndex(self.sizes), known
        self._own.extend(sequence.rows[len(self._own.rows) :])
        for size in self.sizes:
            tail = tuple(sequence.rows[-size:])
            if (place := self._own.followed(tail)) is not None:
                # A match that overlaps what it matches is a round, which goes on as a round.
                return list(islice(cycle(self._own.rows[place:]), most))
            if (place := self._texts.followed(tail)) is not None:
                end = next(end for begin, end in pairwise(self._starts) if begin < place <= end)
                return self._texts.rows[place : min(place + most, end)]
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

    def propose(self, sequence: Sequence, most: int) -> Many[Row]:
        """The rows of the old reply that should come next."""
        reply = sequence.rows[len(sequence) - sequence.generated :]
        if self._counts is not None:
            reply = [row for row in reply if self._counts(row)]
        chains = [self.rows[place : place + most] for place in self._places(reply)]
        if len(chains) == 1:
            return chains[0]
        share, rows, parents = most // max(1, len(chains)), list[Row](), list[int]()
        for chain in chains:
            for place, row in enumerate(chain[:share]):
                parents.append(len(rows) - 1 if place else -1)
                rows.append(row)
        return Draft(rows, parents)

    def _places(self, reply: list[Row]) -> list[int]:
        """Where in the old reply the new one may stand, the likeliest first."""
        here = len(reply)
        if reply == self.rows[:here]:
            return [here]
        if self.presumes:
            return _fewest_changes(reply, self.rows)[: self.branches]
        tail = reply[-self.resume :]
        ends = [end for end in range(self.resume, len(self.rows)) if self.rows[end - self.resume : end] == tail]
        return [min(ends, key=lambda end: abs(end - here))] if ends else []


def _fewest_changes(reply: list[Row], old: list[Row]) -> list[int]:
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

    def propose(self, sequence: Sequence, most: int) -> Many[Row]:
        """The rows of the first source that has some."""
        for source in self.sources:
            if draft := source.propose(sequence, most):
                return draft
        return []
