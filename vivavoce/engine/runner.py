"""Runs a plan on the device: lays the rows out flat, lets the model compute them, and reads the new rows back.

Where the Triton kernels run, a step of few rows replays a CUDA graph captured for its bucket; every other step, and
every step elsewhere, is the same code run eagerly. The only wait for the device is the reading of the new rows.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.captured import Captured
from vivavoce.engine.packing import Packing
from vivavoce.engine.sampling import NO_ROW, Generation, SamplingTables, SlotDraw, Wish
from vivavoce.engine.scheduler import Plan, Work
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft
from vivavoce.engine.steps_ahead import NextModes, StepAhead, follow, has_next
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn import kernels
from vivavoce.nn.ahead import compiling_ahead
from vivavoce.nn.graphed import as_graph
from vivavoce.nn.paged import PagedCache, Piece, RowBatch

Made = TypeVar("Made")
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_PIECE = 4  # in a mixed step, pieces up to this long go through the decode kernel, row by row
READ_AGAIN = 1 << 25  # bytes of a layer that the rows of a prompt may read one by one: so near, they come from L2
GRAPHED_DRAFT = 8  # rows of a draft that a graph has room for; steps with a longer one run eagerly
DRAFT_BUCKET = 512  # of steps in which every sequence has no more rows than its last and such a draft


@dataclass
class Slot:
    """What the device knows of a sequence, and since when."""

    index: int
    page_revision: int = -1
    history: tuple[int, int] | None = None
    """The revision of the rows, and the first row that counts, of which the sampling table knows."""
    known: int = 0
    """How many rows the sampling table knows. Kept drafts are not among them until somebody asks."""
    generation: Generation | None = None


@dataclass
class Drawn:
    """What one sequence made in a step: the row behind its last one, then the row behind each drafted one."""

    rows: list[Row]
    hidden: Tensor | None = None  # [row, …]: the states they were drawn from, where drafts are made of them


class Runner:
    """Owns the device's side of the engine: cache, page tables, sampling tables, graphs."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, context: int, slots: int, use_graphs: bool) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys.device
        self.use_kernels = kernels.usable(cache.keys)
        self.use_graphs = use_graphs and self.use_kernels
        width = -(-context // cache.page_size)
        self._row_bytes = 2 * cache.keys[0, 0, 0].nbytes  # of a layer
        self._page_table_host = np.zeros((slots + 1, width), dtype=np.int32)  # the last slot is for filler rows
        self._page_table = torch.zeros(slots + 1, width, dtype=torch.int32, device=self.device)
        self._tables = SamplingTables.allocate(slots + 1, model.vocabularies, self.device)
        self._packing = Packing(model, filler=slots)
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        self._unused = list(range(slots))
        self._lone_modes: tuple[int, ...] = getattr(model, "lone_modes", ())
        self._graphs: dict[tuple[int, bool, int, bool, int | None], Captured] = {}
        self._pool: Any = None  # of graph memory, shared by all buckets
        self._side: torch.cuda.Stream | None = None  # on which they are captured
        self._next_modes: NextModes | None = getattr(model, "next_modes", None)
        self._ahead: StepAhead | None = None

    @property
    def goes_ahead(self) -> bool:
        """Whether steps may be begun before they are planned, for which every reply needs room for one row more."""
        return self.use_graphs and self._next_modes is not None

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        """The new rows of each work that samples, in the plan's order."""
        self.cache.copy_pages(plan.copies)
        ahead, self._ahead = self._ahead, None
        rows = {} if ahead is None else ahead.rows_of(plan.works)
        if ahead is None or not rows:
            return self._run(plan.works)
        others = [work for work in plan.works if work.sequence.id not in rows]
        if not others and len(rows) == len(ahead.places):
            self._assign(plan.works)
            self._go_on(ahead.captured, plan.works, rows)
        made = ahead.made()
        drawn = iter(self._run(others) if others else ())
        return [
            Drawn([tuple(made[rows[work.sequence.id]])]) if work.sequence.id in rows else next(drawn)
            for work in plan.works
            if work.samples
        ]

    def _go_on(self, captured: Captured, works: list[Work], rows: Mapping[int, int]) -> None:
        """Begin the step behind the one under way, where all that is known of it is what the device makes now."""
        if captured.following is not None and all(has_next(work, self.cache.page_size) for work in works):
            self._ahead = StepAhead(captured, works, rows)

    def _run(self, works: list[Work]) -> list[Drawn]:
        slots = self._assign(works)
        narrow = self._is_narrow([work.sequence for work in works if work.samples])
        total = sum(work.total for work in works)
        longest = max(work.drafted.depth for work in works)
        bucket = next((size for size in BUCKETS if size >= total), None)
        if bucket is None and total <= DRAFT_BUCKET and all(self._is_single(work) for work in works):
            bucket = DRAFT_BUCKET
        relaxed = any(_is_relaxed(work) for work in works)
        if self.use_graphs and bucket is not None and longest <= GRAPHED_DRAFT and not relaxed:
            plain = self._is_plain(works)
            counts = not plain
            drawn = self._replay(works, slots, bucket, narrow, GRAPHED_DRAFT if longest else 0, plain)
        else:
            counts = self._counts(works)
            drawn = self._run_eagerly(works, slots, narrow, longest, counts)
        for work in works if counts else ():
            slot = self._slots[work.sequence.id]
            if slot.known >= work.start:
                slot.known = max(slot.known, work.start + work.count)
        return drawn

    @torch.inference_mode()
    def warm_up(self, buckets: tuple[int, ...] = BUCKETS) -> None:
        """Capture the graphs ahead, so that no conversation pays for it."""
        if not self.use_graphs:
            return
        kinds = [(False, None), *((False, mode) for mode in self._lone_modes), (True, None)]  # plain, mode
        # The largest first: the smaller ones reuse its memory.
        steps = [(bucket, *kind) for bucket in sorted(buckets, reverse=True) for kind in kinds]
        with compiling_ahead() as is_ahead:
            for bucket, plain, mode in steps if is_ahead else ():
                given = torch.from_numpy(self._packing.pack([], [], 0, bucket)[0]).to(self.device)
                self._step(given, bucket, (), None, True, 0, None, not plain, plain, mode)
        for bucket, plain, mode in steps:
            self._graph(bucket, narrow=True, plain=plain, mode=mode)

    def knows(self, sequence: Sequence) -> bool:
        """Whether a sequence's settings are on the device; a slot may have been given away."""
        return sequence.id in self._slots

    def draw_ahead(self, sequences: list[Sequence], places: int) -> SlotDraw:
        """How the rows of so many places behind each sequence's last row would be drawn, place by place.

        # one entry per sequence and place
        """
        facts = [
            (self._slots[sequence.id].index, len(sequence) + place, sequence.mode, sequence.generated + 1 + place)
            for sequence in sequences
            for place in range(places)
        ]
        slot, position, mode, generated = torch.tensor(facts, device=self.device).unbind(-1)
        recent = None
        if self._packing.recall:
            recalled = np.stack([self._packing.recent(sequence, ()) for sequence in sequences]).repeat(places, axis=0)
            recent = torch.from_numpy(recalled).to(self.device)
        generations = [sequence.generation for sequence in sequences if sequence.generation is not None]
        plain = self._is_greedy(sequences) and not any(self._penalises(generation) for generation in generations)
        narrow = self._is_narrow(sequences)
        return SlotDraw(self._tables, slot, position, mode, generated, narrow, recent, plain=plain)

    def keep(self, sequence: Sequence, places: list[int]) -> None:
        """Bring the keys and values of a draft's rows at these places to stand right behind the sequence's."""
        if places != list(range(len(places))):
            self._move(sequence, places)

    @torch.inference_mode()
    def _move(self, sequence: Sequence, places: list[int]) -> None:
        size = self.cache.page_size
        moves = [(sequence.cached + place, sequence.cached + kept) for kept, place in enumerate(places)]
        pages = torch.tensor(sequence.pages, device=self.device)
        source, target = torch.tensor(moves, device=self.device).unbind(1)
        for tensor in self.cache.tensors():
            tensor[:, pages[target // size], target % size] = tensor[:, pages[source // size], source % size]

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that was closed."""
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._unused.append(slot.index)

    def _run_eagerly(
        self, works: list[Work], slots: list[int], narrow: bool, longest: int, counts: bool
    ) -> list[Drawn]:
        # Rows the decode kernel takes stand first; without kernels there are none, and every work is a piece.
        order = sorted(range(len(works)), key=lambda index: not self._goes_row_by_row(works[index]))
        works, slots = [works[index] for index in order], [slots[index] for index in order]
        packed, ends = self._packing.pack(works, slots, longest)
        singles = sum(work.total for work in works if self._goes_row_by_row(work))
        pieces = tuple(
            Piece(slice(end - work.total, end), slot, work.start, self._seen(work))
            for work, slot, end in zip(works, slots, ends, strict=True)
            if not self._goes_row_by_row(work)
        )
        drawing = [row for work, end in zip(works, ends, strict=True) for row in _drawing(work, end)]
        sampled = torch.tensor(drawing, dtype=torch.long, device=self.device)
        given = torch.from_numpy(packed).to(self.device)
        plain = self._is_plain(works)
        wish = self._wish(works)
        mode = None if longest else self._shared_mode(works)
        made, hidden = self._step(given, singles, pieces, sampled, narrow, longest, wish, counts, plain, mode)
        rows, by_work, begin = made.tolist(), {}, 0
        for index, work in zip(order, works, strict=True):
            if work.samples:
                end = begin + 1 + len(work.drafted)
                by_work[index] = _drawn(work, rows[begin:end], hidden, range(begin, end))
                begin = end
        return [by_work[index] for index in sorted(by_work)]

    def _replay(
        self, works: list[Work], slots: list[int], bucket: int, narrow: bool, ahead: int, plain: bool
    ) -> list[Drawn]:
        mode = None if ahead else self._shared_mode(works)
        captured = self._graph(bucket, narrow, ahead, plain, mode)
        packed, ends = self._packing.pack(works, slots, ahead, bucket)
        ticket = captured.start(packed)
        if plain and not ahead:
            self._go_on(captured, works, {work.sequence.id: end - 1 for work, end in zip(works, ends, strict=True)})
        rows = captured.rows(ticket)
        drawing = [(work, _drawing(work, end)) for work, end in zip(works, ends, strict=True) if work.samples]
        return [_drawn(work, rows[places.start : places.stop], captured.hidden, places) for work, places in drawing]

    def _seen(self, work: Work) -> Tensor | None:
        """What each row of a work may see, where its draft branches.  # [row, context] bool"""
        if work.drafted.is_chain:
            return None
        first, drafted = work.start + work.count, len(work.drafted)
        seen = np.tri(work.total, first + drafted, work.start, dtype=bool)
        tree = np.eye(drafted, dtype=bool)
        for place, up in enumerate(work.drafted.parents):
            if up >= 0:
                tree[place] |= tree[up]
        seen[work.count :, first:] = tree
        return torch.from_numpy(seen).to(self.device)

    def _is_single(self, work: Work) -> bool:
        is_short = work.total <= SHORT_PIECE or (bool(work.drafted) and work.total <= 1 + GRAPHED_DRAFT)
        return self.use_kernels and is_short

    def _goes_row_by_row(self, work: Work) -> bool:
        """Whether the decode kernel takes its rows: one launch for all such works, where a piece takes ten."""
        read = work.total * (work.start + work.total) * self._row_bytes
        is_near = self.use_kernels and work.drafted.is_chain and read <= READ_AGAIN
        return is_near or self._is_single(work)

    def _wish(self, works: list[Work]) -> Wish | None:
        """The drafted rows as wishes of the draws before them, where acceptance is relaxed."""
        if not any(_is_relaxed(work) for work in works):
            return None
        none = (NO_ROW,) * self.model.channels
        ids, bounds = [], []
        for work in works:
            if work.samples:
                relaxed = work.sequence.speculation.relaxed if work.sequence.speculation else None
                ids += _wished(work.drafted, none) if relaxed else [none] * (1 + len(work.drafted))
                bounds += [(relaxed.most, relaxed.share) if relaxed else (1.0, 1.0)] * (1 + len(work.drafted))
        most, share = torch.tensor(bounds, device=self.device).unbind(-1)
        return Wish(torch.tensor(ids, dtype=torch.long, device=self.device), most, share)

    def _step(
        self,
        packed: Tensor,
        singles: int,
        pieces: tuple[Piece, ...],
        sampled: Tensor | None,
        narrow: bool,
        ahead: int,
        wish: Wish | None = None,
        counts: bool = True,
        plain: bool = False,
        shared_mode: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The one forward pass, eager or captured: new rows, and the states they come of.

        `sampled` names the rows that yield a new row; None means all. `counts` says whether histories are kept.
        `shared_mode` is that of all rows that yield one, if they have one.
        """
        channels = self.model.channels
        rows = packed[:, :channels].long()
        slots, positions = packed[:, channels].contiguous(), packed[:, channels + 1].contiguous()
        if counts:
            counted = packed[:, channels + 4] != 0
            self._tables.note(torch.where(counted, slots, self._packing.filler), rows)
        places = None
        if any(piece.visible is not None for piece in pieces):
            places = positions.clone()
            for piece in pieces:
                places[piece.rows] = torch.arange(piece.position, piece.context, dtype=places.dtype)
        batch = RowBatch(self.cache, self._page_table, slots, positions, singles, pieces, places, shared_mode)
        hidden = self.model.forward(rows, batch)
        if sampled is not None:
            hidden, packed = hidden[sampled], packed[sampled]
        if packed.shape[0] == 0:
            return rows[:0], hidden
        slot, position, mode, generated = packed[:, channels : channels + 4].long().unbind(-1)
        others = packed[:, channels + 5 :].unflatten(-1, (self._packing.recall + ahead, channels))
        recent = others[:, : self._packing.recall] if self._packing.recall else None
        drafted = others[:, self._packing.recall :] if ahead else None
        draw = SlotDraw(
            self._tables, slot, position + 1, mode, generated, narrow, recent, drafted, wish, plain, shared_mode
        )
        return self.model.next_rows(hidden, draw), hidden

    def _graph(
        self, bucket: int, narrow: bool, ahead: int = 0, plain: bool = False, mode: int | None = None
    ) -> Captured:
        """The captured step of a bucket."""
        key = (bucket, narrow, ahead, plain, mode)
        if key not in self._graphs:
            given = torch.from_numpy(self._packing.pack([], [], ahead, bucket)[0]).to(self.device)
            graph, (made, hidden) = self._capture(
                lambda: self._step(given, bucket, (), None, narrow, ahead, None, not plain, plain, mode)
            )
            following = None
            if plain and not ahead and self._next_modes is not None:
                facts = (self.model.channels, self._packing.filler, self._next_modes)
                following, _ = self._capture(lambda: follow(given, made, *facts))
            self._graphs[key] = Captured(graph, given, made, hidden, following)
        return self._graphs[key]

    def _capture(self, action: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
        """An action as a graph, and what it gives."""
        side = self._side = self._side or torch.cuda.Stream(self.device)
        graph, made = as_graph(action, side, self._pool)
        self._pool = graph.pool()
        return graph, made

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
            self._page_table[self._sent(torch.tensor(indices))] = self._sent(
                torch.from_numpy(self._page_table_host[indices])
            )
        for slot, work in zip(slots, works, strict=True):
            self._refresh(slot, work)
        return [slot.index for slot in slots]

    def _sent(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, for which nobody waits: a step may be under way there."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

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
            slot.history, slot.known = history, work.start
        elif slot.known < work.start and sequence.generation is not None and self._penalises(sequence.generation):
            missed = torch.tensor(sequence.rows[slot.known : work.start], dtype=torch.long, device=self.device)
            self._tables.note(torch.full_like(missed[:, 0], slot.index), missed)
            slot.known = work.start
        if sequence.generation is not None and slot.generation is not sequence.generation:
            self._tables.settle(slot.index, sequence.generation)
            slot.generation = sequence.generation

    def _shared_mode(self, works: list[Work]) -> int | None:
        """The mode of all who make a row, where the model says that knowing it spares work."""
        if any(work.sequence.speculation is not None for work in works):
            return None  # drafts may be made of states that the mode would spare
        modes = {work.sequence.mode for work in works if work.samples}
        return modes.pop() if len(modes) == 1 and modes <= set(self._lone_modes) else None

    def _is_narrow(self, sequences: list[Sequence]) -> bool:
        """Whether the candidates of every one of these draws are surely among the best few."""
        return all(
            sampling.is_narrow
            for sequence in sequences
            if sequence.generation is not None
            for sampling in sequence.generation.per_channel(self.model.channels)
        )

    def _is_greedy(self, sequences: list[Sequence]) -> bool:
        """Whether every one of these draws is to be the likeliest id."""
        return all(
            sampling.temperature == 0
            for sequence in sequences
            if sequence.generation is not None
            for sampling in sequence.generation.per_channel(self.model.channels)
        )

    def _is_plain(self, works: list[Work]) -> bool:
        """Whether there are draws, each is to be the likeliest id, and nobody's penalties count."""
        drawing = [work.sequence for work in works if work.samples]
        return bool(drawing) and not self._counts(works) and self._is_greedy(drawing)

    def _counts(self, works: list[Work]) -> bool:
        """Whether somebody's penalties ask for what stands before. Nobody: a history is caught up with when asked."""
        generations = [work.sequence.generation for work in works]
        return any(generation is not None and self._penalises(generation) for generation in generations)

    def _penalises(self, generation: Generation) -> bool:
        return any(sampling.repetition_penalty != 1 for sampling in generation.per_channel(self.model.channels))


def _is_relaxed(work: Work) -> bool:
    speculation = work.sequence.speculation
    return bool(work.drafted) and speculation is not None and speculation.relaxed is not None


def _wished(draft: Draft, none: Row) -> list[Row]:
    """The likeliest guess behind the sequence's last row and behind each row of the draft."""
    return [draft[draft.parents.index(place)] if place in draft.parents else none for place in range(-1, len(draft))]


def _drawing(work: Work, end: int) -> range:
    """The rows of the step that yield a row, of a work that ends there."""
    return range(end - 1 - len(work.drafted), end) if work.samples else range(0)


def _drawn(work: Work, rows: list[list[int]], hidden: Tensor, places: range) -> Drawn:
    speculation = work.sequence.speculation
    reads = work.sequence.states is not None or (speculation is not None and speculation.reads_hidden)
    return Drawn([tuple(row) for row in rows], hidden[places.start : places.stop].clone() if reads else None)
