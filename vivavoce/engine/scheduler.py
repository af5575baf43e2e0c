"""Plans each step: one budget of rows for decode and prefill (chunked prefill), and the pages they need.

Decode goes first: replies without a first audio, then by when their playback runs out of audio. A reply far ahead of
its playback rests. When no playback is close to running out, steps are spaced out so that more sequences share each.
While a reply waits for its first audio, replies with audio to spare are left out, which keeps the step short. Prefill
follows, oldest sequence first. A sequence that is one row short of its next sample gets that row before a prefill gets
more than its share, so decode never waits for a long prompt.

Pages are held by rank: generating sequences, then those with rows to prefill, then idle ones; older before newer. When
pages run out, a sequence may evict those of lower rank, which keep their rows and are prefilled again later. The first
in rank always progresses, so no sequence starves.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vivavoce.engine.sequence import PacingPolicy, Sequence
from vivavoce.engine.speculative import NO_DRAFT, Draft
from vivavoce.errors import CapacityError
from vivavoce.nn.paged_kv import SCRATCH_PAGE

NO_DRAFTS: Mapping[int, Draft] = {}
MAX_WAIT_SECONDS = 0.5  # between steps of a reply without playback, whatever the deadlines of the others


class PagePool:
    """Free pages of the cache and reference counts; the tensors are in `vivavoce.nn.paged_kv`."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise CapacityError(f"a cache of {pages} pages holds nothing; give at least 2 (one is scratch)")
        self.holders = [0] * pages
        # Last in, first out: the page freed last is still in the processor's caches.
        self._free = [page for page in reversed(range(pages)) if page != SCRATCH_PAGE]

    @property
    def size(self) -> int:
        """Pages that sequences can hold."""
        return len(self.holders) - 1

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def take(self) -> int:
        """Allocate a page, with one holder."""
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a holder to an allocated page."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} is free and cannot be shared")
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """Remove a holder; without holders the page is free."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} was freed twice")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing into this page would be seen by another sequence."""
        return self.holders[page] > 1


