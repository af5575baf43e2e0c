"""Speculative decoding: drafted rows are verified in one pass, and those that the model would have drawn are accepted.

A draft of k rows is computed after the sequence's last row, and the model draws a row after each of these k + 1.
Drafted rows are accepted as long as they equal the drawn ones; then follows the drawn row that differs. The noise of a
draw is a function of seed, position and id alone (`vivavoce.engine.sampling`), so the row drawn after an accepted draft
is the row that plain decoding draws at that position: every reply equals the plain one row by row, greedy or sampled,
whatever the draft. Rejection sampling, which needs the draft's probabilities and preserves only the distribution, is
not needed. A draft model that draws with the same seed and positions shares the noise, so its rows are accepted nearly
as often as by rejection sampling. A draft may be a tree: each row attends to its ancestors only, and the drawn branch
is accepted.

Rounding can differ: a pass over several rows may sum in another order than one over a single row, as in any batch, so
where two ids are equally likely within rounding, the other one may be drawn.
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
    """Drafted rows as a tree: each follows the row at its parent's index, or, for −1, the sequence's last row.

    Without parents they are a chain. Of the rows with one parent, the likeliest comes first.
    """

    parents: tuple[int, ...]

    def __new__(cls, rows: Iterable[Row] = (), parents: Iterable[int] | None = None) -> "Draft":
        draft = super().__new__(cls, rows)
        draft.parents = tuple(range(-1, len(draft) - 1) if parents is None else parents)
        is_tree = all(-1 <= parent < index for index, parent in enumerate(draft.parents))
        if len(draft.parents) != len(draft) or not is_tree:
            raise InputError(f"a draft of {len(draft)} rows cannot have the parents {draft.parents}")
        return draft

    @property
    def is_chain(self) -> bool:
        """Whether every row follows the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depth(self) -> int:
        """Rows of the longest branch."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def branch(self, index: int) -> list[int]:
        """The indices of a row's ancestors, from the first, and of the row itself."""
        indices = []
        while index >= 0:
            indices.append(index)
            index = self.parents[index]
        return indices[::-1]

    def first(self, count: int) -> "Draft":
        """The first rows of the draft."""
        return self if count >= len(self) else Draft(self[:count], self.parents[:count])

    def likeliest(self) -> "Draft":
        """The likeliest branch, as a chain."""
        rows, index = [], -1
        while index in self.parents:
            index = self.parents.index(index)
            rows.append(self[index])
        return Draft(rows)


NO_DRAFT = Draft()


class DraftSource(Protocol):
    """Proposes the next rows of a reply. A wrong draft costs time and never changes the reply."""

    def propose(self, sequence: "Sequence", max_rows: int) -> Many[Row]:
        """Up to `max_rows` rows to follow the last row of a generating sequence; a `Draft` may branch."""
        ...


class BatchedSource(DraftSource, Protocol):
    """A source that drafts for many sequences in one pass."""

    def propose_together(self, wants: "Many[tuple[Sequence, int]]") -> list[Many[Row]]:
        """`propose` for each sequence and its maximum of rows."""
        ...


@dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa): the probability must exceed min(max_probability, share · exp(−entropy)).

    Replies then differ from those of plain decoding.
    """

    max_probability: float = 0.3
    share: float = 0.09

    def __post_init__(self) -> None:
        if not 0 < self.max_probability < 1 or not 0 < self.share < 1:
            raise InputError(f"typical acceptance needs bounds in (0, 1), not {self.max_probability} and {self.share}")


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of a reply: the source of drafts, their length, and relaxed acceptance if wanted."""

    source: DraftSource
    max_rows: int = 4
    relaxed: Typical | None = None
    reads_hidden: bool = False
    """Whether the source reads `Sequence.hidden`, the state from which the newest row was drawn."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise InputError(f"a draft has at least 1 row, not {self.max_rows}")


@dataclass
class Acceptance:
    """Counts of checked drafts by (rows drafted, rows accepted)."""

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def note(self, drafted: int, kept: int) -> None:
        """Count a checked draft."""
        self.counts[drafted, kept] += 1

    @property
    def checks(self) -> int:
        """Checked drafts."""
        return self.counts.total()

    @property
    def drafted(self) -> int:
        """Drafted rows."""
        return sum(drafted * times for (drafted, _), times in self.counts.items())

    @property
    def kept(self) -> int:
        """Accepted rows."""
        return sum(kept * times for (_, kept), times in self.counts.items())

    @property
    def mean_kept(self) -> float:
        """Accepted rows per check; each check emits one row more."""
        return self.kept / self.checks if self.checks else 0.0

    @property
    def histogram(self) -> list[int]:
        """Checks that accepted 0, 1, 2 … rows."""
        times: Counter[int] = Counter()
        for (_, kept), count in self.counts.items():
            times[kept] += count
        return [times[kept] for kept in range(max(times, default=-1) + 1)]

    def rate(self, index: int) -> float:
        """Acceptance rate of drafted row `index`, of the checks that accepted all rows before it."""
        reached = sum(times for (drafted, kept), times in self.counts.items() if drafted > index <= kept)
        accepted = sum(times for (_, kept), times in self.counts.items() if kept > index)
        return accepted / reached if reached else 0.0


def accepted_indices(draft: Draft, drawn: Many[Row]) -> list[int]:
    """Indices of the draft's rows that equal the drawn ones, from the root.

    `drawn` has the row drawn after the sequence's last row, then those drawn after each row of the draft.
    """
    accepted, current = list[int](), -1
    for index, parent in enumerate(draft.parents):
        if parent == current and draft[index] == drawn[current + 1]:
            accepted.append(index)
            current = index
    return accepted


def usable(draft: Many[Row], model: GenerativeModel, max_rows: int) -> Draft:
    """The rows of a draft worth computing: each branch up to an invalid row or one that ends the reply.

    A row that ends the reply is left to the draw at its position: no row is drawn after it.
    """
    tree = draft if isinstance(draft, Draft) else Draft(draft)
    if len(tree) <= max_rows and all(_is_worth_computing(row, model) for row in tree):
        return tree
    new_index, rows, parents = {-1: -1}, list[Row](), list[int]()
    for index, parent in enumerate(tree.parents):
        row = tuple(tree[index])
        if len(rows) < max_rows and parent in new_index and _is_worth_computing(row, model):
            new_index[index] = len(rows)
            rows.append(row)
            parents.append(new_index[parent])
    return Draft(rows, parents)


def _is_worth_computing(row: Row, model: GenerativeModel) -> bool:
    if len(row) != model.channels:
        return False
    for value, size in zip(row, model.vocabularies, strict=True):
        if not 0 <= value < size:
            return False
    return not model.ends(row)


def gather_drafts(wants: "Many[tuple[Sequence, int]]", model: GenerativeModel) -> dict[int, Draft]:
    """Drafts by sequence id, with one call for each source that can batch."""
    groups: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence, max_rows in wants:
        groups.setdefault(id(_source(sequence)), []).append((sequence, max_rows))
    drafts: dict[int, Draft] = {}
    for group in groups.values():
        drafts |= _proposed(group, model)
    return drafts


def _proposed(group: "Many[tuple[Sequence, int]]", model: GenerativeModel) -> dict[int, Draft]:
    """The drafts of sequences that share a source. A sequence for which it fails continues without speculation."""
    source = _source(group[0][0])
    try:
        if hasattr(source, "propose_together"):  # an isinstance check of a Protocol takes as long as a matrix product
            proposed = cast(BatchedSource, source).propose_together(group)
        else:
            proposed = [source.propose(sequence, max_rows) for sequence, max_rows in group]
        return {
            sequence.id: usable(draft, model, max_rows)
            for (sequence, max_rows), draft in zip(group, proposed, strict=True)
        }
    except Exception:
        if len(group) == 1:
            sequence, _ = group[0]
            logger.exception("drafting failed for sequence %d; it continues without speculation", sequence.id)
            sequence.speculation = None
            return {}
    drafts: dict[int, Draft] = {}
    for each in group:
        drafts |= _proposed([each], model)
    return drafts


def _source(sequence: "Sequence") -> DraftSource:
    assert sequence.speculation is not None
    return sequence.speculation.source
