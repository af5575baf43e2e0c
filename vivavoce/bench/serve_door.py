"""`viva bench serve`: conversations through the server, with sockets, voice activity and open microphones.

The server is a process of its own that runs the code of `viva serve`, or one that is already running. Callers are
processes too: their microphones send room noise all the time, a recorded question in it, and noise while the reply
plays. It runs in real time: a level takes about as long as its replies.
"""

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from vivavoce.bench.serve_levels import MAX_TURNS, Behaviour, DoorLevel, LevelPlan, figures, max_at_once, rush, steady
from vivavoce.bench.serve_plans import CallerPlan, CallerReport, CallPlan, CallResult, EncodedSounds
from vivavoce.bench.serve_profile import Profiler, can_trace, print_profile
from vivavoce.bench.serve_report import print_level, print_table, save
from vivavoce.bench.serve_server import ServerPlan, ServerProcess
from vivavoce.bench.serve_sounds import encoded_sounds
from vivavoce.bench.serve_watch import ServerWatch, process_name, process_tree
from vivavoce.bench.turn_client import realtime_url
from vivavoce.cores import usable_cores
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import PowerMeter, free_port, stage

TRANSPORTS = ("websocket", "webrtc", "binary")
MAX_CALLERS = 6
START_SECONDS = 0.3  # between the last caller process that is ready and the start
WARM_UP_SECONDS = 6.0
SETTLE_SECONDS = 1.0
SPARE_SESSIONS = 8
MAX_LINE = 1 << 22


@dataclass(frozen=True)
class DoorOptions:
    """The load, and how it reaches the server. Seconds."""

    sessions: Sequence[int]
    seconds: float = 20.0
    question: float = 2.0
    spread: float = 8.0
    steady: float | None = None
    """Count over this long in a steady stream; None: a rush within `spread`."""
    interrupt: float = 0.0
    transport: str = "websocket"
    callers: int | None = None
    """Caller processes; None: by the number of cores."""
    max_lateness_ms: float = 20.0
    keep_going: bool = False
    profile: bool = False
    seed: int = 1

    def check(self) -> None:
        """Raise InputError for options that cannot be measured."""
        if not self.sessions or min(self.sessions) < 1:
            raise InputError(f"sessions are 1 or more at each level, not {list(self.sessions)}")
        if self.transport not in TRANSPORTS:
            raise InputError(f"transport must be one of {', '.join(TRANSPORTS)}, not {self.transport!r}")
        if not 0 <= self.interrupt <= 1:
            raise InputError(f"interrupt is a share of the callers, from 0 to 1, not {self.interrupt}")

    @property
    def load(self) -> str:
        """In words."""
        arrivals = f"begin within {self.spread:g} s" if self.steady is None else f"come and go, over {self.steady:g} s"
        return f"{self.transport}, replies of {self.seconds:g} s, callers {arrivals}, {self.interrupt:.0%} interrupt"

    @property
    def turns(self) -> int:
        """The most questions of a call."""
        return (1 if self.steady is None else MAX_TURNS) + (self.interrupt > 0)

    def caller_processes(self, count: int) -> int:
        """How many processes make the calls of a level."""
        return min(count, self.callers or default_callers())

    def level(self, count: int, sounds: EncodedSounds) -> LevelPlan:
        """The calls of a level."""
        messages = sum(len(question.messages) for question in sounds.questions) / len(sounds.questions)
        behaviour = Behaviour(
            messages * sounds.packet_seconds, self.seconds, len(sounds.questions), self.interrupt, self.seed
        )
        if self.steady is None:
            return rush(count, self.spread, behaviour)
        return steady(count, self.steady, behaviour)


@dataclass(frozen=True)
class ServerChoice:
    """The server under test: one that this process starts, or the URL of a running one."""

    url: str | None = None
    key: str | None = None
    model: str | None = None
    shape: str = "true"
    device: str = "auto"
    dtype: str = "auto"
    left_chunks: int = 8
    max_sessions: int | None = None
    """None: as many as come."""
    doors: int | None = None


