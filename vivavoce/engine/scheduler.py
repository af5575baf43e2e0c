"""Who computes what in the next step: one budget of rows for decode steps and prefill pieces alike.

A step serves replies first: those of which nothing was heard yet, then by when their listeners run dry. A reply that
is far ahead of its listener rests, and where nobody presses, steps are taken at a pace, so that many share each.
While somebody waits for a first sound, replies with sound to spare stay out, so that the step is short. Then come new
rows that wait to be prefilled, the older sequence first. Every sequence that is one row short of its next sample gets
that row before any prefill gets more than its share, so decode never waits for a long prompt.

Pages are held by rank: sequences that generate, those with rows to prefill, the idle; the older first within each. When
pages run out, a sequence may evict those of lower rank, which keep their rows and are computed again later; the first
in rank therefore always moves on, and nobody waits for ever.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vivavoce.engine.sequence import AheadPolicy, Sequence
from vivavoce.engine.speculative import NO_DRAFT, Draft
from vivavoce.errors import CapacityError
from vivavoce.nn.paged_kv import SCRATCH_PAGE

NO_DRAFTS: Mapping[int, Draft] = {}
PATIENCE_SECONDS = 0.5  # a reply that nobody hears is served at least so often, whoever else is due


class PagePool:
    """Free pages and reference counts. Pure bookkeeping: the tensors are in `vivavoce.nn.paged_kv`."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise CapacityError(f"a cache of {pages} pages holds nothing; give at least 2 (one is scratch)")
        self.holders = [0] * pages
        # The page given back last is taken first: it is still in the processor's caches, and others stay untouched.
        self._free = [page for page in reversed(range(pages)) if page != SCRATCH_PAGE]

    @property
    def size(self) -> int:
        """Pages that sequences can hold."""
        return len(self.holders) - 1

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once."""
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held already."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} is free and cannot be shared")
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
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
    """Rows `[start, start + count)` of a sequence to be computed; `samples` if the last of them yields a new row.

    `drafted` rows are guesses of what follows. They are computed behind the others, and each yields a row too.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafted: Draft = NO_DRAFT

    @property
    def total(self) -> int:
        """Rows of the step."""
        return self.count + len(self.drafted)


