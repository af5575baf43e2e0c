"""`viva bench turn URL`: scripted calls to any server of OpenAI's Realtime protocol, measured, printed and plotted.

A simulated caller speaks in real time, plays replies through a player with an 80 ms start buffer, and reacts to events
as stock clients do. Voice-to-voice latency (V2V) is from the last voiced input sample to the first voiced output.
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

from vivavoce.bench.turn_caller import BenchCaller
from vivavoce.bench.turn_client import PERFECT, Event, ImpairedWire, Wire, WireClosedError, connect, realtime_url
from vivavoce.bench.turn_measure import (
    MIN_SIMILARITY,
    Outcome,
    SessionAnswer,
    answers,
    crosstalk,
    outcomes,
    similarity,
    summary,
)
from vivavoce.bench.turn_scenes import Scene, ScriptedCall, ScriptedExchange, Timing, play, recording, script
from vivavoce.bench.turn_sounds import RATE, Material, SpokenQuestion, gather
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.runtime import event_loop

Connect = Callable[[], AbstractAsyncContextManager[Wire]]
DETECTIONS = ("server_vad", "semantic_vad", "default")
MAX_ERRORS = 10
TRIES = 3  # candidate questions per session


@dataclass(frozen=True)
class TurnPlan:
    """The scenes to play, and the session settings."""

    material: Material
    script: list[Scene]
    turns: int = 4
    """Questions of each concurrent session."""
    sessions: int = 1
    session: Event | None = None
    timing: Timing = field(default_factory=Timing)
    at_once: int = 1
    """Concurrent calls while playing scenes."""


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
    """Call a server, print a table, write `turn.json`, `turn.png` and `turn_timeline.png` to `out`; return the figures.

    `scenes` ["none"] plays none (for `sessions` alone), None all. `sessions` above 1 adds that many calls at once, each
    asking its own question. `keep_sound` writes every call to `out`: a stereo WAV, caller left and replies right,
    and the server's events as JSON lines. `at_once` is the number of concurrent scene calls.
    """
    if turns < 1 or sessions < 1 or at_once < 1:
        raise InputError(f"turns, sessions and at_once must be at least 1, not {turns}, {sessions} and {at_once}")
    if keep_sound and out is None:
        raise InputError("--keep-sound needs a folder; give --out")
    address = realtime_url(url, model)
    with stage("loading recordings"):
        material = gather(speech)
    session = session_of(detection, silence_ms, instructions)
    plan = TurnPlan(material, script(material, turns, scenes), turns, sessions, session, at_once=at_once)
    result, calls = event_loop.run(measure(lambda: connect(address, api_key), plan))
    result = {"what": "turn-taking over the Realtime protocol", "url": without_secrets(address), **result}
    result["how"] = f"{detection}" + (f", {silence_ms} ms of silence" if detection == "server_vad" else "")
    result["how"] += f", {at_once} calls at a time" if at_once > 1 else ""
    print_result(result)
    if out is not None:
        _save(result, calls, out, keep_sound)
    return result


def session_of(detection: str, silence_ms: int, instructions: str | None) -> Event:
    """Session settings: 24 kHz PCM both ways, turn detection by the server."""
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
    """Play the whole plan; return the figures and the calls they come from."""
    free = asyncio.Semaphore(plan.at_once)

    async def played(number: int, scene: Scene) -> ScriptedCall:
        async with free:
            with stage(f"scene {scene.name}, {scene.exchanges[0].question.voice}".removesuffix(", ")):
                return await _call(connect, scene, plan, seed=number)

    spoken = [(number, part) for number, scene in enumerate(plan.script) for part in scene.calls()]
    playing = [asyncio.ensure_future(played(number, part)) for number, part in spoken]
    try:
        calls = await asyncio.gather(*playing)
    finally:  # if one fails, cancel the others
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    together, parallel = await _concurrent_calls(connect, plan) if plan.sessions > 1 else (None, [])
    everything = [*calls, *parallel]
    found = [outcome for call in calls for outcome in outcomes(call)]
    lateness_ms = [1e3 * each for call in everything for each in call.caller.microphone.lateness]
    result = {
        "material": plan.material.source,
        "session": plan.session,
        "python": platform.python_version(),
        "turns": plan.turns,
        "totals": summary(found),
        "scenes": [_scene(scene.name, calls) for scene in plan.script],
        "together": together,
        "microphone_late_ms": _lateness(lateness_ms),
        "errors": server_errors(everything),
        "outcomes": [asdict(outcome) for call in everything for outcome in outcomes(call)],
    }
    return result, everything


def _scene(name: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    scene_calls = [call for call in calls if call.scene.name == name]
    failure = next((call.failure for call in scene_calls if call.failure), None)
    return {
        "name": name,
        "failure": failure,
        **summary([outcome for call in scene_calls for outcome in outcomes(call)]),
    }


async def play_call(
    connect: Connect, scene: Scene, session: Event, timing: Timing, seed: int = 0, number: int = 0
) -> ScriptedCall:
    """One call; if the server closes the connection, the scene fails and the run goes on."""
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(connect())
        if scene.environment.line != PERFECT:
            wire = await stack.enter_async_context(ImpairedWire(wire, scene.environment.line, seed))
        caller = BenchCaller(wire, session, scene.environment, seed)
        call = ScriptedCall(scene, await stack.enter_async_context(caller), number)
        try:
            await play(call, timing)
        except WireClosedError as error:
            call.failure = str(error)
        return call


async def _call(connect: Connect, scene: Scene, plan: TurnPlan, seed: int = 0, number: int = 0) -> ScriptedCall:
    session = plan.session or session_of("server_vad", 200, None)
    return await play_call(connect, scene, session, plan.timing, seed, number)


async def _concurrent_calls(connect: Connect, plan: TurnPlan) -> tuple[dict[str, Any], list[ScriptedCall]]:
    """Concurrent calls, each with its own question, and whether each received its own answers."""
    if len(plan.material.questions) < plan.sessions:
        raise InputError(f"{plan.sessions} sessions need as many questions; there are {len(plan.material.questions)}")
    with stage("reference answers, one call at a time"):
        asked = await _watermarks(connect, plan)
    with stage(f"{plan.sessions} calls at once"):
        repeated = (_repeat_call(connect, question, plan, number) for number, (question, _) in enumerate(asked))
        calls = [call for some in await asyncio.gather(*repeated) for call in some]
    found = [outcome for call in calls for outcome in outcomes(call)]
    failures = [call.failure for call in calls if call.failure]
    references = {question.text: answer for question, answer in asked}
    figures = {"sessions": plan.sessions, "failures": failures, **summary(found), **crosstalk(calls, references)}
    return figures, calls


async def _repeat_call(connect: Connect, question: SpokenQuestion, plan: TurnPlan, number: int) -> list[ScriptedCall]:
    """Repeated calls with the same question, each a fresh session, so that history does not change the answer."""
    scene = Scene("together", (ScriptedExchange(question),))
    return [await _call(connect, scene, plan, _seed(question), number) for _ in range(plan.turns)]


async def _watermarks(connect: Connect, plan: TurnPlan) -> list[tuple[SpokenQuestion, SessionAnswer]]:
    """A question for each session with its reference answer; right and mutually distinct answers are preferred."""
    chosen: list[tuple[SpokenQuestion, SessionAnswer]] = []
    ambiguous: list[tuple[SpokenQuestion, SessionAnswer]] = []
    for question in plan.material.questions[: TRIES * plan.sessions]:
        if len(chosen) == plan.sessions:
            break
        call = await _call(connect, Scene("alone", (ScriptedExchange(question),)), plan, _seed(question))
        answer = next(iter(answers(call)), SessionAnswer(question.text))
        expected = SessionAnswer(question.text, question.reply or answer.transcript)
        is_right = not answer.transcript or similarity(answer, expected) >= MIN_SIMILARITY
        is_unlike = all(similarity(answer, known) < MIN_SIMILARITY for _, known in chosen)
        (chosen if is_right and is_unlike else ambiguous).append((question, answer))
    return [*chosen, *ambiguous][: plan.sessions]


def _seed(question: SpokenQuestion) -> int:
    """Noise seed of a question: the same alone and concurrently, so that the answer is the same."""
    return zlib.crc32(question.text.encode())


def _event_lines(call: ScriptedCall) -> str:
    """The server's events as JSON lines, with their time in the recording."""
    began = call.caller.microphone.began
    return "".join(f"{json.dumps({'at': moment - began, **event})}\n" for moment, event in call.caller.events)


