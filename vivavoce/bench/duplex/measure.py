"""Figures of played scenes. What was heard decides: the recorded microphone and the recorded loudspeaker, on one clock.

What the server says of a reply is used for one thing only: to leave out sounds over a reply that was about to end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from vivavoce.bench.duplex.interaction import (
    IGNORE_SECONDS,
    KEEP_SECONDS,
    YIELD_SECONDS,
    Events,
    Timeline,
    UserSound,
    events_of,
)
from vivavoce.bench.duplex.overlap import AGENT_GAP, Segment, backchannel_turn, takes_turn
from vivavoce.bench.duplex.recording import flags, voiced_segments
from vivavoce.bench.duplex.scenes import DuplexScene
from vivavoce.bench.turn_caller import CallerUtterance
from vivavoce.bench.turn_measure import cut_at
from vivavoce.bench.turn_scenes import ScriptedCall, recording
from vivavoce.bench.turn_sounds import RATE

TICK = 0.02
"""Seconds of the grid on which the measures are taken; the windows are those of τ-voice."""

Part = Literal["asked", "over", "stray"]


@dataclass(frozen=True)
class Spoken:
    """A sound of the caller, in seconds of the recording."""

    part: Part
    """The question, a sound over the reply, or one in the silence after it."""
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class CallOutcome:
    """One call. Times are seconds of its recording; None where nothing could be measured."""

    scene: str
    language: str
    condition: str
    number: int
    voice: str
    text: str
    seconds: float
    caller: list[Spoken]
    pauses: list[Segment]
    agent: list[Segment]
    """Voice of the replies as heard, pauses up to half a second inside a reply bridged."""
    failure: str | None = None
    answered: bool = False
    latency: float | None = None
    """From the last voice of the question to the first of the reply; None if it came before."""
    spoke_early: bool = False
    """A reply was heard before the question had ended."""
    took_turn: bool = False
    """What was heard before the question had ended is a turn-over."""
    backchannels: int = 0
    """Short sounds of the agent before the question had ended."""
    over: str = ""
    over_name: str = ""
    stopped: bool | None = None
    """Whether the sound over the reply silenced it; None if there was none, or the reply ended by itself."""
    stop_seconds: float | None = None
    over_latency: float | None = None
    """From the end of an interruption to the reply to it."""
    stray_answered: bool | None = None
    cut_short: bool = False
    """A reply was stopped although the caller was silent."""
    server_events: list[tuple[float, str]] = field(default_factory=list)


def outcome(duplex: DuplexScene, call: ScriptedCall) -> CallOutcome:
    """The figures of one call."""
    began = call.caller.microphone.began
    samples = recording(call).shape[1]
    agent = _heard_segments(call, samples)
    result = CallOutcome(
        scene=duplex.name,
        language=duplex.language,
        condition=duplex.condition,
        number=duplex.number,
        voice=duplex.exchange.question.voice,
        text=duplex.exchange.question.text,
        seconds=samples / RATE,
        caller=[],
        pauses=[],
        agent=agent,
        failure=call.failure,
        over_name=duplex.over_name,
        server_events=_server_events(call),
    )
    if not call.played:
        return result
    played = call.played[0]
    asked = _spoken("asked", played.asked, began)
    over = None if played.over is None else _spoken("over", played.over, began)
    stray = None if played.stray is None else _spoken("stray", played.stray, began)
    start = played.asked.start - began
    return replace(
        result,
        caller=[each for each in (asked, over, stray) if each is not None],
        pauses=[(start + begin / RATE, start + end / RATE) for begin, end in duplex.pauses],
        **_question_figures(asked, agent),
        **_over_figures(call, over, agent),
        stray_answered=None if stray is None else _starts_after(agent, stray),
        cut_short=_is_cut_short(call, [each for each in (over, stray) if each is not None]),
    )


def _heard_segments(call: ScriptedCall, samples: int) -> list[Segment]:
    """Voice of each reply as it was played, in seconds of the recording."""
    began, replies = call.caller.microphone.began, call.caller.loudspeaker.replies.values()
    return sorted(each for reply in replies for each in voiced_segments(reply.read(began, samples), gap=AGENT_GAP))


def _question_figures(asked: Spoken, agent: Sequence[Segment]) -> dict[str, Any]:
    early = [(start, min(end, asked.end)) for start, end in agent if asked.start < start < asked.end]
    first = next((start for start, end in agent if end > asked.end), None)
    takes, backchannels = backchannel_turn(early, early)
    return {
        "answered": first is not None,
        "latency": first - asked.end if first is not None and first >= asked.end else None,
        "spoke_early": bool(early),
        "took_turn": takes or takes_turn(early),
        "backchannels": backchannels,
    }


def _over_figures(call: ScriptedCall, over: Spoken | None, agent: Sequence[Segment]) -> dict[str, Any]:
    planned = call.played[0].exchange.over
    if planned is None:
        return {}
    reply = None if over is None else next((each for each in agent if each[0] <= over.start < each[1]), None)
    if over is None or reply is None:
        return {"over": planned.kind}
    is_interruption = planned.kind == "interruption"
    window = YIELD_SECONDS if is_interruption else KEEP_SECONDS
    stop = reply[1] - over.start
    if _ends_by_itself(call, over.start, window):
        return {"over": planned.kind}
    answer = next((start for start, _ in agent if start >= over.end), None)
    return {
        "over": planned.kind,
        "stopped": stop <= window,
        "stop_seconds": stop if stop <= window else None,
        "over_latency": answer - over.end if is_interruption and answer is not None else None,
    }


def _ends_by_itself(call: ScriptedCall, moment: float, window: float) -> bool:
    """Whether the reply that was heard at this time was played to its end within the window."""
    now = call.caller.microphone.began + moment
    for reply in call.caller.loudspeaker.replies.values():
        if reply.spans and reply.spans[0].start <= now <= reply.ends_at():
            return cut_at(reply) is None and reply.ends_at() <= now + window
    return False


def _is_cut_short(call: ScriptedCall, sounds: Sequence[Spoken]) -> bool:
    """Whether a reply to the whole question was stopped before the caller made another sound."""
    began, asked = call.caller.microphone.began, call.played[0].asked
    for reply in call.caller.loudspeaker.replies.values():
        cut = cut_at(reply)
        if cut is None or not reply.spans or reply.spans[0].start < asked.last:
            continue
        if not any(each.start <= cut - began for each in sounds):
            return True
    return False


def _starts_after(agent: Sequence[Segment], sound: Spoken) -> bool:
    return any(sound.start <= start <= sound.end + IGNORE_SECONDS for start, _ in agent)


def timeline(found: CallOutcome, over: UserSound | None) -> Timeline:
    """The call on the measures' grid; a sound that could not be measured is left out of it."""
    ticks = max(2, round(found.seconds / TICK))
    user, sound = np.zeros(ticks, np.bool_), np.zeros(ticks, np.int8)
    for each in found.caller:
        covered = flags([(each.start, each.end)], ticks, TICK)
        if each.part == "asked":
            user |= covered
        elif over is None:
            continue
        elif each.part == "over" and found.stopped is not None:
            user |= covered
            sound[covered] = over
        elif each.part == "stray":
            sound[covered & ~user] = over
    if found.caller and not found.answered:
        user[-2:] = True  # the caller would have to speak again
    return Timeline(user, flags(found.agent, ticks, TICK), sound, TICK)


