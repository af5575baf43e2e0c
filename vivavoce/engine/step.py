"""One step on the device: per-sequence tables with LRU eviction, and the forward pass, eager or captured.

Packed rows go in; new rows and the hidden states they were drawn from come out.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.sampling import NO_ROW, Generation, SamplingRequest, SamplingTables, SlotDraw
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch


@dataclass
class SequenceSlot:
    """A sequence's row of the tables, and since when it holds."""

    index: int
    page_revision: int = -1
    history: tuple[int, int] | None = None
    """The revision of the rows, and the first row that counts, of which the sampling table knows."""
    known: int = 0
    """How many rows the sampling table knows. Kept drafts are not among them until somebody asks."""
    generation: Generation | None = None


class SequenceTables:
    """So many sequences as tables on the device; whoever was longest absent gives way to who comes."""

    def __init__(self, model: GenerativeModel, device: torch.device, count: int, pages: int) -> None:
        self.device, self.channels = device, model.channels
        self.filler = count  # one slot more, for rows that only fill a step up
        self._page_table_host = np.zeros((count + 1, pages), dtype=np.int32)
        self.page_table = torch.zeros(count + 1, pages, dtype=torch.int32, device=device)
        self.tables = SamplingTables.allocate(count + 1, model.vocabularies, device)
        self._slots: OrderedDict[int, SequenceSlot] = OrderedDict()
        self._unused = list(range(count))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._slots

    def index(self, sequence: Sequence) -> int:
        """The row of a sequence that has one."""
        return self._slots[sequence.id].index

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that was closed."""
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._unused.append(slot.index)

    def assign(self, works: list[Work]) -> list[int]:
        """A slot for each sequence of the step, its device state brought up to date."""
        for work in works:
            if work.sequence.id in self._slots:
                self._slots.move_to_end(work.sequence.id)
        slots = [self._slot(work.sequence) for work in works]
        stale = [
            (slot, work.sequence)
            for slot, work in zip(slots, works, strict=True)
            if slot.page_revision != work.sequence.page_revision
        ]
        for slot, sequence in stale:
            self._page_table_host[slot.index, : len(sequence.pages)] = sequence.pages
            slot.page_revision = sequence.page_revision
        if stale:
            indices = [slot.index for slot, _ in stale]
            self.page_table[self._sent(torch.tensor(indices))] = self._sent(
                torch.from_numpy(self._page_table_host[indices])
            )
        for slot, work in zip(slots, works, strict=True):
            self._refresh(slot, work)
        return [slot.index for slot in slots]

    def counted(self, works: Iterable[Work]) -> None:
        """The step has added these rows to the histories."""
        for work in works:
            slot = self._slots[work.sequence.id]
            if slot.known >= work.start:
                slot.known = max(slot.known, work.start + work.count)

    def _sent(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, for which nobody waits: a step may be under way there."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _slot(self, sequence: Sequence) -> SequenceSlot:
        """The sequence's slot, or that of whoever was longest absent."""
        if sequence.id not in self._slots:
            index = self._unused.pop() if self._unused else self._slots.popitem(last=False)[1].index
            self._slots[sequence.id] = SequenceSlot(index)
        self._slots.move_to_end(sequence.id)
        return self._slots[sequence.id]

    def _refresh(self, slot: SequenceSlot, work: Work) -> None:
        """Bring history and settings of a slot to what the sequence says."""
        sequence = work.sequence
        history = (sequence.row_revision, sequence.first_counted)
        if slot.history != history:
            past = sequence.rows[sequence.first_counted : work.start]
            rows = torch.tensor(past, dtype=torch.long).reshape(-1, self.channels)
            self.tables.store_rows(slot.index, rows.to(self.device))
            slot.history, slot.known = history, work.start
        elif slot.known < work.start and sequence.generation is not None and sequence.generation.penalises:
            missed = torch.tensor(sequence.rows[slot.known : work.start], dtype=torch.long, device=self.device)
            self.tables.note(torch.full_like(missed[:, 0], slot.index), missed)
            slot.known = work.start
        if sequence.generation is not None and slot.generation is not sequence.generation:
            self.tables.settle(slot.index, sequence.generation)
            slot.generation = sequence.generation