def _lateness(milliseconds: list[float]) -> dict[str, float] | None:
    if not milliseconds:
        return None
    return {"p50": float(np.percentile(milliseconds, 50)), "p95": float(np.percentile(milliseconds, 95))}


def server_errors(calls: Sequence[ScriptedCall]) -> list[str]:
    """Distinct error messages of the server."""
    events = [event for call in calls for _, event in call.caller.events if event["type"] == "error"]
    return list(dict.fromkeys(str(event.get("error", {}).get("message")) for event in events))[:MAX_ERRORS]


def without_secrets(url: str) -> str:
    """The address without keys."""
    return re.sub(r"((?:key|token|secret)[^=&]*=)[^&]+", r"\1…", url, flags=re.IGNORECASE)


def _save(result: dict[str, Any], calls: Sequence[ScriptedCall], out: Path, keep_sound: bool) -> None:
    from vivavoce.audio.io import Sound, write

    out.mkdir(parents=True, exist_ok=True)
    (out / "turn.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    plot(result, [outcome for call in calls for outcome in outcomes(call)], calls, out)
    for index, call in enumerate(calls if keep_sound else ()):
        name = re.sub(r"\W+", "_", f"{call.scene.name} {index}")
        if call.caller.microphone.record:
            write(out / f"{name}.wav", Sound(recording(call), RATE))
            (out / f"{name}.jsonl").write_text(_event_lines(call), encoding="utf8")


SELECTIVE = ("backchannel", "cough", "knock", "side_talk")
LATE_MS = 20.0
COLOURS = {"question": "tab:blue", "interruption": "tab:red", "backchannel": "tab:green"}
TIMELINE_SECONDS = 25.0
LEGEND = (
    "said: questions answered; V2V: last voice in to first voice heard, median/95th percentile; yields: replies that "
    "an interruption stopped, and how soon; kept: replies that another sound did not stop; early: hesitations taken "
    "for the end; self: replies the server stopped without caller speech; dry: times the player ran out of sound"
)


def print_result(result: dict[str, Any]) -> None:
    """Print the figures on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"{result['url']}: {result['how']}; questions: {result['material']}")
    console.print(_table(result))
    _print_totals(console, result)


def _table(result: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=LEGEND, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("scene", no_wrap=True)
    for name in ("asked", "said", "V2V ms", "yields", "in ms", "kept", "early", "self", "dry"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*result["scenes"], {"name": "all", **result["totals"]}]:
        kept = [row[f"{kind}_selectivity"] for kind in SELECTIVE if row[f"{kind}_selectivity"] is not None]
        table.add_row(
            row["name"] + (" ✗" if row.get("failure") else ""),
            str(row["questions"]),
            _percent(row["response_rate"]),
            _spread(row["response_ms"]),
            _percent(row["yield_rate"]),
            _spread(row["yield_ms"]),
            _percent(sum(kept) / len(kept) if kept else None),
            _percent(row["false_end_rate"]),
            str(row["self_interruptions"]),
            str(row["underruns"]),
            end_section=row is result["scenes"][-1] if result["scenes"] else False,
        )
    return table


def _print_totals(console: Any, result: dict[str, Any]) -> None:
    totals = result["totals"]
    shares = ", ".join(f"{kind.replace('_', ' ')} {_percent(totals[f'{kind}_selectivity'])}" for kind in SELECTIVE)
    console.print(f"reply not stopped by: {shares}; sounds in silence not answered: ", end="")
    console.print(_percent(totals["stray_selectivity"]))
    for row in result["scenes"]:
        if row.get("failure"):
            console.print(f"[red]{row['name']}[/red] ended early: {row['failure']}")
    for message in result["errors"]:
        console.print(f"server error: {message}")
    lateness_ms = result["microphone_late_ms"]
    if lateness_ms is not None and lateness_ms["p95"] > LATE_MS:
        console.print(f"[yellow]this machine was busy:[/yellow] packets left {lateness_ms['p95']:.0f} ms late at p95")
    together = result.get("together")
    if together is not None:
        console.print(
            f"{together['sessions']} sessions at once: V2V {_spread(together['response_ms'])} ms, "
            f"{together['underruns']} underruns; of "
            f"{together['answers']} answers {together['own']} their own, {together['other']} another's, "
            f"{together['unclear']} like none (by {together['compared_by']})"
        )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def _spread(value: dict[str, float] | None) -> str:
    return "–" if value is None else f"{value['p50']:.0f}/{value['p95']:.0f}"


def plot(result: dict[str, Any], found: Sequence[Outcome], calls: Sequence[ScriptedCall], out: Path) -> None:
    """Write `turn.png` (latencies and rates by scene) and `turn_timeline.png`; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 5), layout="constrained")
    latency, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_latency(latency, [row["name"] for row in result["scenes"]], found)
    _draw_shares(shares, result["totals"])
    figure.suptitle(f"{result['url']}: {result['how']}", fontsize=9)
    figure.savefig(out / "turn.png", dpi=130)
    timeline = Figure(figsize=(11, 1 + 0.55 * max(1, len(calls))), layout="constrained")
    _draw_timelines(timeline.subplots(), calls)
    timeline.savefig(out / "turn_timeline.png", dpi=130)


