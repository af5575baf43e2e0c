"""The sessions of a server: opened within its limits, found for a resume, and ended when idle, detached or too old."""

import asyncio
import ctypes
import gc
import hmac
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

from vivavoce.errors import CapacityError
from vivavoce.server.admission import AdmissionController, SessionCount
from vivavoce.server.config import OpenRate, ServerOptions
from vivavoce.server.host import Host
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.greeting import greet
from vivavoce.server.realtime.response import AudioSink
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.telephony.active_calls import ActiveCalls
from vivavoce.server.telephony.records import CallRecords
from vivavoce.server.webhooks import SessionData, Webhooks
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
RETRY_AFTER_SECONDS = 5
REFUSAL_LOG_SECONDS = 10.0
UNANSWERED_SECONDS = 15.0  # age from which on a session without an answer counts as idle
CLEANUP_DELAY_SECONDS = 5.0  # between two looks whether there is garbage to collect
MANY_OBJECTS = 50_000  # allocated since the last collection, for which a collection pays
STOPPING = (1012, "the server is stopping")  # a code that lets clients reconnect after a restart
MAX_OBJECTS = 1_000_000  # for which it is done though replies are played


class SessionCleanup:
    """Collects the garbage of ended sessions and returns memory to the system, while no reply is played.

    A full collection holds the interpreter's lock, and `malloc_trim` the heap's: with a hundred sessions for tenths of
    a second. Where `frozen_heap` is in effect, nothing else collects garbage.
    """

    def __init__(self, metrics: Metrics, is_speaking: Callable[[], bool]) -> None:
        self._metrics, self._is_speaking = metrics, is_speaking
        self._ended: list[weakref.ref[RealtimeSession]] = []

    def session_ended(self, session: RealtimeSession) -> None:
        """Schedule a collection."""
        self._ended.append(weakref.ref(session))

    async def run(self) -> None:
        """Collect where it is due, until cancelled."""
        while True:
            await asyncio.sleep(CLEANUP_DELAY_SECONDS)
            allocated = gc.get_count()[0]
            if allocated > MAX_OBJECTS or ((self._ended or allocated > MANY_OBJECTS) and not self._is_speaking()):
                gc.collect()
                ended, self._ended = self._ended, [session for session in self._ended if session() is not None]
                self._metrics.released.inc(len(ended) - len(self._ended))
                await asyncio.to_thread(trim_heap)


def trim_heap() -> None:
    """Return free heap memory to the system, where the C library has `malloc_trim`."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class RefusalLog:
    """Logs why sessions are refused: for each code at once, then at most every few seconds."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def note(self, code: str, reason: str) -> None:
        """Note a refused session."""
        now = asyncio.get_running_loop().time()
        if now - self._logged_at.get(code, -REFUSAL_LOG_SECONDS) < REFUSAL_LOG_SECONDS:
            self._unlogged[code] += 1
            return
        before = f" ({count} more since the last such line)" if (count := self._unlogged.pop(code, 0)) else ""
        logger.warning("a session was refused, %s: %s%s", code, reason, before)
        self._logged_at[code] = now


