"""The playback clock, which estimates how much of a sound has been played, and the clocks it reads.

Every part that needs to know what was played uses `PlaybackClock`: the chunk policies (when playback runs dry), the
dialogue (what was played before an interruption, and the echo reference), the engine's deadlines, the server's paced
output (when the next piece is due), and the benchmarks (underruns). It computes and never waits.
"""

import asyncio
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Protocol

START_BUFFER_SECONDS = 0.08
ROUNDING_SECONDS = 1e-6  # sound that arrives exactly on time is not late
MAX_EXTRAPOLATION_SECONDS = 0.2  # after a client's report, playback is assumed to go on this long
REPORT_GRACE_SECONDS = 1.0  # a client that reports may be this much behind the estimate


@dataclass
class PlaybackSpan:
    """A run of sound played without a gap: its start time, its position in the sound, and its length."""

    start: float
    position: float
    seconds: float

    @property
    def end(self) -> float:
        """When its playback ends."""
        return self.start + self.seconds


@dataclass
class PlaybackClock:
    """Seconds of sound sent to one player, seconds played at a moment, and when it runs dry.

    The estimate models a player that starts as soon as `start_buffer` seconds are buffered, also after it ran dry.
    Reports of the client correct it. Times are seconds of any monotonic clock.
    """

    start_buffer: float = START_BUFFER_SECONDS
    sent: float = 0.0
    underruns: int = 0
    dry_seconds: float = 0.0
    first_dry_at: float | None = None
    """Seconds of sound sent when it first ran dry."""
    _spans: list[PlaybackSpan] = field(default_factory=list)
    _buffered: float = 0.0  # sent, but too little to start playback
    _dry_since: float | None = None
    _is_whole: bool = False
    _latest: float = -math.inf
    _reported: float | None = None
    _reported_at: float = 0.0
    _stopped_at: float | None = None

    @property
    def started(self) -> float | None:
        """When the first sample was played."""
        return self._spans[0].start if self._spans else None

    @property
    def ends(self) -> float:
        """When the player runs dry, by the estimate; minus infinity before it has started."""
        return self._spans[-1].end if self._spans else -math.inf

    def feed(self, now: float, seconds: float, not_before: float = -math.inf) -> None:
        """Send sound of this length; it is played after what was sent before, and `not_before` (other sound's end)."""
        moment = max(now, not_before)
        self._note_dryness(moment)
        self.sent += seconds
        if moment <= self.ends + ROUNDING_SECONDS:
            self._spans[-1].seconds += seconds
            return
        self._buffered += seconds
        if self._buffered >= self.start_buffer:
            self._start(moment)

    def advance(self, now: float) -> None:
        """Count an underrun if the player has run dry by now."""
        if now < self._latest:
            raise ValueError(f"time went back from {self._latest} to {now}")
        self._latest = now
        self._note_dryness(now)

    def finish(self, now: float) -> None:
        """Nothing more is sent: the buffer is played, and running dry from now on is no underrun."""
        self.advance(now)
        if self._buffered > 0:
            self._start(now)
        self._is_whole = True

    def resume(self, now: float) -> None:
        """The player was disconnected: its buffer is played by now, and the gap is no underrun."""
        if self._spans and now > self.ends:
            self._spans.append(PlaybackSpan(now, self.sent - self._buffered, 0.0))
            self._dry_since = None

    def stop(self, now: float) -> None:
        """The player drops its buffer."""
        self._stopped_at = now if self._stopped_at is None else min(self._stopped_at, now)

    def report(self, seconds: float, now: float) -> None:
        """The client reports that it has played this much. Reports never decrease."""
        played = min(self.sent, max(seconds, self._reported or 0.0))
        if played < self.sent or played != self._reported:  # the first report of all that was sent says when it ended
            self._reported, self._reported_at = played, now

    def played(self, now: float) -> float:
        """Seconds certainly played: as last reported, or by the estimate where the client does not report."""
        return self._estimate(now) if self._reported is None else self._reported

    def position(self, now: float) -> float:
        """Seconds played at this moment, also a past one, assuming that playback goes on after the last report."""
        if self._reported is None:
            return self._estimate(now)
        elapsed = min(now - self._reported_at, MAX_EXTRAPOLATION_SECONDS)
        return min(self.sent, max(0.0, self._reported + elapsed))

    def lead(self, now: float) -> float:
        """Seconds sent and not yet played."""
        return self.sent - self.position(now)

    def is_playing(self, now: float) -> bool:
        """Whether the client may be playing now, or will with what it was sent."""
        return self.sent > 0 and now < self._plays_until

    def was_playing(self, moment: float) -> bool:
        """Whether the client may have been playing at a moment that has passed."""
        return self.started is not None and self.started <= moment < self._plays_until

    @property
    def _plays_until(self) -> float:
        """When playback has certainly ended."""
        until = self.ends
        if self._reported is not None:
            left = self.sent - self._reported
            late = max(self.ends, self._reported_at + left) + REPORT_GRACE_SECONDS
            until = late if left > 1e-3 else self._reported_at
        return until if self._stopped_at is None else min(until, self._stopped_at)

    def _estimate(self, now: float) -> float:
        now = now if self._stopped_at is None else min(now, self._stopped_at)
        for span in reversed(self._spans):
            if now >= span.start:
                return span.position + min(span.seconds, now - span.start)
        return 0.0

    def _note_dryness(self, now: float) -> None:
        is_dry = self._spans and now > self.ends + ROUNDING_SECONDS
        if is_dry and self._dry_since is None and not self._is_whole:
            self._dry_since = self.ends
            self.underruns += 1
            self.first_dry_at = self.sent if self.first_dry_at is None else self.first_dry_at

    def _start(self, now: float) -> None:
        if self._dry_since is not None:
            self.dry_seconds += now - self._dry_since
            self._dry_since = None
        self._spans.append(PlaybackSpan(now, self.sent - self._buffered, self._buffered))
        self._buffered = 0.0


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds."""
        ...

    async def until(self, moment: float) -> None:
        """Wait until a moment; returns immediately where it has passed."""
        ...


class WallClock:
    """The event loop's clock."""

    def now(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    async def until(self, moment: float) -> None:
        """Wait until a moment; returns immediately where it has passed."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


class SimulatedClock:
    """A clock that tests advance; it wakes the coroutines whose moment has come."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Seconds."""
        return self._now

    async def until(self, moment: float) -> None:
        """Wait until a moment; returns immediately where it has passed."""
        if moment <= self._now:
            return
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (moment, next(self._count), arrived))
        await arrived

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self._now += seconds
        while self._waiting and self._waiting[0][0] <= self._now + 1e-9:
            _, _, arrived = heapq.heappop(self._waiting)
            if not arrived.done():
                arrived.set_result(None)
