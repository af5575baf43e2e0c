"""The maximum over a sliding time window."""

import math
from collections import deque

WINDOW_SECONDS = 5.0
BUCKETS = 20


class Extreme:
    """The maximum over a sliding time window, in constant memory."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._width = seconds / BUCKETS
        self._buckets: deque[tuple[int, float]] = deque()  # number and maximum of each bucket

    def note(self, now: float, value: float) -> None:
        """Add a value."""
        number = math.floor(now / self._width)
        if self._buckets and self._buckets[-1][0] == number:
            self._buckets[-1] = (number, max(self._buckets[-1][1], value))
        else:
            self._buckets.append((number, value))
        self._forget(number)

    def largest(self, now: float) -> float | None:
        """The maximum; None: no value in the window."""
        self._forget(math.floor(now / self._width))
        return max((value for _, value in self._buckets), default=None)

    def _forget(self, number: int) -> None:
        while self._buckets and self._buckets[0][0] <= number - BUCKETS:
            self._buckets.popleft()
