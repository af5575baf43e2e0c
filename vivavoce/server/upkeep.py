"""What sessions leave when they have ended goes back to the system.

A session dies as a web of objects that hold one another, which Python takes apart when it happens to look, dozens of
sessions later; and what is then free lies scattered over the pools of several threads, where the C library keeps it.
Neither is lost, but memory grows for hundreds of sessions, and nobody can tell that from a leak.
"""

import asyncio
import ctypes
import gc
import sys
import time
import weakref

from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime_session import RealtimeSession

TOGETHER_SECONDS = 5.0  # those that end at about the same time are tidied up after together: whoever speaks feels it
SHARE = 0.01  # of the time, at most, nobody is heard because of it


class Upkeep:
    """Tidies up after sessions that ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended: list[weakref.ref[RealtimeSession]] = []
        self._has_work = asyncio.Event()

    def session_ended(self, session: RealtimeSession) -> None:
        """There is something to do, as soon as nobody needs it any more."""
        self._ended.append(weakref.ref(session))
        self._has_work.set()

    async def run(self) -> None:
        """Do it whenever there is, for ever."""
        while True:
            await self._has_work.wait()
            await asyncio.sleep(TOGETHER_SECONDS)
            began = time.perf_counter()
            gc.collect()
            took = time.perf_counter() - began
            ended, self._ended = self._ended, [session for session in self._ended if session() is not None]
            if not self._ended:  # else they are still being closed
                self._has_work.clear()
            gone = len(ended) - len(self._ended)
            await asyncio.to_thread(give_back_memory)
            self._metrics.tidied.inc(gone)
            await asyncio.sleep(took / SHARE)


def give_back_memory() -> None:
    """Let the system have what is free in the pools of all threads, where the C library can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
