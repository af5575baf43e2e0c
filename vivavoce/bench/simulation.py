"""`viva bench rehearsal`: many calls at once to a server that is this process, in time that the processor's work makes.

The server's own sessions, conversations and models answer the callers of `viva bench turn`; there are no sockets. Time
passes by what the event loop and the workers need of the processor, so that the figures are those of a machine that
has nothing else to do, whatever this one does besides.
"""

import asyncio
import json
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from vivavoce import hub
from vivavoce.bench import turn_report
from vivavoce.bench.turn import TurnPlan, measure, session_of
from vivavoce.bench.turn_client import Event
from vivavoce.bench.turn_scenes import script
from vivavoce.bench.turn_sounds import gather
from vivavoce.evaluation.machine import stage
from vivavoce.nn.process_settings import torch_threads
from vivavoce.runtime.executor import EARLY_SECONDS, DeadlineExecutor, Task, most_urgent
from vivavoce.s2s.loading import load_moss_speech
from vivavoce.s2s.moss_speech import MossSpeechBackend
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.conversations import SpeechHost
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions

Given = TypeVarTuple("Given")
Result = TypeVar("Result")
SHORTEST = 1e-9  # seconds: what is left of work that is done
HINDERED = 1.3  # times more than others fill: on an H200 a hop of 23 ms took 70 beside steps of a language model
LONGEST_WAIT = 60.0  # real seconds for a thread that is not ours, when nothing else is left to wait for


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes by its own work, and jumps to the next timer when it has none."""

    def __init__(self, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.worked = 0.0
        """Seconds of the processor that the loop itself has needed."""
        self._now = 1000.0
        self._since = time.thread_time()
        self._held: list[Callable[[], object]] | None = None
        super().__init__(_Skipping(self))

    def live(self, main: Coroutine[Any, Any, Result]) -> Result:
        """What comes of a coroutine that has this loop to itself, with tensors on one thread, whose time it counts."""
        with torch_threads.held(1):
            asyncio.set_event_loop(self)
            try:
                return self.run_until_complete(main)
            finally:
                asyncio.set_event_loop(None)
                self.close()

    def time(self) -> float:
        """Seconds of the loop's clock."""
        spent = time.thread_time()
        if self._held is not None:  # it is not the loop that works
            return self._now + (spent - self._since) * self.slowdown
        self.worked += spent - self._since
        self._now += (spent - self._since) * self.slowdown
        self._since = spent
        return self._now

    def skip(self, seconds: float) -> None:
        """Nobody has anything to do for so long."""
        self._now += max(0.0, seconds)

    def aside(self, work: Callable[[], None]) -> tuple[float, list[Callable[[], object]]]:
        """Do something that is not the loop's work: how long it took, and what it has to tell the loop afterwards."""
        self.time()
        told: list[Callable[[], object]] = []
        begun, self._held = self._since, told
        try:
            work()
        finally:
            self._held, self._since = None, time.thread_time()
        return self._since - begun, told

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Given]], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        """As every loop's, but what is told by work aside is told when that is done."""
        if self._held is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        self._held.append(lambda: callback(*args))
        return asyncio.Handle(callback, args, self, context)


