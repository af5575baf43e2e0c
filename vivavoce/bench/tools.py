"""`viva bench tools`: what tools cost on any OpenAI-Realtime server.

Each bundled question is asked twice, in sessions with tools that it does not need and without tools, in turns; the
difference of the times to the first sound is what the decision takes. Then a tool is called that takes a while, and the
longest silence until its result is heard is measured.
"""

import asyncio
import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vivavoce import hub
from vivavoce.audio.io import float_to_pcm16, read
from vivavoce.bench.turn_client import Event, Wire, connect, realtime_url
from vivavoce.cores import usable_cores
from vivavoce.errors import VivaError
from vivavoce.evaluation.machine import stage

RATE = 24_000
PIECE_SECONDS = 0.1
MAX_SECONDS = 60.0  # of one reply
QUESTIONS = hub.BUNDLED / "questions"
FILLER = {"viva": "filler"}
TOOLS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("open_curtains", "Opens the curtains.", {}),
    ("play_music", "Plays a song in a room.", {"room": "integer", "song": "string"}),
    ("set_temperature", "Sets the temperature of a room.", {"room": "integer", "degrees": "number"}),
)


def tool_list() -> list[Event]:
    """The tools of the sessions that have any."""
    return [
        {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": list(arguments),
                "additionalProperties": False,
            },
        }
        for name, description, arguments in TOOLS
    ]


@dataclass
class SilenceMeter:
    """A client's loudspeaker: sound is played as it arrives."""

    start: float
    max_silence: float = 0.0
    _until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._until = self.start

    def play(self, now: float, seconds: float) -> None:
        """Play some sound that arrives now."""
        self.max_silence = max(self.max_silence, now - self._until)
        self._until = max(now, self._until) + seconds


@dataclass
class TimedReply:
    """What a response was: its calls, and when its first sound came, in seconds after it was asked for."""

    calls: list[Event] = field(default_factory=list)
    first_sound: float | None = None


@dataclass
class ManualTurnClient:
    """A session without turn detection: the client says when a turn ends."""

    wire: Wire
    fillers: set[str] = field(default_factory=set)  # ids of responses
    playback: SilenceMeter | None = None

    async def configure(self, tools: Sequence[Event], instructions: str = "") -> None:
        """Without `instructions` those of the server are left."""
        audio = {"input": {"turn_detection": None, "format": {"type": "audio/pcm", "rate": RATE}}}
        session = {"type": "realtime", "audio": audio, "tools": list(tools)}
        if instructions:
            session["instructions"] = instructions
        await self.wire.send({"type": "session.update", "session": session})
        await self._until("session.updated")

    async def speak(self, pcm: bytes) -> None:
        """Send a turn at the pace of speech."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await self.append(pcm, lambda number: start + number * PIECE_SECONDS - loop.time())

    async def append(self, pcm: bytes, wait: Callable[[int], float] | None = None) -> None:
        """Send a turn; `wait` says how long after each piece, by its number."""
        size = round(2 * RATE * PIECE_SECONDS)
        for number, begin in enumerate(range(0, len(pcm), size), start=1):
            piece = base64.b64encode(pcm[begin : begin + size]).decode()
            await self.wire.send({"type": "input_audio_buffer.append", "audio": piece})
            if wait is not None:
                await asyncio.sleep(wait(number))
        await self.wire.send({"type": "input_audio_buffer.commit"})

    async def reply(self, **options: Any) -> TimedReply:
        """Ask for a response, and wait until it is over; fillers are played, but are none."""
        loop, reply = asyncio.get_running_loop(), TimedReply()
        start = loop.time()
        await self.wire.send({"type": "response.create", "response": options})
        while True:
            event = await self._next()
            match event["type"]:
                case "response.output_audio.delta":
                    self._play(event)
                    if reply.first_sound is None and event["response_id"] not in self.fillers:
                        reply.first_sound = loop.time() - start
                case "response.done" if event["response"]["id"] not in self.fillers:
                    response = event["response"]
                    if response["status"] == "failed":
                        raise VivaError(f"a response failed: {response['status_details']}")
                    reply.calls = [item for item in response["output"] if item["type"] == "function_call"]
                    return reply

    async def wait(self, seconds: float) -> None:
        """Play what comes meanwhile."""
        end = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(end):
                while True:
                    event = await self._next()
                    if event["type"] == "response.output_audio.delta":
                        self._play(event)
        except TimeoutError:
            return

    async def _until(self, kind: str) -> None:
        while (await self._next())["type"] != kind:
            pass

    async def _next(self) -> Event:
        event = await self.wire.receive()
        if event["type"] == "error":
            raise VivaError(f"the server refused a request: {event['error'].get('message')}")
        if event["type"] == "response.created" and event["response"].get("metadata") == FILLER:
            self.fillers.add(event["response"]["id"])
        return event

    def _play(self, event: Event) -> None:
        if self.playback is not None:
            seconds = len(base64.b64decode(event["delta"])) / 2 / RATE
            self.playback.play(asyncio.get_running_loop().time(), seconds)


def run(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    turns: int = 10,
    tool_seconds: float = 3.0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure and print; write `tools.json` to `out`."""
    sounds = [_pcm(file) for file in sorted(QUESTIONS.glob("*.opus"))[:turns]]
    result = asyncio.run(_measure(realtime_url(url, model), api_key, sounds, tool_seconds))
    result |= {"url": url, "cores": usable_cores(), "load_average": round(os.getloadavg()[0], 1)}
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tools.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _pcm(file: Path) -> bytes:
    return float_to_pcm16(read(file).resampled(RATE).mono().samples[0]).tobytes()


