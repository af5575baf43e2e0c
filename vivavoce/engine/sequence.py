"""The engine's view of one conversation: its rows, the pages of their keys and values, and the reply under way."""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from vivavoce.engine.sampling import Generation
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import CapacityError
from vivavoce.models.interface import Row


@dataclass(frozen=True)
class PlaybackDeadline:
    """Somebody who waits for the sound of a reply. Times are seconds of the scheduler's clock."""

    row_seconds: float
    """Of sound that one row becomes."""
    first_rows: int
    """Rows that the first sound is made of."""
    since: float
    """When the wait began."""
    playing: float | None = None
    """When the reply's beginning was played; later, by as much, if the player ran dry. None: nothing was heard yet."""

    def awaits_sound(self, rows: int) -> bool:
        """Whether so many rows are too few for a first sound."""
        return self.playing is None and rows < self.first_rows

    def is_voiced(self, rows: int) -> bool:
        """Whether so many rows are enough for a first sound, of which nothing was heard yet."""
        return self.playing is None and rows >= self.first_rows

    def runs_dry(self, rows: int) -> float:
        """When so many rows will have been played; before anything was, as if it had been from the beginning."""
        return (self.since if self.playing is None else self.playing) + rows * self.row_seconds

    def heard(self, now: float, seconds: float) -> "PlaybackDeadline":
        """The same listener, who by now has played so much of the reply."""
        return replace(self, playing=now - seconds)


@dataclass(frozen=True)
class AheadPolicy:
    """How far replies run ahead of those who hear them."""

    furthest: float = 6.0
    """Seconds ahead at which a reply rests: what is made further ahead is lost if the listener interrupts."""
    calm: float = 4.0
    """Seconds ahead at which a reply no longer presses: it is served when a step is due anyway."""
    pace: float = 0.06
    """Seconds from step to step where nobody presses: reading the weights for many costs hardly more than for one."""
    spare: float = 2.2
    """Seconds ahead at which a reply lets a step be shorter, for those who have heard nothing yet."""
    haste: float = 0.5
    """Of the pace, from step to step, while somebody is neither calm nor short of sound."""
    voicing: float = 0.1
    """Seconds for which a reply rests once its first sound can be made: the voice has the device for itself."""


ON_GRAPHS = AheadPolicy(calm=5.0, spare=4.0)
"""Where a voice makes many replies' sound in one pass: with codes enough waiting it is given long hops, which cost a
third of short ones, and a crowd that begins at once gets ahead of its listeners."""


FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


@dataclass(eq=False)
class Sequence:
    """Rows in order, of which the first `cached` have keys and values in `pages`."""

    id: int
    rows: list[Row] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    last_used: int = 0
    is_open: bool = True
    is_wanted: bool = False
    """Rows were added that nobody has computed yet. An evicted sequence that nobody asks for is not."""
    page_revision: int = 0
    """Counts changes of `pages`, by which a copy of the page table knows that it is stale."""
    row_revision: int = 0
    """Counts rewinds: rows that were there are gone, and what was derived from them is stale."""

    generation: Generation | None = None
    generated: int = 0
    mode: int = 0
    unread: int = 0
    """Rows made that the consumer has not taken yet; with `max_unread` it makes a slow consumer pause the reply."""
    max_unread: int | None = None
    listener: PlaybackDeadline | None = None
    """Who hears the reply while it is made, if anybody does."""
    served: float = 0.0
    """When a step last computed some of its rows, on the scheduler's clock."""
    voiced: float | None = None
    """When the rows of its first sound were there."""
    speculation: Speculation | None = None
    hidden: Tensor | None = None
    """The model's state from which the newest row was drawn, kept where a draft is made of it."""
    states: list[Tensor] | None = None
    """The states from which all rows of the reply were drawn, [row, …] each, where somebody keeps them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_generating(self) -> bool:
        """Whether a reply is being made."""
        return self.generation is not None

    @property
    def first_counted(self) -> int:
        """From which row on repetition penalties count."""
        if self.generation is None or self.generation.penalise_prompt:
            return 0
        return len(self.rows) - self.generated

    @property
    def is_paused(self) -> bool:
        """Whether the reply waits for its consumer."""
        return self.max_unread is not None and self.unread >= self.max_unread

    @property
    def awaits_sound(self) -> bool:
        """Whether somebody has heard nothing of the reply because its first rows are not there."""
        return self.is_generating and self.listener is not None and self.listener.awaits_sound(self.generated)

    @property
    def runs_dry(self) -> float | None:
        """When its listener will have heard all there is; None: nobody listens."""
        return None if self.listener is None else self.listener.runs_dry(self.generated)

    @property
    def pending(self) -> int:
        """Rows without keys and values yet."""
        return len(self.rows) - self.cached

    @property
    def has_work(self) -> bool:
        """Whether a step should compute some of its rows."""
        if self.is_generating:
            return not self.is_paused
        return self.is_wanted and self.pending > 0


def rows_in_common(first: list[Row], second: list[Row]) -> int:
    """How many rows both begin with."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(place for place in range(length) if first[place] != second[place])


