"""Arrival jitter of a client's audio, and the lead by which ours is sent: as large as the jitter needs, and no larger.

What has been sent can no longer be ducked. Jitter in both directions is about the same, and a late event loop is late
for both.
"""

from collections import deque
from dataclasses import dataclass

from vivavoce.engine.sequence import Extreme

WINDOW_SECONDS = 5.0
MIN_ARRIVALS = 10  # arrivals from which something can be said


class Arrivals:
    """Measures the jitter of audio that should arrive evenly."""

    def __init__(self) -> None:
        self._latest, self._soonest = Extreme(WINDOW_SECONDS), Extreme(WINDOW_SECONDS)
        self._newest: deque[float] = deque(maxlen=MIN_ARRIVALS)  # when they came

    def note(self, now: float, heard: float) -> None:
        """By now, so many seconds of sound have come."""
        late = now - heard
        self._latest.note(now, late)
        self._soonest.note(now, -late)
        self._newest.append(now)

    def unevenness(self, now: float) -> float | None:
        """Seconds between the soonest and the latest of the last moments; None where too little came."""
        latest, soonest = self._latest.largest(now), self._soonest.largest(now)
        is_known = len(self._newest) == MIN_ARRIVALS and self._newest[0] >= now - WINDOW_SECONDS
        return latest + soonest if is_known and latest is not None and soonest is not None else None


@dataclass(frozen=True)
class Lead:
    """Seconds by which sound is sent before it is to be heard."""

    min_seconds: float
    max_seconds: float
    """Where nothing is known of the way: a client that sends no sound cannot talk over a reply either."""
    arrivals: Arrivals

    def __call__(self, now: float) -> float:
        """The lead now."""
        uneven = self.arrivals.unevenness(now)
        return self.max_seconds if uneven is None else min(self.max_seconds, self.min_seconds + uneven)
