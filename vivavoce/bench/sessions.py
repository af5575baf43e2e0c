"""`viva bench sessions`: many short conversations, a few at a time, with a server of its own, and its memory meanwhile.

Each speaks a question and hears the beginning of the answer; every eighth hears it to the end. A server that keeps
something of each holds more by so much a session when all are gone: it is looked at while it rests, after those that
warm it up and after the rest. What it has while it works comes and goes; of that, the most in each half is told.
"""

import asyncio
import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from vivavoce.audio.io import float_to_pcm16
from vivavoce.bench.turn_client import Wire, connect
from vivavoce.bench.turn_sounds import RATE, Samples, gather
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import stage

SILENCE_SECONDS = 0.6
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
WHOLE_EVERY = 8
DELTAS = 3  # after so many pieces of sound the caller hangs up
TOGETHER = 4
BETWEEN_SECONDS = 0.1  # in which a server is done with those that hung up
REST_SECONDS = 60.0  # in which a server has tidied up
OPENS_PER_MINUTE = 10_000  # usually one address may open fewer


@dataclass(frozen=True)
class BenchServer:
    """A server of our own."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Where it can be spoken to."""
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        return resident_bytes(self.pid)

    def figure(self, name: str) -> float:
        """What it tells of itself now."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10.0) as page:
            lines = [line.split() for line in page.read().decode().splitlines()]
        return next(float(line[1]) for line in lines if line[0] == name)


def run(
    model: str = "mini-speech",
    count: int = 200,
    warm: int = 80,
    most_tokens: int = 25,
    between: float = BETWEEN_SECONDS,
    out: Path | None = None,
) -> dict[str, Any]:
    """Open `warm` and then `count` sessions; what the server's memory did, in bytes."""
    if count < 2 or warm < 1:
        raise InputError(f"a slope needs at least 2 sessions after 1 to warm up, not {count} after {warm}")
    sounds = [question.sound for question in gather().questions]
    result = asyncio.run(measure(model, sounds, count, warm, most_tokens, between))
    _show(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "sessions.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


async def measure(
    model: str, questions: Sequence[Samples], count: int, warm: int, most_tokens: int, between: float
) -> dict[str, Any]:
    """The figures, from a server that is started and stopped here."""
    async with serving(model) as server:
        with stage(f"{warm} sessions to warm up, then {count}"):
            sizes = await open_and_end(server, range(warm), questions, most_tokens, between)
            before, cached_before = await asyncio.to_thread(_at_rest, server, warm)
            later = range(warm, warm + count)
            sizes += await open_and_end(server, later, questions, most_tokens, between)
            after, cached_after = await asyncio.to_thread(_at_rest, server, warm + count)
    half = warm + count // 2
    return {
        "what": "memory of a server over sessions that end",
        "model": model,
        "sessions": count,
        "rest_after_warm_up": before,
        "rest_at_the_end": after,
        "most_of_first_half": max(sizes[warm:half]),
        "most_of_second_half": max(sizes[half:]),
        "bytes_a_session": (after - before) / count,
        "cache_used_a_session": (cached_after - cached_before) / count,
        "sizes": sizes,
    }


async def open_and_end(
    server: BenchServer, numbers: range, questions: Sequence[Samples], most_tokens: int, between: float
) -> list[int]:
    """Have these sessions, a few at a time; the server's memory after each."""
    sizes: list[int] = []
    for first in numbers[::TOGETHER]:
        group = range(first, min(first + TOGETHER, numbers.stop))
        await asyncio.gather(*(_session(server, each, questions, most_tokens) for each in group))
        await asyncio.sleep(between)
        sizes += [server.resident_bytes] * len(group)
    return sizes


def _at_rest(server: BenchServer, sessions: int) -> tuple[int, float]:
    """The memory of a server that has tidied up after so many sessions, and which share of its cache is in use."""
    deadline = time.monotonic() + REST_SECONDS
    while server.figure("viva_sessions_tidied_total") < sessions:
        if time.monotonic() > deadline:
            raise VivaError(f"the server did not tidy up after {sessions} sessions within {REST_SECONDS:.0f} s")
        time.sleep(0.1)
    return server.resident_bytes, server.figure("viva_kv_used_ratio")


@contextlib.asynccontextmanager
async def serving(model: str) -> AsyncIterator[BenchServer]:
    """A `viva serve` process that is ready, and gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "serve.toml"
        settings.write_text(f"[server]\nopens_per_minute = {OPENS_PER_MINUTE}\n", encoding="utf8")
        command = [sys.executable, "-m", "vivavoce.cli", "serve", "--model", model, "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--config", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            await asyncio.to_thread(_until_ready, process, port)
            yield BenchServer(port, process.pid)
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate)


def resident_bytes(pid: int) -> int:
    """The memory of a process that is really there, on Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"the memory of process {pid} cannot be read ({error}); this needs Linux") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def _until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            told = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
            raise VivaError(f"the server ended before it was ready: {told.splitlines()[-1] if told else 'no word'}")
        with contextlib.suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2.0) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise VivaError(f"the server was not ready within {START_SECONDS:.0f} s")


async def _session(server: BenchServer, number: int, questions: Sequence[Samples], most_tokens: int) -> None:
    async with connect(server.url) as wire:
        await _call(wire, questions[number % len(questions)], most_tokens, hears_all=number % WHOLE_EVERY == 0)


async def _call(wire: Wire, question: Samples, most_tokens: int, hears_all: bool) -> None:
    """One session, from its first event to hanging up."""
    await wire.send({"type": "session.update", "session": {"type": "realtime", "max_output_tokens": most_tokens}})
    sound = np.concatenate([question, np.zeros(round(SILENCE_SECONDS * RATE), np.float32)])
    pcm = float_to_pcm16(sound).astype("<i2", copy=False).tobytes()
    await wire.send({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
    heard = 0
    async with asyncio.timeout(ANSWER_SECONDS):
        while True:
            event = await wire.receive()
            heard += event["type"] == "response.output_audio.delta"
            if event["type"] == "response.done" or (heard >= DELTAS and not hears_all):
                return


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    mebibytes = {name: f"{result[name] / 2**20:.0f} MiB" for name in result if name.startswith(("rest", "most"))}
    Console(highlight=False).print(
        f"{result['sessions']} sessions of {result['model']}: {mebibytes['rest_after_warm_up']} at rest after warming "
        f"up, {mebibytes['rest_at_the_end']} after the last, {result['bytes_a_session'] / 2**10:.1f} KiB a session; at "
        f"most {mebibytes['most_of_first_half']} in their first half, {mebibytes['most_of_second_half']} in the second"
    )
