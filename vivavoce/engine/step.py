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

from vivavoce.engine.sampling import ALL_ALLOWED, NO_ROW, Generation, SamplingRequest, SamplingTables, SlotDraw
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn.paged_kv import TILE_ROWS, CachePiece, PagedCache, RowBatch


@dataclass
class SequenceSlot:
    """A sequence's row of the device tables, and what of the sequence it reflects."""

    index: int
    page_revision: int = -1
    history: tuple[int, int] | None = None
    """`row_revision` and `first_counted` of the sequence when its history was stored."""
    known: int = 0
    """Rows in the stored history. Accepted drafts are added later, when a penalty needs them."""
    generation: Generation | None = None


class SequenceTables:
    """Per-sequence device tables (pages, sampling settings, history) with LRU eviction."""

    def __init__(self, model: GenerativeModel, device: torch.device, count: int, pages: int) -> None:
        self.device, self.channels = device, model.channels
        self.filler = count  # one slot more, for rows of padding
        self._page_table_host = np.zeros((count + 1, pages), dtype=np.int32)
        self.page_table = torch.zeros(count + 1, pages, dtype=torch.int32, device=device)
        self.tables = SamplingTables.allocate(count + 1, model.vocabularies, device)
        self._slots: OrderedDict[int, SequenceSlot] = OrderedDict()
        self._unused = list(range(count))
        self._masked: set[int] = set()  # slot indices whose row of `tables.allowed` excludes ids

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._slots

    def index(self, sequence: Sequence) -> int:
        """The slot index of a sequence that has one."""
        return self._slots[sequence.id].index

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, if it has one."""
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._unused.append(slot.index)

    def assign(self, works: list[Work]) -> list[int]:
        """Slot indices of the step's sequences, their device tables updated."""
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
        self._mask([(slot.index, work.sequence) for slot, work in zip(slots, works, strict=True) if work.samples])
        return [slot.index for slot in slots]

    def counted(self, works: Iterable[Work]) -> None:
        """Note that the step has added the rows of these works to the histories."""
        for work in works:
            slot = self._slots[work.sequence.id]
            if slot.known >= work.start:
                slot.known = max(slot.known, work.start + work.count)

    def _mask(self, drawing: list[tuple[int, Sequence]]) -> None:
        """Store which ids the grammars of these sequences allow; in slots without one, all are allowed again."""
        changed = [each for each in drawing if each[0] in self._masked or each[1].matcher is not None]
        if not changed:
            return
        words = np.full((len(changed), self.tables.allowed.shape[1]), ALL_ALLOWED, dtype=np.int32)
        for row, (_, sequence) in enumerate(changed):
            if sequence.matcher is not None:
                words[row] = sequence.matcher.allowed()
        indices = [slot for slot, _ in changed]
        self._masked.difference_update(indices)
        self._masked.update(slot for slot, sequence in changed if sequence.matcher is not None)
        self.tables.allowed[self._sent(torch.tensor(indices))] = self._sent(torch.from_numpy(words))

    def _sent(self, tensor: Tensor) -> Tensor:
        """A copy on the device, made without synchronising: a step may be running there."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _slot(self, sequence: Sequence) -> SequenceSlot:
        """The sequence's slot; if it has none, an unused one or that of the least recently used sequence."""
        if sequence.id not in self._slots:
            index = self._unused.pop() if self._unused else self._slots.popitem(last=False)[1].index
            self._slots[sequence.id] = SequenceSlot(index)
        self._slots.move_to_end(sequence.id)
        return self._slots[sequence.id]

    def _refresh(self, slot: SequenceSlot, work: Work) -> None:
        """Update history and settings of a slot."""
        sequence = work.sequence
        history = (sequence.row_revision, sequence.first_counted)
        if slot.history != history:
            counted = sequence.rows[sequence.first_counted : work.start]
            rows = torch.tensor(counted, dtype=torch.long).reshape(-1, self.channels)
            self.tables.store_rows(slot.index, rows.to(self.device))
            slot.history, slot.known = history, work.start
        elif slot.known < work.start and sequence.generation is not None and sequence.generation.penalises:
            missing = torch.tensor(sequence.rows[slot.known : work.start], dtype=torch.long, device=self.device)
            self.tables.note(torch.full_like(missing[:, 0], slot.index), missing)
            slot.known = work.start
        if sequence.generation is not None and slot.generation is not sequence.generation:
            self.tables.settle(slot.index, sequence.generation)
            slot.generation = sequence.generation