WINDOW_SECONDS = 5.0
BUCKETS = 20


class Extreme:
    """The largest of values noted within the last seconds, in constant memory."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._width = seconds / BUCKETS
        self._buckets: deque[tuple[int, float]] = deque()  # number of the bucket, and its largest

    def note(self, now: float, value: float) -> None:
        """A value of now."""
        number = math.floor(now / self._width)
        if self._buckets and self._buckets[-1][0] == number:
            self._buckets[-1] = (number, max(self._buckets[-1][1], value))
        else:
            self._buckets.append((number, value))
        self._forget(number)

    def largest(self, now: float) -> float | None:
        """The largest; None where nothing was noted."""
        self._forget(math.floor(now / self._width))
        return max((value for _, value in self._buckets), default=None)

    def _forget(self, number: int) -> None:
        while self._buckets and self._buckets[0][0] <= number - BUCKETS:
            self._buckets.popleft()


class Slack:
    """What is measured of an engine as it steps."""

    def __init__(self) -> None:
        self._lateness = Extreme()
        self.busy = 0.0
        """Seconds of all steps together."""
        self.max_step_seconds = 0.0
        self.min_slack: float | None = None

    def note(self, now: float, left: float) -> None:
        """A row came when its listener had sound for so many seconds more."""
        self._lateness.note(now, -left)
        self.min_slack = left if self.min_slack is None else min(self.min_slack, left)

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self.busy, self.max_step_seconds = self.busy + seconds, max(self.max_step_seconds, seconds)

    def reset(self) -> None:
        """Forget the extremes; what was busy stays."""
        self._lateness = Extreme()
        self.max_step_seconds, self.min_slack = 0.0, None

    def recent_min_slack(self, now: float) -> float | None:
        """The least time a listener had left lately; below 0 somebody heard a gap. None: nobody listened."""
        lateness = self._lateness.largest(now)
        return None if lateness is None else -lateness


@dataclass(frozen=True)
class Admission:
    """When one more session may come in."""

    wanted_slack: float = 0.1
    """Seconds that every listener had left lately."""
    rows: int = 1024
    """Of history for which a newcomer needs room."""

    def check(self, slack: float | None, free_rows: int, free_bytes: float, voice_bytes: float = 0.0) -> None:
        """`CapacityError` that says what is short: time, room for the history, or memory for the voice."""
        if slack is not None and slack < self.wanted_slack:
            raise CapacityError(
                f"listeners had {slack * 1e3:.0f} ms of sound left and {self.wanted_slack * 1e3:.0f} are wanted before "
                "another session comes in"
            )
        if free_rows < self.rows:
            raise CapacityError(f"the cache has room for {free_rows} rows and a session is to have {self.rows}")
        if free_bytes < voice_bytes:
            raise CapacityError(
                f"{free_bytes / 1e6:.0f} MB are free and a session's voice needs {voice_bytes / 1e6:.0f} MB"
            )
