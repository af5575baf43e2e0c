"""All sessions of a server: opened within its limits, found again, and ended when nobody wants them."""

import asyncio
import ctypes
import gc
import hmac
import logging
import sys
import time
import weakref
from collections.abc import Iterator

from vivavoce.errors import CapacityError
from vivavoce.server.config import OpenRate, ServerOptions
from vivavoce.server.host import Host
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.response import AudioSink
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.wire import WireError

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


logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
RETRY_AFTER_SECONDS = 5


class Sessions:
    """The sessions that are open."""

    def __init__(self, host: Host, options: ServerOptions, metrics: Metrics) -> None:
        self.host, self.options, self.metrics = host, options, metrics
        self._sessions: dict[str, RealtimeSession] = {}
        self._rate = OpenRate(options.opens_per_minute)
        self._ending: set[asyncio.Task[None]] = set()
        self.upkeep = Upkeep(metrics)
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[RealtimeSession]:
        return iter(list(self._sessions.values()))

    def open(self, opening: Opening, address: str, transport: str, track: AudioSink | None = None) -> RealtimeSession:
        """A new session, not yet started; WireError 503 or 429 where there is no room."""
        if not self._rate.admits(address):
            raise self._refusal(f"{address} opened too many sessions", "rate_limit_exceeded", 429)
        if self.is_stopping or not self.host.is_ready:
            raise self._refusal("the server is not ready", "server_not_ready", 503)
        if len(self) >= self.options.max_sessions and not self._end_one_that_waits():
            raise self._refusal(f"{len(self)} sessions are open, the most there can be", "session_limit_reached", 503)
        try:
            session = RealtimeSession(self.host, opening, self.options, self.metrics, track)
        except CapacityError as error:
            raise self._refusal(str(error), "capacity", 503) from error
        self._sessions[session.id] = session
        session.on_closed.append(lambda: self._closed(session))
        self.metrics.opened.labels(transport).inc()
        self.metrics.sessions.set(len(self))
        logger.info("session %s opened over %s", session.id, transport)
        return session

    def find(self, id: str) -> RealtimeSession | None:
        """A session by its id, or by the id of its call."""
        return self._sessions.get(id.replace("rtc_", "sess_", 1))

    def reclaim(self, id: str, token: str) -> RealtimeSession:
        """The session of a client that comes back with its token; WireError 404 where it is gone."""
        session = self.find(id)
        if session is None or not hmac.compare_digest(session.resume_token.encode(), token.encode()):
            raise WireError(
                f"there is no session {id} to resume, or the token is not its own", "session_gone", status=404
            )
        self.metrics.resumed.inc()
        return session

    async def sweep(self) -> None:
        """End, for ever, what is idle, too old, or was left."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._sweep_once()

    def _sweep_once(self) -> None:
        for session in self:
            self._end_if_over(session)
        self.metrics.detached.set(sum(not session.connections for session in self))

    async def close(self) -> None:
        """End everything; clients may come back to the next server."""
        self.is_stopping = True
        await asyncio.gather(*(session.close(1012, "the server stops") for session in self), return_exceptions=True)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def end(self, session: RealtimeSession, code: int, reason: str) -> None:
        """End a session, without waiting for it."""
        task = asyncio.create_task(session.close(code, reason))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _end_if_over(self, session: RealtimeSession) -> None:
        options, idle = self.options, session.idle_seconds
        if not session.connections and not session.is_call and idle > options.resume_seconds:
            self.end(session, 1001, "nobody came back")
        elif idle > options.idle_seconds:
            error = WireError(f"nothing was sent for {options.idle_seconds:g} s", "session_idle")
            session.send_error(error)
            self.end(session, 1001, str(error))
        elif options.session_seconds is not None and session.age_seconds > options.session_seconds:
            error = WireError(f"a session lasts at most {options.session_seconds:g} s", "session_expired")
            session.send_error(error)
            self.end(session, 1001, str(error))

    def _end_one_that_waits(self) -> bool:
        """Make room by giving up the session whose client has been away longest."""
        waiting = [session for session in self if not session.connections and not session.is_call]
        if not waiting:
            return False
        oldest = max(waiting, key=lambda session: session.idle_seconds)
        self.end(oldest, 1013, "its place was needed")
        self._closed(oldest)
        return True

    def _closed(self, session: RealtimeSession) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self.metrics.sessions.set(len(self))
            self.upkeep.session_ended(session)
            logger.info("session %s closed", session.id)

    def _refusal(self, message: str, code: str, status: int) -> WireError:
        self.metrics.refused.labels(code).inc()
        return WireError(f"{message}; try again in {RETRY_AFTER_SECONDS} s", code, status=status, kind="server_error")


def served_model(sessions: Sessions, name: str | None) -> str:
    """The model by this name; clients made for other servers name others, and get the first."""
    names = [card.id for card in sessions.host.models]
    return name if name in names else names[0]
