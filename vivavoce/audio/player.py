"""How far the listener is: a playback clock, and the clocks that it takes its time from.

Every part that needs to know what was played uses `PlaybackClock`: the chunk policies (how long until the loudspeaker
runs dry), the dialogue (what was heard when the user interrupts, what the echo is made of), the engine's deadlines, the
server's paced output (when the next piece is due), and the benchmarks (underruns). It computes and never waits.
"""

import asyncio
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Protocol

START_BUFFER_SECONDS = 0.08
ROUNDING_SECONDS = 1e-6  # sound that comes just when it is needed is not late
MAX_EXTRAPOLATION_SECONDS = 0.2  # after a client's report, in which it is supposed to play on
REPORT_GRACE_SECONDS = 1.0  # a client that reports may be this much behind the estimate


@dataclass
class PlaybackSpan:
    """A run of sound played without a gap: when it starts, where in the sound, and how much of it."""

    start: float
    position: float
    seconds: float

    @property
    def end(self) -> float:
        """When it has been played."""
        return self.start + self.seconds


@dataclass
class PlaybackClock:
    """Seconds of sound sent to one player, seconds played at a moment, and when it runs dry.

    The estimate is a player that plays at pace and in order as soon as `start_buffer` seconds are there, also after it
    ran dry. Reports of the client correct it. Times are seconds of any clock that only goes forward.
    """

    start_buffer: float = START_BUFFER_SECONDS
    sent: float = 0.0
    underruns: int = 0
    dry_seconds: float = 0.0
    _spans: list[PlaybackSpan] = field(default_factory=list)
    _buffered: float = 0.0  # sent, and too little to start playing
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
        """Nothing more is sent: what is buffered is played, and running out from now on is no underrun."""
        self.advance(now)
        if self._buffered > 0:
            self._start(now)
        self._is_whole = True

    def resume(self, now: float) -> None:
        """The player was disconnected: what it had is played by now, and the gap is no underrun."""
        if self._spans and now > self.ends:
            self._spans.append(PlaybackSpan(now, self.sent - self._buffered, 0.0))
            self._dry_since = None

    def stop(self, now: float) -> None:
        """The player drops what it has not played."""
        self._stopped_at = now if self._stopped_at is None else min(self._stopped_at, now)

    def report(self, seconds: float, now: float) -> None:
        """The client has played this much by now. Reports never go back."""
        self._reported, self._reported_at = min(self.sent, max(seconds, self._reported or 0.0)), now

    def played(self, now: float) -> float:
        """Seconds surely played: as last reported, or by the estimate where the client does not report."""
        return self._estimate(now) if self._reported is None else self._reported

    def position(self, now: float) -> float:
        """Seconds played if the client went on since its last report."""
        if self._reported is None:
            return self._estimate(now)
        elapsed = max(0.0, now - self._reported_at)
        return min(self.sent, self._reported + min(elapsed, MAX_EXTRAPOLATION_SECONDS))

    def lead(self, now: float) -> float:
        """Seconds sent and not yet played."""
        return self.sent - self.position(now)

    def is_playing(self, now: float) -> bool:
        """Whether the client may be playing now."""
        if self.sent == 0 or (self._stopped_at is not None and now >= self._stopped_at):
            return False
        if self._reported is None:
            return now < self.ends
        left = self.sent - self._reported
        return left > 1e-3 and now < max(self.ends, self._reported_at + left) + REPORT_GRACE_SECONDS

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

    def _start(self, now: float) -> None:
        if self._dry_since is not None:
            self.dry_seconds += now - self._dry_since
            self._dry_since = None
        self._spans.append(PlaybackSpan(now, self.sent - self._buffered, self._buffered))
        self._buffered = 0.0


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float:
        """Seconds."""
        ...

    async def until(self, moment: float) -> None:
        """Wait for a moment; one that has passed is now."""
        ...


class WallClock:
    """The event loop's time: the machine's own, unless the loop has another."""

    def now(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    async def until(self, moment: float) -> None:
        """Wait for a moment; one that has passed is now."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


class SimulatedClock:
    """A clock that tests move by hand; it wakes what waits for the time it passes."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Seconds."""
        return self._now

    async def until(self, moment: float) -> None:
        """Wait for a moment; one that has passed is now."""
        if moment <= self._now:
            return
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (moment, next(self._count), arrived))
        await arrived

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
        while self._waiting and self._waiting[0][0] <= self._now + 1e-9:
            _, _, arrived = heapq.heappop(self._waiting)
            if not arrived.done():
                arrived.set_result(None)