@dataclass(frozen=True)
class Target:
    """Where the callers go, and what is known of the server."""

    url: str
    http: str
    key: str | None = None
    pid: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    """Raises where the server has ended."""
    own_stacks: Path | None = None
    """The file to which the server samples its own stacks, where py-spy cannot."""


def default_callers() -> int:
    """Three eighths of the cores, at most `MAX_CALLERS`."""
    return max(1, min(MAX_CALLERS, usable_cores() * 3 // 8))


def run(server: ServerChoice, options: DoorOptions, out: Path | None = None) -> dict[str, Any]:
    """Measure level by level until one does not hold; print, write `serve.json` and `serve.png`, return the figures."""
    options.check()
    if server.url is not None and (options.profile or server.doors is not None or server.max_sessions is not None):
        raise InputError("--profile, --doors and --max-sessions are for a server that is started here, not for --url")
    result: dict[str, Any] = {}
    levels: list[DoorLevel] = []
    with ExitStack() as stack:
        with stage("encoding the callers' sounds"):
            sounds = encoded_sounds(options.transport, options.question)
            file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="viva-bench-"))) / "sounds"
            file.write_bytes(msgspec.msgpack.encode(sounds))
        target = _target(server, options, stack)

        def store(level: DoorLevel) -> None:
            """Save after each level, so that an interrupted run keeps the finished ones."""
            levels.append(level)
            result.update(
                {
                    "what": "speech-to-speech sessions through the server: sockets, voice activity, open microphones",
                    "shape": (server.model or "model") if server.url else server.shape,
                    "device": "",
                    **target.about,
                    "transport": options.transport,
                    "load": options.load,
                    "python": platform.python_version(),
                    "question_seconds": options.question,
                    "reply_seconds": options.seconds,
                    "spread_seconds": None if options.steady else options.spread,
                    "steady_seconds": options.steady,
                    "interrupting_share": options.interrupt,
                    "doors": server.doors,
                    "how": "real time; first sound from the last speech sample sent to the first sound received",
                    "most_without_a_gap": max((each.sessions for each in levels if each.holds), default=0),
                    "levels": [each.as_json() for each in levels],
                }
            )
            if out is not None:
                save(result, out)

        asyncio.run(_measure(target, options, sounds, str(file), store))
    print_table(levels, result)
    return result


def _target(server: ServerChoice, options: DoorOptions, stack: ExitStack) -> Target:
    """The running server, or one that is started here and ends with the stack."""
    if server.url is not None:
        url = realtime_url(server.url, server.model)
        parts = urlsplit(url)
        http = urlunsplit(("https" if parts.scheme == "wss" else "http", parts.netloc, "", "", ""))
        return Target(url, http, server.key)
    peak = max(max_at_once(count, options.steady is not None) for count in options.sessions)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="viva-bench-")))
    about, stacks = folder / "about.json", folder / "own.stacks" if options.profile and not can_trace() else None
    plan = ServerPlan(
        shape=server.shape,
        device=server.device,
        dtype=server.dtype,
        port=free_port(),
        sessions=min(peak, server.max_sessions or peak),
        max_sessions=server.max_sessions or peak + SPARE_SESSIONS,
        turns=options.turns,
        question_seconds=options.question,
        reply_seconds=options.seconds,
        left_chunks=server.left_chunks,
        about=str(about),
        doors=server.doors,
        stacks=None if stacks is None else str(stacks),
    )
    process = stack.enter_context(ServerProcess(plan))
    with stage(f"starting the server: {server.shape}, for {plan.sessions} sessions"):
        process.wait_until_ready()
    described = msgspec.json.decode(about.read_bytes(), type=dict[str, Any])
    return Target(
        realtime_url(process.url), process.url, pid=process.pid, about=described, check=process.check, own_stacks=stacks
    )


async def _measure(
    target: Target, options: DoorOptions, sounds: EncodedSounds, file: str, store: Callable[[DoorLevel], None]
) -> None:
    with stage("one call to warm up"):
        alone = replace(options.level(1, sounds), calls=[CallPlan(0, 0.0, [0])], ends=WARM_UP_SECONDS)
        await _run_calls(target, options, alone, file, lambda done: None)
    for count in options.sessions:
        await asyncio.sleep(SETTLE_SECONDS)
        level = await measure_level(target, options, options.level(count, sounds), file)
        target.check()
        print_level(level)
        store(level)
        if not level.holds and not options.keep_going:
            break


