"""How unevenly a client's sound arrives, and so how far ahead ours must be sent: as far as need be, and no further.

What has been sent can no longer be played softer. The way back is about as uneven as the way here, and an event loop
that is late is late for both.
"""

from collections import deque
from dataclasses import dataclass

from vivavoce.engine.sequence import Extreme

WINDOW_SECONDS = 5.0
FEWEST = 10  # arrivals from which something can be said


class Arrivals:
    """When sound came that should have come evenly."""

    def __init__(self) -> None:
        self._latest, self._soonest = Extreme(WINDOW_SECONDS), Extreme(WINDOW_SECONDS)
        self._newest: deque[float] = deque(maxlen=FEWEST)  # when they came

    def note(self, now: float, heard: float) -> None:
        """By now, so many seconds of sound have come."""
        late = now - heard
        self._latest.note(now, late)
        self._soonest.note(now, -late)
        self._newest.append(now)

    def unevenness(self, now: float) -> float | None:
        """Seconds between the soonest and the latest of the last moments; None where too little came."""
        latest, soonest = self._latest.largest(now), self._soonest.largest(now)
        is_known = len(self._newest) == FEWEST and self._newest[0] >= now - WINDOW_SECONDS
        return latest + soonest if is_known and latest is not None and soonest is not None else None


@dataclass(frozen=True)
class Lead:
    """Seconds by which sound is sent before it is to be heard."""

    least: float
    most: float
    """Where nothing is known of the way: a client that sends no sound cannot talk over a reply either."""
    arrivals: Arrivals

    def __call__(self, now: float) -> float:
        """The lead now."""
        uneven = self.arrivals.unevenness(now)
        return self.most if uneven is None else min(self.most, self.least + uneven)