async def _measure(address: str, key: str | None, sounds: Sequence[bytes], tool_seconds: float) -> dict[str, Any]:
    plain: list[float] = []
    offered: list[float] = []
    needless = 0
    await _ask(address, key, sounds[0], ())  # the first reply of a server is slower
    with stage(f"{len(sounds)} questions, with and without tools"):
        for number, sound in enumerate(sounds):
            replies = {}
            for has_tools in (False, True) if number % 2 else (True, False):
                replies[has_tools] = await _ask(address, key, sound, tool_list() if has_tools else ())
            needless += bool(replies[True].calls)
            first, later = replies[False].first_sound, replies[True].first_sound
            if first is not None and later is not None and not replies[True].calls:
                plain.append(first)
                offered.append(later)
    silence, failure = None, None
    with stage(f"a tool of {tool_seconds:g} s"):
        try:
            silence = round(await _slow_tool(address, key, sounds[0], tool_seconds), 2)
        except VivaError as error:  # the latencies are worth printing nevertheless
            failure = str(error)
    differences = [later - first for first, later in zip(plain, offered, strict=True)]
    return {
        "questions": len(sounds),
        "compared": len(differences),
        "needless_calls": needless,
        "first_sound_ms": _ms(plain),
        "first_sound_with_tools_ms": _ms(offered),
        "difference_ms": _ms(differences),
        "tool_seconds": tool_seconds,
        "max_silence_seconds": silence,
        "tool_failure": failure,
    }


async def _ask(address: str, key: str | None, sound: bytes, tools: Sequence[Event]) -> TimedReply:
    async with asyncio.timeout(MAX_SECONDS), connect(address, key) as wire:
        caller = ManualTurnClient(wire)
        await caller.configure(tools)
        await caller.speak(sound)
        return await caller.reply()


async def _slow_tool(address: str, key: str | None, sound: bytes, seconds: float) -> float:
    """The longest silence from the end of the user's turn to the answer that follows a slow tool."""
    async with asyncio.timeout(MAX_SECONDS + seconds), connect(address, key) as wire:
        caller = ManualTurnClient(wire)
        await caller.configure(tool_list())
        await caller.speak(sound)
        playback = caller.playback = SilenceMeter(asyncio.get_running_loop().time())
        called = await caller.reply(tool_choice={"type": "function", "name": TOOLS[0][0]})
        if not called.calls:
            raise VivaError(f"the server called no tool, although tool_choice named {TOOLS[0][0]}")
        await caller.wait(seconds)
        for call in called.calls:
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "The curtains are open."}
            await wire.send({"type": "conversation.item.create", "item": output})
        await caller.reply(tool_choice="none")
        return playback.max_silence


def _ms(seconds: Sequence[float]) -> int | None:
    """The median, in milliseconds."""
    return round(1e3 * median(seconds)) if seconds else None


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{result['cores']} cores, load {result['load_average']}")
    console.print(
        f"first sound p50 {result['first_sound_ms']} ms, with tools {result['first_sound_with_tools_ms']} ms; "
        f"of the same question {result['difference_ms']} ms later (p50 of {result['compared']}); "
        f"{result['needless_calls']} of {result['questions']} questions called a tool needlessly"
    )
    silence = f"{result['max_silence_seconds']} s" if result["tool_failure"] is None else result["tool_failure"]
    console.print(f"longest silence with a tool of {result['tool_seconds']:g} s: {silence}")
