"""When audio was captured, by the clock of the conversation, whatever its way to us delayed it."""

import math

from vivavoce.engine.sliding_maximum import Extreme

WINDOW_SECONDS = 2.0  # a stall of this length is bridged; a client that sends nothing for longer starts anew


class CaptureClock:
    """Estimates capture times: audio arrives late by a varying delay, of which the smallest recent one is the best."""

    def __init__(self) -> None:
        self._offsets = Extreme(WINDOW_SECONDS)  # negative, as the smallest is wanted
        self._latest = -math.inf

    def note(self, now: float, seconds: float) -> None:
        """The first `seconds` of the audio have arrived by now."""
        self._latest = now
        self._offsets.note(now, seconds - now)

    def moment(self, seconds: float) -> float:
        """When this much of the audio had been captured; audio must have arrived."""
        largest = self._offsets.largest(self._latest)
        assert largest is not None
        return seconds - largest
