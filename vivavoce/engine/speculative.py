"""Speculative decoding: rows guessed ahead are checked in one pass, and those the model would have made are kept.

A draft of k rows is computed behind the sequence's last row, and the model's own row is drawn after each of these.
The draft is kept for as long as it equals what was drawn; then comes the row that was drawn instead. Because the noise
of a draw is a function of seed, place and id alone (`vivavoce.engine.sampling`), the row drawn behind a kept draft is
the very row plain decoding draws there: every reply equals the plain one row for row, greedy or sampled, whatever the
draft was. Rejection sampling, which needs the draft's chances and keeps only the distribution, has nothing to add. A
source that draws with the same seed and places shares the model's noise, and so is right nearly as often as rejection
sampling would accept it. Guesses may branch: a draft is then a tree, whose rows each see the rows they follow and no
others, and the branch that was drawn is kept.

What can differ is rounding: a pass over several rows may add in another order than one over a single row, as any batch
may, and where two ids are equally likely within rounding, the other one may be taken.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from vivavoce.errors import InputError
from vivavoce.models.interface import GenerativeModel, Row

if TYPE_CHECKING:
    from vivavoce.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Draft(tuple[Row, ...]):
    """Rows guessed ahead, each behind an earlier one of them, or, where its parent is −1, behind the sequence's last.

    Without parents they are a chain. Of the rows that follow one row, the likeliest stands first.
    """

    parents: tuple[int, ...]

    def __new__(cls, rows: Iterable[Row] = (), parents: Iterable[int] | None = None) -> "Draft":
        made = super().__new__(cls, rows)
        made.parents = tuple(range(-1, len(made) - 1) if parents is None else parents)
        if len(made.parents) != len(made) or any(not -1 <= up < place for place, up in enumerate(made.parents)):
            raise InputError(f"a draft of {len(made)} rows cannot have the parents {made.parents}")
        return made

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depth(self) -> int:
        """How many rows the longest branch has."""
        depths: list[int] = []
        for up in self.parents:
            depths.append(1 if up < 0 else depths[up] + 1)
        return max(depths, default=0)

    def branch(self, place: int) -> list[int]:
        """The places of the rows from the first up to and with this one."""
        places = []
        while place >= 0:
            places.append(place)
            place = self.parents[place]
        return places[::-1]

    def first(self, count: int) -> "Draft":
        """The draft without all but its first rows."""
        return self if count >= len(self) else Draft(self[:count], self.parents[:count])

    def likeliest(self) -> "Draft":
        """Only the branch of first guesses, as a chain."""
        rows, place = [], -1
        while place in self.parents:
            place = self.parents.index(place)
            rows.append(self[place])
        return Draft(rows)


NO_DRAFT = Draft()


class DraftSource(Protocol):
    """Something that guesses how a reply goes on. A bad guess costs time, never a row."""

    def propose(self, sequence: "Sequence", max_rows: int) -> Many[Row]:
        """Up to `most` rows that may follow the last row of a sequence that is generating; a `Draft` may branch."""
        ...


class BatchedSource(DraftSource, Protocol):
    """A source that guesses better for many sequences at once."""

    def propose_together(self, wants: "Many[tuple[Sequence, int]]") -> list[Many[Row]]:
        """What `propose` gives, for each of these."""
        ...


@dataclass(frozen=True)
class Typical:
    """Relaxed acceptance: accepts a guess with probability above min(max_probability, share · exp(−entropy)).

    Replies are then no longer those of plain decoding; this is the typical acceptance of Medusa.
    """

    max_probability: float = 0.3
    share: float = 0.09

    def __post_init__(self) -> None:
        if not 0 < self.max_probability < 1 or not 0 < self.share < 1:
            raise InputError(f"typical acceptance needs bounds in (0, 1), not {self.max_probability} and {self.share}")


@dataclass(frozen=True)
class Speculation:
    """How a reply is sped up: who guesses, how far ahead, and whether a guess need only be likely."""

    source: DraftSource
    max_rows: int = 4
    relaxed: Typical | None = None
    reads_hidden: bool = False
    """Whether the source wants `Sequence.hidden`, the model's state behind the newest row."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise InputError(f"a draft has at least 1 row, not {self.max_rows}")