def events(found: Iterable[tuple[CallOutcome, UserSound | None]]) -> Events:
    """The interaction events of these calls; those with a television, which is no user, have figures of their own."""
    return events_of(timeline(each, over) for each, over in found if each.caller and each.scene != "television")


def scene_figures(found: Sequence[CallOutcome]) -> dict[str, float | None]:
    """Figures of one scene's calls; shares are 0 to 1, latencies medians in seconds."""
    over = [each for each in found if each.stopped is not None]
    strays = [each for each in found if each.stray_answered is not None]
    return {
        "calls": len(found),
        "failed": sum(each.failure is not None for each in found),
        "answered": _share(found, lambda each: each.answered),
        "latency_p50": _median(each.latency for each in found),
        "early": _share(found, lambda each: each.spoke_early),
        "turn_over": _share(found, lambda each: each.took_turn),
        "backchannels_a_second": _rate(found),
        "measured": len(over),
        "stopped": _share(over, lambda each: bool(each.stopped)),
        "stop_p50": _median(each.stop_seconds for each in over),
        "over_latency_p50": _median(each.over_latency for each in over),
        "stray_answered": _share(strays, lambda each: bool(each.stray_answered)),
        "cut_short": _share(found, lambda each: each.cut_short),
    }


def _spoken(part: Part, said: CallerUtterance, began: float) -> Spoken:
    return Spoken(part, said.kind, said.first - began, said.last - began)


def _server_events(call: ScriptedCall) -> list[tuple[float, str]]:
    """Times and types of the events that tell of turns and replies."""
    kinds = ("input_audio_buffer.", "response.created", "response.done", "error")
    began = call.caller.microphone.began
    return [
        (round(moment - began, 3), event["type"])
        for moment, event in call.caller.events
        if event["type"].startswith(kinds)
    ]


def _share(found: Sequence[CallOutcome], is_so: Callable[[CallOutcome], bool]) -> float | None:
    return sum(map(is_so, found)) / len(found) if found else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _rate(found: Sequence[CallOutcome]) -> float | None:
    seconds = sum(each.caller[0].end - each.caller[0].start for each in found if each.caller)
    return sum(each.backchannels for each in found) / seconds if seconds else None
