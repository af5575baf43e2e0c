"""Runs a plan on the device: lays the rows out flat, lets the model compute them, and reads the new rows back.

Where the Triton kernels run, a step of few rows replays a CUDA graph captured for its bucket; every other step, and
every step elsewhere, is the same code run eagerly. The only wait for the device is the reading of the new rows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce import kernels
from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS, Captured, NextModes, StepAhead, StepGraphs, goes_on
from vivavoce.engine.sampling import NO_ROW, SamplingRequest, SlotDraw
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft
from vivavoce.engine.step import GRAPHED_DRAFT, Packing, SequenceTables, Step, StepKind
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn.paged_kv import FP8, CachePiece, PagedCache

logger = logging.getLogger(__name__)
SHORT_PIECE = 4  # in a mixed step, pieces up to this long go through the decode kernel, row by row
READ_AGAIN = 1 << 25  # bytes of a layer that the rows of a prompt may read one by one: so near, they come from L2
DRAFT_BUCKET = 512  # of steps in which every sequence has no more rows than its last and such a draft


@dataclass
class Drawn:
    """What one sequence made in a step: the row behind its last one, then the row behind each drafted one."""

    rows: list[Row]
    hidden: Tensor | None = None  # [row, …]: the states they were drawn from, where drafts are made of them


Outcome = Drawn | Exception | None
"""Of a work: what it made, None where it only prefills, or why it failed."""


class Runner:
    """Owns the device's side of the engine: cache, slots, graphs."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, context: int, slots: int, use_graphs: bool) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys.device
        self.use_kernels = kernels.usable(cache.keys)
        self.use_graphs = use_graphs and self.use_kernels
        self._row_bytes = 2 * cache.keys[0, 0, 0].nbytes  # of a layer
        self._slots = SequenceTables(model, self.device, slots, pages=-(-context // cache.page_size))
        self._packing = Packing(model, self._slots.filler)
        self._step = Step(model, cache, self._slots, self._packing.recall)
        self._lone_modes: tuple[int, ...] = getattr(model, "lone_modes", ())
        self._next_modes: NextModes | None = getattr(model, "next_modes", None)
        self._graphs = StepGraphs(self._step.of_singles, self._packing, self.device, self._next_modes)
        self._ahead: StepAhead | None = None

    @property
    def goes_ahead(self) -> bool:
        """Whether steps may be begun before they are planned, for which every reply needs room for one row more."""
        return self.use_graphs and self._next_modes is not None

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Drawn]:
        """The new rows of each work that samples, in order."""
        try:
            return self._run_with_ahead(works)
        except Exception:
            self._reset(works)
            raise

    @torch.inference_mode()
    def run_isolated(self, works: list[Work]) -> list[Outcome]:
        """As `run`, for each work; where the step fails, its halves are run, down to the works that fail alone."""
        outcomes = self._attempt(works)
        if not isinstance(outcomes, Exception):
            return outcomes
        if len(works) == 1:
            return [outcomes]
        logger.warning("a step of %d sequences failed and is run again in parts", len(works), exc_info=outcomes)
        del outcomes  # its traceback holds the activations of the failed pass
        middle = len(works) // 2
        halves = [*self.run_isolated(works[:middle]), *self.run_isolated(works[middle:])]
        self._ahead = None  # begun for one part; the graph's buffers may have been written for another since
        return halves

    def _attempt(self, works: list[Work]) -> list[Outcome] | Exception:
        try:
            drawn = iter(self.run(works))
            return [next(drawn) if work.samples else None for work in works]
        except Exception as error:
            return error

    def _reset(self, works: list[Work]) -> None:
        """Forget what a failed step may have left half done: its slots' tables, and the step begun behind it."""
        self._ahead = None
        for work in works:
            self._slots.forget(work.sequence)

    def _run_with_ahead(self, works: list[Work]) -> list[Drawn]:
        ahead, self._ahead = self._ahead, None
        rows = {} if ahead is None else ahead.rows_of(works)
        if ahead is None or not rows:
            return self._run(works)
        others = [work for work in works if work.sequence.id not in rows]
        if not others and len(rows) == len(ahead.places):
            self._slots.assign(works)
            self._go_on(ahead.captured, works, rows)
        made = ahead.made()
        drawn = iter(self._run(others) if others else ())
        return [
            Drawn([tuple(made[rows[work.sequence.id]])]) if work.sequence.id in rows else next(drawn)
            for work in works
            if work.samples
        ]

    def _go_on(self, captured: Captured, works: list[Work], rows: Mapping[int, int]) -> None:
        """Begin the step behind the one under way, where all that is known of it is what the device makes now."""
        if captured.following is not None and goes_on(works, self.cache.page_size):
            self._ahead = StepAhead(captured, works, rows)

    def _run(self, works: list[Work]) -> list[Drawn]:
        slots = self._slots.assign(works)
        kind, bucket = StepKind.of(works, self._lone_modes), self._bucket(works)
        if bucket is not None and kind.ahead <= GRAPHED_DRAFT and not any(_is_relaxed(work) for work in works):
            kind = kind.graphed
            drawn = self._replay(works, slots, bucket, kind)
        else:
            drawn = self._run_eagerly(works, slots, kind)
        if kind.counts:
            self._slots.counted(works)
        return drawn

    def _bucket(self, works: list[Work]) -> int | None:
        """Rows of the smallest graph that has room for these works, if one has."""
        if not self.use_graphs:
            return None
        total = sum(work.total for work in works)
        if total > BUCKETS[-1]:
            return DRAFT_BUCKET if total <= DRAFT_BUCKET and all(self._is_single(work) for work in works) else None
        return next(size for size in BUCKETS if size >= total)

    @torch.inference_mode()
    def warm_up(self, buckets: tuple[int, ...] = BUCKETS) -> None:
        """Capture the graphs ahead, so that no conversation pays for it."""
        if self.use_graphs:
            self._graphs.warm_up(buckets, self._lone_modes)

    def knows(self, sequence: Sequence) -> bool:
        """Whether a sequence's settings are on the device; a slot may have been given away."""
        return sequence in self._slots

    def draw_ahead(self, sequences: list[Sequence], places: int) -> SlotDraw:
        """How the rows of so many places behind each sequence's last row would be drawn, place by place.

        # one entry per sequence and place
        """
        facts = [
            (self._slots.index(sequence), len(sequence) + place, sequence.mode, sequence.generated + 1 + place)
            for sequence in sequences
            for place in range(places)
        ]
        slot, position, mode, generated = torch.tensor(facts, device=self.device).unbind(-1)
        recent = None
        if self._packing.recall:
            recalled = np.stack([self._packing.recent(sequence, ()) for sequence in sequences]).repeat(places, axis=0)
            recent = torch.from_numpy(recalled).to(self.device)
        generations = [sequence.generation for sequence in sequences if sequence.generation is not None]
        plain = all(generation.is_greedy and not generation.penalises for generation in generations)
        fits_top_k_kernel = all(generation.fits_top_k_kernel for generation in generations)
        return SlotDraw(self._slots.tables, slot, position, mode, generated, fits_top_k_kernel, recent, plain=plain)

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
        self._slots.forget(sequence)

    def _run_eagerly(self, works: list[Work], slots: list[int], kind: StepKind) -> list[Drawn]:
        # Rows the decode kernel takes stand first; without kernels there are none, and every work is a piece.
        order = sorted(range(len(works)), key=lambda index: not self._goes_row_by_row(works[index]))
        works, slots = [works[index] for index in order], [slots[index] for index in order]
        packed, ends = self._packing.pack(works, slots, kind.ahead)
        singles = sum(work.total for work in works if self._goes_row_by_row(work))
        pieces = tuple(
            CachePiece(slice(end - work.total, end), slot, work.start, self._seen(work))
            for work, slot, end in zip(works, slots, ends, strict=True)
            if not self._goes_row_by_row(work)
        )
        drawing = [row for work, end in zip(works, ends, strict=True) for row in _drawing(work, end)]
        sampled = torch.tensor(drawing, dtype=torch.long, device=self.device)
        given = torch.from_numpy(packed).to(self.device)
        made, hidden = self._step(given, kind, singles, pieces, sampled, self._sampling_request(works))
        rows, by_work, begin = made.tolist(), {}, 0
        for index, work in zip(order, works, strict=True):
            if work.samples:
                end = begin + 1 + len(work.drafted)
                by_work[index] = _drawn(work, rows[begin:end], hidden, range(begin, end))
                begin = end
        return [by_work[index] for index in sorted(by_work)]

    def _replay(self, works: list[Work], slots: list[int], bucket: int, kind: StepKind) -> list[Drawn]:
        captured = self._graphs.of(bucket, kind)
        packed, ends = self._packing.pack(works, slots, kind.ahead, bucket)
        ticket = captured.start(packed)
        if not kind.ahead:
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

    def _sampling_request(self, works: list[Work]) -> SamplingRequest | None:
        """The drafted rows as wishes of the draws before them, where acceptance is relaxed."""
        if not any(_is_relaxed(work) for work in works):
            return None
        none = (NO_ROW,) * self.model.channels
        ids, bounds = [], []
        for work in works:
            if work.samples:
                relaxed = work.sequence.speculation.relaxed if work.sequence.speculation else None
                ids += _requested_ids(work.drafted, none) if relaxed else [none] * (1 + len(work.drafted))
                bounds += [(relaxed.max_probability, relaxed.share) if relaxed else (1.0, 1.0)] * (
                    1 + len(work.drafted)
                )
        max_probability, share = torch.tensor(bounds, device=self.device).unbind(-1)
        return SamplingRequest(torch.tensor(ids, dtype=torch.long, device=self.device), max_probability, share)


def _is_relaxed(work: Work) -> bool:
    speculation = work.sequence.speculation
    return bool(work.drafted) and speculation is not None and speculation.relaxed is not None


def _requested_ids(draft: Draft, none: Row) -> list[Row]:
    """The likeliest guess behind the sequence's last row and behind each row of the draft."""
    return [draft[draft.parents.index(place)] if place in draft.parents else none for place in range(-1, len(draft))]


def _drawing(work: Work, end: int) -> range:
    """The rows of the step that yield a row, of a work that ends there."""
    return range(end - 1 - len(work.drafted), end) if work.samples else range(0)


def _drawn(work: Work, rows: list[list[int]], hidden: Tensor, places: range) -> Drawn:
    speculation = work.sequence.speculation
    reads = work.sequence.states is not None or (speculation is not None and speculation.reads_hidden)
    return Drawn([tuple(row) for row in rows], hidden[places.start : places.stop].clone() if reads else None)


CPU_CACHE_ROWS = 16384
FREE_MEMORY_SHARE = 0.85  # of what the weights leave; the rest is for activations and graphs


def cache_dtype(model: GenerativeModel, device: Device, dtype: torch.dtype, kv: str) -> torch.dtype:
    """The type in which keys and values are kept, refused where something would have to compute with it that cannot."""
    if kv == "float":
        return dtype
    if kv != "fp8":
        raise InputError(f"kv must be 'float' or 'fp8', not {kv!r}")
    if not getattr(model, "takes_fp8_cache", False):
        raise InputError(f"{type(model).__name__} keeps keys and values as floats only; leave kv at 'float'")
    if device.kind == "mps" or (device.kind == "cuda" and torch.cuda.get_device_capability(device.index) < (8, 9)):
        raise InputError(f"{device.name} does not compute with float8; leave kv at 'float'")
    return FP8


def rows_that_fit(model: GenerativeModel, device: Device, dtype: torch.dtype) -> int:
    if device.kind == "cpu":
        return CPU_CACHE_ROWS
    row = model.kv_shape.bytes_per_row(dtype)
    free = int(device.free_memory() * FREE_MEMORY_SHARE)
    if free < row * 64:
        raise CapacityError(
            f"{device.name} has {free / 2**20:.0f} MiB left for the cache; free memory or take a smaller model"
        )
    return free // row


def allocate_cache(
    model: GenerativeModel, pages: int, page_size: int, dtype: torch.dtype, device: Device
) -> PagedCache:
    try:
        return PagedCache.allocate(model.kv_shape, pages, page_size, dtype, device.torch_device)
    except RuntimeError as error:  # torch's out-of-memory errors on every device
        size = model.kv_shape.bytes_per_row(dtype) * pages * page_size
        raise CapacityError(
            f"a cache of {size / 2**30:.1f} GiB does not fit on {device.name}; lower cache_rows"
        ) from error
