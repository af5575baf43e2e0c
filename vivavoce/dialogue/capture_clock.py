"""When audio was captured, by the clock of the conversation, whatever its way to us delayed it."""

import math

from vivavoce.engine.sliding_maximum import Extreme

WINDOW_SECONDS = 2.0  # a stall of this length is bridged; a client that sends nothing for longer starts anew
MAX_LAG_SECONDS = 1.0  # audio that stays further behind was not delayed: the client had stopped sending
BURST_SECONDS = 0.1  # within which audio that was held up arrives


class CaptureClock:
    """Estimates capture times: audio arrives late by a varying delay, of which the smallest recent one is the best."""

    def __init__(self) -> None:
        self._offsets = Extreme(WINDOW_SECONDS)  # negative, as the smallest is wanted
        self._latest = -math.inf
        self._behind_since: float | None = None

    def note(self, now: float, seconds: float) -> None:
        """The first `seconds` of the audio have arrived by now."""
        offset = seconds - now
        largest = self._offsets.largest(now)
        if largest is None or largest - offset <= MAX_LAG_SECONDS:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since >= BURST_SECONDS:
            self._offsets, self._behind_since = Extreme(WINDOW_SECONDS), None
        self._latest = now
        self._offsets.note(now, offset)

    def moment(self, seconds: float) -> float:
        """When this much of the audio had been captured; audio must have arrived."""
        largest = self._offsets.largest(self._latest)
        assert largest is not None
        return seconds - largest