class Packing:
    """Packs the works of a step into one integer array. Rows of padding have the slot `filler`."""

    def __init__(self, model: GenerativeModel, filler: int) -> None:
        self.model, self.filler = model, filler
        self.recall: int = getattr(model, "recall", 0)

    def columns(self, draft_depth: int = 0) -> int:
        """Columns of packed rows."""
        return self.model.channels * (1 + self.recall + draft_depth) + 5

    def pack(
        self, works: list[Work], slots: list[int], draft_depth: int = 0, size: int | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """The packed rows of a step, and the row at which each work ends.

        Columns: ids, slot, position, mode, rows generated, whether penalties count the row; then the last rows of the
        reply, if the model recalls any, and up to `draft_depth` drafted rows that precede the one to be drawn.
        """
        channels = self.model.channels
        total = size or sum(work.total for work in works)
        packed = np.zeros((total, self.columns(draft_depth)), dtype=np.int32)
        packed[:, channels] = self.filler
        packed[:, channels + 4] = 1
        packed[:, channels * (1 + self.recall) + 5 :] = NO_ROW
        end, ends = 0, []
        singles: list[tuple[int, ...]] = []
        indices: list[int] = []
        for work, slot in zip(works, slots, strict=True):
            sequence = work.sequence
            begin, end = end, end + work.total
            ends.append(end)
            if work.total == 1 and not self.recall:
                counted = sequence.first_counted <= work.start
                singles.append(
                    (*sequence.rows[work.start], slot, work.start, sequence.mode, sequence.generated + 1, counted)
                )
                indices.append(begin)
                continue
            packed[begin:end, :channels] = [*sequence.rows[work.start : work.start + work.count], *work.drafted]
            packed[begin:end, channels] = slot
            packed[begin:end, channels + 1] = range(work.start, work.start + work.total)
            packed[begin:end, channels + 2] = sequence.mode
            packed[begin:end, channels + 3] = sequence.generated + 1
            uncounted = min(max(0, sequence.first_counted - work.start), work.count)
            packed[begin : begin + uncounted, channels + 4] = 0
            if work.samples:
                self._pack_draws(packed[end - 1 - len(work.drafted) : end], work)
        if singles:  # one assignment for all: most steps have nothing else
            packed[indices, : channels + 5] = singles
        return packed, ends

    def _pack_draws(self, packed: np.ndarray, work: Work) -> None:
        """Fill in what the draws after the last row and after each drafted row need."""
        channels, sequence = self.model.channels, work.sequence
        recalled = channels + 5 + channels * self.recall
        branches: list[tuple[Row, ...]] = [()]
        facts = [(work.start + work.count - 1, sequence.mode, sequence.generated + 1)]
        for row, parent in zip(work.drafted, work.drafted.parents, strict=True):
            branches.append((*branches[1 + parent], row))
            position, mode, generated = facts[1 + parent]
            facts.append((position + 1, self.model.next_mode(mode, row), generated + 1))
        packed[:, channels + 1 : channels + 4] = facts
        packed[1:, channels + 4] = 0
        for index, branch in enumerate(branches):
            packed[index, recalled : recalled + channels * len(branch)] = [value for row in branch for value in row]
            if self.recall:
                packed[index, channels + 5 : recalled] = self.recent(sequence, branch).reshape(-1)

    def recent(self, sequence: Sequence, drafted: tuple[Row, ...]) -> np.ndarray:
        """The last `recall` rows of the reply, padded with NO_ROW at the front.  # [row, channel]"""
        recent = np.full((self.recall, self.model.channels), NO_ROW, dtype=np.int32)
        reply = [*sequence.rows[len(sequence) - min(self.recall, sequence.generated) :], *drafted][-self.recall :]
        if reply:
            recent[-len(reply) :] = reply
        return recent


GRAPHED_DRAFT = 8  # depth of drafts in graphs; steps with a deeper one run eagerly


@dataclass(frozen=True)
class StepKind:
    """What all draws of a step have in common; a CUDA graph is captured per kind."""

    fits_top_k_kernel: bool = True
    """All generations are greedy or have a top_k of at most `MAX_TOP_K`."""
    plain: bool = False
    """All generations are greedy and without penalties."""
    counts: bool = True
    """Rows are added to the histories that penalties read; otherwise they are added later, when needed."""
    draft_depth: int = 0
    """Drafted rows that may precede a draw."""
    masked: bool = False
    """Some generation has a grammar."""
    mode: int | None = None
    """The mode of all sequences that draw, if it is one of the model's `lone_modes`, which spare it work."""

    @classmethod
    def of(cls, works: list[Work], lone_modes: Many[int]) -> "StepKind":
        """The kind of a step of these works; `lone_modes` are the model's."""
        generations = [work.sequence.generation for work in works if work.sequence.generation is not None]
        drawn = [work.sequence.generation for work in works if work.samples and work.sequence.generation is not None]
        counts = any(generation.penalises for generation in generations)
        draft_depth = max(work.drafted.depth for work in works)
        return cls(
            fits_top_k_kernel=all(generation.fits_top_k_kernel for generation in drawn),
            plain=bool(drawn) and not counts and all(generation.is_greedy for generation in drawn),
            counts=counts,
            draft_depth=draft_depth,
            masked=any(work.sequence.matcher is not None for work in works if work.samples),
            mode=None if draft_depth else _shared_mode(works, lone_modes),
        )

    @property
    def graphed(self) -> "StepKind":
        """The kind of the graph that steps of this kind replay, of which there are few."""
        return replace(self, counts=not self.plain, draft_depth=GRAPHED_DRAFT if self.draft_depth else 0)

    @property
    def prefilling(self) -> "StepKind":
        """The kind of the prefill graph that steps of this kind replay."""
        return StepKind(fits_top_k_kernel=self.fits_top_k_kernel, masked=self.masked)


def _shared_mode(works: list[Work], lone_modes: Many[int]) -> int | None:
    if any(work.sequence.speculation is not None for work in works):
        return None  # drafts may read states that are not computed in a lone mode
    modes = {work.sequence.mode for work in works if work.samples}
    return modes.pop() if len(modes) == 1 and modes <= set(lone_modes) else None


class Step:
    """The forward pass and the draw of a step, on rows packed by `Packing`."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, slots: SequenceTables, recall: int) -> None:
        self.model, self.cache, self.slots, self.recall = model, cache, slots, recall

    def of_singles(self, packed: Tensor, kind: StepKind) -> tuple[Tensor, Tensor]:
        """The step that graphs capture: every row goes through the decode kernel, and a row is drawn after each."""
        return self(packed, kind, singles=packed.shape[0], pieces=(), sampled=None)

    def of_tiles(self, inputs: Tensor, layout: "PrefillLayout", kind: StepKind) -> tuple[Tensor, Tensor]:
        """The prefill that graphs capture: every row goes through the prefill kernel."""
        packed, tiles, sampled = layout.split(inputs)
        return self(packed, kind, singles=0, pieces=(), sampled=sampled, tiles=tiles)

    def __call__(
        self,
        packed: Tensor,
        kind: StepKind,
        singles: int,
        pieces: tuple[CachePiece, ...],
        sampled: Tensor | None,
        sampling_request: SamplingRequest | None = None,
        tiles: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New rows and the states they were drawn from. `sampled`: indices of the rows to draw after; None: all."""
        channels = self.model.channels
        rows = packed[:, :channels].long()
        slots, positions = packed[:, channels].contiguous(), packed[:, channels + 1].contiguous()
        if kind.counts:
            counted = packed[:, channels + 4] != 0
            self.slots.tables.note(torch.where(counted, slots, self.slots.filler), rows)
        cache_positions = _cache_positions(positions, pieces)
        table = self.slots.page_table
        batch = RowBatch(self.cache, table, slots, positions, singles, pieces, cache_positions, kind.mode, tiles)
        hidden = self.model.forward(rows, batch)
        if sampled is not None:
            hidden, packed = hidden[sampled], packed[sampled]
        if packed.shape[0] == 0:
            return rows[:0], hidden
        return self.model.next_rows(hidden, self._draw(packed, kind, sampling_request)), hidden

    def _draw(self, packed: Tensor, kind: StepKind, sampling_request: SamplingRequest | None) -> SlotDraw:
        """The draw of the rows after these."""
        channels = self.model.channels
        slot, position, mode, generated = packed[:, channels : channels + 4].long().unbind(-1)
        others = packed[:, channels + 5 :].unflatten(-1, (self.recall + kind.draft_depth, channels))
        recent = others[:, : self.recall] if self.recall else None
        drafted = others[:, self.recall :] if kind.draft_depth else None
        settings = (kind.fits_top_k_kernel, recent, drafted, sampling_request, kind.plain, kind.mode, kind.masked)
        return SlotDraw(self.slots.tables, slot, position + 1, mode, generated, *settings)


MAX_PREFILL_WORKS = 64  # of a captured prefill


@dataclass(frozen=True)
class PrefillLayout:
    """The input of a captured prefill as one array: packed rows, tiles, and the rows to draw after.

    There are as many tiles and draws as that many works of that many rows may need; unused tiles have no rows, and
    unused draws are after row 0.
    """

    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        return self.rows // TILE_ROWS + MAX_PREFILL_WORKS

    def join(self, packed: np.ndarray, tiles: Many[tuple[int, int, int, int]], drawing: Many[int]) -> np.ndarray:
        """The array.  # packed [row, column] → [element]"""
        all_tiles = np.zeros((self.tiles, 4), dtype=np.int32)
        all_tiles[: len(tiles)] = np.asarray(tiles, dtype=np.int32).reshape(-1, 4)
        draws = np.zeros(MAX_PREFILL_WORKS, dtype=np.int32)
        draws[: len(drawing)] = drawing
        return np.concatenate([packed.reshape(-1), all_tiles.reshape(-1), draws])

    def split(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows, tiles and draws of the array."""
        packed, tiles, draws = inputs.split([self.rows * self.columns, self.tiles * 4, MAX_PREFILL_WORKS])
        return packed.view(self.rows, self.columns), tiles.view(self.tiles, 4), draws.long()


def _cache_positions(positions: Tensor, pieces: tuple[CachePiece, ...]) -> Tensor | None:
    """Where rows are stored, if not at their positions: the branches of a draft share positions.  # [row]"""
    if all(piece.visible is None for piece in pieces):
        return None
    stored = positions.clone()
    for piece in pieces:
        stored[piece.rows] = torch.arange(piece.position, piece.context, dtype=stored.dtype)
    return stored


@dataclass(frozen=True)
class Emission:
    """A new row of a sequence, and why the reply ended, if it did."""

    sequence: Sequence
    row: Row
    finish: FinishReason | None


@dataclass(frozen=True)
class Failure:
    """A sequence that failed in a step. Its reply has ended and its pages are free; its rows are unchanged."""

    sequence: Sequence
    error: Exception


@dataclass
class StepResult:
    """The outcome of one step."""

    emissions: list[Emission] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
