"""`viva bench rehearsal`: simulated calls to an in-process server, on a virtual clock driven by CPU time.

The server's real sessions, conversations and models answer the callers of `viva bench turn`, without sockets. The clock
advances by the CPU time of the event loop and of the executor and skips idle time, so that figures do not depend on
other load on this machine. Also here: the virtual event loop, device and executor that `serve_simulation` uses.
"""

import asyncio
import json
import selectors
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from vivavoce import hub
from vivavoce.bench.turn import TurnPlan, measure, print_result, session_of
from vivavoce.bench.turn_client import Event
from vivavoce.bench.turn_scenes import script
from vivavoce.bench.turn_sounds import gather
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.evaluation.machine import stage
from vivavoce.nn.process_settings import torch_threads
from vivavoce.runtime.executor import EARLY_SECONDS, DeadlineExecutor, Task, earliest_deadline
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_moss_speech
from vivavoce.server.admission import AdmissionController, LoopMonitor
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.hosts import SpeechHost
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.audio_events import AudioEventEncoder
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions

Given = TypeVarTuple("Given")
Result = TypeVar("Result")
EPSILON_SECONDS = 1e-9  # work below this is done
CONTENTION_FACTOR = 1.3  # fitted: on an H200 a hop of 23 ms took 70 ms beside language model steps
MAX_WAIT_SECONDS = 60.0  # real seconds to wait for other threads when no timer is pending


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances by its own CPU time, and jumps to the next timer when idle."""

    def __init__(self, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.worked = 0.0
        """CPU seconds used by the loop itself."""
        self._now = 1000.0
        self._since = time.thread_time()
        self._held: list[Callable[[], object]] | None = None
        super().__init__(_SkippingSelector(self))

    def run_main(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to completion on this loop, with torch on one thread so that its CPU time is counted."""
        with torch_threads.held(1):
            asyncio.set_event_loop(self)
            try:
                return self.run_until_complete(main)
            finally:
                asyncio.set_event_loop(None)
                self.close()

    def time(self) -> float:
        spent = time.thread_time()
        if self._held is not None:  # code outside the loop is running
            return self._now + (spent - self._since) * self.slowdown
        self.worked += spent - self._since
        self._now += (spent - self._since) * self.slowdown
        self._since = spent
        return self._now

    def skip(self, seconds: float) -> None:
        """Advance the clock over idle time."""
        self._now += max(0.0, seconds)

    def run_outside(self, work: Callable[[], None]) -> tuple[float, list[Callable[[], object]]]:
        """Run work that is not the loop's own: its CPU seconds, and the callbacks it scheduled on the loop."""
        self.time()
        callbacks: list[Callable[[], object]] = []
        started, self._held = self._since, callbacks
        try:
            work()
        finally:
            self._held, self._since = None, time.thread_time()
        return self._since - started, callbacks

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[Given]], Result], *args: *Given
    ) -> "asyncio.Future[Result]":
        """Run the work now; its result is visible when its CPU time has passed, as that of a thread would be."""
        future: asyncio.Future[Result] = self.create_future()
        finish: list[Callable[[], None]] = []

        def work() -> None:
            try:
                finish.append(partial(future.set_result, func(*args)))
            except Exception as error:
                finish.append(partial(future.set_exception, error))

        def done() -> None:
            for callback in callbacks:
                callback()
            if not future.done():
                finish[0]()

        spent, callbacks = self.run_outside(work)
        self.call_later(spent * self.slowdown, done)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Given]], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        """Like the base class, but callbacks from `run_outside` are held until that work ends."""
        if self._held is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._held.append(lambda: callback(*args))
        return asyncio.Handle(callback, args, self, context)


