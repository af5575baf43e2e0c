"""What the device knows of each sequence: its row of the page table and of the sampling tables, brought up to date."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.sampling import NO_ROW, Generation, SamplingTables
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.models.interface import GenerativeModel, Row


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
            self.tables.remember(slot.index, rows.to(self.device))
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
        for place, so_far in enumerate(before):
            packed[place, recalled : recalled + channels * len(so_far)] = [value for row in so_far for value in row]
            if self.recall:
                packed[place, channels + 5 : recalled] = self.recent(sequence, so_far).reshape(-1)

    def recent(self, sequence: Sequence, drafted: tuple[Row, ...]) -> np.ndarray:
        """The last rows of the reply so far, with NO_ROW before its beginning.  # [row, channel]"""
        recent = np.full((self.recall, self.model.channels), NO_ROW, dtype=np.int32)
        reply = [*sequence.rows[len(sequence) - min(self.recall, sequence.generated) :], *drafted][-self.recall :]
        if reply:
            recent[-len(reply) :] = reply
        return recent
