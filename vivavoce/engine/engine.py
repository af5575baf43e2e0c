"""The engine: many sequences on one model, advanced together step by step.

This is the synchronous core, driven by one thread; `vivavoce.runtime.async_engine` is its asynchronous interface.
A sequence may be appended to while it waits, forked, rewound and closed at any moment between steps.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.runner import Drawn, Runner, allocate_cache, cache_dtype, rows_that_fit
from vivavoce.engine.sampling import Generation
from vivavoce.engine.scheduler import PagePool, Scheduler, StepPlan, Work
from vivavoce.engine.sequence import ON_GRAPHS, AheadPolicy, FinishReason, PlaybackDeadline, Sequence, Slack
from vivavoce.engine.speculative import Acceptance, Draft, Speculation, agreed, gather
from vivavoce.engine.step import Emission, Failure, StepResult
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import GenerativeModel, Row

__all__ = ["Emission", "Engine", "EngineLimits", "Failure", "StepResult"]

logger = logging.getLogger(__name__)
Kept = Literal["float", "fp8"]


@dataclass(frozen=True)
class EngineLimits:
    """How much the engine takes on. Defaults suit one session on a laptop and a hundred on a large GPU."""

    page_size: int = 16
    cache_rows: int | None = None
    """Rows of keys and values held in all; None: what fits into the device's free memory."""
    context: int | None = None
    """Rows one sequence may have; None: as many as the model and the cache allow."""
    rows_per_step: int = 512
    sequences_per_step: int = 128
    kv: Kept = "float"
    """How keys and values are kept: as the model computes them, or in float8, a scale for each head of each row."""
    sound: AheadPolicy | None = None
    """How far replies run ahead of their listeners; None: as suits the device."""