@dataclass
class Acceptance:
    """How drafts fared: how often so many rows were drafted and so many of them kept."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def note(self, drafted: int, kept: int) -> None:
        """One draft was checked."""
        self.counts[drafted, kept] += 1

    @property
    def checks(self) -> int:
        """Drafts that were checked."""
        return self.counts.total()

    @property
    def drafted(self) -> int:
        """Rows that were guessed."""
        return sum(drafted * times for (drafted, _), times in self.counts.items())

    @property
    def kept(self) -> int:
        """Guessed rows that were right."""
        return sum(kept * times for (_, kept), times in self.counts.items())

    @property
    def mean_kept(self) -> float:
        """Guessed rows kept per check; a check makes one row more than it keeps."""
        return self.kept / self.checks if self.checks else 0.0

    @property
    def histogram(self) -> list[int]:
        """How many checks kept 0, 1, 2 … rows."""
        times: Counter[int] = Counter()
        for (_, kept), count in self.counts.items():
            times[kept] += count
        return [times[kept] for kept in range(max(times, default=-1) + 1)]

    def rate(self, place: int) -> float:
        """How often the guess at this place (0 is the first) was right, where all before it were."""
        reached = sum(times for (drafted, kept), times in self.counts.items() if drafted > place <= kept)
        right = sum(times for (_, kept), times in self.counts.items() if kept > place)
        return right / reached if reached else 0.0


def agreed(draft: Draft, drawn: Many[Row]) -> list[int]:
    """The places of a draft's rows that are what the model drew, from the first on.

    `drawn` is what followed the sequence's last row, then what followed each row of the draft.
    """
    places, current = list[int](), -1
    for place, up in enumerate(draft.parents):
        if up == current and draft[place] == drawn[current + 1]:
            places.append(place)
            current = place
    return places


def usable(draft: Many[Row], model: GenerativeModel, max_rows: int) -> Draft:
    """The rows of a draft worth computing: up to a row that ends the reply, or that the model cannot read.

    An end is left to the draw in its place: nothing needs to be computed behind it.
    """
    given = draft if isinstance(draft, Draft) else Draft(draft)
    if len(given) <= max_rows and all(_is_worth_computing(row, model) for row in given):
        return given
    moved, rows, parents = {-1: -1}, list[Row](), list[int]()
    for place, up in enumerate(given.parents):
        row = tuple(given[place])
        if len(rows) < max_rows and up in moved and _is_worth_computing(row, model):
            moved[place] = len(rows)
            rows.append(row)
            parents.append(moved[up])
    return Draft(rows, parents)


def _is_worth_computing(row: Row, model: GenerativeModel) -> bool:
    if len(row) != model.channels:
        return False
    for value, size in zip(row, model.vocabularies, strict=True):
        if not 0 <= value < size:
            return False
    return not model.ends(row)


def gather(wants: "Many[tuple[Sequence, int]]", model: GenerativeModel) -> dict[int, Draft]:
    """The drafts of all sequences that may have one, by the sequence's id; each source is asked once if it can be."""
    groups: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence, max_rows in wants:
        groups.setdefault(id(_source(sequence)), []).append((sequence, max_rows))
    drafts: dict[int, Draft] = {}
    for group in groups.values():
        drafts |= _proposed(group, model)
    return drafts


def _proposed(group: "Many[tuple[Sequence, int]]", model: GenerativeModel) -> dict[int, Draft]:
    """The drafts of sequences that share a source. A sequence for which it fails goes on without drafts."""
    source = _source(group[0][0])
    try:
        if hasattr(source, "propose_together"):  # asking whether it is a `GatheredSource` takes as long as a product
            given = cast(BatchedSource, source).propose_together(group)
        else:
            given = [source.propose(sequence, max_rows) for sequence, max_rows in group]
        return {
            sequence.id: usable(draft, model, max_rows)
            for (sequence, max_rows), draft in zip(group, given, strict=True)
        }
    except Exception:
        if len(group) == 1:
            sequence, _ = group[0]
            logger.exception("no draft for sequence %d; it goes on without speculation", sequence.id)
            sequence.speculation = None
            return {}
    drafts: dict[int, Draft] = {}
    for each in group:
        drafts |= _proposed([each], model)
    return drafts


def _source(sequence: "Sequence") -> DraftSource:
    assert sequence.speculation is not None
    return sequence.speculation.source
