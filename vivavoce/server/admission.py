"""Admission control: a session is opened only if the event loops of the server have time for one more.

The models have an admission control of their own, by the slack and the cost of their replies and by memory
(`CapacityError`).
Limits on lateness alone are noticed too late: sessions that have just been opened cost little until they are answered.
So the load of the event loops is also extrapolated to one more session, and sessions that wait for their first answer
are limited in number.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vivavoce.cores import usable_cores
from vivavoce.server.config import ServerOptions

SAMPLE_SECONDS = 0.025
WINDOW_SECONDS = 2.0
MAX_BUSY = 0.9  # share of a core that an event loop may use
SATURATED_SHARE = 0.1  # of the lag limit: with less lag, a busy event loop has only had much to do for a moment
MIN_SESSIONS = 4  # with fewer, the measurements say nothing about one more
MIN_UNANSWERED, UNANSWERED_PER_CORE = 64, 8  # sessions that may wait for their first answer


@dataclass(frozen=True)
class LoopLoad:
    """The load of an event loop over the last seconds."""

    lag: float = 0.0
    """Median lateness of its timers in seconds."""
    worst_lag: float = 0.0
    """99th percentile of the lateness."""
    busy: float = 0.0
    """CPU time of its thread as a share of a core."""


class _LoopSample(NamedTuple):
    at: float
    cpu: float
    lag: float


class LoopMonitor:
    """Measures the load of the event loop it runs on."""

    def __init__(self, note_lag: Callable[[float], None] | None = None) -> None:
        self._note_lag = note_lag
        self._samples: deque[_LoopSample] = deque()

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)
            now = loop.time()
            lag = max(now - due, 0.0)
            self._samples.append(_LoopSample(now, time.thread_time(), lag))
            while self._samples[0].at < now - WINDOW_SECONDS and len(self._samples) > 2:
                self._samples.popleft()
            if self._note_lag is not None:
                self._note_lag(lag)

    @property
    def load(self) -> LoopLoad:
        """The load of the last seconds."""
        if len(self._samples) < 2:
            return LoopLoad()
        first, last = self._samples[0], self._samples[-1]
        lags = sorted(sample.lag for sample in self._samples)
        worst = lags[min(len(lags) - 1, round(0.99 * len(lags)))]
        return LoopLoad(statistics.median(lags), worst, (last.cpu - first.cpu) / max(last.at - first.at, 1e-3))


@dataclass(frozen=True)
class SessionCount:
    """The open sessions that admission depends on."""

    open: int
    unanswered: int
    """Opened recently, and without an answer so far."""


class AdmissionController:
    """Decides whether one more session can be served in time beside the open ones."""

    def __init__(self, monitor: LoopMonitor, options: ServerOptions) -> None:
        self._monitor, self._max_lag = monitor, options.max_lag_ms / 1000
        self.other_loops: Callable[[], Mapping[str, LoopLoad]] = dict
        """Loads of the event loops of other processes of the server, by name."""
        self.max_unanswered = max(MIN_UNANSWERED, UNANSWERED_PER_CORE * usable_cores())

    def refusal(self, sessions: SessionCount) -> str | None:
        """Why one more session is not admitted; None: it is."""
        if sessions.open < MIN_SESSIONS:
            return None
        if sessions.unanswered >= max(self.max_unanswered, sessions.open - sessions.unanswered):
            return f"{sessions.unanswered} sessions wait for their first answer"
        growth = (sessions.open + 1) / sessions.open
        for name, load in {"the event loop": self._monitor.load, **self.other_loops()}.items():
            is_saturated = load.busy * growth > MAX_BUSY and load.lag > SATURATED_SHARE * self._max_lag
            if load.lag > self._max_lag or is_saturated:
                return f"{name} is busy for {load.busy:.0%} of the time and {load.lag * 1000:.0f} ms late"
        return None
