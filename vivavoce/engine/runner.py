"""Runs a plan on the device: lays the rows out flat, lets the model compute them, and reads the new rows back.

Where the Triton kernels run, a step of few rows replays a CUDA graph captured for its bucket; every other step, and
every step elsewhere, is the same code run eagerly. The only wait for the device is the reading of the new rows.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.sampling import NO_ROW, Generation, SamplingTables, SlotDraw
from vivavoce.engine.scheduler import Plan, Work
from vivavoce.engine.sequence import Sequence
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn import kernels
from vivavoce.nn.paged import PagedCache, Piece, RowBatch

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_PIECE = 4  # in a mixed step, pieces up to this long go through the decode kernel, row by row


@dataclass
class Slot:
    """What the device knows of a sequence, and since when."""

    index: int
    page_revision: int = -1
    history: tuple[int, int] | None = None
    """The revision of the rows, and the first row that counts, of which the sampling table knows."""
    generation: Generation | None = None


class Runner:
    """Owns the device's side of the engine: cache, page tables, sampling tables, graphs."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, context: int, slots: int, use_graphs: bool) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys.device
        self.use_kernels = kernels.usable(cache.keys)
        self.use_graphs = use_graphs and self.use_kernels
        width = -(-context // cache.page_size)
        self._page_table_host = np.zeros((slots + 1, width), dtype=np.int32)  # the last slot is for filler rows
        self._page_table = torch.zeros(slots + 1, width, dtype=torch.int32, device=self.device)
        self._tables = SamplingTables.allocate(slots + 1, model.vocabularies, self.device)
        self._recall: int = getattr(model, "recall", 0)
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        self._unused = list(range(slots))
        self._filler = slots
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None  # of graph memory, shared by all buckets

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Row]:
        """The new row of each work that samples, in the plan's order."""
        self.cache.copy_pages(plan.copies)
        slots = self._assign(plan.works)
        narrow = all(
            sampling.is_narrow
            for work in plan.works
            if work.samples and work.sequence.generation is not None
            for sampling in work.sequence.generation.per_channel(self.model.channels)
        )
        total = sum(work.count for work in plan.works)
        bucket = next((size for size in BUCKETS if size >= total), None)
        if self.use_graphs and bucket is not None:
            return self._replay(plan.works, slots, bucket, narrow)
        return self._run_eagerly(plan.works, slots, narrow)

    @torch.inference_mode()
    def warm_up(self, buckets: tuple[int, ...] = BUCKETS) -> None:
        """Capture the graphs ahead, so that no conversation pays for it."""
        if self.use_graphs:
            for bucket in sorted(buckets, reverse=True):  # the largest first: the smaller ones reuse its memory
                self._graph(bucket, narrow=True)

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that was closed."""
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._unused.append(slot.index)

    def _run_eagerly(self, works: list[Work], slots: list[int], narrow: bool) -> list[Row]:
        # Rows the decode kernel takes stand first; without kernels there are none, and every work is a piece.
        order = sorted(range(len(works)), key=lambda index: not self._is_single(works[index]))
        packed, ends = self._pack([works[index] for index in order], [slots[index] for index in order])
        singles = sum(works[index].count for index in order if self._is_single(works[index]))
        pieces = tuple(
            Piece(slice(end - works[index].count, end), slots[index], works[index].start)
            for index, end in zip(order, ends, strict=True)
            if not self._is_single(works[index])
        )
        last_rows = [end - 1 for index, end in zip(order, ends, strict=True) if works[index].samples]
        sampled = torch.tensor(last_rows, dtype=torch.long, device=self.device)
        rows = self._step(torch.from_numpy(packed).to(self.device), singles, pieces, sampled, narrow).tolist()
        by_work = dict(zip([index for index in order if works[index].samples], rows, strict=True))
        return [tuple(by_work[index]) for index in sorted(by_work)]

    def _replay(self, works: list[Work], slots: list[int], bucket: int, narrow: bool) -> list[Row]:
        graph, given, made = self._graph(bucket, narrow)
        packed, ends = self._pack(works, slots, bucket)
        given.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        graph.replay()
        rows = made.cpu().numpy()
        return [tuple(rows[end - 1].tolist()) for work, end in zip(works, ends, strict=True) if work.samples]

    def _is_single(self, work: Work) -> bool:
        return self.use_kernels and work.count <= SHORT_PIECE

    def _pack(self, works: list[Work], slots: list[int], size: int | None = None) -> tuple[np.ndarray, list[int]]:
        """A row of the step as integers: ids, slot, position, mode, rows generated, whether penalties count it.

        Then the last rows of the reply, if the model wants to recall them. Beside all this, where each work ends.
        """
        channels = self.model.channels
        counts = [work.count for work in works]
        packed = np.zeros((size or sum(counts), channels * (1 + self._recall) + 5), dtype=np.int32)
        packed[:, channels] = self._filler
        packed[:, channels + 4] = 1
        end, ends = 0, []
        for work, slot in zip(works, slots, strict=True):
            sequence = work.sequence
            begin, end = end, end + work.count
            ends.append(end)
            packed[begin:end, :channels] = sequence.rows[work.start : work.start + work.count]
            packed[begin:end, channels] = slot
            packed[begin:end, channels + 1] = range(work.start, work.start + work.count)
            packed[begin:end, channels + 2] = sequence.mode
            packed[begin:end, channels + 3] = sequence.generated + 1
            uncounted = min(max(0, sequence.first_counted - work.start), work.count)
            packed[begin : begin + uncounted, channels + 4] = 0
            if self._recall and work.samples:
                packed[end - 1, channels + 5 :] = self._recent(sequence).reshape(-1)
        return packed, ends

    def _recent(self, sequence: Sequence) -> np.ndarray:
        """The last rows of the reply so far, with NO_ROW before its beginning.  # [row, channel]"""
        recent = np.full((self._recall, self.model.channels), NO_ROW, dtype=np.int32)
        count = min(self._recall, sequence.generated)
        if count:
            recent[-count:] = sequence.rows[-count:]
        return recent

    def _step(
        self, packed: Tensor, singles: int, pieces: tuple[Piece, ...], sampled: Tensor | None, narrow: bool
    ) -> Tensor:
        """The one forward pass, eager or captured. `sampled` names the rows that yield a new row; None means all."""
        channels = self.model.channels
        rows = packed[:, :channels].long()
        slots, positions = packed[:, channels].contiguous(), packed[:, channels + 1].contiguous()
        counted = packed[:, channels + 4] != 0
        self._tables.note(torch.where(counted, slots, self._filler), rows)
        batch = RowBatch(self.cache, self._page_table, slots, positions, singles, pieces)
        hidden = self.model.forward(rows, batch)
        if sampled is not None:
            hidden, packed = hidden[sampled], packed[sampled]
        if packed.shape[0] == 0:
            return rows[:0]
        slot, position, mode, generated = packed[:, channels : channels + 4].long().unbind(-1)
        recent = packed[:, channels + 5 :].unflatten(-1, (-1, channels)) if self._recall else None
        draw = SlotDraw(self._tables, slot, position + 1, mode, generated, narrow, recent)
        return self.model.next_rows(hidden, draw)

    def _graph(self, bucket: int, narrow: bool) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """The captured step of a bucket, with the tensor it reads and the one it writes."""
        if (bucket, narrow) not in self._graphs:
            given = torch.from_numpy(self._pack([], [], bucket)[0]).to(self.device)
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles kernels and lets libraries allocate, neither of which may be captured
                    self._step(given, bucket, (), None, narrow)
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                made = self._step(given, bucket, (), None, narrow)
            self._pool = graph.pool()
            self._graphs[bucket, narrow] = (graph, given, made)
        return self._graphs[bucket, narrow]

    def _assign(self, works: list[Work]) -> list[int]:
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
            fresh = torch.from_numpy(self._page_table_host[indices]).to(self.device)
            self._page_table[torch.tensor(indices, device=self.device)] = fresh
        for slot, work in zip(slots, works, strict=True):
            self._refresh(slot, work)
        return [slot.index for slot in slots]

    def _slot(self, sequence: Sequence) -> Slot:
        """The sequence's slot, or that of whoever was longest absent."""
        if sequence.id not in self._slots:
            index = self._unused.pop() if self._unused else self._slots.popitem(last=False)[1].index
            self._slots[sequence.id] = Slot(index)
        self._slots.move_to_end(sequence.id)
        return self._slots[sequence.id]

    def _refresh(self, slot: Slot, work: Work) -> None:
        """Bring history and settings of a slot to what the sequence says."""
        sequence = work.sequence
        history = (sequence.row_revision, sequence.first_counted)
        if slot.history != history:
            past = sequence.rows[sequence.first_counted : work.start]
            rows = torch.tensor(past, dtype=torch.long).reshape(-1, self.model.channels)
            self._tables.remember(slot.index, rows.to(self.device))
            slot.history = history
        if sequence.generation is not None and slot.generation is not sequence.generation:
            self._tables.settle(slot.index, sequence.generation)
            slot.generation = sequence.generation
