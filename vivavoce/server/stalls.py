"""Logs what an event loop was doing when it stalled: all sessions of a process wait for it."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vivavoce.thread_stacks import StackFrame, thread_stacks

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.02
REPEAT_SECONDS = 60.0  # between two records
MAX_FRAMES = 8


class StallWatch:
    """A thread that samples the stacks of all threads while the event loop is late by more than `seconds`."""

    def __init__(self, seconds: float = 0.1, repeat_seconds: float = REPEAT_SECONDS) -> None:
        self._seconds, self._repeat_seconds = seconds, repeat_seconds
        self._beat = 0.0
        self._logged, self._omitted = float("-inf"), 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running event loop, which is the calling thread's, during the block."""
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        is_over = threading.Event()
        timer: asyncio.TimerHandle | None = None

        def beat() -> None:
            nonlocal timer
            self._beat = time.monotonic()
            timer = loop.call_later(BEAT_SECONDS, beat)

        beat()
        watcher = threading.Thread(target=self._watch, args=(thread, is_over), name="viva-stalls", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            if timer is not None:
                timer.cancel()
            watcher.join()

    def _watch(self, loop_thread: int, is_over: threading.Event) -> None:
        sampled: tuple[float, str] | None = None  # the beat before the stall, and the stacks during it
        while not is_over.wait(BEAT_SECONDS):
            beat, now = self._beat, time.monotonic()
            if sampled is not None and beat != sampled[0]:
                self._log(beat - sampled[0] - BEAT_SECONDS, sampled[1], now)
                sampled = None
            if sampled is None and now - beat - BEAT_SECONDS > self._seconds:
                sampled = (beat, _stacks(loop_thread))

    def _log(self, seconds: float, stacks: str, now: float) -> None:
        if now - self._logged < self._repeat_seconds:
            self._omitted += 1
            return
        more = f" ({self._omitted} more stalls since the last record)" if self._omitted else ""
        logger.warning("the event loop did not run for %.0f ms%s; it was in %s", seconds * 1000, more, stacks)
        self._logged, self._omitted = now, 0


def _stacks(loop_thread: int) -> str:
    """The innermost frames of the event loop's thread, and where the other threads are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = thread_stacks()
    own = stacks.pop(loop_thread, [])
    stacks.pop(threading.get_ident(), None)
    others = [f"{names.get(ident, ident)} in {_lines(frames[:1])}" for ident, frames in stacks.items()]
    return "; ".join([_lines(own[:MAX_FRAMES]), *others])


def _lines(frames: Sequence[StackFrame]) -> str:
    return " < ".join(f"{frame.function} ({'/'.join(frame.file.split('/')[-2:])}:{frame.line})" for frame in frames)