async def measure_level(target: Target, options: DoorOptions, plan: LevelPlan, file: str) -> DoorLevel:
    """Run the calls of one level."""
    async with AsyncExitStack() as stack:
        show = stack.enter_context(_progress(plan))
        watch = await stack.enter_async_context(ServerWatch(target.http, target.key, target.pid))
        power = await stack.enter_async_context(PowerMeter())
        profiler = stack.enter_context(_profiler(target)) if options.profile and target.pid is not None else None
        results, reports, wall = await _run_calls(target, options, plan, file, show)
    level = figures(plan, results, reports, wall, options.max_lateness_ms, watch.use, power.mean)
    if profiler is None:
        return level
    print_profile(profiler)
    return replace(level, profile=profiler.as_json())


@contextmanager
def _profiler(target: Target) -> Iterator[Profiler]:
    assert target.pid is not None
    names = {pid: process_name(pid, pid == target.pid) for pid in process_tree(target.pid)}
    with (
        tempfile.TemporaryDirectory(prefix="viva-bench-") as folder,
        Profiler(names, Path(folder), target.own_stacks) as profiler,
    ):
        yield profiler


class _progress:
    """Shows how many calls of a level are over."""

    def __init__(self, plan: LevelPlan) -> None:
        from rich.console import Console

        self._plan, self._console = plan, Console(stderr=True, highlight=False)
        self._status = self._console.status(self._text(0)) if self._console.is_terminal else None

    def __enter__(self) -> Callable[[int], None]:
        if self._status is None:
            self._console.print(f"… {self._text(0)}")
            return lambda done: None
        self._status.start()
        return lambda done: self._status.update(self._text(done)) if self._status is not None else None

    def __exit__(self, *exc_info: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _text(self, done: int) -> str:
        calls, seconds = len(self._plan.calls), self._plan.expected_seconds
        return f"{self._plan.sessions} sessions, about {seconds:.0f} s: {done} of {calls} calls over"


async def _run_calls(
    target: Target, options: DoorOptions, plan: LevelPlan, file: str, show: Callable[[int], None]
) -> tuple[list[CallResult], list[CallerReport], float]:
    """Make the calls from caller processes; the results, the callers' reports, and how long it took."""
    count = options.caller_processes(len(plan.calls))
    plans = [
        CallerPlan(target.url, target.key, options.transport, file, options.seconds, plan.calls[part::count], plan.ends)
        for part in range(count)
    ]
    processes = [_CallerProcess(each) for each in plans]
    results: list[CallResult] = []

    def finished(result: CallResult) -> None:
        results.append(result)
        show(len(results))

    try:
        await asyncio.gather(*(process.start() for process in processes))
        began = time.monotonic() + START_SECONDS
        reports = await asyncio.gather(*(process.run(began, finished) for process in processes))
        return results, list(reports), time.monotonic() - began
    finally:
        for process in processes:
            await process.end()


class _CallerProcess:
    """A process of `vivavoce.bench.serve_callers`."""

    def __init__(self, plan: CallerPlan) -> None:
        self._plan = plan
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vivavoce.bench.serve_callers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._plan) + b"\n")
        if await self._line() != b'"ready"\n':
            raise VivaError("a caller process did not start")

    async def run(self, began: float, finished: Callable[[CallResult], None]) -> CallerReport:
        """Make the calls from this time of the monotonic clock on."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{began}\n".encode())
        for _ in self._plan.calls:
            finished(msgspec.json.decode(await self._line(), type=CallResult))
        return msgspec.json.decode(await self._line(), type=CallerReport)

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise VivaError("a caller process ended early; its error is above")
        return line

    async def end(self) -> None:
        """Wait for it, or kill it where it was interrupted."""
        if self._process is not None:
            if self._process.returncode is None:
                try:
                    async with asyncio.timeout(5.0):
                        await self._process.wait()
                except TimeoutError:
                    self._process.kill()
            await self._process.wait()