class _Skipping(selectors.DefaultSelector):
    """Waits for nobody but other threads."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(LONGEST_WAIT)
        found = super().select(0)
        if not found:
            self._loop.skip(timeout)
        return found


@dataclass
class _OnDevice:
    left: float  # seconds, if it were alone
    fills: float
    done: Callable[[], None]
    slower: float = 1.0  # times, for what else is there


class VirtualDevice:
    """What computes for the workers while they wait: whatever is on it at once is slowed by what else is there.

    Work that fills little of it is a chain of small pieces, each of which waits for room: it is slowed most.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.busy = 0.0
        """Seconds in which it had anything to do."""
        self._loop, self._since = loop, 0.0
        self._asked, self._fills = 0.0, 1.0
        self._left: dict[int, _OnDevice] = {}
        self._count = 0
        self._alarm: asyncio.TimerHandle | None = None

    def spend(self, seconds: float, fills: float = 1.0) -> None:
        """The work that is being done now takes so long on it, alone, and fills such a share of it meanwhile."""
        self._asked, self._fills = self._asked + seconds, fills

    def asked(self) -> float:
        """What the work just done needs."""
        asked, self._asked = self._asked, 0.0
        return asked

    def begin(self, seconds: float, done: Callable[[], None]) -> None:
        """Compute for so long, if nothing else did; then tell."""
        self._advance()
        self._count += 1
        self._left[self._count] = _OnDevice(seconds, self._fills, done)
        self._plan()

    def _advance(self) -> None:
        now = self._loop.time()
        if self._left:
            self.busy += now - self._since
            for each in self._left.values():
                each.left -= (now - self._since) / each.slower
        self._since = now

    def _plan(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._left:
            filled = sum(each.fills for each in self._left.values())
            for each in self._left.values():
                each.slower = 1 + (1 + HINDERED * (1 - each.fills)) * (filled - each.fills)
            soonest = min(each.left * each.slower for each in self._left.values())
            self._alarm = self._loop.call_later(max(0.0, soonest), self._finish)

    def _finish(self) -> None:
        self._advance()
        over = [key for key, each in self._left.items() if each.left <= SHORTEST]
        for each in [self._left.pop(key) for key in over]:
            each.done()
        self._plan()


class VirtualExecutor(DeadlineExecutor):
    """Workers without threads: what they do is done at once, and known when their cores would have done it."""

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
        """Seconds of the processor that they have needed."""
        self.longest = 0.0
        """The longest piece of work."""

    def now(self) -> float:
        """The loop's time."""
        return self._loop.time()

    def add(self, duty: Task) -> None:
        """One more duty."""
        super().add(duty)
        self.wake()

    def remove(self, duty: Task) -> None:
        """A duty is no more."""
        self._discard(duty)

    def wake(self, duty: Task | None = None) -> None:
        """Something may have become due."""
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._idle and self._is_open:
            due, duty = most_urgent([duty for duty in self.tasks if id(duty) not in self._busy])
            if duty is None:
                return
            rest = due - self.now() - self.early
            if rest > 0:
                self._alarm = self._loop.call_later(rest, self._look)
                return
            self._begin(duty)

    def _begin(self, duty: Task) -> None:
        self._idle -= 1
        self._busy.add(id(duty))
        spent, told = self._loop.aside(duty.do_next)
        self.worked, self.longest = self.worked + spent, max(self.longest, spent)
        done = partial(self._done, duty, told)
        asked = 0.0 if self._device is None else self._device.asked()
        if self._device is not None and asked:
            self._loop.call_later(spent * self._loop.slowdown, self._device.begin, asked, done)
        else:
            self._loop.call_later(spent * self._loop.slowdown, done)

    def _done(self, duty: Task, told: list[Callable[[], object]]) -> None:
        self._idle += 1
        self._busy.discard(id(duty))
        for tell in told:
            tell()
        self._look()


MANY = 1e6  # sessions a minute: nobody is to be refused here


class SessionWire:
    """A `Wire` straight into a session of this process."""

    def __init__(self, session: RealtimeSession, cursor: Cursor) -> None:
        self._session, self._cursor = session, cursor

    async def send(self, event: Event) -> None:
        """An event goes out."""
        await self._session.receive_text(json.dumps(event))

    async def receive(self) -> Event:
        """The next event that comes."""
        entry = await self._cursor.next()
        self._cursor.advance(entry)
        event: Event = json.loads(entry.payload)
        return event


class SimulatedListener:
    """A `Connection` that reads on until it is dropped."""

    def drop(self, code: int, reason: str) -> None:
        """Nothing is to be closed."""


def run(
    model: str = "mini-speech",
    scenes: list[str] | None = None,
    turns: int = 3,
    sessions: int = 8,
    silence_ms: int = 200,
    slowdown: float = 1.0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Rehearse the scenes ("none": none) and then `sessions` calls at once; what came of it, as `viva bench turn` does.

    `slowdown` makes every processor so much slower: the margin that is left.
    """
    loop = VirtualLoop(slowdown)
    result = loop.live(_rehearse(loop, model, scenes or ["none"], turns, sessions, silence_ms))
    turn_report.show(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "rehearsal.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


async def _rehearse(
    loop: VirtualLoop, model: str, scenes: list[str], turns: int, sessions: int, silence_ms: int
) -> dict[str, Any]:
    material = gather()
    with stage(f"loading {model}"):
        workers = VirtualExecutor(loop)
        pipeline = load_moss_speech(hub.resolve(model), device="cpu", workers=workers)
    pipeline.core.scheduler.now = loop.time
    plan = TurnPlan(
        material, script(material, turns, scenes), turns, sessions, session_of("server_vad", silence_ms, None)
    )
    async with pipeline:
        host = SpeechHost(model, pipeline)
        await host.warm_up()
        server = Sessions(host, ServerOptions(opens_per_minute=MANY), Metrics(host))
        began, looped, worked = loop.time(), loop.worked, workers.worked
        heard: list[float] = []
        result, _ = await measure(lambda: connect(server, heard), plan)
        seconds, talked = loop.time() - began, sum(heard)
        await server.close()
    return {
        "what": "a rehearsal in the processor's time",
        "url": model,
        **result,
        "how": f"{silence_ms} ms of silence; times of the processor, {loop.slowdown:g} × slower",
        "budget": {
            "seconds": seconds,
            "session_seconds": talked,
            "loop_ms_a_second": 1e3 * (loop.worked - looped) / talked,
            "workers_ms_a_second": 1e3 * (workers.worked - worked) / talked,
            "longest_piece_ms": 1e3 * workers.longest,
            **_batches(pipeline),
        },
    }


def _batches(pipeline: MossSpeechBackend) -> dict[str, Any]:
    return {
        "engine_steps": pipeline.core.steps,
        "ear": [pipeline.ear.batches, pipeline.ear.jobs],
        "voice": [pipeline.voice.batches, pipeline.voice.jobs],
    }


@asynccontextmanager
async def connect(server: Sessions, heard: list[float]) -> AsyncIterator[SessionWire]:
    """A session that is opened, and closed afterwards; its seconds are added to those that were `heard`."""
    session = server.open(Opening(server.host.models[0].id), "here", "memory")
    session.start()
    cursor = session.attach(SimulatedListener(), 0)
    try:
        yield SessionWire(session, cursor)
    finally:
        heard.append(session.clock.heard_ms / 1e3)
        await session.close()
