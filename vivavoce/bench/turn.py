"""`viva bench turn URL`: scripted calls to any server that speaks OpenAI's Realtime protocol, and what they were like.

A caller speaks in real time, hears the replies through a player with an 80 ms start buffer, and does about events what
stock clients do. Times are from the last voiced sample that went in to the first voiced one that is heard.
"""

import asyncio
import json
import platform
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.bench import turn_report
from vivavoce.bench.turn_caller import BenchCaller
from vivavoce.bench.turn_client import PERFECT, BadWire, Event, Wire, WireClosedError, connect, realtime_url
from vivavoce.bench.turn_measure import ALIKE, SessionAnswer, answers, crosstalk, outcomes, similarity, summary
from vivavoce.bench.turn_scenes import Scene, ScriptedCall, ScriptedExchange, Timing, play, recording, script
from vivavoce.bench.turn_sounds import RATE, Material, SpokenQuestion, gather
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.runtime import event_loop as quick_loop

Connect = Callable[[], AbstractAsyncContextManager[Wire]]
DETECTIONS = ("server_vad", "semantic_vad", "default")
MOST_ERRORS = 10
TRIES = 3  # questions tried for each session that wants one of its own


@dataclass(frozen=True)
class TurnPlan:
    """What is played, and how the session is set up."""

    material: Material
    script: list[Scene]
    turns: int = 4
    """Questions each of the sessions at once asks."""
    sessions: int = 1
    session: Event | None = None
    timing: Timing = field(default_factory=Timing)
    at_once: int = 1
    """Calls of scenes that are made at the same time."""


def run(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    scenes: list[str] | None = None,
    turns: int = 4,
    sessions: int = 1,
    speech: Path | None = None,
    silence_ms: int = 200,
    detection: str = "server_vad",
    instructions: str | None = None,
    out: Path | None = None,
    keep_sound: bool = False,
    at_once: int = 1,
) -> dict[str, Any]:
    """Call a server, print a table, write `turn.json`, `turn.png` and `turn_timeline.png` to `out`; what was measured.

    `scenes` ["none"] plays none (for `sessions` alone), None all. `sessions` above 1 adds that many calls at once, each
    asking its own question. `keep_sound` writes every call to `out`: a stereo WAV, caller left and replies right,
    and what the server told as JSON lines. `at_once` of them are made at the same time, which is sooner done.
    """
    if turns < 1 or sessions < 1 or at_once < 1:
        raise InputError(f"turns, sessions and at_once must be at least 1, not {turns}, {sessions} and {at_once}")
    if keep_sound and out is None:
        raise InputError("keeping the sound needs a folder; give --out")
    address = realtime_url(url, model)
    with stage("gathering what is said"):
        material = gather(speech)
    session = session_of(detection, silence_ms, instructions)
    plan = TurnPlan(material, script(material, turns, scenes), turns, sessions, session, at_once=at_once)
    result, calls = quick_loop.run(measure(lambda: connect(address, api_key), plan))
    result = {"what": "turn-taking over the Realtime protocol", "url": _without_secrets(address), **result}
    result["how"] = f"{detection}" + (f", {silence_ms} ms of silence" if detection == "server_vad" else "")
    result["how"] += f", {at_once} calls at a time" if at_once > 1 else ""
    turn_report.show(result)
    if out is not None:
        _save(result, calls, out, keep_sound)
    return result


def session_of(detection: str, silence_ms: int, instructions: str | None) -> Event:
    """The session that is asked for: 24 kHz PCM both ways, and turns ended by the server."""
    if detection not in DETECTIONS:
        raise InputError(f"detection must be one of {', '.join(DETECTIONS)}, not {detection!r}")
    pcm = {"type": "audio/pcm", "rate": RATE}
    heard: Event = {"format": pcm}
    if detection != "default":
        heard["turn_detection"] = {"type": detection, "create_response": True, "interrupt_response": True}
        if detection == "server_vad":
            heard["turn_detection"]["silence_duration_ms"] = silence_ms
    session: Event = {"type": "realtime", "output_modalities": ["audio"]}
    session["audio"] = {"input": heard, "output": {"format": pcm}}
    return session if instructions is None else session | {"instructions": instructions}


async def measure(connect: Connect, plan: TurnPlan) -> tuple[dict[str, Any], list[ScriptedCall]]:
    """Play the whole plan, a few calls at a time; the figures, and the calls they come from."""
    free = asyncio.Semaphore(plan.at_once)

    async def played(number: int, scene: Scene) -> ScriptedCall:
        async with free:
            with stage(f"scene {scene.name}, {scene.exchanges[0].question.voice}".removesuffix(", ")):
                return await _call(connect, scene, plan, seed=number)

    spoken = [(number, part) for number, scene in enumerate(plan.script) for part in scene.calls()]
    playing = [asyncio.ensure_future(played(number, part)) for number, part in spoken]
    try:
        calls = await asyncio.gather(*playing)
    finally:  # where one fails, the others are not left to themselves
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    together, parallel = await _together(connect, plan) if plan.sessions > 1 else (None, [])
    everything = [*calls, *parallel]
    found = [outcome for call in calls for outcome in outcomes(call)]
    late = [1e3 * each for call in everything for each in call.caller.microphone.lateness]
    result = {
        "material": plan.material.source,
        "session": plan.session,
        "python": platform.python_version(),
        "turns": plan.turns,
        "totals": summary(found),
        "scenes": [_scene(scene.name, calls) for scene in plan.script],
        "together": together,
        "microphone_late_ms": _late(late),
        "errors": _errors(everything),
        "outcomes": [asdict(outcome) for call in everything for outcome in outcomes(call)],
    }
    return result, everything


