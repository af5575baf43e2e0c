"""`viva bench telephone`: calls over SIP, many at once, beside WebSockets, over lossy lines and with echo."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.bench.answer import AskedQuestion, recorded_questions
from vivavoce.bench.serve_server import LOCAL
from vivavoce.bench.serve_sounds import one_turn_questions
from vivavoce.bench.telephone_caller import AskedTurn, CallFailedError, Sideband, SipCaller, SocketCaller
from vivavoce.bench.telephone_line import LineSettings
from vivavoce.bench.telephone_media import measure_quality
from vivavoce.bench.telephone_server import SCRIPTED, TelephonePlan, TelephoneServer
from vivavoce.bench.telephone_sipp import SippPlan, is_installed, measure_sipp, sipp_program
from vivavoce.bench.turn_sounds import RATE, Samples
from vivavoce.cores import usable_cores
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import free_port, stage
from vivavoce.train.front_desk import judge

SIPP_PARTS = ("sipp", "sipp-model")
MODEL_PARTS = ("model", "sipp-model", "answers")
PARTS = ("load", "sipp", "latency", "loss", "echo", "model", "sipp-model", "answers")
QUESTION_SECONDS = 1.6
SCRIPTED_SECONDS, MODEL_SECONDS = 7.0, 15.0  # between two questions of sipp, which does not listen
START_SECONDS = 0.1  # between the first packets of two calls
QUALITY_SECONDS = 20.0
LOSSY = LineSettings(loss=0.05, jitter_seconds=0.06)
ECHO = LineSettings(echo_db=-15.0, echo_seconds=0.12)
ECHO_CALLS = 8
LOSSY_CALLS = 8
MAX_EXTRA_V2V = 0.06
MAX_SCORE_LOSS = 0.3
MAX_ANSWERS_LOSS = 0.05
REQUIREMENTS = (
    "all scripted calls are served",
    "all scripted calls of sipp are served",
    "all calls of the model are served",
    "all calls of sipp are served by the model",
    "V2V over SIP within 60 ms of WebSocket",
    "no lossy call is dropped",
    "opinion score within 0.3 of clean",
    "no self-interruption",
    "answers within 5 points of wideband",
)


@dataclass(frozen=True)
class TelephoneOptions:
    """What is measured."""

    parts: tuple[str, ...] | None = None
    """None: all, those with sipp only where it is installed."""
    calls: int = 32
    model_calls: int = 8
    turns: int = 3
    replies: int = 100
    """With echo."""
    questions: int | None = None
    """Of the bundled ones, asked over both lines; None: all."""
    model: str = "mini-speech"
    device: str = "auto"
    front_end_processes: int | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.parts or ()) - set(PARTS):
            raise InputError(f"there is no part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
        if set(self.parts or ()) & set(SIPP_PARTS):
            sipp_program()

    @property
    def measured(self) -> list[str]:
        """The parts that are measured, in their order."""
        wanted = self.parts or [part for part in PARTS if part not in SIPP_PARTS or is_installed()]
        return [part for part in PARTS if part in wanted]


@dataclass(frozen=True)
class Served:
    """A running server."""

    plan: TelephonePlan
    show: Callable[[str], None] = lambda text: None
    """Shows how far a part is."""

    @property
    def http(self) -> str:
        """The URL of its API."""
        return f"http://127.0.0.1:{self.plan.port}"

    @property
    def realtime(self) -> str:
        """The URL of its sessions."""
        return f"ws://127.0.0.1:{self.plan.port}/v1/realtime"

    def call_of(self, user: str) -> str:
        """The id of the call of a caller."""
        with LOCAL.open(f"{self.http}/v1/realtime/calls", timeout=10.0) as response:
            calls = json.loads(response.read())["data"]
        return next(str(call["id"]) for call in calls if f"sip:{user}@" in call["caller"])


def run(options: TelephoneOptions, out: Path | None = None) -> dict[str, Any]:
    """Measure and print; write `telephone.json` to `out`."""
    processes = options.front_end_processes
    machine = {"device": options.device, "cores": usable_cores(), "front_end_processes": processes}
    result: dict[str, Any] = {"name": options.model, **machine}
    measures: dict[str, Measure] = {
        "load": _load,
        "sipp": _sipp_load,
        "latency": _latency,
        "loss": _loss,
        "echo": _echo,
        "model": _model_load,
        "sipp-model": _sipp_model_load,
        "answers": _answers,
    }
    for is_model in (False, True):
        wanted = [part for part in options.measured if (part in MODEL_PARTS) == is_model]
        if not wanted:
            continue
        model = options.model if is_model else SCRIPTED
        sessions = 2 + max(options.calls, options.model_calls, LOSSY_CALLS)
        ports = free_port(), free_port()
        plan = TelephonePlan(*ports, model, options.device, sessions, options.front_end_processes)
        with stage(f"starting a server with {model}"), TelephoneServer(plan) as server:
            server.wait_until_ready()
            asyncio.run(_calls(Served(plan), 1, 1, LineSettings(), one_turn_questions(QUESTION_SECONDS)))  # warm
            for part in wanted:
                with stage(part) as show:
                    result[part] = asyncio.run(measures[part](Served(plan, show), options))
                server.check()
    result["requirements"] = requirements(result)
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "telephone.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
    return result


Measure = Callable[[Served, TelephoneOptions], Coroutine[Any, Any, dict[str, Any]]]


# Parts


async def _load(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    return await _calls(server, options.calls, options.turns, LineSettings(), one_turn_questions(QUESTION_SECONDS))


async def _model_load(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    questions = one_turn_questions(QUESTION_SECONDS)
    return await _calls(server, options.model_calls, options.turns, LineSettings(), questions)


async def _sipp_load(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    plan = SippPlan(server.plan.sip_port, options.calls, options.turns, SCRIPTED_SECONDS)
    return await measure_sipp(server.http, plan, one_turn_questions(QUESTION_SECONDS))


async def _sipp_model_load(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    plan = SippPlan(server.plan.sip_port, options.model_calls, options.turns, MODEL_SECONDS)
    return await measure_sipp(server.http, plan, one_turn_questions(QUESTION_SECONDS))


async def _loss(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    questions = one_turn_questions(QUESTION_SECONDS)
    figures = await _calls(server, min(options.calls, LOSSY_CALLS), options.turns, LOSSY, questions)
    quality = await measure_quality(LOSSY, QUALITY_SECONDS)
    return figures | {"loss": LOSSY.loss, "jitter_ms": 1000 * LOSSY.jitter_seconds, "opinion_score": quality}


async def _latency(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    """One call and one session over a WebSocket, which take turns, so that both meet the same machine."""
    turns: dict[str, list[AskedTurn]] = {"sip": [], "websocket": []}
    questions = one_turn_questions(QUESTION_SECONDS)
    async with SipCaller(server.plan.sip_port) as call, SocketCaller(server.realtime) as socket:
        for number in range(max(2, 3 * options.turns)):
            question = questions[number % len(questions)]
            turns["sip"].append(await call.ask(question, RATE))
            turns["websocket"].append(await socket.ask(question, RATE))
    return {name: _turn_figures(each) for name, each in turns.items()}


async def _calls(
    server: Served, count: int, turns: int, line: LineSettings, questions: Sequence[Samples]
) -> dict[str, Any]:
    """Calls at once, each with a number of questions."""
    asked: list[AskedTurn] = []
    lateness: list[float] = []
    dropped = refused = 0

    async def call(number: int) -> None:
        nonlocal dropped, refused
        await asyncio.sleep(number * START_SECONDS)
        try:
            async with SipCaller(server.plan.sip_port, line, seed=number) as caller:
                for turn in range(turns):
                    asked.append(await caller.ask(questions[(number + turn) % len(questions)], RATE))
                lateness.extend(caller.lateness)
                dropped += caller.is_hung_up
        except CallFailedError:
            refused += 1

    began = time.monotonic()
    await asyncio.gather(*(call(number) for number in range(count)))
    return _turn_figures(asked) | {
        "calls": count,
        "refused": refused,
        "dropped": dropped,
        "seconds": round(time.monotonic() - began, 1),
        "caller_lateness_ms_p99": _milliseconds(lateness, 99),
    }


async def _echo(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    """Replies on a line with echo, while the caller says nothing: those that are cut have interrupted themselves."""
    questions = one_turn_questions(QUESTION_SECONDS)
    count = min(ECHO_CALLS, options.replies)
    asked: list[AskedTurn] = []
    cut = 0

    async def call(number: int) -> None:
        nonlocal cut
        turns = len(range(number, options.replies, count))
        async with AsyncExitStack() as stack:
            caller = await stack.enter_async_context(SipCaller(server.plan.sip_port, ECHO, seed=number))
            url = f"{server.realtime}?call_id={await asyncio.to_thread(server.call_of, caller.user)}"
            sideband = await stack.enter_async_context(Sideband(url))
            for turn in range(turns):
                asked.append(await caller.ask(questions[(number + turn) % len(questions)], RATE))
                server.show(f"echo: {len(asked)} of {options.replies} replies")
            cut += sideband.cut

    await asyncio.gather(*(call(number) for number in range(count)))
    echo = {"echo_db": ECHO.echo_db, "echo_ms": 1000 * ECHO.echo_seconds}
    return _turn_figures(asked) | {"self_interruptions": cut, **echo}


async def _answers(server: Served, options: TelephoneOptions) -> dict[str, Any]:
    """The bundled questions, each in a call and in a session of its own, at the same time."""
    right: dict[str, list[bool]] = {"sip": [], "websocket": []}
    replies = []
    for asked in recorded_questions()[: options.questions]:
        heard = await asyncio.gather(_answer_by_call(server, asked), _answer_by_socket(server, asked))
        for name, transcript in zip(right, heard, strict=True):
            right[name].append(judge(transcript, asked.exchange))
        said = dict(zip(right, heard, strict=True))
        replies.append({"intent": asked.exchange.intent, "expected": asked.exchange.reply, **said})
        server.show(f"answers: {len(replies)} questions")
    shares = {name: float(np.mean(each)) for name, each in right.items()}
    return {"questions": len(replies), **shares, "replies": replies}


async def _answer_by_call(server: Served, asked: AskedQuestion) -> str:
    async with SipCaller(server.plan.sip_port) as caller:
        url = f"{server.realtime}?call_id={await asyncio.to_thread(server.call_of, caller.user)}"
        async with Sideband(url) as sideband:
            await caller.ask(asked.sound.samples[0], asked.sound.rate)
            await sideband.until_played()
            return " ".join(sideband.transcripts)


async def _answer_by_socket(server: Served, asked: AskedQuestion) -> str:
    async with SocketCaller(server.realtime) as caller:
        return (await caller.ask(asked.sound.samples[0], asked.sound.rate)).transcript


# Figures


def _turn_figures(turns: Sequence[AskedTurn]) -> dict[str, Any]:
    answered = [turn.v2v_seconds for turn in turns if turn.v2v_seconds is not None]
    return {
        "asked": len(turns),
        "answered": len(answered),
        "v2v_ms_p50": _milliseconds(answered, 50),
        "v2v_ms_p95": _milliseconds(answered, 95),
    }


def _milliseconds(seconds: Sequence[float], percentile: float) -> float | None:
    return round(1000 * float(np.percentile(seconds, percentile)), 1) if seconds else None


def requirements(result: dict[str, Any]) -> dict[str, bool | None]:
    """Which bounds hold; None for those that were not measured."""
    latency, loss, echo, answers = (result.get(part) for part in ("latency", "loss", "echo", "answers"))
    checks: dict[str, bool | None] = dict.fromkeys(REQUIREMENTS)
    for part, name in (("load", "all scripted calls are served"), ("model", "all calls of the model are served")):
        if (calls := result.get(part)) is not None:
            is_whole = not calls["dropped"] and not calls["refused"]
            checks[name] = is_whole and calls["answered"] == calls["asked"]
    sipp = (
        ("sipp", "all scripted calls of sipp are served"),
        ("sipp-model", "all calls of sipp are served by the model"),
    )
    for part, name in sipp:
        if (calls := result.get(part)) is not None:
            checks[name] = calls["successful"] == calls["calls"] and calls["answered"] == calls["asked"]
    if latency and None not in (latency["sip"]["v2v_ms_p50"], latency["websocket"]["v2v_ms_p50"]):
        extra = latency["sip"]["v2v_ms_p50"] - latency["websocket"]["v2v_ms_p50"]
        checks["V2V over SIP within 60 ms of WebSocket"] = extra <= 1000 * MAX_EXTRA_V2V
    if loss:
        checks["no lossy call is dropped"] = not loss["dropped"] and not loss["refused"]
        scores = loss["opinion_score"]
        if scores["clean"] is not None and scores["lossy"] is not None:
            checks["opinion score within 0.3 of clean"] = scores["clean"] - scores["lossy"] <= MAX_SCORE_LOSS
    if echo:
        checks["no self-interruption"] = not echo["self_interruptions"]
    if answers:
        checks["answers within 5 points of wideband"] = answers["websocket"] - answers["sip"] <= MAX_ANSWERS_LOSS
    return checks


def _print(result: dict[str, Any]) -> None:
    for part in PARTS:
        if part in result:
            print(f"{part}: {json.dumps({name: each for name, each in result[part].items() if name != 'replies'})}")
    for name, holds in result["requirements"].items():
        print(f"{'not measured' if holds is None else 'holds' if holds else 'FAILS'}: {name}")
