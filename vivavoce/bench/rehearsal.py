"""`viva bench rehearsal`: many calls at once to a server that is this process, in time that the processor's work makes.

The server's own sessions, conversations and models answer the callers of `viva bench turn`; there are no sockets. Time
passes by what the event loop and the workers need of the processor, so that the figures are those of a machine that
has nothing else to do, whatever this one does besides.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vivavoce import hub
from vivavoce.bench import turn_report
from vivavoce.bench.progress import stage
from vivavoce.bench.turn import TurnPlan, measure, session_of
from vivavoce.bench.turn_questions import gather
from vivavoce.bench.turn_scenes import script
from vivavoce.bench.turn_wire import Event
from vivavoce.bench.virtual_time import VirtualExecutor, VirtualLoop
from vivavoce.pipelines.loading import load_moss_speech
from vivavoce.pipelines.moss_speech import MossSpeechBackend
from vivavoce.server.journal import Cursor
from vivavoce.server.metrics import Metrics
from vivavoce.server.options import ServerOptions
from vivavoce.server.realtime_session import Opening, RealtimeSession
from vivavoce.server.sessions import Sessions
from vivavoce.serving.hosts import SpeechHost

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
