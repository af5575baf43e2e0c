"""The one forward pass of a step, eager or captured: packed rows in, new rows and the states they come of out."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vivavoce.engine.device_tables import SequenceTables
from vivavoce.engine.sampling import SamplingRequest, SlotDraw
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch

GRAPHED_DRAFT = 8  # rows of a draft that a graph has room for; steps with a longer one run eagerly


@dataclass(frozen=True)
class StepKind:
    """What holds for every draw of a step."""

    narrow: bool = True
    """The candidates are surely among the best few."""
    plain: bool = False
    """The likeliest id is taken, and nobody's penalties count."""
    counts: bool = True
    """Rows are added to the histories of which penalties ask. Where nobody asks, they are caught up with later."""
    ahead: int = 0
    """Drafted rows that may stand before a draw."""
    mode: int | None = None
    """The mode of all who make a row, where the model says that knowing it spares work."""

    @classmethod
    def of(cls, works: list[Work], lone_modes: Many[int]) -> "StepKind":
        """The kind of a step of these works, on a model that is spared work where all are in one of these modes."""
        asked = [work.sequence.generation for work in works if work.sequence.generation is not None]
        drawn = [work.sequence.generation for work in works if work.samples and work.sequence.generation is not None]
        counts = any(generation.penalises for generation in asked)
        ahead = max(work.drafted.depth for work in works)
        return cls(
            narrow=all(generation.is_narrow for generation in drawn),
            plain=bool(drawn) and not counts and all(generation.is_greedy for generation in drawn),
            counts=counts,
            ahead=ahead,
            mode=None if ahead else _shared_mode(works, lone_modes),
        )

    @property
    def graphed(self) -> "StepKind":
        """The kind of the graph that steps of this kind replay: there are few, so that few are captured."""
        return replace(self, counts=not self.plain, ahead=GRAPHED_DRAFT if self.ahead else 0)


def _shared_mode(works: list[Work], lone_modes: Many[int]) -> int | None:
    if any(work.sequence.speculation is not None for work in works):
        return None  # drafts may be made of states that the mode would spare
    modes = {work.sequence.mode for work in works if work.samples}
    return modes.pop() if len(modes) == 1 and modes <= set(lone_modes) else None


class Step:
    """Computes rows as `Packing` lays them out, `recall` of a reply's last rows beside each."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, slots: SequenceTables, recall: int) -> None:
        self.model, self.cache, self.slots, self.recall = model, cache, slots, recall

    def of_singles(self, packed: Tensor, kind: StepKind) -> tuple[Tensor, Tensor]:
        """The step that a graph holds: the decode kernel takes every row, and each yields a new one."""
        return self(packed, kind, singles=packed.shape[0], pieces=(), sampled=None)

    def __call__(
        self,
        packed: Tensor,
        kind: StepKind,
        singles: int,
        pieces: tuple[CachePiece, ...],
        sampled: Tensor | None,
        wish: SamplingRequest | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New rows, and the states they come of. `sampled` names the rows that yield one; None means all."""
        channels = self.model.channels
        rows = packed[:, :channels].long()
        slots, positions = packed[:, channels].contiguous(), packed[:, channels + 1].contiguous()
        if kind.counts:
            counted = packed[:, channels + 4] != 0
            self.slots.tables.note(torch.where(counted, slots, self.slots.filler), rows)
        places = _places(positions, pieces)
        batch = RowBatch(self.cache, self.slots.page_table, slots, positions, singles, pieces, places, kind.mode)
        hidden = self.model.forward(rows, batch)
        if sampled is not None:
            hidden, packed = hidden[sampled], packed[sampled]
        if packed.shape[0] == 0:
            return rows[:0], hidden
        return self.model.next_rows(hidden, self._draw(packed, kind, wish)), hidden

    def _draw(self, packed: Tensor, kind: StepKind, wish: SamplingRequest | None) -> SlotDraw:
        """How the rows behind these are drawn."""
        channels = self.model.channels
        slot, position, mode, generated = packed[:, channels : channels + 4].long().unbind(-1)
        others = packed[:, channels + 5 :].unflatten(-1, (self.recall + kind.ahead, channels))
        recent = others[:, : self.recall] if self.recall else None
        drafted = others[:, self.recall :] if kind.ahead else None
        settings = (kind.narrow, recent, drafted, wish, kind.plain, kind.mode)
        return SlotDraw(self.slots.tables, slot, position + 1, mode, generated, *settings)


def _places(positions: Tensor, pieces: tuple[CachePiece, ...]) -> Tensor | None:
    """Where rows are kept, if that is not at their positions: the branches of a draft share theirs.  # [row]"""
    if all(piece.visible is None for piece in pieces):
        return None
    places = positions.clone()
    for piece in pieces:
        places[piece.rows] = torch.arange(piece.position, piece.context, dtype=places.dtype)
    return places


@dataclass(frozen=True)
class Emission:
    """A row a sequence has just made, and why the reply ended, if it did."""

    sequence: Sequence
    row: Row
    finish: FinishReason | None


@dataclass(frozen=True)
class Failure:
    """A sequence whose part of a step failed. Its reply has ended and its pages are free; its rows are as before."""

    sequence: Sequence
    error: Exception


@dataclass
class StepResult:
    """The outcome of one step."""

    emissions: list[Emission] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
