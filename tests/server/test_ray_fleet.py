"""A fleet on one machine, with real Ray: replicas come, go, and are killed, and no conversation is lost."""

import asyncio
import os
import signal
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed

from vivavoce.server.ray_options import FleetOptions

ray = pytest.importorskip("ray", reason="a fleet needs Ray Serve: pip install 'vivavoce[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own

PATIENCE = 90.0  # for what takes seconds on a quiet machine
PLACES = 6
QUIET_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.3",
    "OMP_NUM_THREADS": "1",
    "VIVA_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def fleet():
    """One replica of mini-speech with six places, which may become two."""
    from vivavoce.server.ray_app import start

    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        for name, value in QUIET_RAY.items():
            patch.setenv(name, value)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        speech = {"model": {"model": "mini-speech", "device": "cpu"}, "sessions": PLACES, "wanted_sessions": 5}
        speech |= {"least": 1, "most": 2, "grow_seconds": 0.5, "shrink_seconds": 1.0, "look_back_seconds": 1.5}
        try:
            start(FleetOptions.read({"server": {"port": port}, "speech": speech, "drain_seconds": 30}))
            yield f"http://127.0.0.1:{port}"
        finally:
            ray.shutdown()


class Caller:
    """One conversation through the official client."""

    def __init__(self, connection) -> None:
        self.connection = connection
        self.errors: list[str] = []
        self.session = ""

    async def ask(self, text: str, modality: str = "text", on_sound=None) -> tuple[str, str]:
        """A text turn; the words of the reply and how it ended."""
        content = [{"type": "input_text", "text": text}]
        await self.connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await self.connection.response.create(response={"output_modalities": [modality]})
        words, pieces = "", 0
        async with asyncio.timeout(PATIENCE):
            async for event in self.connection:
                if event.type in ("response.output_audio_transcript.delta", "response.output_text.delta"):
                    words += event.delta
                elif event.type == "response.output_audio.delta":
                    pieces += 1
                    if pieces == 2 and on_sound is not None:
                        on_sound()
                elif event.type == "error":
                    self.errors.append(event.error.code)
                elif event.type == "response.done":
                    return words, event.response.status
        raise AssertionError("the socket closed")


@asynccontextmanager
async def calling(url: str):
    client = AsyncOpenAI(api_key="any", base_url=f"{url}/v1")
    async with client.realtime.connect(model="mini-speech") as connection:
        caller = Caller(connection)
        created = await asyncio.wait_for(connection.recv(), PATIENCE)
        assert created.type == "session.created", created
        caller.session = created.session.model_extra["id"] if created.session.model_extra else created.session.id
        yield caller


def kill(process: int) -> None:
    with suppress(ProcessLookupError):  # another caller did it
        os.kill(process, signal.SIGKILL)


async def on_roll(method: str, *args):
    from ray import serve

    return await serve.get_deployment_handle("roll", "viva").ask.remote(method, *args)


async def home(caller: Caller) -> str | None:
    """The replica that has a session."""
    found = await on_roll("where", caller.session)
    return found and found[0].replica


async def until_members(count: int) -> list:
    """The replicas, once there are so many."""
    async with asyncio.timeout(PATIENCE):
        while len(members := [each for each in await on_roll("fleet") if not each.is_draining]) != count:
            await asyncio.sleep(0.2)
    return members


async def is_refused(url: str) -> bool:
    """Whether one more is refused as the protocol says it, and at once instead of waiting in a queue."""
    client = AsyncOpenAI(api_key="any", base_url=f"{url}/v1")
    async with client.realtime.connect(model="mini-speech") as connection:
        begun = time.monotonic()
        told = await connection.recv()
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
        assert closed.value.rcvd.code == 1013
        assert time.monotonic() - begun < 5.0
        return told.type == "error" and told.error.code == "session_limit_reached"


async def test_conversations_outlive_their_replicas(fleet):
    async with AsyncExitStack() as callers:
        first = [await callers.enter_async_context(calling(fleet)) for _ in range(PLACES)]
        assert await is_refused(fleet)

        # One replica becomes two while all talk.
        told = await asyncio.gather(*(caller.ask("a table for three please") for caller in first))
        assert {status for _, status in told} == {"completed"}
        undisturbed = (await first[0].ask("how many did i say?"))[0]
        assert "three" in undisturbed
        await until_members(2)

        # Two leave, two come, and find their place at the new one.
        for caller in first[4:]:
            await caller.connection.close()
        late = [await callers.enter_async_context(calling(fleet)) for _ in range(2)]
        for caller in late:
            await caller.ask("a table for three please")
        seats = [await on_roll("where", caller.session) for caller in (*first[:4], *late)]
        assert [seat.replica == seats[0][0].replica for seat, _ in seats] == [True] * 4 + [False] * 2

        # The new one is killed while it speaks.
        doomed = seats[-1][1]
        spoken = await asyncio.gather(
            *(caller.ask("what time is breakfast?", "audio") for caller in first[:4]),
            *(caller.ask("what time is breakfast?", "audio", lambda: kill(doomed.pid)) for caller in late),
        )
        assert [status for _, status in spoken] == ["completed"] * 4 + ["failed"] * 2
        assert [caller.errors for caller in (*first[:4], *late)] == [[]] * 4 + [["replica_lost"]] * 2
        for caller in late:
            assert (await caller.ask("how many did i say?"))[0] == undisturbed
            assert await home(caller) == seats[0][0].replica
        assert "seven" in (await late[0].ask("what time is breakfast?"))[0]

        # A replica takes the place of the dead one; with few callers one of the two goes, and takes nobody along.
        await until_members(2)
        for caller in first[2:4]:
            await caller.connection.close()
        stayed = [*first[:2], *late]
        last = (await until_members(1))[0].replica
        async with asyncio.timeout(PATIENCE):
            while {await home(caller) for caller in stayed} != {last}:
                await asyncio.sleep(0.2)
        for caller in stayed:
            assert (await caller.ask("how many did i say?"))[0] == undisturbed
            assert caller.errors == (["replica_lost"] if caller in late else [])
