"""A player that exists only as arithmetic: when it starts, how far ahead it is fed, and when it runs dry."""

import asyncio
import heapq
import itertools
from dataclasses import dataclass
from typing import Protocol

START_BUFFER_SECONDS = 0.08
ROUNDING_SECONDS = 1e-6  # sound that comes just when it is needed is not late


@dataclass
class SimulatedPlayer:
    """Plays as soon as `start_buffer` seconds are there, also after it ran dry. Times are seconds of any clock."""

    start_buffer: float = START_BUFFER_SECONDS
    started: float | None = None
    """When the first sample was played."""
    underruns: int = 0
    dry_seconds: float = 0.0
    _now: float = 0.0
    _buffered: float = 0.0
    _is_playing: bool = False
    _dry_since: float | None = None

    def feed(self, now: float, seconds: float) -> None:
        """Sound of this length arrives."""
        self.advance(now)
        self._buffered += seconds
        if not self._is_playing and self._buffered >= self.start_buffer:
            self._start(now)

    def advance(self, now: float) -> None:
        """Let the time go by until `now`, playing what there is."""
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        elapsed, self._now = now - self._now, now
        if not self._is_playing:
            return
        if elapsed > self._buffered + ROUNDING_SECONDS:
            self._dry_since = now - (elapsed - self._buffered)
            self._buffered, self._is_playing = 0.0, False
            self.underruns += 1
        else:
            self._buffered = max(0.0, self._buffered - elapsed)

    def finish(self, now: float) -> None:
        """The reply is complete: what is buffered will be played, and running out now is no underrun."""
        self.advance(now)
        if not self._is_playing and self._buffered > 0:
            self._start(now)

    def lead(self, now: float) -> float:
        """Seconds of sound that are there and not yet played."""
        self.advance(now)
        return self._buffered

    def _start(self, now: float) -> None:
        self._is_playing = True
        if self.started is None:
            self.started = now
        if self._dry_since is not None:
            self.dry_seconds += now - self._dry_since
            self._dry_since = None


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float:
        """The time."""
        ...

    async def until(self, moment: float) -> None:
        """Wait for a moment; one that has passed is now."""
        ...


class WallClock:
    """The event loop's time: the machine's own, unless the loop has another."""

    def now(self) -> float:
        """The time."""
        return asyncio.get_running_loop().time()

    async def until(self, moment: float) -> None:
        """Wait for a moment; one that has passed is now."""
        while (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


class SimulatedClock:
    """Stands still until it is moved, and wakes whoever waited for the time it passes."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """The time."""
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
