"""Runs planned steps on the device: packs the rows of all works, runs the model, and reads the new rows back.

With Triton kernels, a step of few rows replays the CUDA graph of its bucket; all other steps run the same code eagerly.
The host waits for the device only to read the new rows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce import kernels
from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import (
    BUCKETS,
    PREFILL_BUCKETS,
    CapturedStep,
    NextModes,
    PrelaunchedStep,
    StepGraphs,
    can_prelaunch,
)
from vivavoce.engine.sampling import NO_ROW, SamplingRequest, SlotDraw
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Draft
from vivavoce.engine.step import GRAPHED_DRAFT, MAX_PREFILL_WORKS, Packing, SequenceTables, Step, StepKind
from vivavoce.errors import CapacityError, InputError
from vivavoce.log import FailureLog
from vivavoce.models.interface import GenerativeModel, Row
from vivavoce.nn.cuda_graphs import bucket_for
from vivavoce.nn.paged_kv import FP8, TILE_ROWS, CachePiece, PagedCache, tiles_of

logger = logging.getLogger(__name__)
SHORT_PIECE = 4  # rows of a work that the decode kernel takes one by one, also beside longer prefills
MAX_REREAD_BYTES = 1 << 25  # of a layer's cache that the rows of a prompt may read one by one: they come from L2
DRAFT_BUCKET = 512  # rows of the graph for many sequences with drafts


@dataclass
class Drawn:
    """Rows drawn for one sequence in a step: after its last row, then after each drafted row."""

    rows: list[Row]
    hidden: Tensor | None = None  # [row, …]: the states they were drawn from, where drafts read them


Outcome = Drawn | Exception | None
"""Of a work: the drawn rows, None for prefill only, or the error."""


class Runner:
    """The device side of the engine: cache, per-sequence tables, graphs."""

    def __init__(self, model: GenerativeModel, cache: PagedCache, context: int, slots: int, use_graphs: bool) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys.device
        self.use_kernels = kernels.usable(cache.keys)
        self.use_graphs = use_graphs and self.use_kernels
        self._row_bytes = 2 * cache.keys[0, 0, 0].nbytes  # keys and values of a row in one layer
        self._slots = SequenceTables(model, self.device, slots, pages=-(-context // cache.page_size))
        self._packing = Packing(model, self._slots.filler)
        self._step = Step(model, cache, self._slots, self._packing.recall)
        self._lone_modes: tuple[int, ...] = getattr(model, "lone_modes", ())
        self._next_modes: NextModes | None = getattr(model, "next_modes", None)
        self._graphs = StepGraphs(self._step, self._packing, self.device, self._next_modes)
        self._captures_prefill: bool = self.use_graphs and getattr(model, "captures_prefill", False)
        self._prelaunched: PrelaunchedStep | None = None
        self._failures = FailureLog(logger)

    @property
    def can_prelaunch(self) -> bool:
        """Whether steps may be launched before they are planned; replies then need pages for one row more."""
        return self.use_graphs and self._next_modes is not None

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Drawn]:
        """The drawn rows of each work that samples, in order."""
        try:
            return self._run_or_read(works)
        except Exception:
            self._reset(works)
            raise

    @torch.inference_mode()
    def run_isolated(self, works: list[Work]) -> list[Outcome]:
        """The outcome of each work. A step that fails is run again in halves, down to single works."""
        outcomes = self._attempt(works)
        if not isinstance(outcomes, Exception):
            return outcomes
        if len(works) == 1:
            return [outcomes]
        self._failures.log(outcomes, "a step of %d sequences failed; running its halves", len(works))
        del outcomes  # its traceback holds the activations of the failed pass
        middle = len(works) // 2
        halves = [*self.run_isolated(works[:middle]), *self.run_isolated(works[middle:])]
        self._prelaunched = None  # launched after one half; the other may have overwritten the graph's buffers
        return halves

    def _attempt(self, works: list[Work]) -> list[Outcome] | Exception:
        try:
            drawn = iter(self.run(works))
            return [next(drawn) if work.samples else None for work in works]
        except Exception as error:
            return error

    def _reset(self, works: list[Work]) -> None:
        """Drop what a failed step may have left incomplete: the tables of its sequences, and a prelaunched step."""
        self._prelaunched = None
        for work in works:
            self._slots.forget(work.sequence)

    def _run_or_read(self, works: list[Work]) -> list[Drawn]:
        """Read the works that a prelaunched step has computed, and run the others."""
        step, self._prelaunched = self._prelaunched, None
        rows = {} if step is None else step.rows_of(works)
        if step is None or not rows:
            return self._run(works)
        others = [work for work in works if work.sequence.id not in rows]
        if not others and len(rows) == len(step.slots):
            self._slots.assign(works)
            self._prelaunch(step.captured, works, rows)
        outputs = step.read()
        drawn = iter(self._run(others) if others else ())
        return [
            Drawn([tuple(outputs[rows[work.sequence.id]])]) if work.sequence.id in rows else next(drawn)
            for work in works
            if work.samples
        ]

    def _prelaunch(self, captured: CapturedStep, works: list[Work], rows: Mapping[int, int]) -> None:
        """Launch the step after the current one, if it is sure to have the same sequences."""
        if captured.advance is not None and can_prelaunch(works, self.cache.page_size):
            self._prelaunched = PrelaunchedStep(captured, works, rows)

    def _run(self, works: list[Work]) -> list[Drawn]:
        slots = self._slots.assign(works)
        kind, bucket = StepKind.of(works, self._lone_modes), self._bucket(works)
        prefill_bucket = self._prefill_bucket(works)
        if prefill_bucket is not None:
            kind = kind.prefilling
            drawn = self._replay_prefill(works, slots, prefill_bucket, kind)
        elif bucket is not None and kind.draft_depth <= GRAPHED_DRAFT and not any(_is_relaxed(work) for work in works):
            kind = kind.graphed
            drawn = self._replay(works, slots, bucket, kind)
        else:
            drawn = self._run_eagerly(works, slots, kind)
        if kind.counts:
            self._slots.counted(works)
        return drawn

    def _bucket(self, works: list[Work]) -> int | None:
        """Rows of the smallest graph that holds these works; None: run eagerly."""
        if not self.use_graphs:
            return None
        total = sum(work.total for work in works)
        if total > BUCKETS[-1]:
            return DRAFT_BUCKET if total <= DRAFT_BUCKET and all(self._is_single(work) for work in works) else None
        return bucket_for(BUCKETS, total)

    def _prefill_bucket(self, works: list[Work]) -> int | None:
        """Rows of the smallest prefill graph that holds these works; None: they have no long prompt, or do not fit."""
        prompts = [work for work in works if work.total > TILE_ROWS] if self._captures_prefill else []
        if not prompts or len(works) > MAX_PREFILL_WORKS or any(work.drafted for work in works):
            return None
        total = sum(work.total for work in works)
        read = sum(work.total * (work.start + work.total) for work in prompts) * self._row_bytes
        if total > PREFILL_BUCKETS[-1] or read <= MAX_REREAD_BYTES:
            return None
        return bucket_for(PREFILL_BUCKETS, total)

    @torch.inference_mode()
    def warm_up(self, buckets: tuple[int, ...] = BUCKETS) -> None:
        """Capture the graphs of these sizes."""
        if self.use_graphs:
            self._graphs.warm_up(buckets, self._lone_modes, PREFILL_BUCKETS if self._captures_prefill else ())

    def knows(self, sequence: Sequence) -> bool:
        """Whether a sequence has a slot in the device tables; it may have been evicted."""
        return sequence in self._slots

    def draw_ahead(self, sequences: list[Sequence], count: int) -> SlotDraw:
        """The draw of the next `count` rows of each sequence, one entry per sequence and row."""
        facts = [
            (self._slots.index(sequence), len(sequence) + index, sequence.mode, sequence.generated + 1 + index)
            for sequence in sequences
            for index in range(count)
        ]
        slot, position, mode, generated = torch.tensor(facts, device=self.device).unbind(-1)
        recent = None
        if self._packing.recall:
            recalled = np.stack([self._packing.recent(sequence, ()) for sequence in sequences]).repeat(count, axis=0)
            recent = torch.from_numpy(recalled).to(self.device)
        generations = [sequence.generation for sequence in sequences if sequence.generation is not None]
        plain = all(generation.is_greedy and not generation.penalises for generation in generations)
        fits_top_k_kernel = all(generation.fits_top_k_kernel for generation in generations)
        return SlotDraw(self._slots.tables, slot, position, mode, generated, fits_top_k_kernel, recent, plain=plain)

    def compact(self, sequence: Sequence, accepted: list[int]) -> None:
        """Move the keys and values of a draft's accepted rows to directly after the sequence's."""
        if accepted != list(range(len(accepted))):
            self._move(sequence, accepted)

    @torch.inference_mode()
    def _move(self, sequence: Sequence, accepted: list[int]) -> None:
        size = self.cache.page_size
        moves = [(sequence.cached + index, sequence.cached + target) for target, index in enumerate(accepted)]
        pages = torch.tensor(sequence.pages, device=self.device)
        source, target = torch.tensor(moves, device=self.device).unbind(1)
        for tensor in self.cache.tensors():
            tensor[:, pages[target // size], target % size] = tensor[:, pages[source // size], source % size]

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that was closed."""
        self._slots.forget(sequence)

    def _run_eagerly(self, works: list[Work], slots: list[int], kind: StepKind) -> list[Drawn]:
        # Rows for the decode kernel come first; without kernels there are none, and every work is a piece.
        order = sorted(range(len(works)), key=lambda index: not self._goes_row_by_row(works[index]))
        works, slots = [works[index] for index in order], [slots[index] for index in order]
        packed, ends = self._packing.pack(works, slots, kind.draft_depth)
        singles = sum(work.total for work in works if self._goes_row_by_row(work))
        pieces = tuple(
            self._piece(work, slot, end)
            for work, slot, end in zip(works, slots, ends, strict=True)
            if not self._goes_row_by_row(work)
        )
        tiles = None
        causal = [piece for piece in pieces if piece.visible is None]
        if self.use_kernels and causal:
            tiles = torch.tensor(tiles_of(causal), dtype=torch.int32, device=self.device)
            pieces = tuple(piece for piece in pieces if piece.visible is not None)
        drawing = [row for work, end in zip(works, ends, strict=True) for row in _drawing(work, end)]
        sampled = torch.tensor(drawing, dtype=torch.long, device=self.device)
        inputs = torch.from_numpy(packed).to(self.device)
        outputs, hidden = self._step(inputs, kind, singles, pieces, sampled, self._sampling_request(works), tiles)
        rows, by_work, begin = outputs.tolist(), {}, 0
        for index, work in zip(order, works, strict=True):
            if work.samples:
                end = begin + 1 + len(work.drafted)
                by_work[index] = _drawn(work, rows[begin:end], hidden, range(begin, end))
                begin = end
        return [by_work[index] for index in sorted(by_work)]

    def _replay(self, works: list[Work], slots: list[int], bucket: int, kind: StepKind) -> list[Drawn]:
        captured = self._graphs.of(bucket, kind)
        packed, ends = self._packing.pack(works, slots, kind.draft_depth, bucket)
        ticket = captured.launch(packed)
        if not kind.draft_depth:
            self._prelaunch(captured, works, {work.sequence.id: end - 1 for work, end in zip(works, ends, strict=True)})
        rows = captured.read(ticket)
        drawing = [(work, _drawing(work, end)) for work, end in zip(works, ends, strict=True) if work.samples]
        return [_drawn(work, rows[span.start : span.stop], captured.hidden, span) for work, span in drawing]

    def _replay_prefill(self, works: list[Work], slots: list[int], bucket: int, kind: StepKind) -> list[Drawn]:
        captured = self._graphs.of_prefill(bucket, kind)
        packed, ends = self._packing.pack(works, slots, size=bucket)
        pieces = map(self._piece, works, slots, ends)
        drawing = [(work, end - 1) for work, end in zip(works, ends, strict=True) if work.samples]
        inputs = self._graphs.layout(bucket).join(packed, tiles_of(pieces), [row for _, row in drawing])
        rows = captured.read(captured.launch(inputs))
        return [
            _drawn(work, [rows[index]], captured.hidden, range(index, index + 1))
            for index, (work, _) in enumerate(drawing)
        ]

    def _piece(self, work: Work, slot: int, end: int) -> CachePiece:
        """The rows of a work, which end at `end` of the step's."""
        draws = 1 + len(work.drafted) if work.samples else 0
        generation = work.sequence.generation
        lone_mode = None if generation is None else generation.lone_mode
        return CachePiece(slice(end - work.total, end), slot, work.start, self._visible(work), draws, lone_mode)

    def _visible(self, work: Work) -> Tensor | None:
        """The attention mask of a work whose draft branches.  # [row, context] bool"""
        if work.drafted.is_chain:
            return None
        first, drafted = work.start + work.count, len(work.drafted)
        visible = np.tri(work.total, first + drafted, work.start, dtype=bool)
        tree = np.eye(drafted, dtype=bool)
        for index, parent in enumerate(work.drafted.parents):
            if parent >= 0:
                tree[index] |= tree[parent]
        visible[work.count :, first:] = tree
        return torch.from_numpy(visible).to(self.device)

    def _is_single(self, work: Work) -> bool:
        is_short = work.total <= SHORT_PIECE or (bool(work.drafted) and work.total <= 1 + GRAPHED_DRAFT)
        return self.use_kernels and is_short

    def _goes_row_by_row(self, work: Work) -> bool:
        """Whether the decode kernel takes its rows: one launch for all such works, where a piece takes ten."""
        read = work.total * (work.start + work.total) * self._row_bytes
        is_cheap = self.use_kernels and work.drafted.is_chain and read <= MAX_REREAD_BYTES
        return is_cheap or self._is_single(work)

    def _sampling_request(self, works: list[Work]) -> SamplingRequest | None:
        """The drafted rows as requests to the draws at their positions, where acceptance is relaxed."""
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
    """The likeliest drafted row after the sequence's last row and after each row of the draft."""
    parents = draft.parents
    return [draft[parents.index(index)] if index in parents else none for index in range(-1, len(draft))]


def _drawing(work: Work, end: int) -> range:
    """The rows of the step after which a work that ends at `end` draws."""
    return range(end - 1 - len(work.drafted), end) if work.samples else range(0)


def _drawn(work: Work, rows: list[list[int]], hidden: Tensor, span: range) -> Drawn:
    speculation = work.sequence.speculation
    reads = work.sequence.states is not None or (speculation is not None and speculation.reads_hidden)
    return Drawn([tuple(row) for row in rows], hidden[span.start : span.stop].clone() if reads else None)


CPU_CACHE_ROWS = 16384
FREE_MEMORY_SHARE = 0.85  # of the memory left by the weights; the rest is for activations and graphs


def cache_dtype(model: GenerativeModel, device: Device, dtype: torch.dtype, kv: str) -> torch.dtype:
    """The dtype of keys and values; InputError where the model or the device does not support it."""
    if kv == "float":
        return dtype
    if kv != "fp8":
        raise InputError(f"kv must be 'float' or 'fp8', not {kv!r}")
    if not getattr(model, "takes_fp8_cache", False):
        raise InputError(f"{type(model).__name__} supports float keys and values only; leave kv at 'float'")
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
