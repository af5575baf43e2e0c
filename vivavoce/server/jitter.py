"""How unevenly a client's sound arrives, and so how far ahead ours must be sent: as far as need be, and no further.

What has been sent can no longer be played softer. The way back is about as uneven as the way here, and an event loop
that is late is late for both.
"""

from collections import deque
from dataclasses import dataclass, field

WINDOW_SECONDS = 5.0
FEWEST = 10  # arrivals from which something can be said


@dataclass
class Arrivals:
    """When sound came that should have come evenly."""

    _late: deque[tuple[float, float]] = field(default_factory=deque)  # when, and how much later than the first

    def note(self, now: float, heard: float) -> None:
        """By now, so many seconds of sound have come."""
        self._late.append((now, now - heard))
        while self._late[0][0] < now - WINDOW_SECONDS:
            self._late.popleft()

    def unevenness(self, now: float) -> float | None:
        """Seconds between the soonest and the latest of the last moments; None where too little came."""
        late = [late for moment, late in self._late if moment >= now - WINDOW_SECONDS]
        return max(late) - min(late) if len(late) >= FEWEST else None


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
