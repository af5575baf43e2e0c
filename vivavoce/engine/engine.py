"""The engine: continuous batching of many sequences on one model, one step at a time.

This is the synchronous core, driven by one thread; `vivavoce.runtime.async_engine` is its asynchronous interface.
Between two steps, sequences may be appended to, forked, rewound and closed.
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
from vivavoce.engine.sequence import ON_GRAPHS, FinishReason, PacingPolicy, PlaybackDeadline, Sequence, Slack
from vivavoce.engine.speculative import Acceptance, Draft, Speculation, accepted_indices, gather_drafts
from vivavoce.engine.step import Emission, Failure, StepResult
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import GenerativeModel, Row

__all__ = ["Emission", "Engine", "EngineLimits", "Failure", "StepResult"]

logger = logging.getLogger(__name__)
KVFormat = Literal["float", "fp8"]


@dataclass(frozen=True)
class EngineLimits:
    """Limits of memory and batch size. The defaults suit one session on a laptop and a hundred on a large GPU."""

    page_size: int = 16
    cache_rows: int | None = None
    """Rows of keys and values in the cache; None: as many as fit into the device's free memory."""
    context: int | None = None
    """Rows one sequence may have; None: as many as the model and the cache allow."""
    rows_per_step: int = 512
    sequences_per_step: int = 128
    kv: KVFormat = "float"
    """Format of keys and values: the model's dtype, or float8 with a scale for each head of each row."""
    sound: PacingPolicy | None = None
    """How far replies are generated ahead of their playback; None: the default of the device."""


