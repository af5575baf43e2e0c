"""How long a good client waits for its first sound beside callers that cost the server work and listen to nothing.

    python -m tests.load.hostile_callers [--model mini-speech] [--repeats 5]

Starts `viva serve` with its default limits. The good client asks for a reply and takes the time until the first sound,
alone and beside each kind of hostile caller. The ratio to its time alone counts, not the time: the machine may be busy.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import websockets
from websockets.asyncio.client import ClientConnection

from vivavoce.bench.capacity import BenchServer, serving

QUESTION = "Tell me a very long story about the sea, the stars and the old lighthouse."
VANISHED = 6
DROPPING = 2
ANSWER_SECONDS = 90.0


async def ask(socket: ClientConnection) -> None:
    """Request a spoken reply."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    await socket.send(json.dumps({"type": "response.create"}))


async def first_sound(server: BenchServer) -> float:
    """Seconds from the request of a new session's reply to its first sound."""
    async with asyncio.timeout(ANSWER_SECONDS), websockets.connect(server.url, max_size=None) as socket:
        asked = time.monotonic()
        await ask(socket)
        async for message in socket:
            if json.loads(message)["type"] == "response.output_audio.delta":
                return time.monotonic() - asked
    raise AssertionError("the server closed the connection before the first sound")


async def vanish(server: BenchServer, seconds: float) -> None:
    """Ask for a reply, and be gone without a word after some seconds."""
    with contextlib.suppress(websockets.WebSocketException, OSError):
        socket = await websockets.connect(server.url, max_size=None)
        await ask(socket)
        await asyncio.sleep(seconds)
        socket.transport.abort()


@asynccontextmanager
async def alone(server: BenchServer) -> AsyncIterator[None]:
    """Nobody else."""
    yield


@asynccontextmanager
async def beside_vanished(server: BenchServer) -> AsyncIterator[None]:
    """Callers that were gone while their replies had just begun."""
    await asyncio.gather(*(vanish(server, 1.0) for _ in range(VANISHED)))
    yield


@asynccontextmanager
async def beside_dropping(server: BenchServer) -> AsyncIterator[None]:
    """Callers that open a session, ask and drop it, once a second each."""

    async def drop_again_and_again() -> None:
        while True:
            await asyncio.gather(vanish(server, 0.2), asyncio.sleep(1.0))

    tasks = [asyncio.create_task(drop_again_and_again()) for _ in range(DROPPING)]
    await asyncio.sleep(8.0)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


CALLERS: dict[str, Callable[[BenchServer], AbstractAsyncContextManager[None]]] = {
    "alone": alone,
    f"beside {VANISHED} vanished": beside_vanished,
    f"beside {DROPPING} that drop once a second": beside_dropping,
}


async def measure(model: str, repeats: int) -> dict[str, float]:
    """Median seconds to the first sound, by the callers beside it."""
    seconds = {}
    async with serving(model) as server:
        await first_sound(server)
        for name, callers in CALLERS.items():
            async with callers(server):
                seconds[name] = statistics.median([await first_sound(server) for _ in range(repeats)])
            print(f"{name}: {seconds[name]:.2f} s, {seconds[name] / seconds['alone']:.2f} x", flush=True)
    return seconds


def main() -> None:
    """Print the times and their ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-speech")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.model, arguments.repeats))


if __name__ == "__main__":
    main()
