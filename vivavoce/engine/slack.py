"""How late the engine was lately: time that listeners had left when their rows came, and how long steps took."""

import math
from collections import deque
from dataclasses import dataclass

from vivavoce.errors import CapacityError

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
        self.longest_ever = 0.0
        self.least_ever: float | None = None

    def note(self, now: float, left: float) -> None:
        """A row came when its listener had sound for so many seconds more."""
        self._lateness.note(now, -left)
        self.least_ever = left if self.least_ever is None else min(self.least_ever, left)

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self.busy, self.longest_ever = self.busy + seconds, max(self.longest_ever, seconds)

    def begin_anew(self) -> None:
        """Forget the extremes; what was busy stays."""
        self._lateness = Extreme()
        self.longest_ever, self.least_ever = 0.0, None

    def least(self, now: float) -> float | None:
        """The least time a listener had left lately; below 0 somebody heard a gap. None: nobody listened."""
        lateness = self._lateness.largest(now)
        return None if lateness is None else -lateness


@dataclass(frozen=True)
class Admission:
    """When one more session may come in."""

    least_slack: float = 0.1
    """Seconds that every listener had left lately."""
    rows: int = 1024
    """Of history for which a newcomer needs room."""

    def check(self, slack: float | None, free_rows: int, free_bytes: float, voice_bytes: float = 0.0) -> None:
        """`CapacityError` that says what is short: time, room for the history, or memory for the voice."""
        if slack is not None and slack < self.least_slack:
            raise CapacityError(
                f"listeners had {slack * 1e3:.0f} ms of sound left and {self.least_slack * 1e3:.0f} are wanted before "
                "another session comes in"
            )
        if free_rows < self.rows:
            raise CapacityError(f"the cache has room for {free_rows} rows and a session is to have {self.rows}")
        if free_bytes < voice_bytes:
            raise CapacityError(
                f"{free_bytes / 1e6:.0f} MB are free and a session's voice needs {voice_bytes / 1e6:.0f} MB"
            )