class Engine:
    """Opens, extends, forks, rewinds and closes sequences; a step advances all sequences that have work."""

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
        kv_dtype = cache_dtype(model, device, dtype, limits.kv)
        rows = limits.cache_rows or rows_that_fit(model, device, kv_dtype)
        pages = -(-rows // limits.page_size) + 1
        self.capacity = min((pages - 1) * limits.page_size, model.context_limit, limits.context or model.context_limit)
        cache = allocate_cache(model, pages, limits.page_size, kv_dtype, device)
        self.scheduler = Scheduler(
            PagePool(pages), limits.page_size, limits.rows_per_step, limits.sequences_per_step, limits.sound
        )
        self.slack = Slack()
        use_graphs = use_graphs and device.graphs and device.triton
        self.runner = Runner(model, cache, self.capacity, limits.sequences_per_step, use_graphs)
        self.scheduler.spare_rows = int(self.runner.can_prelaunch)
        if self.runner.use_graphs:  # a step too large for a graph takes as long as five with one
            self.scheduler.rows_beside_sound = BUCKETS[-1]
            self.scheduler.sound = limits.sound or ON_GRAPHS
        self.acceptance = Acceptance()
        self._next_id = 0
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    @property
    def has_work(self) -> bool:
        """Whether a step is due now."""
        return self.seconds_to_next_step == 0

    @property
    def seconds_to_next_step(self) -> float | None:
        """Seconds until the next step is due; None: no sequence has work."""
        return self.scheduler.seconds_to_next_step()

    @property
    def free_rows(self) -> int:
        """Rows of cache not held by sequences that have work; idle sequences are evicted for new ones."""
        held = {page for s in self.scheduler.sequences.values() if s.has_work for page in s.pages}
        return (self.scheduler.pool.size - len(held)) * self.limits.page_size

    @property
    def free_bytes(self) -> float:
        """Free memory of a CUDA device, with what torch has reserved but not allocated; infinite on other devices."""
        device = self.runner.device
        if device.type != "cuda":
            return float("inf")
        unallocated = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unallocated

    def warm_up(self) -> None:
        """Capture the graphs of all batch sizes, and run one long prefill, before the first conversation."""
        largest = min(2 * self.limits.sequences_per_step, BUCKETS[-1])
        self.runner.warm_up(tuple(bucket for bucket in BUCKETS if bucket <= largest))
        if self.runner.use_graphs:
            self._prefill_once()

    def _prefill_once(self) -> None:
        """Prefill a prompt too long for any graph: the libraries it loads take a second."""
        sequence = self.open([(0,) * self.model.channels] * min(self.limits.rows_per_step, self.capacity))
        previous = 0
        while previous != sequence.pending > 0:  # unchanged where there are no pages for it
            previous = sequence.pending
            self.step()
        self.close(sequence)

    def open(self, rows: Iterable[Row] = ()) -> Sequence:
        """A new sequence; its rows are prefilled in the following steps."""
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
        """Add rows at the end, such as those of user speech. `InputError` while the sequence is generating."""
        self._require_open(sequence)
        if sequence.is_generating:
            raise InputError(f"sequence {sequence.id} is generating; stop or rewind it before appending")
        added = [tuple(row) for row in rows]
        self._check(added, sequence)
        sequence.rows.extend(added)
        sequence.needs_prefill = sequence.needs_prefill or bool(added)
        sequence.last_used = self._steps

    def generate(
        self,
        sequence: Sequence,
        generation: Generation,
        max_unread: int | None = None,
        speculation: Speculation | None = None,
        listener: PlaybackDeadline | None = None,
        after: Sequence | None = None,
    ) -> None:
        """Start a reply after the last row. With `max_unread`, it pauses while that many rows have not been taken.

        With `speculation`, a step may generate several rows; the rows are the same. With a `listener`, the reply is
        scheduled by when its playback runs out of audio, and rests while it is far ahead of the playback. With `after`,
        it starts when that sequence has the rows of its first audio, so that it runs while these are decoded.
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
        # The last row is computed again where it is cached: the first draw needs its hidden state.
        sequence.cached = min(sequence.cached, len(sequence) - 1)
        sequence.mode = self.model.start_mode(sequence.rows[-1])
        sequence.generation, sequence.generated = generation, 0
        sequence.matcher = None if generation.grammar is None else generation.grammar.start()
        sequence.unread, sequence.max_unread = 0, max_unread
        sequence.speculation, sequence.hidden, sequence.after = speculation, None, after
        sequence.listener, sequence.last_served, sequence.first_audio_ready = listener, self.scheduler.now(), None

    def report_playback(self, sequence: Sequence, seconds: float) -> None:
        """Note that the playback of the reply has reached this many seconds."""
        if sequence.listener is not None:
            sequence.listener = sequence.listener.at(self.scheduler.now(), seconds)

    def take(self, sequence: Sequence, rows: int = 1) -> None:
        """Note that the consumer has taken rows; a reply paused by `max_unread` continues."""
        sequence.unread = max(0, sequence.unread - rows)

    def suspend(self, sequence: Sequence) -> None:
        """Let the reply wait until `resume`; its pages may be evicted meanwhile."""
        sequence.is_suspended = sequence.is_generating

    def resume(self, sequence: Sequence, seconds: float) -> None:
        """Continue a suspended reply, of which this many seconds have been played."""
        if sequence.is_suspended:
            sequence.is_suspended = False
            if sequence.listener is not None:
                sequence.listener = sequence.listener.after_suspension(self.scheduler.now(), seconds)

    def stop(self, sequence: Sequence) -> None:
        """End the reply, if there is one. Its rows stay, and so does `hidden`."""
        sequence.generation = sequence.matcher = None
        sequence.is_suspended = False
        sequence.max_unread = None
        sequence.speculation = sequence.listener = sequence.after = None

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same rows. Pages are shared until one of the two writes to them."""
        self._require_open(sequence)
        forked = Sequence(
            self._next_id,
            list(sequence.rows),
            sequence.pages[: -(-sequence.cached // self.limits.page_size)],
            sequence.cached,
            last_used=self._steps,
            needs_prefill=sequence.needs_prefill,
        )
        for page in forked.pages:
            self.scheduler.pool.share(page)
        self._next_id += 1
        self.scheduler.sequences[forked.id] = forked
        return forked

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Remove the rows from `length` on; a reply in progress ends."""
        self._require_open(sequence)
        if not 0 <= length <= len(sequence):
            raise InputError(f"sequence {sequence.id} has {len(sequence)} rows and cannot be rewound to {length}")
        self.stop(sequence)
        del sequence.rows[length:]
        self.scheduler.release(sequence, keep_rows=min(sequence.cached, length))
        sequence.row_revision += 1

    def close(self, sequence: Sequence) -> None:
        """Free a sequence; a reply in progress ends. Closing twice does nothing."""
        if sequence.is_open:
            self.stop(sequence)
            self.scheduler.release(sequence)
            self.runner.forget(sequence)
            del self.scheduler.sequences[sequence.id]
            sequence.is_open = False

    def step(self) -> list[Emission]:
        """Advance every sequence that has work and return the new rows. An error leaves all sequences unchanged.

        For a single caller. `advance` isolates the failures of sequences from one another.
        """
        plan = self.scheduler.plan(self._drafts())
        if not plan.works:
            return []
        start = self.scheduler.now()
        self._copy_pages(plan)
        drawn = iter(self.runner.run(plan.works))
        self._note_step(plan, start)
        return [
            emission for work in plan.works for emission in self._commit(work, next(drawn) if work.samples else None)
        ]

    def advance(self) -> StepResult:
        """Advance every sequence that has work. If the step fails, only the sequences that cause it fail.

        A failed step is run again in halves, down to single sequences. Keys and values it has written are beyond the
        `cached` rows of its sequences, so they are overwritten.
        """
        try:
            plan = self.scheduler.plan(self._drafts())
        except Exception as error:
            busy = [sequence for sequence in self.scheduler.sequences.values() if sequence.has_work]
            return StepResult(failures=[self.fail(sequence, error) for sequence in busy])
        result = StepResult()
        if not plan.works:
            return result
        start = self.scheduler.now()
        try:
            self._copy_pages(plan)
        except Exception as error:
            return StepResult(failures=[self.fail(work.sequence, error) for work in plan.works])
        outcomes = self.runner.run_isolated(plan.works)
        self._note_step(plan, start)
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
        """End a sequence's reply or prefill after an error, and free its pages, which may be partly written.

        It stays open and keeps its rows; they are prefilled again when it is next used.
        """
        logger.error("sequence %d failed", sequence.id, exc_info=error)
        self.stop(sequence)
        sequence.needs_prefill, sequence.hidden = False, None
        self.scheduler.release(sequence)
        self.runner.forget(sequence)
        return Failure(sequence, error)

    def _copy_pages(self, plan: StepPlan) -> None:
        """Copy the shared pages that this step writes to. If that fails, the sequences with such copies are evicted."""
        try:
            self.runner.cache.copy_pages(plan.copies)
        except Exception:
            copied = {target for _, target in plan.copies}
            for work in plan.works:
                if copied.intersection(work.sequence.pages):
                    self.scheduler.release(work.sequence)
            raise

    def _note_step(self, plan: StepPlan, start: float) -> None:
        self._note_slack(plan, start, self.scheduler.now())
        self._steps += 1

    def _commit(self, work: Work, drawn: Drawn | None) -> list[Emission]:
        """Mark the rows of a work as cached, and append the rows that it generated."""
        sequence = work.sequence
        sequence.cached += work.count
        sequence.last_used = self._steps
        sequence.needs_prefill = sequence.needs_prefill and sequence.pending > 0
        return [] if drawn is None else self._verify(work, drawn)

    def complete(self, sequence: Sequence, generation: Generation, speculation: Speculation | None = None) -> list[Row]:
        """All rows of a reply; other sequences are advanced in the same steps."""
        self.generate(sequence, generation, speculation=speculation)
        rows: list[Row] = []
        while sequence.is_generating:
            rows += [emission.row for emission in self.step() if emission.sequence is sequence]
        return rows

    def _drafts(self) -> dict[int, Draft]:
        """Drafts by sequence id, as far as the step's budget has rows left besides the pending ones."""
        busy = [sequence for sequence in self.scheduler.sequences.values() if sequence.has_work]
        spare = self.limits.rows_per_step - sum(sequence.pending for sequence in busy)
        wants = []
        for sequence in busy:
            max_drafted = min(self._max_drafted(sequence), spare)
            if max_drafted > 0:
                wants.append((sequence, max_drafted))
                spare -= max_drafted
        drafts = gather_drafts(wants, self.model)
        # The decode kernel attends to all previous rows, so it cannot verify drafts that branch.
        return {key: draft.likeliest() for key, draft in drafts.items()} if self.runner.use_kernels else drafts

    def _max_drafted(self, sequence: Sequence) -> int:
        """Rows of a draft that could be accepted: a check of n rows emits up to n + 1."""
        if sequence.generation is None or sequence.speculation is None or sequence.matcher is not None:
            return 0
        room = [sequence.generation.max_new_rows - sequence.generated, self.capacity - len(sequence)]
        if sequence.max_unread is not None:
            room.append(sequence.max_unread - sequence.unread)
        return min(sequence.speculation.max_rows, min(room) - 1)

    def _note_slack(self, plan: StepPlan, start: float, now: float) -> None:
        self.slack.note_step(now - start)
        for sequence in (work.sequence for work in plan.works if work.samples):
            if sequence.listener is not None and sequence.listener.started is not None:
                self.slack.note(now, sequence.listener.playback_end(sequence.generated) - now)

    def _verify(self, work: Work, drawn: Drawn) -> list[Emission]:
        """Accept the draft's rows that equal the drawn ones, and the first drawn row that differs."""
        sequence = work.sequence
        accepted = accepted_indices(work.drafted, drawn.rows)
        last = 1 + accepted[-1] if accepted else 0
        sequence.hidden = None if drawn.hidden is None else drawn.hidden[last]
        if sequence.states is not None and drawn.hidden is not None:
            sequence.states.append(drawn.hidden[[0, *(1 + index for index in accepted)]])
        self.runner.compact(sequence, accepted)
        sequence.cached += len(accepted)
        rows = [*(work.drafted[index] for index in accepted), drawn.rows[last]]
        emissions = [self._accept(sequence, row) for row in rows]
        if work.drafted:
            self.acceptance.note(work.drafted.depth, len(accepted))
            self.scheduler.trim(sequence)
        return emissions

    def _accept(self, sequence: Sequence, row: Row) -> Emission:
        """Append a generated row and check whether the reply has ended."""
        assert sequence.generation is not None
        sequence.rows.append(row)
        sequence.generated += 1
        sequence.unread += 1
        sequence.mode = self.model.next_mode(sequence.mode, row)
        if sequence.matcher is not None:
            sequence.matcher.accept(row[0])
        if (
            sequence.first_audio_ready is None
            and sequence.listener is not None
            and sequence.listener.has_first_audio(sequence.generated)
        ):
            sequence.first_audio_ready = self.scheduler.now()
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
        """Raise for ids outside the vocabularies, and for more rows than a sequence may have."""
        vocabularies = self.model.vocabularies
        odd = next((row for row in rows if len(row) != len(vocabularies)), None)
        if odd is not None:
            raise InputError(f"a row has {len(vocabularies)} ids in this model, not {len(odd)}: {odd}")
        for channel, (values, size) in enumerate(zip(zip(*rows, strict=True), vocabularies, strict=False)):
            for value in (min(values), max(values)):
                if not 0 <= value < size:
                    raise InputError(f"id {value} of channel {channel} is not in 0…{size - 1}")
        if len(sequence) + len(rows) > self.capacity:
            raise CapacityError(
                f"{len(sequence) + len(rows)} rows are more than the {self.capacity} a sequence may have here; "
                "shorten the prompt or raise cache_rows and context"
            )
