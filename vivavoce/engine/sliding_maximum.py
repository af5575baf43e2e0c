"""The maximum over a sliding time window."""

import math
from collections import deque

WINDOW_SECONDS = 5.0
BUCKETS = 20


class Extreme:
    """The maximum over a sliding time window, in constant memory and time."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._width = seconds / BUCKETS
        self._candidates: deque[tuple[int, float]] = deque()  # bucket numbers, and values, which only decrease

    def note(self, now: float, value: float) -> None:
        """Add a value."""
        number, candidates = math.floor(now / self._width), self._candidates
        while candidates and candidates[-1][1] <= value:
            candidates.pop()
        if not candidates or candidates[-1][0] != number:
            candidates.append((number, value))
            self._forget(number)

    def largest(self, now: float) -> float | None:
        """The maximum; None: no value in the window."""
        self._forget(math.floor(now / self._width))
        return self._candidates[0][1] if self._candidates else None

    def _forget(self, number: int) -> None:
        while self._candidates and self._candidates[0][0] <= number - BUCKETS:
            self._candidates.popleft()
