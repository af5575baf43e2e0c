"""`viva serve --doors 2` with a real model: a door is killed in the middle of a reply, and the server is stopped."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.server.harness import DEADLINE, Client, connected, eventually
from tests.server.test_resume import numbers, resuming

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@dataclass
class Address:
    ws: str


def doors_of(engine: int) -> list[int]:
    """The processes of the doors of an engine process."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(pid) for pid in children if b"doors.door" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_reply_of_mini_speech_survives_its_door(stack):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = f"from vivavoce.cli import app; app('serve --doors 2 --port {port}'.split())"
    engine = await asyncio.create_subprocess_exec(sys.executable, "-c", run, stdout=DEVNULL)
    server = Address(f"ws://127.0.0.1:{port}")
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http, asyncio.timeout(6 * DEADLINE):
            while engine.returncode is None:
                try:
                    if (await http.get("/readyz")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass  # it does not listen yet
                await asyncio.sleep(0.2)
        async with connected(server) as client:
            session = (await client.until("session.created"))["session"]
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
            await client.send("conversation.item.create", item=item)
            await client.send("response.create")
            await client.until("response.output_audio.delta")
            doors = doors_of(engine.pid)
            assert len(doors) == 2
            for door in doors:  # the client is at one of them
                os.kill(door, signal.SIGKILL)
            assert await client.closed() == 1006
        await eventually(lambda: len(doors_of(engine.pid)) == 2, "the doors are started again")
        query = resuming(session["id"], session["viva"]["resume_token"], client.events[-1]["event_id"])
        again = await reconnected(server, query, stack)
        assert (await again.until("response.done"))["response"]["status"] == "completed"
        both = numbers(client) + numbers(again)
        assert both == list(range(1, len(both) + 1))
        doors = doors_of(engine.pid)
        engine.send_signal(signal.SIGTERM)
        assert await again.closed() == 1012
        await asyncio.wait_for(engine.wait(), DEADLINE)
        assert not any(Path(f"/proc/{door}").exists() for door in doors)
    finally:
        if engine.returncode is None:
            engine.kill()
            await engine.wait()


async def reconnected(server: Address, query: str, stack: AsyncExitStack) -> Client:
    """A client, as soon as a door listens again."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return await stack.enter_async_context(connected(server, query))
            except OSError:
                await asyncio.sleep(0.1)
