"""Time as a conversation sees it: the wall's, or one that a test moves by hand."""

import asyncio
import heapq
import itertools
from typing import Protocol


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