@dataclass
class StepPlan:
    """One step: what to compute, and which shared pages to copy before anything is written."""

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
        sound: AheadPolicy | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.rows_beside_sound = rows_per_step
        """Rows of a step in which somebody's reply is heard: beside it, prompts are computed in smaller pieces."""
        self.spare_rows = 0  # for which a reply holds a page beforehand, where one is free
        self.sound, self.now = sound or AheadPolicy(), now
        self.page_size = page_size
        self.rows_per_step = rows_per_step
        self.sequences_per_step = sequences_per_step
        self.sequences: dict[int, Sequence] = {}
        self.evictions = 0
        self._planned = float("-inf")  # when a step was last planned

    def plan(self, drafts: Mapping[int, Draft] = NO_DRAFTS) -> StepPlan:
        """The next step's work; pages are taken for it. Drafts, by their sequence's id, get what nobody else needs."""
        now = self._planned = self.now()
        ranked = sorted(self._ready(now), key=lambda sequence: _urgency(sequence, now))
        waiting_decodes = sum(_decodes(sequence) for sequence in ranked)
        is_heard = any(sequence.is_generating and sequence.listener is not None for sequence in ranked)
        budget = min(self.rows_per_step, self.rows_beside_sound) if is_heard else self.rows_per_step
        plan = StepPlan()
        for sequence in ranked:
            if budget == 0 or len(plan.works) == self.sequences_per_step:
                break
            waiting_decodes -= _decodes(sequence)
            # At least one row, or a crowd of decoding sequences could keep an older prompt out for ever.
            count = min(sequence.pending, max(1, budget - waiting_decodes))
            if not self._secure(sequence, count, plan):
                continue
            samples = sequence.is_generating and count == sequence.pending
            plan.works.append(Work(sequence, sequence.cached, count, samples))
            sequence.served = now
            budget -= count
        for index, work in enumerate(plan.works):
            drafted = drafts.get(work.sequence.id, NO_DRAFT).first(budget) if work.samples else NO_DRAFT
            if drafted:
                plan.works[index] = self._with_draft(work, drafted)
                budget -= len(plan.works[index].drafted)
            if work.samples and self.pool.free:
                self._extend(work.sequence, work.start + work.count + self.spare_rows)
        return plan

    def rests(self) -> float | None:
        """Seconds until a step is due: 0 where it is now, None where nothing is to be done at all."""
        now, sound = self.now(), self.sound
        busy = [sequence for sequence in self.sequences.values() if sequence.has_work]
        if not busy:
            return None
        until_voiced = [self._until_voiced(sequence, now) for sequence in busy]
        awake = [sequence for sequence, rest in zip(busy, until_voiced, strict=True) if rest <= 0]
        if not awake:
            return min(until_voiced)
        ahead = [_ahead(sequence, now) for sequence in awake]
        rest = self._planned + self._pace(awake, ahead) - now
        return max(0.0, rest, min(ahead) - sound.furthest)

    def _pace(self, awake: list[Sequence], ahead: list[float]) -> float:
        """Seconds from the last step to the next: none where somebody is short of sound, or nobody is heard."""
        sound = self.sound
        min_lead = min((lead for s, lead in zip(awake, ahead, strict=True) if s.is_generating), default=sound.furthest)
        if min_lead <= sound.spare or all(sequence.listener is None for sequence in awake):
            return 0.0
        return sound.pace * (sound.haste if min_lead <= sound.calm else 1.0)

    def _until_voiced(self, sequence: Sequence, now: float) -> float:
        """Seconds for which a reply rests because its first sound is being made."""
        listener, voiced = sequence.listener, sequence.voiced
        if listener is None or voiced is None or listener.playing is not None or not sequence.is_generating:
            return 0.0
        return voiced + self.sound.voicing - now

    def _ready(self, now: float) -> list[Sequence]:
        """Who is served: not those far ahead, nor, while somebody has heard nothing, those with sound to spare."""
        busy = [sequence for sequence in self.sequences.values() if sequence.has_work]
        ready = [sequence for sequence in busy if _ahead(sequence, now) <= self.sound.furthest]
        if any(sequence.awaits_sound for sequence in ready):
            ready = [sequence for sequence in ready if _ahead(sequence, now) <= self.sound.spare]
        return ready

    def trim(self, sequence: Sequence) -> None:
        """Give back pages that were taken for rows which did not stay."""
        if len(sequence.pages) > -(-sequence.cached // self.page_size):
            self.release(sequence, sequence.cached)

    def release(self, sequence: Sequence, keep_rows: int = 0) -> None:
        """Give back the pages behind the first `keep_rows` rows."""
        keep = -(-keep_rows // self.page_size)
        for page in sequence.pages[keep:]:
            self.pool.release(page)
        del sequence.pages[keep:]
        sequence.cached = min(sequence.cached, keep_rows)
        sequence.page_revision += 1

    def _secure(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Make sure the pages for `count` more rows are held and private, evicting lower ranks if it must be."""
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
        """The work and as much of a draft as free pages hold: a guess evicts nobody."""
        end = work.start + work.count
        room = (len(work.sequence.pages) + self.pool.free) * self.page_size - end
        drafted = drafted.first(room)
        self._extend(work.sequence, end + len(drafted))
        return replace(work, drafted=drafted)

    def _extend(self, sequence: Sequence, rows: int) -> None:
        """Take pages until they hold so many rows."""
        while len(sequence.pages) * self.page_size < rows:
            sequence.pages.append(self.pool.take())
            sequence.page_revision += 1

    def _lacking(self, sequence: Sequence, count: int) -> int:
        """How many pages must be taken before `count` more rows can be written."""
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
        """The lowest in rank that holds pages, is not part of this step, and ranks below the claimant."""
        candidates = [s for s in self.sequences.values() if s.pages and s.id not in planned and s is not claimant]
        victim = max(candidates, key=_eviction_rank, default=None)
        return victim if victim is not None and _rank(victim) > _rank(claimant) else None


def _decodes(sequence: Sequence) -> bool:
    return sequence.is_generating and sequence.pending == 1


def _ahead(sequence: Sequence, now: float) -> float:
    """Seconds that a reply is ahead of its listener; of what nobody hears, and of what nobody has heard, none."""
    dry = sequence.runs_dry
    return 0.0 if dry is None or not sequence.is_generating or sequence.awaits_sound else dry - now


def _urgency(sequence: Sequence, now: float) -> tuple[int, bool, float, int]:
    """Lower is served first."""
    if not sequence.is_generating:
        return 1, False, 0.0, sequence.id
    dry = sequence.runs_dry
    due = sequence.served + PATIENCE_SECONDS if dry is None else dry
    goes_first = due < now if dry is None else sequence.awaits_sound
    return 0, not goes_first, due, sequence.id


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Lower keeps its pages."""
    kind = 2 if not sequence.has_work else 0 if sequence.is_generating else 1
    return kind, sequence.id


def _eviction_rank(sequence: Sequence) -> tuple[int, int]:
    """Higher is evicted first: among the idle, the one unused for longest."""
    kind, age = _rank(sequence)
    return kind, -sequence.last_used if kind == 2 else age
