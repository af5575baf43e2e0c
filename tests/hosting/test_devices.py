"""`viva serve --devices` in real processes: replicas share the sessions, are killed and come back, and end together."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
import websockets

from tests.server.harness import Client
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import free_port
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.server.hosting.devices import placed, serve_devices

PATIENCE = 180.0  # for what takes seconds on a quiet machine
QUESTION = "When is breakfast?"


class ServedFleet:
    """`viva serve` with these arguments on a free port, and so many replicas."""

    def __init__(self, count: int, *arguments: str) -> None:
        self.port, self.count = free_port(), count
        self._arguments = (*arguments, "--model", "mini-speech", "--port", str(self.port), "--log-level", "warning")

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vivavoce.cli", "serve", *self._arguments),
            env=os.environ | {"VIVA_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        await self.until(lambda sessions: len(sessions) == self.count, "all replicas are ready")
        return self

    async def __aexit__(self, *error) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def sessions(self) -> dict[str, float]:
        """The sessions of each replica, by `/metrics`."""
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"http://127.0.0.1:{self.port}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("viva_fleet_sessions{")]
        return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}

    async def until(self, condition, what: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if condition(await self.sessions()):
                        return
                assert self.process.returncode is None, f"the server ended before {what}"
                await asyncio.sleep(0.1)

    def replicas(self) -> list[int]:
        """The process ids of the replicas."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]

    @contextlib.asynccontextmanager
    async def session(self):
        async with websockets.connect(f"ws://127.0.0.1:{self.port}/v1/realtime", max_size=None) as socket:
            client = Client(socket)
            await client.until("session.created")
            yield client


async def answer(client: Client) -> str:
    """The reply to a question in text; one that a replica could not finish is asked for again."""
    for _ in range(3):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create", response={"output_modalities": ["text"]})
        while (event := await client.next())["type"] != "response.done":
            assert event["type"] != "error" or event["error"]["code"] == "replica_lost", event
        if event["response"]["status"] == "completed":
            return event["response"]["output"][0]["content"][0]["text"]
    raise AssertionError("no reply was completed")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def all_end(pids: list[int]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not all(map(has_ended, pids)):
            await asyncio.sleep(0.05)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="replicas are found in /proc")


@pytest.mark.full
@needs_proc
async def test_sessions_are_shared_by_replicas_and_survive_one_that_is_killed():
    async with ServedFleet(2, "--devices", "cpu,cpu") as fleet:
        pids = fleet.replicas()
        assert len(pids) == 2
        async with fleet.session() as one, fleet.session() as two:
            await fleet.until(lambda sessions: set(sessions.values()) == {1.0}, "each replica has a session")
            said = await answer(one)
            assert said and await answer(two) == said
            os.kill(pids[0], signal.SIGKILL)
            assert await answer(one) == await answer(two) == said
            await fleet.until(lambda sessions: len(sessions) == 2, "the killed replica is started again")
            assert len(set(fleet.replicas()) - set(pids)) == 1
            ending = fleet.replicas()
            fleet.process.send_signal(signal.SIGTERM)
            assert await one.closed() == await two.closed() == 1012
        async with asyncio.timeout(PATIENCE):
            await fleet.process.wait()
        await all_end(ending)


@pytest.mark.full
@needs_proc
async def test_a_codec_on_a_device_of_its_own_speaks_and_replicas_end_with_their_server():
    async with ServedFleet(2, "--devices", "cpu", "--codec-devices", "cpu") as fleet:
        async with fleet.session() as client:
            await client.say(QUESTION)
            assert len(client.sound()) > 24_000, "half a second of speech"
        pids = fleet.replicas()
        assert len(pids) == 2
        fleet.process.kill()
        await all_end(pids)


@pytest.mark.full
async def test_a_replica_that_cannot_load_its_model_ends_the_server():
    command = ("serve", "--devices", "cpu", "--model", "no-such-model", "--port", str(free_port()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vivavoce.cli", *command),
        env=os.environ | {"VIVA_OFFLINE": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode
    assert b"no-such-model" in stderr
    assert b"ended before it was ready" in stderr


@pytest.mark.parametrize("device", ["7", "cuda:7", "nonsense"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(InputError):
        placed(device)


async def test_what_replicas_cannot_serve_is_refused():
    with pytest.raises(InputError, match="telephone"):
        await serve_devices(ServingOptions(server=ServerOptions(media_streams=True)), ["cpu"])
    with pytest.raises(InputError, match="--codec-devices"):
        await serve_devices(ServingOptions(chat="smollm2"), ["cpu"], ["cpu"])
