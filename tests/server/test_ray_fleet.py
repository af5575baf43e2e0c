"""A fleet on one machine, with real Ray: replicas come, go, and are killed, and no conversation is lost."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from openai import AsyncOpenAI, InternalServerError
from websockets.exceptions import ConnectionClosed

from tests.server.harness import free_port
from vivavoce import hub
from vivavoce.server.cluster.app import APP

CONFIG = Path(__file__).parents[2] / "docs" / "ray.yaml"
NEEDED = "a fleet needs Ray Serve: pip install 'vivavoce[ray]'"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(find_spec("ray") is None, reason=NEEDED),
]

PATIENCE = 240.0  # for what takes seconds on a quiet machine
PLACES = 6
QUIET_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # by itself Ray lets everybody else go first
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.3",
    "OMP_NUM_THREADS": "1",
    "VIVA_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """The fleet of docs/ray.yaml, deployed by `serve deploy`: mini-speech, six places a replica, one or two of them."""
    import ray  # a second to load, and every worker collects this file

    file = tmp_path_factory.mktemp("fleet") / "ray.yaml"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET_RAY.items():
            patch.setenv(name, value)
        patch.setattr("ray._private.ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S", PATIENCE, raising=False)
        port = free_port()
        file.write_text(yaml.safe_dump(configured(port)), encoding="utf8")
        started = ray.init(
            num_cpus=4,
            include_dashboard=True,
            dashboard_port=free_port(),
            object_store_memory=80 << 20,
            log_to_driver=False,
        )
        try:
            deploy(file, started.dashboard_url)
            yield f"http://127.0.0.1:{port}"
        finally:
            ray.shutdown()


def configured(port: int) -> dict:
    """The configuration in the docs, with this port and a pool that is quick to change its size."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf8"))
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args["server"]["port"], args["drain_seconds"] = port, 30
    args["speech"] |= {"sessions": PLACES, "wanted_sessions": 5, "min_replicas": 1, "max_replicas": 2}
    args["speech"] |= {"cpus": 1, "gpus": 0}
    args["speech"] |= {"grow_seconds": 0.5, "shrink_seconds": 1.0, "look_back_seconds": 1.5, "min_slack_ms": -1e6}
    args["asr"] = {"model": {"asr": "mini-asr", "device": "cpu"}, "sessions": 1, "cpus": 0.5}
    return config


def deploy(file: Path, dashboard: str) -> None:
    """As a person does it, and until all of it runs."""
    from ray import serve

    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "--address", f"http://{dashboard}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + PATIENCE
    while (status := serve.status().applications[APP]).status != "RUNNING":
        assert status.status in ("DEPLOYING", "NOT_STARTED") and time.monotonic() < deadline, status
        time.sleep(0.1)


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
    async with client, client.realtime.connect(model="mini-speech") as connection:
        caller = Caller(connection)
        created = await asyncio.wait_for(connection.recv(), PATIENCE)
        assert created.type == "session.created", created
        caller.session = created.session.model_extra["id"] if created.session.model_extra else created.session.id
        yield caller


def kill(process: int) -> None:
    with suppress(ProcessLookupError):  # another caller did it
        os.kill(process, signal.SIGKILL)


async def registry(method: str, *args):
    from ray import serve

    return await serve.get_deployment_handle("registry", APP).call.remote(method, *args)


async def home(caller: Caller) -> str | None:
    """The replica that has a session."""
    found = await registry("locate", caller.session)
    return found and found[0].replica


async def until_members(count: int) -> list:
    """The replicas, once there are so many."""
    async with asyncio.timeout(PATIENCE):
        while len(members := await speech_members()) != count:
            await asyncio.sleep(0.2)
    return members


async def speech_members() -> list:
    return [each for each in await registry("replicas") if each.role == "speech" and not each.is_draining]


async def is_refused(url: str) -> bool:
    """Whether one more is refused as the protocol says it, and at once instead of waiting in a queue."""
    client = AsyncOpenAI(api_key="any", base_url=f"{url}/v1")
    async with client, client.realtime.connect(model="mini-speech") as connection:
        async with asyncio.timeout(60):  # nobody leaves meanwhile: who waits in a queue waits for ever
            results = await connection.recv()
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
        assert closed.value.rcvd.code == 1013
        return results.type == "error" and results.error.code == "session_limit_reached"


async def test_conversations_outlive_their_replicas(fleet):
    async with AsyncExitStack() as callers:
        first = [await callers.enter_async_context(calling(fleet)) for _ in range(PLACES)]
        assert await is_refused(fleet)

        # One replica becomes two while all talk.
        results = await asyncio.gather(*(caller.ask("a table for three please") for caller in first))
        assert {status for _, status in results} == {"completed"}
        undisturbed = (await first[0].ask("how many did i say?"))[0]
        assert "three" in undisturbed
        await until_members(2)

        # Two leave, two come, and find their place at the new one.
        for caller in first[4:]:
            await caller.connection.close()
        late = [await callers.enter_async_context(calling(fleet)) for _ in range(2)]
        for caller in late:
            await caller.ask("a table for three please")
        placements = [await registry("locate", caller.session) for caller in (*first[:4], *late)]
        assert [placement.replica == placements[0][0].replica for placement, _ in placements] == [True] * 4 + [
            False
        ] * 2

        # The new one is killed while it speaks.
        doomed = placements[-1][1]
        spoken = await asyncio.gather(
            *(caller.ask("what time is breakfast?", "audio") for caller in first[:4]),
            *(caller.ask("what time is breakfast?", "audio", lambda: kill(doomed.pid)) for caller in late),
        )
        assert [status for _, status in spoken] == ["completed"] * 4 + ["failed"] * 2
        assert [caller.errors for caller in (*first[:4], *late)] == [[]] * 4 + [["replica_lost"]] * 2
        for caller in late:
            assert (await caller.ask("how many did i say?"))[0] == undisturbed
            assert await home(caller) == placements[0][0].replica
        assert "seven" in (await late[0].ask("what time is breakfast?"))[0]

        # A replica takes the place of the dead one; with few callers one of the two goes, and takes nobody along.
        await until_members(2)
        for caller in first[2:4]:
            await caller.connection.close()
        stayed = [*first[:2], *late]
        async with asyncio.timeout(PATIENCE):
            while len(await speech_members()) > 1 or {await home(caller) for caller in stayed} != {
                each.replica for each in await speech_members()
            }:
                await asyncio.sleep(0.2)
        for caller in stayed:
            assert (await caller.ask("how many did i say?"))[0] == undisturbed
            assert caller.errors == (["replica_lost"] if caller in late else [])


async def test_a_pool_of_recognisers_takes_recordings_and_refuses_one_too_many(fleet, official):
    client = official(f"{fleet}/v1", "any")
    file = hub.BUNDLED / "questions" / "15-breakfast.opus"
    asked = [client.audio.transcriptions.create(model="mini-asr", file=file) for _ in range(3)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    heard = [each.text for each in results if not isinstance(each, Exception)]
    assert heard and len(heard[0].split()) > 1
    refused = [each for each in results if isinstance(each, Exception)]
    assert refused and all(isinstance(each, InternalServerError) and each.status_code == 503 for each in refused)
    kinds = {model.id: model.viva["kind"] async for model in client.models.list()}
    assert kinds == {"mini-speech": "realtime", "mini-tts": "speech", "mini-asr": "transcription"}
