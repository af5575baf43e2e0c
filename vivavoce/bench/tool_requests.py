"""`viva bench tool-calls`: spoken requests to the front desk, and the function calls that a server makes of them.

Every request is a session of its own with the desk's four tools and two that nothing asks for. Its phrasing and its
voice are held out of training. A call is right if its tool and all of its arguments are; what asks for no tool is
answered rightly without a call. The tools are those that mini-speech was trained with, or described ones, for models
that do not know the desk.
"""

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from vivavoce.audio.io import Sound, float_to_pcm16
from vivavoce.bench import described_tools
from vivavoce.bench.tools import RATE, ManualTurnClient
from vivavoce.bench.turn_client import Event, connect, realtime_url
from vivavoce.dialogue.settings import Tool
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import stage
from vivavoce.s2s.text_branch import NO_CALL
from vivavoce.train.front_desk import Exchange, language, tool_dialogues
from vivavoce.train.front_desk.english_values import NUMBERS, SHORT_DISHES, TIMES
from vivavoce.train.front_desk.tools import CLOCK, SUBJECTS, tool_of
from vivavoce.train.lm.tool_examples import EVALUATED_TOOLS
from vivavoce.train.questions import spoken_by_kokoro
from vivavoce.train.voices import HELD_OUT, programs, speak
from vivavoce.train.voices import RATE as PROGRAM_RATE

INSTRUCTIONS = (
    "You are the front desk of a restaurant with hotel. Call a function when the guest asks for what it does and all "
    "of its required values are known; give it what was said and nothing else. Otherwise answer in one short sentence. "
    "Write times as 8:30. Subjects of look_up are "
    + ", ".join(dict.fromkeys(subject for subject, _ in SUBJECTS.values()))
    + ", or a dish, for its price."
)
EDITION = 2
SPARE = 40  # dialogues drawn for each request that is needed
REPLY_SECONDS = 120.0
SHORT_SUBJECTS = {"restaurant hours": "restaurant", "room price": "room"}
CLOCK_TIME = re.compile(r"(\d{1,2})(?:[:.](\d\d))?")


@dataclass(frozen=True)
class SpokenRequest:
    """What is said to the desk, and the call that is right."""

    exchange: Exchange
    voice: str
    pcm: bytes


@dataclass(frozen=True)
class ScoredRequest:
    """A request, the calls that the server made, and whether they are right."""

    request: SpokenRequest
    calls: tuple[str, ...]
    is_right: bool
    failure: str = ""
    """Why there was no reply, if there was none; it is not right then."""


def run(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    requests: int = 200,
    others: int = 100,
    kokoro: bool = False,
    instructions: str | None = None,
    described: bool = False,
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Ask, score and print; write `tool_calls.json` to `out`. `others` is the number that ask for no tool."""
    tools = described_tools.DESCRIBED_TOOLS if described else EVALUATED_TOOLS
    if instructions is None:
        instructions = described_tools.INSTRUCTIONS if described else INSTRUCTIONS
    exchanges = drawn_requests(requests, others, seed)
    with stage(f"speaking {len(exchanges)} requests"):
        spoken = spoken_requests(exchanges, kokoro, seed)
    address = realtime_url(url, model)
    scored = []
    for request in track(spoken, "requests"):
        scored.append(_scored(address, api_key, request, instructions, tools))
    made = {"url": url, "voices": "kokoro" if kokoro else "programs", "described_tools": described, "seed": seed}
    result = {**made, **figures(scored)}
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tool_calls.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
    return result


def drawn_requests(requests: int, others: int, seed: int) -> list[Exchange]:
    """Single turns with held-out phrasings: some that ask for a tool, and others."""
    drawn = tool_dialogues("held_out", SPARE * (requests + others), seed, (1, 1), language("en", EDITION))
    distinct = {exchange.user: exchange for (exchange,) in drawn}.values()
    asking = [exchange for exchange in distinct if exchange.call != NO_CALL][:requests]
    talking = [exchange for exchange in distinct if exchange.call == NO_CALL][:others]
    if len(asking) < requests or len(talking) < others:
        raise InputError(f"there are {len(asking)} distinct requests for tools and {len(talking)} others; ask for less")
    return asking + talking


def spoken_requests(exchanges: Sequence[Exchange], kokoro: bool, seed: int) -> list[SpokenRequest]:
    """The requests in voices that were held out: Kokoro's, or those of the installed synthesis programs."""
    texts = [exchange.user for exchange in exchanges]
    if kokoro:
        spoken = spoken_by_kokoro(texts, seed, "auto")
    else:
        source, installed = random.Random(f"tool requests {seed}"), programs()
        voices = [source.choice(HELD_OUT) for _ in texts]
        spoken = [
            (voice.name, Sound(speak(voice, text, installed), PROGRAM_RATE))
            for voice, text in zip(voices, texts, strict=True)
        ]
    return [
        SpokenRequest(exchange, voice, float_to_pcm16(sound.resampled(RATE).mono().samples[0]).tobytes())
        for exchange, (voice, sound) in zip(exchanges, spoken, strict=True)
    ]


def _scored(
    address: str, key: str | None, request: SpokenRequest, instructions: str, tools: Sequence[Tool]
) -> ScoredRequest:
    """Ask; a request that fails or takes too long does not end the run."""
    try:
        calls = asyncio.run(_ask(address, key, request, instructions, tools))
    except (VivaError, TimeoutError) as error:
        return ScoredRequest(request, (), False, str(error) or f"no reply within {REPLY_SECONDS:g} s")
    return ScoredRequest(request, calls, is_right(request.exchange.call, calls))


async def _ask(
    address: str, key: str | None, request: SpokenRequest, instructions: str, tools: Sequence[Tool]
) -> tuple[str, ...]:
    async with asyncio.timeout(REPLY_SECONDS), connect(address, key) as wire:
        caller = ManualTurnClient(wire)
        await caller.configure(_declared(tools), instructions)
        await caller.append(request.pcm)
        reply = await caller.reply()
    return tuple(json.dumps({"name": call["name"], "arguments": _object(call["arguments"])}) for call in reply.calls)


def _declared(tools: Sequence[Tool]) -> list[Event]:
    return [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in tools
    ]


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"not JSON": arguments}


