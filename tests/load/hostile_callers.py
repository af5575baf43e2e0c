"""How long a good client waits for its first sound beside callers that cost the server work and listen to nothing.

    python -m tests.load.hostile_callers [--model mini-speech] [--repeats 5]

Starts `viva serve`. The good client opens a session, asks for a reply and takes the time until its first sound: alone,
and beside each kind of hostile caller. The ratio to the times alone, taken before and after, counts, not the time: the
machine may be busy. Besides, the processor time that the server used until the first sound is printed, which depends on
other programs less. Takes two minutes on two idle cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection

from vivavoce.bench.capacity import BenchServer, serving

QUESTION = "Tell me a very long story about the sea, the stars and the old lighthouse."
VANISHED = 6
DROPPING = 2
HALF_OPEN = 1000
BODY_BYTES = 600 << 20
HEADER_BYTES = 100 << 20
ANSWER_SECONDS = 90.0
START_SECONDS = 5.0  # for hostile callers that go on, before the good client begins
HEAD = b"Host: 127.0.0.1\r\n"
UPLOAD = b"POST /v1/audio/transcriptions HTTP/1.1\r\n" + HEAD + b"Content-Type: multipart/form-data; boundary=x\r\n"


async def ask(socket: ClientConnection) -> None:
    """Request a spoken reply."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    await socket.send(json.dumps({"type": "response.create"}))


@dataclass(frozen=True)
class FirstSound:
    """Seconds until the first sound, and seconds of processor time that the server used meanwhile."""

    wall: float
    processor: float


async def first_sound(server: BenchServer) -> FirstSound:
    """Open a session, ask, and wait for sound."""
    began, used = time.monotonic(), processor_seconds(server.pid)
    async with asyncio.timeout(ANSWER_SECONDS), websockets.connect(server.url, max_size=None) as socket:
        await ask(socket)
        async for message in socket:
            if json.loads(message)["type"] == "response.output_audio.delta":
                return FirstSound(time.monotonic() - began, processor_seconds(server.pid) - used)
    raise AssertionError("the server closed the connection before the first sound")


def processor_seconds(pid: int) -> float:
    """User and system time of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Hostile callers


async def vanish(server: BenchServer, seconds: float) -> None:
    """Ask for a reply, and be gone without a word after some seconds."""
    with contextlib.suppress(websockets.WebSocketException, OSError):
        socket = await websockets.connect(server.url, max_size=None)
        await ask(socket)
        await asyncio.sleep(seconds)
        socket.transport.abort()


async def send_bytes(server: BenchServer, head: bytes, count: int) -> None:
    """Send a head and so many bytes, as far as the server takes them."""
    piece = b"x" * (1 << 16)
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(head)
            for _ in range(count // len(piece)):
                writer.write(piece)
                await writer.drain()
        finally:
            writer.transport.abort()


@asynccontextmanager
async def alone(server: BenchServer) -> AsyncIterator[None]:
    """No hostile caller: the baseline."""
    yield


@asynccontextmanager
async def beside_vanished(server: BenchServer) -> AsyncIterator[None]:
    """Callers that were gone while their replies had just begun."""
    await asyncio.gather(*(vanish(server, 1.0) for _ in range(VANISHED)))
    yield


@asynccontextmanager
async def beside_half_open(server: BenchServer) -> AsyncIterator[None]:
    """Connections that send the beginning of a request and no more."""
    writers = []
    for _ in range(HALF_OPEN):
        writers.append((await asyncio.open_connection("127.0.0.1", server.port))[1])
        writers[-1].write(b"GET /healthz HTTP/1.1\r\n")
    yield
    for writer in writers:
        writer.transport.abort()


def beside(
    callers: int, call: Callable[[BenchServer], Coroutine[Any, Any, None]]
) -> Callable[[BenchServer], AbstractAsyncContextManager[None]]:
    """Callers that call again and again, once a second each."""

    async def call_again_and_again(server: BenchServer) -> None:
        while True:
            await asyncio.gather(call(server), asyncio.sleep(1.0))

    @asynccontextmanager
    async def calling(server: BenchServer) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(call_again_and_again(server)) for _ in range(callers)]
        await asyncio.sleep(START_SECONDS)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return calling


CALLERS: dict[str, Callable[[BenchServer], AbstractAsyncContextManager[None]]] = {
    f"{VANISHED} vanished": beside_vanished,
    f"{DROPPING} that ask and drop once a second": beside(DROPPING, lambda server: vanish(server, 0.2)),
    f"{HALF_OPEN} half-open requests": beside_half_open,
    "headers of 100 MiB": beside(
        1, lambda server: send_bytes(server, b"GET / HTTP/1.1\r\n" + HEAD + b"X-Large: ", HEADER_BYTES)
    ),
    "uploads that announce 600 MiB": beside(
        1, lambda server: send_bytes(server, UPLOAD + b"Content-Length: %d\r\n\r\n" % BODY_BYTES, BODY_BYTES)
    ),
}


async def median_of(server: BenchServer, repeats: int) -> FirstSound:
    """The median of some first sounds, one after another."""
    sounds = [await first_sound(server) for _ in range(repeats)]
    return FirstSound(*(statistics.median(getattr(each, name) for each in sounds) for name in ("wall", "processor")))


async def measure(model: str, repeats: int, arguments: list[str]) -> None:
    """Print the times beside each kind of caller, and their ratio to the times alone before and after."""
    async with serving(model, *arguments) as server:
        await first_sound(server)
        before = await median_of(server, repeats)
        for name, callers in CALLERS.items():
            async with callers(server):
                beside_them = await median_of(server, repeats)
            after = await median_of(server, repeats)
            wall, processor = ((before.wall + after.wall) / 2, (before.processor + after.processor) / 2)
            print(
                f"{name}: {beside_them.wall:.2f} s, alone {wall:.2f} s, ratio {beside_them.wall / wall:.2f}; "
                f"processor {beside_them.processor:.2f} s, alone {processor:.2f} s",
                flush=True,
            )
            before = after


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-speech")
    parser.add_argument("--repeats", type=int, default=5)
    arguments, more = parser.parse_known_args()
    asyncio.run(measure(arguments.model, arguments.repeats, more))


if __name__ == "__main__":
    main()