class Sessions:
    """The open sessions."""

    def __init__(self, host: Host, options: ServerOptions, metrics: Metrics, admission: AdmissionController) -> None:
        self.host, self.options, self.metrics = host, options, metrics
        self._admission = admission
        self._sessions: dict[str, RealtimeSession] = {}
        self._rate = OpenRate(options.opens_per_minute)
        self._refusals = RefusalLog()
        self._ending: set[asyncio.Task[None]] = set()
        self.cleanup = SessionCleanup(metrics, lambda: any(each.encoder.is_speaking for each in self))
        self.is_stopping = False
        self.calls, self.call_records = ActiveCalls(), CallRecords(options.call_records)
        self.webhooks: Webhooks | None = None
        if options.webhook_url is not None and options.webhook_secret is not None:
            self.webhooks = Webhooks(options.webhook_url, options.webhook_secret)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[RealtimeSession]:
        return iter(list(self._sessions.values()))

    def open(self, opening: Opening, address: str, transport: str, track: AudioSink | None = None) -> RealtimeSession:
        """A new session, not yet started; WireError 429 or 503 where it is refused."""
        if not self._rate.admits(address):
            raise self._refusal(f"{address} opened too many sessions", "rate_limit_exceeded", 429)
        if self.is_stopping or not self.host.is_ready:
            state = "stopping" if self.is_stopping else "not ready"
            raise self._refusal(f"the server is {state}", "server_not_ready", 503)
        if len(self) >= self.options.max_sessions and not self._evict_detached():
            raise self._refusal(f"{len(self)} sessions are open, which is the limit", "session_limit_reached", 503)
        overload = self._admission.refusal(self._count())
        if overload is not None:
            raise self._refusal(f"the server is overloaded: {overload}", "overloaded", 503)
        try:
            session = RealtimeSession(self.host, opening, self.options, self.metrics, track)
        except CapacityError as error:
            self._evict_detached()  # its memory is free when the client tries again
            raise self._refusal(str(error), "capacity", 503) from error
        self._sessions[session.id] = session
        self._open_extras(session, opening, transport)
        session.on_closed.append(lambda: self._closed(session))
        self.metrics.opened.labels(transport).inc()
        self.metrics.sessions.set(len(self))
        logger.info("session %s opened over %s", session.id, transport)
        return session

    def _open_extras(self, session: RealtimeSession, opening: Opening, transport: str) -> None:
        """Greet the client and tell the webhooks, where that is configured."""
        options = self.options
        is_greeted = options.greeting is not None or options.greeting_instructions is not None
        if is_greeted and opening.kind == "realtime":
            greeting = asyncio.create_task(greet(session, self.host, options))
            session.on_closed.append(lambda: cancel_unless_current(greeting))
        if (webhooks := self.webhooks) is not None:
            webhooks.send("session.started", SessionData(session.id, opening.model, transport))

            def ended() -> None:
                duration, (code, reason) = round(session.age_seconds, 3), session.close_reason
                data = SessionData(session.id, opening.model, transport, duration, code, reason)
                webhooks.send("session.ended", data)

            session.on_closed.append(ended)

    def _count(self) -> SessionCount:
        unanswered = sum(each.is_unanswered and each.age_seconds < UNANSWERED_SECONDS for each in self)
        return SessionCount(len(self), unanswered)

    def find(self, id: str) -> RealtimeSession | None:
        """A session by its id, or by the id of its call."""
        return self._sessions.get(id.replace("rtc_", "sess_", 1))

    def resume(self, id: str, token: str) -> RealtimeSession:
        """The session of a client that reconnects with its resume token; WireError 404 where it has ended."""
        session = self.find(id)
        if session is None or not hmac.compare_digest(session.resume_token.encode(), token.encode()):
            raise WireError(
                f"there is no session {id} to resume, or the token is wrong",
                "session_gone",
                status=404,
            )
        self.metrics.resumed.inc()
        return session

    async def sweep(self) -> None:
        """End sessions that are idle, detached or too old, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._sweep_once()

    def _sweep_once(self) -> None:
        for session in self:
            self._end_if_expired(session)
        self.metrics.detached.set(sum(not session.connections for session in self))

    def end_idle(self) -> bool:
        """End the sessions without a reply in progress, and those without a client; whether there are others."""
        busy = [session for session in self if session.is_busy and (session.connections or session.is_call)]
        for session in self:
            if session not in busy:
                self.end(session, *STOPPING)
        return bool(busy)

    async def close(self) -> None:
        """End all sessions."""
        self.is_stopping = True
        await asyncio.gather(*(session.close(*STOPPING) for session in self), return_exceptions=True)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def end(self, session: RealtimeSession, code: int, reason: str) -> None:
        """Start to end a session, without waiting for it."""
        task = asyncio.create_task(session.close(code, reason))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _end_if_expired(self, session: RealtimeSession) -> None:
        options, idle = self.options, session.idle_seconds
        if not session.connections and not session.is_call and idle > options.resume_seconds:
            self.end(session, 1001, "the client did not reconnect")
        elif idle > options.idle_seconds:
            error = WireError(f"the session was idle for {options.idle_seconds:g} s", "session_idle")
            session.send_error(error)
            self.end(session, 1001, str(error))
        elif options.session_seconds is not None and session.age_seconds > options.session_seconds:
            error = WireError(f"a session lasts at most {options.session_seconds:g} s", "session_expired")
            session.send_error(error)
            self.end(session, 1001, str(error))

    def _evict_detached(self) -> bool:
        """End the session that has been without a client for the longest time; whether there was one."""
        waiting = [session for session in self if not session.connections and not session.is_call]
        if not waiting:
            return False
        oldest = max(waiting, key=lambda session: session.idle_seconds)
        self.end(oldest, 1013, "the capacity was needed for a new session")
        self._closed(oldest)
        return True

    def _closed(self, session: RealtimeSession) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self.metrics.sessions.set(len(self))
            self.cleanup.session_ended(session)
            logger.info("session %s closed", session.id)

    def _refusal(self, message: str, code: str, status: int) -> WireError:
        self.metrics.refused.labels(code).inc()
        if status == 503:  # an address that opens too many sessions says nothing of the server
            self._refusals.note(code, message)
        return WireError(f"{message}; try again in {RETRY_AFTER_SECONDS} s", code, status=status, kind="server_error")


def cancel_unless_current(task: asyncio.Task[None]) -> None:
    """Cancel a task that is not the one that calls."""
    if task is not asyncio.current_task():
        task.cancel()


def served_model(sessions: Sessions, name: str | None) -> str:
    """The model of this name, else the first one: stock clients name models of other servers."""
    names = [card.id for card in sessions.host.models]
    return name if name in names else names[0]