def _draw_latency(axes: Any, names: list[str], found: Sequence[Outcome]) -> None:
    for row, name in enumerate(names):
        for kind, value, marker in (("response_ms", "V2V", "o"), ("stop_ms", "yield", "x")):
            wanted = [each for each in found if each.scene == name]
            if kind == "stop_ms":
                wanted = [each for each in wanted if each.over == "interruption"]
            times = [getattr(each, kind) for each in wanted if getattr(each, kind) is not None]
            colour = "tab:blue" if marker == "o" else "tab:red"
            axes.plot(times, [row] * len(times), marker, color=colour, alpha=0.6, label=value if row == 0 else None)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title="V2V (o) and time to yield (x), every turn")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)


def _draw_shares(axes: Any, totals: dict[str, Any]) -> None:
    names = ["response_rate", "yield_rate", *(f"{kind}_selectivity" for kind in SELECTIVE), "stray_selectivity"]
    known = [(name, totals[name]) for name in names if totals[name] is not None]
    labels = [name.replace("_", " ") for name, _ in known]
    bars = axes.barh(labels, [share for _, share in known], color="tab:blue")
    axes.bar_label(bars, [f"{100 * share:.0f}%" for _, share in known], padding=3)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.2), title="higher is better")


def _draw_timelines(axes: Any, calls: Sequence[ScriptedCall]) -> None:
    """One row per call: caller above, replies below."""
    for row, call in enumerate(calls):
        began = call.caller.microphone.began
        for played in call.played:
            for sound in (played.asked, played.over, played.stray):
                if sound is not None and sound.first - began < TIMELINE_SECONDS:
                    colour = COLOURS.get(sound.kind, "tab:orange")
                    axes.broken_barh([(sound.first - began, sound.last - sound.first)], (row - 0.35, 0.3), color=colour)
        for reply in call.caller.loudspeaker.replies.values():
            spans = [(begin - began, end - begin) for begin, end in reply.voiced_spans()]
            axes.broken_barh(spans, (row + 0.02, 0.3), color="tab:gray")
    axes.set_yticks(range(len(calls)), [call.scene.name for call in calls])
    axes.invert_yaxis()
    axes.set(xlim=(0, TIMELINE_SECONDS), xlabel="seconds of the call")
    axes.set_title("caller (blue asks, red interrupts, green mm-hm, orange other sounds) above, replies (grey) below")