class _SkippingSelector(selectors.DefaultSelector):
    """A selector that skips timeouts instead of sleeping."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(MAX_WAIT_SECONDS)
        found = super().select(0)
        if not found:
            self._loop.skip(timeout)
        return found


@dataclass
class _OnDevice:
    left: float  # seconds on an idle device
    fills: float
    done: Callable[[], None]
    contention: float = 1.0  # slowdown by concurrent work


class VirtualDevice:
    """A simulated accelerator on which concurrent work items slow each other down.

    Work with low occupancy is a chain of small kernels, each of which waits for free units: it is slowed most.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.busy = 0.0
        """Seconds with at least one work item."""
        self._loop, self._since = loop, 0.0
        self._requested, self._fills = 0.0, 1.0
        self._left: dict[int, _OnDevice] = {}
        self._count = 0
        self._alarm: asyncio.TimerHandle | None = None

    def spend(self, seconds: float, fills: float = 1.0) -> None:
        """Called by the running task: it needs this much idle-device time at this occupancy."""
        self._requested, self._fills = self._requested + seconds, fills

    def take_requested(self) -> float:
        """Device seconds requested by the task that just ran; resets the request."""
        requested, self._requested = self._requested, 0.0
        return requested

    def start(self, seconds: float, done: Callable[[], None]) -> None:
        """Start work of this idle-device duration; `done` is called at its end."""
        self._advance()
        self._count += 1
        self._left[self._count] = _OnDevice(seconds, self._fills, done)
        self._schedule()

    def _advance(self) -> None:
        now = self._loop.time()
        if self._left:
            self.busy += now - self._since
            for each in self._left.values():
                each.left -= (now - self._since) / each.contention
        self._since = now

    def _schedule(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._left:
            filled = sum(each.fills for each in self._left.values())
            for each in self._left.values():
                each.contention = 1 + (1 + CONTENTION_FACTOR * (1 - each.fills)) * (filled - each.fills)
            soonest = min(each.left * each.contention for each in self._left.values())
            self._alarm = self._loop.call_later(max(0.0, soonest), self._finish)

    def _finish(self) -> None:
        self._advance()
        over = [key for key, each in self._left.items() if each.left <= EPSILON_SECONDS]
        for each in [self._left.pop(key) for key in over]:
            each.done()
        self._schedule()


class VirtualExecutor(DeadlineExecutor):
    """A deadline executor without threads: a task runs immediately, its result is visible at its virtual end."""

    def __init__(
        self,
        loop: VirtualLoop,
        threads: int = 1,
        early: float = EARLY_SECONDS,
        device: VirtualDevice | None = None,
    ) -> None:
        super().__init__("virtual", 0, early)
        self._loop, self._idle, self._device = loop, threads, device
        self._alarm: asyncio.TimerHandle | None = None
        self.worked = 0.0
        """CPU seconds used by tasks."""
        self.max_task_seconds = 0.0
        """CPU seconds of the longest task."""

    def now(self) -> float:
        return self._loop.time()

    def add(self, task: Task) -> None:
        super().add(task)
        self.wake()

    def remove(self, task: Task) -> None:
        self._discard(task)

    def wake(self, task: Task | None = None) -> None:
        """Look for a due task on the next loop iteration."""
        self._loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._idle and self._is_open:
            due, task = earliest_deadline([task for task in self.tasks if id(task) not in self._busy])
            if task is None:
                return
            rest = due - self.now() - self.early
            if rest > 0:
                self._alarm = self._loop.call_later(rest, self._dispatch)
                return
            self._start(task)

    def _start(self, task: Task) -> None:
        self._idle -= 1
        self._busy.add(id(task))
        spent, callbacks = self._loop.run_outside(task.do_next)
        self.worked, self.max_task_seconds = self.worked + spent, max(self.max_task_seconds, spent)
        done = partial(self._finish_task, task, callbacks)
        device_seconds = 0.0 if self._device is None else self._device.take_requested()
        if self._device is not None and device_seconds:
            self._loop.call_later(spent * self._loop.slowdown, self._device.start, device_seconds, done)
        else:
            self._loop.call_later(spent * self._loop.slowdown, done)

    def _finish_task(self, task: Task, callbacks: list[Callable[[], object]]) -> None:
        self._idle += 1
        self._busy.discard(id(task))
        for callback in callbacks:
            callback()
        self._dispatch()


SESSIONS_PER_MINUTE = 1e6  # high enough that no session is rate limited


class SessionWire:
    """A `Wire` to a session in this process."""

    def __init__(self, session: RealtimeSession, cursor: Cursor) -> None:
        self._session, self._cursor = session, cursor
        self._encoder = AudioEventEncoder(cursor.log.tag, cursor.after)
        self._received: deque[str | bytes] = deque()

    async def send(self, event: Event) -> None:
        await self._session.receive_text(json.dumps(event))

    async def receive(self) -> Event:
        while not self._received:
            entry = await self._cursor.next()
            self._cursor.advance(entry)
            self._received += self._encoder.messages(entry.sequence, entry.payload)
        event: Event = json.loads(self._received.popleft())
        return event


class SimulatedListener:
    """A `Connection` without a transport."""

    def drop(self, code: int, reason: str) -> None:
        """No transport to close."""


def run(
    model: str = "mini-speech",
    scenes: list[str] | None = None,
    turns: int = 3,
    sessions: int = 8,
    silence_ms: int = 200,
    slowdown: float = 1.0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Play the scenes ("none": none) and then `sessions` concurrent calls; figures as of `viva bench turn`.

    `slowdown` scales all CPU times, to find the headroom that is left.
    """
    loop = VirtualLoop(slowdown)
    result = loop.run_main(_simulate(loop, model, scenes or ["none"], turns, sessions, silence_ms))
    print_result(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rehearsal.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


@dataclass
class SimulatedServer:
    """A server in this process, on a virtual clock."""

    sessions: Sessions
    pipeline: MossSpeechBackend
    executor: "VirtualExecutor"
    call_seconds: list[float] = field(default_factory=list)
    """Seconds of input of each call that has ended."""

    def connect(self) -> AbstractAsyncContextManager["SessionWire"]:
        """Open a session."""
        return connect(self.sessions, self.call_seconds)


@asynccontextmanager
async def simulated_server(
    loop: VirtualLoop,
    model: str,
    dialogue: DialogueOptions | None = None,
    settings: ConversationSettings | None = None,
) -> AsyncIterator[SimulatedServer]:
    """The server of a speech-to-speech model, loaded and warmed up; `settings` are those of clients that send none."""
    with stage(f"loading {model}"):
        executor = VirtualExecutor(loop)
        executor.start()
        pipeline = load_moss_speech(hub.resolve(model), device="cpu", executor=executor)
    pipeline.core.scheduler.now = loop.time
    async with pipeline:
        host = SpeechHost(model, pipeline, dialogue or DialogueOptions(), settings=settings or ConversationSettings())
        await host.warm_up()
        options = ServerOptions(opens_per_minute=SESSIONS_PER_MINUTE)
        sessions = Sessions(host, options, Metrics(host), AdmissionController(LoopMonitor(), options))
        try:
            yield SimulatedServer(sessions, pipeline, executor)
        finally:
            await sessions.close()


async def _simulate(
    loop: VirtualLoop, model: str, scenes: list[str], turns: int, sessions: int, silence_ms: int
) -> dict[str, Any]:
    material = gather()
    plan = TurnPlan(
        material, script(material, turns, scenes), turns, sessions, session_of("server_vad", silence_ms, None)
    )
    async with simulated_server(loop, model) as server:
        began, looped, worked = loop.time(), loop.worked, server.executor.worked
        result, _ = await measure(server.connect, plan)
        seconds, session_seconds = loop.time() - began, sum(server.call_seconds)
    return {
        "what": "a simulation on a CPU-time clock",
        "url": model,
        **result,
        "how": f"{silence_ms} ms of silence; CPU time, {loop.slowdown:g} × slower",
        "budget": {
            "seconds": seconds,
            "session_seconds": session_seconds,
            "loop_ms_a_second": 1e3 * (loop.worked - looped) / session_seconds,
            "workers_ms_a_second": 1e3 * (server.executor.worked - worked) / session_seconds,
            "longest_piece_ms": 1e3 * server.executor.max_task_seconds,
            **_batches(server.pipeline),
        },
    }


def _batches(pipeline: MossSpeechBackend) -> dict[str, Any]:
    return {
        "engine_steps": pipeline.core.steps,
        "encoder": [pipeline.speech_encoder.batches, pipeline.speech_encoder.jobs],
        "voice": [pipeline.vocoder.batches, pipeline.vocoder.jobs],
    }


@asynccontextmanager
async def connect(server: Sessions, call_seconds: list[float]) -> AsyncIterator[SessionWire]:
    """An open session; on exit its seconds of input are appended to `call_seconds`."""
    session = server.open(Opening(server.host.models[0].id), "here", "memory")
    session.start()
    cursor = session.attach(SimulatedListener(), 0)
    try:
        yield SessionWire(session, cursor)
    finally:
        call_seconds.append(session.clock.received_ms / 1e3)
        await session.close()