@dataclass(frozen=True)
class Work:
    """Rows `[start, start + count)` of a sequence to compute; if `samples`, a new row is drawn after the last.

    `drafted` rows are computed after the others, and a row is drawn after each of them too.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafted: Draft = NO_DRAFT

    @property
    def total(self) -> int:
        """Rows computed in the step, drafted ones included."""
        return self.count + len(self.drafted)


@dataclass
class StepPlan:
    """One step: the works, and the shared pages to copy, (from, to), before they are written."""

    works: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Plans steps and owns the pages. Knows no tensor."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        rows_per_step: int,
        sequences_per_step: int,
        sound: PacingPolicy | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.rows_beside_sound = rows_per_step
        """Rows of a step that has a reply with playback: prompts are then prefilled in smaller pieces."""
        self.spare_rows = 0  # rows beyond its last for which a reply allocates pages in advance, if some are free
        self.sound, self.now = sound or PacingPolicy(), now
        self.page_size = page_size
        self.rows_per_step = rows_per_step
        self.sequences_per_step = sequences_per_step
        self.sequences: dict[int, Sequence] = {}
        self.evictions = 0
        self._planned = float("-inf")  # when a step was last planned

    def plan(self, drafts: Mapping[int, Draft] = NO_DRAFTS) -> StepPlan:
        """The next step; its pages are allocated. Drafts, by sequence id, get the rows of the budget that are left."""
        now = self._planned = self.now()
        ranked = sorted(self._ready(now), key=lambda sequence: _urgency(sequence, now))
        waiting_decodes = sum(_decodes(sequence) for sequence in ranked)
        has_playback = any(sequence.is_generating and sequence.listener is not None for sequence in ranked)
        budget = min(self.rows_per_step, self.rows_beside_sound) if has_playback else self.rows_per_step
        plan = StepPlan()
        for sequence in ranked:
            if budget == 0 or len(plan.works) == self.sequences_per_step:
                break
            waiting_decodes -= _decodes(sequence)
            # At least one row: otherwise many decoding sequences could starve an older prompt.
            count = min(sequence.pending, max(1, budget - waiting_decodes))
            if not self._secure(sequence, count, plan):
                continue
            samples = sequence.is_generating and count == sequence.pending
            plan.works.append(Work(sequence, sequence.cached, count, samples))
            sequence.last_served = now
            budget -= count
        for index, work in enumerate(plan.works):
            drafted = drafts.get(work.sequence.id, NO_DRAFT).first(budget) if work.samples else NO_DRAFT
            if drafted:
                plan.works[index] = self._with_draft(work, drafted)
                budget -= len(plan.works[index].drafted)
            if work.samples and self.pool.free:
                self._extend(work.sequence, work.start + work.count + self.spare_rows)
        return plan

    def seconds_to_next_step(self) -> float | None:
        """Seconds until a step is due, 0 if it is due now; None: no sequence has work."""
        now, sound = self.now(), self.sound
        busy = [sequence for sequence in self.sequences.values() if sequence.has_work]
        if not busy:
            return None
        rests = [self._first_audio_rest(sequence, now, sound.first_audio_rest) for sequence in busy]
        active = [sequence for sequence, rest in zip(busy, rests, strict=True) if rest <= 0]
        if not active:
            return min(rests)
        leads = [_lead(sequence, now) for sequence in active]
        if sound.others_rest and min(leads) > sound.spare_lead:
            others_rest = max(self._first_audio_rest(sequence, now, sound.others_rest) for sequence in busy)
            if others_rest > 0:
                return others_rest
        rest = self._planned + self._pace(active, leads) - now
        return max(0.0, rest, min(leads) - sound.max_lead)

    def _pace(self, active: list[Sequence], leads: list[float]) -> float:
        """Seconds from the last step to the next: 0 where a playback is short of audio, or there is none."""
        sound = self.sound
        generating = (lead for sequence, lead in zip(active, leads, strict=True) if sequence.is_generating)
        min_lead = min(generating, default=sound.max_lead)
        if min_lead <= sound.short_lead or all(sequence.listener is None for sequence in active):
            return 0.0
        if min_lead <= sound.spare_lead:
            return sound.pace * sound.brisk
        return sound.pace * (sound.hurry if min_lead <= sound.calm_lead else 1.0)

    def _first_audio_rest(self, sequence: Sequence, now: float, rest: float) -> float:
        """What is left of `rest` seconds since the rows of a first audio, which is being decoded, were complete."""
        listener, ready = sequence.listener, sequence.first_audio_ready
        if listener is None or ready is None or listener.started is not None or not sequence.is_generating:
            return 0.0
        return ready + rest - now

    def _ready(self, now: float) -> list[Sequence]:
        """Sequences to serve: none far ahead and, while one waits for its first audio, none with audio to spare.

        A reply that rests is left out while the prompt of a branch that gave way to it is prefilled: that step is long.
        """
        busy = [sequence for sequence in self.sequences.values() if sequence.has_work]
        leading = {sequence.after.id for sequence in busy if sequence.after is not None and sequence.pending > 1}
        ready = [
            sequence
            for sequence in busy
            if _lead(sequence, now) <= self.sound.max_lead
            and (sequence.id not in leading or self._first_audio_rest(sequence, now, self.sound.first_audio_rest) <= 0)
        ]
        if any(sequence.awaits_first_audio for sequence in ready):
            ready = [sequence for sequence in ready if _lead(sequence, now) <= self.sound.spare_lead]
        return ready

    def trim(self, sequence: Sequence) -> None:
        """Release pages of drafted rows that were not accepted."""
        if len(sequence.pages) > -(-sequence.cached // self.page_size):
            self.release(sequence, sequence.cached)

    def release(self, sequence: Sequence, keep_rows: int = 0) -> None:
        """Release the pages after the first `keep_rows` rows."""
        keep = -(-keep_rows // self.page_size)
        for page in sequence.pages[keep:]:
            self.pool.release(page)
        del sequence.pages[keep:]
        sequence.cached = min(sequence.cached, keep_rows)
        sequence.page_revision += 1

    def _secure(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Allocate pages for `count` more rows, none of them shared, evicting sequences of lower rank if necessary."""
        while self._lacking(sequence, count) > self.pool.free:
            victim = self._victim(sequence, {work.sequence.id for work in plan.works})
            if victim is None:
                return False
            self.release(victim)
            self.evictions += 1
        first = sequence.cached // self.page_size
        for index in range(first, len(sequence.pages)):
            if self.pool.is_shared(sequence.pages[index]):
                plan.copies.append(self._make_private(sequence, index))
        self._extend(sequence, sequence.cached + count)
        return True

    def _with_draft(self, work: Work, drafted: Draft) -> Work:
        """The work with as much of a draft as free pages hold: nothing is evicted for drafts."""
        end = work.start + work.count
        room = (len(work.sequence.pages) + self.pool.free) * self.page_size - end
        drafted = drafted.first(room)
        self._extend(work.sequence, end + len(drafted))
        return replace(work, drafted=drafted)

    def _extend(self, sequence: Sequence, rows: int) -> None:
        """Allocate pages until they hold this many rows."""
        while len(sequence.pages) * self.page_size < rows:
            sequence.pages.append(self.pool.take())
            sequence.page_revision += 1

    def _lacking(self, sequence: Sequence, count: int) -> int:
        """Pages to allocate before `count` more rows can be written."""
        first = sequence.cached // self.page_size
        shared = sum(self.pool.is_shared(page) for page in sequence.pages[first:])
        return shared + -(-(sequence.cached + count) // self.page_size) - len(sequence.pages)

    def _make_private(self, sequence: Sequence, index: int) -> tuple[int, int]:
        shared, own = sequence.pages[index], self.pool.take()
        self.pool.release(shared)
        sequence.pages[index] = own
        sequence.page_revision += 1
        return shared, own

    def _victim(self, claimant: Sequence, planned: set[int]) -> Sequence | None:
        """The sequence of lowest rank that has pages, is not planned, and ranks below the claimant."""
        candidates = [s for s in self.sequences.values() if s.pages and s.id not in planned and s is not claimant]
        victim = max(candidates, key=_eviction_rank, default=None)
        return victim if victim is not None and _rank(victim) > _rank(claimant) else None


def _decodes(sequence: Sequence) -> bool:
    return sequence.is_generating and sequence.pending == 1


def _lead(sequence: Sequence, now: float) -> float:
    """Seconds by which a reply is ahead of its playback; 0 without playback and before its first audio."""
    end = sequence.playback_end
    return 0.0 if end is None or not sequence.is_generating or sequence.awaits_first_audio else end - now


def _urgency(sequence: Sequence, now: float) -> tuple[int, bool, float, int]:
    """Sort key: lower is served first."""
    if not sequence.is_generating:
        return 1, False, 0.0, sequence.id
    end = sequence.playback_end
    due = sequence.last_served + MAX_WAIT_SECONDS if end is None else end
    goes_first = due < now if end is None else sequence.awaits_first_audio
    return 0, not goes_first, due, sequence.id


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Sort key: lower keeps its pages longer."""
    kind = 2 if not sequence.has_work else 0 if sequence.is_generating else 1
    return kind, sequence.id


def _eviction_rank(sequence: Sequence) -> tuple[int, int]:
    """Sort key: higher is evicted first; of idle sequences, the least recently used."""
    kind, age = _rank(sequence)
    return kind, -sequence.last_used if kind == 2 else age
