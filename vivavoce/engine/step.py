"""The one forward pass of a step, eager or captured: packed rows in, new rows and the states they come of out."""

import torch
from torch import Tensor

from vivavoce.engine.sampling import SamplingRequest, SlotDraw
from vivavoce.engine.slots import SequenceTables
from vivavoce.engine.step_kind import StepKind
from vivavoce.models.interface import GenerativeModel
from vivavoce.nn.paged import CachePiece, PagedCache, RowBatch


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