def is_right(expected: str, calls: Sequence[str]) -> bool:
    """Whether the calls are the one that was expected, or none where none was."""
    if expected == NO_CALL or not calls:
        return expected == NO_CALL and not calls
    return len(calls) == 1 and _comparable(calls[0]) == _comparable(expected)


def _comparable(call: str) -> tuple[str, dict[str, str]]:
    """Tool and arguments of a call in one form; arguments without a value are left out."""
    arguments = json.loads(call)["arguments"]
    if not isinstance(arguments, Mapping):
        return tool_of(call), {"arguments": str(arguments)}
    said = {name: _value(name, str(value)) for name, value in arguments.items() if value not in (None, "")}
    return tool_of(call), said


def _value(name: str, value: str) -> str:
    """A value in the form that all ways to write it have."""
    plain = re.sub(r"[^a-z0-9:. ]", " ", value.lower().replace("wi-fi", "wifi")).strip()
    if name == "time":
        return _clock(plain)
    if name in ("people", "nights"):
        return str(1 + NUMBERS.index(plain)) if plain in NUMBERS else plain
    if name == "day":
        return re.sub(r"^(on|this|next) ", "", plain)
    if name == "subject":
        subjects = (subject for subject, _ in SUBJECTS.values())
        return next(
            (each for each in subjects if plain.startswith((each, SHORT_SUBJECTS.get(each, each)))), _dish(plain)
        )
    return _dish(plain) if name == "dish" else plain


def _clock(plain: str) -> str:
    """A time of twelve hours as 8:30."""
    for expected, ways in TIMES.items():
        if plain in ways or plain == expected:
            return CLOCK[expected]
    found = CLOCK_TIME.match(plain)
    return f"{(int(found[1]) - 1) % 12 + 1}:{found[2] or '00'}" if found else plain


def _dish(plain: str) -> str:
    """The full name of a dish, without words around it."""
    name = re.sub(r"^((the|a|an|price|of) )+| price$", "", plain)
    return next((dish for dish, ways in SHORT_DISHES.items() if name in ways), name)


def figures(scored: Sequence[ScoredRequest]) -> dict[str, Any]:
    """Shares of right calls and of right silence, by tool and by speaker, and what was wrong."""
    by_tool: dict[str, list[bool]] = defaultdict(list)
    by_speaker: dict[str, list[bool]] = defaultdict(list)
    for each in scored:
        expected = each.request.exchange.call
        by_tool[NO_CALL if expected == NO_CALL else tool_of(expected)].append(each.is_right)
        by_speaker[each.request.voice].append(each.is_right)
    right = [each for tool, found in by_tool.items() if tool != NO_CALL for each in found]
    wrong = [
        {"said": each.request.exchange.user, "voice": each.request.voice, "expected": each.request.exchange.call}
        | {"calls": each.calls}
        | ({"failure": each.failure} if each.failure else {})
        for each in scored
        if not each.is_right
    ]
    return {
        "failed": sum(bool(each.failure) for each in scored),
        "requests": len(right),
        "right_calls": _share(right),
        "others": len(by_tool[NO_CALL]),
        "right_without_call": _share(by_tool[NO_CALL]),
        "by_tool": {tool: {"requests": len(found), "right": sum(found)} for tool, found in sorted(by_tool.items())},
        "by_voice": {name: {"requests": len(found), "right": sum(found)} for name, found in sorted(by_speaker.items())},
        "wrong": wrong,
    }


def _share(found: Sequence[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for name, count, meaning in (
        ("right_calls", "requests", "with the right tool and arguments"),
        ("right_without_call", "others", "that ask for no tool, without a call"),
    ):
        if result[name] is not None:
            console.print(f"{100 * result[name]:.1f} % of {result[count]} requests {meaning}")
    parts = (f"{tool} {found['right']} of {found['requests']}" for tool, found in result["by_tool"].items())
    console.print(", ".join(parts))
    if result["failed"]:
        console.print(f"{result['failed']} requests got no reply, and are wrong")