def _scene(name: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    """The figures of a scene."""
    mine = [call for call in calls if call.scene.name == name]
    failure = next((call.failure for call in mine if call.failure), None)
    return {"name": name, "failure": failure, **summary([outcome for call in mine for outcome in outcomes(call)])}


async def _call(connect: Connect, scene: Scene, plan: TurnPlan, seed: int = 0, number: int = 0) -> ScriptedCall:
    """One call from ringing to hanging up; a server that hangs up first has failed the scene, not the run."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(connect())
        if scene.surroundings.line != PERFECT:
            wire = await stack.enter_async_context(BadWire(wire, scene.surroundings.line, seed))
        caller = BenchCaller(wire, plan.session or session_of("server_vad", 200, None), scene.surroundings, seed)
        call = ScriptedCall(scene, await stack.enter_async_context(caller), number)
        try:
            await play(call, plan.timing)
        except WireClosedError as error:
            call.failure = str(error)
        return call


async def _together(connect: Connect, plan: TurnPlan) -> tuple[dict[str, Any], list[ScriptedCall]]:
    """Many calls at once, each with a question of its own, and whether each got its own answers."""
    if len(plan.material.questions) < plan.sessions:
        raise InputError(f"{plan.sessions} sessions need as many questions; there are {len(plan.material.questions)}")
    with stage("questions one at a time, for those that are known by their answers"):
        asked = await _watermarks(connect, plan)
    with stage(f"{plan.sessions} calls at once"):
        each = await asyncio.gather(*(_callers(connect, question, plan, n) for n, (question, _) in enumerate(asked)))
    calls = [call for some in each for call in some]
    found = [outcome for call in calls for outcome in outcomes(call)]
    failures = [call.failure for call in calls if call.failure]
    references = {question.text: answer for question, answer in asked}
    figures = {"sessions": plan.sessions, "failures": failures, **summary(found), **crosstalk(calls, references)}
    return figures, calls


async def _callers(connect: Connect, question: SpokenQuestion, plan: TurnPlan, number: int) -> list[ScriptedCall]:
    """Call after call with the same question: one that was asked before may be answered otherwise the next time."""
    scene = Scene("together", (ScriptedExchange(question),))
    return [await _call(connect, scene, plan, _seed(question), number) for _ in range(plan.turns)]


async def _watermarks(connect: Connect, plan: TurnPlan) -> list[tuple[SpokenQuestion, SessionAnswer]]:
    """A question for each session with what is answered to it alone; first those answered right, and unlike others."""
    chosen: list[tuple[SpokenQuestion, SessionAnswer]] = []
    lesser: list[tuple[SpokenQuestion, SessionAnswer]] = []
    for question in plan.material.questions[: TRIES * plan.sessions]:
        if len(chosen) == plan.sessions:
            break
        call = await _call(connect, Scene("alone", (ScriptedExchange(question),)), plan, _seed(question))
        answer = next(iter(answers(call)), SessionAnswer(question.text))
        expected = SessionAnswer(question.text, question.reply or answer.transcript)
        is_right = not answer.transcript or similarity(answer, expected) >= ALIKE
        is_unlike = all(similarity(answer, known) < ALIKE for _, known in chosen)
        (chosen if is_right and is_unlike else lesser).append((question, answer))
    return [*chosen, *lesser][: plan.sessions]


def _seed(question: SpokenQuestion) -> int:
    """Of what is around a question: alone and beside others it must sound the same to be answered the same."""
    return zlib.crc32(question.text.encode())


def _told(call: ScriptedCall) -> str:
    """What the server told, with the seconds of the recording."""
    began = call.caller.microphone.began
    return "".join(f"{json.dumps({'at': moment - began, **event})}\n" for moment, event in call.caller.events)


def _late(milliseconds: list[float]) -> dict[str, float] | None:
    if not milliseconds:
        return None
    return {"p50": float(np.percentile(milliseconds, 50)), "p95": float(np.percentile(milliseconds, 95))}


def _errors(calls: Sequence[ScriptedCall]) -> list[str]:
    """What servers complained of, each once."""
    events = [event for call in calls for _, event in call.caller.events if event["type"] == "error"]
    return list(dict.fromkeys(str(event.get("error", {}).get("message")) for event in events))[:MOST_ERRORS]


def _without_secrets(url: str) -> str:
    return re.sub(r"((?:key|token|secret)[^=&]*=)[^&]+", r"\1…", url, flags=re.IGNORECASE)


def _save(result: dict[str, Any], calls: Sequence[ScriptedCall], out: Path, keep_sound: bool) -> None:
    from vivavoce.audio.io import Sound, write

    out.mkdir(parents=True, exist_ok=True)
    (out / "turn.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    turn_report.draw(result, [outcome for call in calls for outcome in outcomes(call)], calls, out)
    for place, call in enumerate(calls if keep_sound else ()):
        name = re.sub(r"\W+", "_", f"{call.scene.name} {place}")
        if call.caller.microphone.record:
            write(out / f"{name}.wav", Sound(recording(call), RATE))
            (out / f"{name}.jsonl").write_text(_told(call), encoding="utf8")