class Packing:
    """Lays works out for a model. Rows that only fill a batch up stand in the slot `filler`."""

    def __init__(self, model: GenerativeModel, filler: int) -> None:
        self.model, self.filler = model, filler
        self.recall: int = getattr(model, "recall", 0)

    def pack(
        self, works: list[Work], slots: list[int], ahead: int = 0, size: int | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """A row of the step as integers: ids, slot, position, mode, rows generated, whether penalties count it.

        Then the last rows of the reply, if the model wants to recall them, and room for `ahead` drafted rows that stand
        before the one to be drawn. Beside all this, where each work ends.
        """
        channels = self.model.channels
        total = size or sum(work.total for work in works)
        packed = np.zeros((total, channels * (1 + self.recall + ahead) + 5), dtype=np.int32)
        packed[:, channels] = self.filler
        packed[:, channels + 4] = 1
        packed[:, channels * (1 + self.recall) + 5 :] = NO_ROW
        end, ends = 0, []
        singles: list[tuple[int, ...]] = []
        places: list[int] = []
        for work, slot in zip(works, slots, strict=True):
            sequence = work.sequence
            begin, end = end, end + work.total
            ends.append(end)
            if work.total == 1 and not self.recall:
                counted = sequence.first_counted <= work.start
                singles.append(
                    (*sequence.rows[work.start], slot, work.start, sequence.mode, sequence.generated + 1, counted)
                )
                places.append(begin)
                continue
            packed[begin:end, :channels] = [*sequence.rows[work.start : work.start + work.count], *work.drafted]
            packed[begin:end, channels] = slot
            packed[begin:end, channels + 1] = range(work.start, work.start + work.total)
            packed[begin:end, channels + 2] = sequence.mode
            packed[begin:end, channels + 3] = sequence.generated + 1
            uncounted = min(max(0, sequence.first_counted - work.start), work.count)
            packed[begin : begin + uncounted, channels + 4] = 0
            if work.samples:
                self._replies(packed[end - 1 - len(work.drafted) : end], work)
        if singles:  # one assignment for all: most steps are nothing else
            packed[places, : channels + 5] = singles
        return packed, ends

    def _replies(self, packed: np.ndarray, work: Work) -> None:
        """What the draw behind the last row must know, and those behind the drafted rows if those are right."""
        channels, sequence = self.model.channels, work.sequence
        recalled = channels + 5 + channels * self.recall
        before: list[tuple[Row, ...]] = [()]
        facts = [(work.start + work.count - 1, sequence.mode, sequence.generated + 1)]
        for row, up in zip(work.drafted, work.drafted.parents, strict=True):
            before.append((*before[1 + up], row))
            position, mode, generated = facts[1 + up]
            facts.append((position + 1, self.model.next_mode(mode, row), generated + 1))
        packed[:, channels + 1 : channels + 4] = facts
        packed[1:, channels + 4] = 0
        for place, previous_rows in enumerate(before):
            packed[place, recalled : recalled + channels * len(previous_rows)] = [
                value for row in previous_rows for value in row
            ]
            if self.recall:
                packed[place, channels + 5 : recalled] = self.recent(sequence, previous_rows).reshape(-1)

    def recent(self, sequence: Sequence, drafted: tuple[Row, ...]) -> np.ndarray:
        """The last rows of the reply so far, with NO_ROW before its beginning.  # [row, channel]"""
        recent = np.full((self.recall, self.model.channels), NO_ROW, dtype=np.int32)
        reply = [*sequence.rows[len(sequence) - min(self.recall, sequence.generated) :], *drafted][-self.recall :]
        if reply:
            recent[-len(reply) :] = reply
        return recent


GRAPHED_DRAFT = 8  # rows of a draft that a graph has room for; steps with a longer one run eagerly


@dataclass(frozen=True)
class StepKind:
    """What holds for every draw of a step."""

    fits_top_k_kernel: bool = True
    """All generations are greedy or have a top_k of at most `MAX_TOP_K`."""
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
            fits_top_k_kernel=all(generation.fits_top_k_kernel for generation in drawn),
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
        sampling_request: SamplingRequest | None = None,
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
        return self.model.next_rows(hidden, self._draw(packed, kind, sampling_request)), hidden

    def _draw(self, packed: Tensor, kind: StepKind, sampling_request: SamplingRequest | None) -> SlotDraw:
        """How the rows behind these are drawn."""
        channels = self.model.channels
        slot, position, mode, generated = packed[:, channels : channels + 4].long().unbind(-1)
        others = packed[:, channels + 5 :].unflatten(-1, (self.recall + kind.ahead, channels))
        recent = others[:, : self.recall] if self.recall else None
        drafted = others[:, self.recall :] if kind.ahead else None
        settings = (kind.fits_top_k_kernel, recent, drafted, sampling_request, kind.plain, kind.mode)
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