class Engine:
    """Opens sequences, appends, generates, forks, rewinds and closes them; `step` advances all that have work."""

    def __init__(
        self,
        model: GenerativeModel,
        device: Device,
        dtype: torch.dtype | None = None,
        limits: EngineLimits | None = None,
        use_graphs: bool = True,
    ) -> None:
        self.model = model
        self.limits = limits = limits or EngineLimits()
        dtype = dtype or device.dtype
        kept = cache_dtype(model, device, dtype, limits.kv)
        rows = limits.cache_rows or rows_that_fit(model, device, kept)
        pages = -(-rows // limits.page_size) + 1
        self.capacity = min((pages - 1) * limits.page_size, model.context_limit, limits.context or model.context_limit)
        cache = allocate_cache(model, pages, limits.page_size, kept, device)
        self.scheduler = Scheduler(
            PagePool(pages), limits.page_size, limits.rows_per_step, limits.sequences_per_step, limits.sound
        )
        self.slack = Slack()
        use_graphs = use_graphs and device.graphs and device.triton
        self.runner = Runner(model, cache, self.capacity, limits.sequences_per_step, use_graphs)
        self.scheduler.spare_rows = int(self.runner.goes_ahead)
        if self.runner.use_graphs:  # a step without a graph takes as long as five
            self.scheduler.rows_beside_sound = BUCKETS[-1]
            self.scheduler.sound = limits.sound or ON_GRAPHS
        self.acceptance = Acceptance()
        self._next_id = 0
        self._steps = 0

    @property
    def steps(self) -> int:
        """Passes of the model so far."""
        return self._steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.rests == 0

    @property
    def rests(self) -> float | None:
        """Seconds until a step would do anything, 0 where it would now; None: not before somebody asks."""
        return self.scheduler.rests()

    @property
    def free_rows(self) -> int:
        """Rows that could be held beside those of sequences that have work; the idle give way."""
        held = {page for s in self.scheduler.sequences.values() if s.has_work for page in s.pages}
        return (self.scheduler.pool.size - len(held)) * self.limits.page_size

    @property
    def free_bytes(self) -> float:
        """Memory of the device that can still be taken, what torch keeps for later included; on a CPU nobody counts."""
        device = self.runner.device
        if device.type != "cuda":
            return float("inf")
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    def warm_up(self) -> None:
        """Capture the steps of all batches that sequences can make, so that no conversation waits for it."""
        largest = min(2 * self.limits.sequences_per_step, BUCKETS[-1])
        self.runner.warm_up(tuple(bucket for bucket in BUCKETS if bucket <= largest))
        if self.runner.use_graphs:
            self._prefill_once()

    def _prefill_once(self) -> None:
        """Compute a prompt too long for any graph: what libraries load for it takes a second."""
        sequence = self.open([(0,) * self.model.channels] * min(self.limits.rows_per_step, self.capacity))
        left = 0
        while left != sequence.pending > 0:  # or nothing moves, for want of pages
            left = sequence.pending
            self.step()
        self.close(sequence)

    def open(self, rows: Iterable[Row] = ()) -> Sequence:
        """A new sequence, its first rows to be computed in the steps that follow."""
        sequence = Sequence(self._next_id)
        self._next_id += 1
        self.scheduler.sequences[sequence.id] = sequence
        try:
            self.append(sequence, rows)
        except Exception:
            self.close(sequence)
            raise
        return sequence

    def append(self, sequence: Sequence, rows: Iterable[Row]) -> None:
        """Add rows at the end: what the user says, as it comes. Not while a reply is being made."""
        self._require_open(sequence)
        if sequence.is_generating:
            raise InputError(f"sequence {sequence.id} is generating; stop or rewind it before appending")
        added = [tuple(row) for row in rows]
        self._check(added, sequence)
        sequence.rows.extend(added)
        sequence.is_wanted = sequence.is_wanted or bool(added)
        sequence.last_used = self._steps

    def generate(
        self,
        sequence: Sequence,
        generation: Generation,
        max_unread: int | None = None,
        speculation: Speculation | None = None,
        listener: PlaybackDeadline | None = None,
    ) -> None:
        """Start a reply after the last row. With `max_unread`, it pauses while so many rows are not taken.

        With `speculation`, steps may make several of its rows; which rows it makes does not change. A `listener` hears
        it while it is made: the reply is served by when they run dry, and rests where it is far ahead.
        """
        self._require_open(sequence)
        if not sequence.rows:
            raise InputError(f"sequence {sequence.id} has no rows to reply to")
        if sequence.is_generating:
            raise InputError(f"sequence {sequence.id} is generating already")
        if len(sequence) >= self.capacity:
            raise CapacityError(
                f"sequence {sequence.id} fills all {self.capacity} rows it may have; rewind it or raise the cache"
            )
        generation.per_channel(self.model.channels)
        # The last row is computed (again) so that its hidden state is at hand.
        sequence.cached = min(sequence.cached, len(sequence) - 1)
        sequence.mode = self.model.start_mode(sequence.rows[-1])
        sequence.generation, sequence.generated = generation, 0
        sequence.unread, sequence.max_unread = 0, max_unread
        sequence.speculation, sequence.hidden = speculation, None
        sequence.listener, sequence.served, sequence.voiced = listener, self.scheduler.now(), None

    def heard(self, sequence: Sequence, seconds: float) -> None:
        """The listener has played so much of the reply by now."""
        if sequence.listener is not None:
            sequence.listener = sequence.listener.heard(self.scheduler.now(), seconds)

    def take(self, sequence: Sequence, rows: int = 1) -> None:
        """The consumer has taken rows; a reply that waited for it goes on."""
        sequence.unread = max(0, sequence.unread - rows)

    def stop(self, sequence: Sequence) -> None:
        """End the reply under way, if any; its rows stay, and the state behind the newest one, if it was wanted."""
        sequence.generation = None
        sequence.max_unread = None
        sequence.speculation, sequence.listener = None, None

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same rows. Pages are shared until one of the two writes into them."""
        self._require_open(sequence)
        forked = Sequence(
            self._next_id,
            list(sequence.rows),
            sequence.pages[: -(-sequence.cached // self.limits.page_size)],
            sequence.cached,
            last_used=self._steps,
            is_wanted=sequence.is_wanted,
        )
        for page in forked.pages:
            self.scheduler.pool.share(page)
        self._next_id += 1
        self.scheduler.sequences[forked.id] = forked
        return forked

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget every row from `length` on; a reply under way ends."""
        self._require_open(sequence)
        if not 0 <= length <= len(sequence):
            raise InputError(f"sequence {sequence.id} has {len(sequence)} rows and cannot be rewound to {length}")
        self.stop(sequence)
        del sequence.rows[length:]
        self.scheduler.release(sequence, keep_rows=min(sequence.cached, length))
        sequence.row_revision += 1

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever it is doing. Closing twice does nothing."""
        if sequence.is_open:
            self.stop(sequence)
            self.scheduler.release(sequence)
            self.runner.forget(sequence)
            del self.scheduler.sequences[sequence.id]
            sequence.is_open = False

    def step(self) -> list[Emission]:
        """Advance every sequence that has work; what they made. An error leaves all sequences as they were.

        A driver that serves several callers takes `advance`, in which one sequence's error is not another's.
        """
        plan = self.scheduler.plan(self._drafts())
        if not plan.works:
            return []
        begun = self.scheduler.now()
        self._copy_pages(plan)
        made = iter(self.runner.run(plan.works))
        self._note_step(plan, begun)
        return [
            emission for work in plan.works for emission in self._commit(work, next(made) if work.samples else None)
        ]

    def advance(self) -> StepResult:
        """Advance every sequence that has work. A sequence whose part of the step fails is failed, and only that one.

        The sequences of a failing step are computed again in smaller groups, which finds those that fail by themselves.
        Nothing of a failing step is kept: its keys and values lie behind the rows that count, and are written again.
        """
        try:
            plan = self.scheduler.plan(self._drafts())
        except Exception as error:
            busy = [sequence for sequence in self.scheduler.sequences.values() if sequence.has_work]
            return StepResult(failures=[self.fail(sequence, error) for sequence in busy])
        result = StepResult()
        if not plan.works:
            return result
        begun = self.scheduler.now()
        try:
            self._copy_pages(plan)
        except Exception as error:
            return StepResult(failures=[self.fail(work.sequence, error) for work in plan.works])
        outcomes = self.runner.run_isolated(plan.works)
        self._note_step(plan, begun)
        for work, outcome in zip(plan.works, outcomes, strict=True):
            if isinstance(outcome, Exception):
                result.failures.append(self.fail(work.sequence, outcome))
                continue
            try:
                result.emissions += self._commit(work, outcome)
            except Exception as error:
                if work.samples:
                    del work.sequence.rows[work.start + work.count :]
                    work.sequence.row_revision += 1
                result.failures.append(self.fail(work.sequence, error))
        return result

    def fail(self, sequence: Sequence, error: Exception) -> Failure:
        """End what a sequence is doing and free its pages: what is in them may be half written.

        It stays open and keeps its rows, which are computed again when they are next asked for.
        """
        logger.error("sequence %d failed", sequence.id, exc_info=error)
        self.stop(sequence)
        sequence.is_wanted, sequence.hidden = False, None
        self.scheduler.release(sequence)
        self.runner.forget(sequence)
        return Failure(sequence, error)

    def _copy_pages(self, plan: StepPlan) -> None:
        """Give forks pages of their own. Where that fails, what is in their pages is not theirs and is given back."""
        try:
            self.runner.cache.copy_pages(plan.copies)
        except Exception:
            copied = {target for _, target in plan.copies}
            for work in plan.works:
                if copied.intersection(work.sequence.pages):
                    self.scheduler.release(work.sequence)
            raise

    def _note_step(self, plan: StepPlan, begun: float) -> None:
        self._note_slack(plan, begun, self.scheduler.now())
        self._steps += 1

    def _commit(self, work: Work, drawn: Drawn | None) -> list[Emission]:
        """Count the rows of a work as computed, and add those it made."""
        sequence = work.sequence
        sequence.cached += work.count
        sequence.last_used = self._steps
        sequence.is_wanted = sequence.is_wanted and sequence.pending > 0
        return [] if drawn is None else self._verify(work, drawn)

    def complete(self, sequence: Sequence, generation: Generation, speculation: Speculation | None = None) -> list[Row]:
        """A whole reply at once, other sequences going on beside it."""
        self.generate(sequence, generation, speculation=speculation)
        rows: list[Row] = []
        while sequence.is_generating:
            rows += [emission.row for emission in self.step() if emission.sequence is sequence]
        return rows

    def _drafts(self) -> dict[int, Draft]:
        """Guesses of what follows, by sequence, as many as a step has room for once everybody's rows are in it."""
        busy = [sequence for sequence in self.scheduler.sequences.values() if sequence.has_work]
        spare = self.limits.rows_per_step - sum(sequence.pending for sequence in busy)
        wants = []
        for sequence in busy:
            max_drafted = min(self._max_drafted(sequence), spare)
            if max_drafted > 0:
                wants.append((sequence, max_drafted))
                spare -= max_drafted
        drafts = gather(wants, self.model)
        # The decode kernel lets a row see all before it, so where it runs, drafts do not branch.
        return {key: draft.likeliest() for key, draft in drafts.items()} if self.runner.use_kernels else drafts

    def _max_drafted(self, sequence: Sequence) -> int:
        """How many guesses could be kept: one row less than the reply, the cache and the consumer have room for."""
        if sequence.generation is None or sequence.speculation is None:
            return 0
        room = [sequence.generation.max_new_rows - sequence.generated, self.capacity - len(sequence)]
        if sequence.max_unread is not None:
            room.append(sequence.max_unread - sequence.unread)
        return min(sequence.speculation.max_rows, min(room) - 1)

    def _note_slack(self, plan: StepPlan, begun: float, now: float) -> None:
        self.slack.note_step(now - begun)
        for sequence in (work.sequence for work in plan.works if work.samples):
            if sequence.listener is not None and sequence.listener.playing is not None:
                self.slack.note(now, sequence.listener.runs_dry(sequence.generated) - now)

    def _verify(self, work: Work, drawn: Drawn) -> list[Emission]:
        """Keep a draft for as long as it is what was drawn, and then the row that was."""
        sequence = work.sequence
        places = agreed(work.drafted, drawn.rows)
        last = 1 + places[-1] if places else 0
        sequence.hidden = None if drawn.hidden is None else drawn.hidden[last]
        if sequence.states is not None and drawn.hidden is not None:
            sequence.states.append(drawn.hidden[[0, *(1 + place for place in places)]])
        self.runner.keep(sequence, places)
        sequence.cached += len(places)
        emissions = [self._accept(sequence, row) for row in [*(work.drafted[p] for p in places), drawn.rows[last]]]
        if work.drafted:
            self.acceptance.note(work.drafted.depth, len(places))
            self.scheduler.trim(sequence)
        return emissions

    def _accept(self, sequence: Sequence, row: Row) -> Emission:
        """Add a made row to its sequence and see whether the reply is over."""
        assert sequence.generation is not None
        sequence.rows.append(row)
        sequence.generated += 1
        sequence.unread += 1
        sequence.mode = self.model.next_mode(sequence.mode, row)
        if (
            sequence.voiced is None
            and sequence.listener is not None
            and sequence.listener.is_voiced(sequence.generated)
        ):
            sequence.voiced = self.scheduler.now()
        finish: FinishReason | None = None
        if self.model.ends(row):
            finish = "stop"
        elif sequence.generated >= sequence.generation.max_new_rows:
            finish = "length"
        elif len(sequence) >= self.capacity:
            finish = "context"
        if finish is not None:
            self.stop(sequence)
        return Emission(sequence, row, finish)

    def _require_open(self, sequence: Sequence) -> None:
        if not sequence.is_open:
            raise InputError(f"sequence {sequence.id} is closed")

    def _check(self, rows: list[Row], sequence: Sequence) -> None:
        """Refuse rows the model cannot embed, and more of them than can be held."""
        vocabularies = self.model.vocabularies
        for row in rows:
            if len(row) != len(vocabularies):
                raise InputError(f"a row has {len(vocabularies)} ids in this model, not {len(row)}: {row}")
            for channel, (value, size) in enumerate(zip(row, vocabularies, strict=True)):
                if not 0 <= value < size:
                    raise InputError(f"id {value} of channel {channel} is not in 0…{size - 1}")
        if len(sequence) + len(rows) > self.capacity:
            raise CapacityError(
                f"{len(sequence) + len(rows)} rows are more than the {self.capacity} a sequence may have here; "
                "shorten the prompt or raise cache_rows and context"
            )
