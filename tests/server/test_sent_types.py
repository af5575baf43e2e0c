"""Whatever a client sends, what it is sent is of the types of OpenAI's packages, for Python and for Node."""

import asyncio
import json
import shutil
import subprocess

import pytest
import pytest_asyncio

from tests.server.harness import RunningServer, connected
from tests.server.node_packages import installed
from tests.server.openai_types import CLIENT_EVENTS, SERVER_EVENTS, accepted, refused
from tests.server.scripted import ScriptedHost
from vivavoce.server.config import ServerOptions

BATCH = 100


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sent() -> list[dict]:
    """All that a server sends to clients that send each value that OpenAI's types accept, and many that they refuse."""
    options = ServerOptions(max_lag_ms=60_000, opens_per_minute=1e6, events_per_second=1e6)
    events: list[dict] = []
    async with RunningServer(ScriptedHost(), options) as server:
        for model in CLIENT_EVENTS.values():
            samples = [sample.value for sample in (*accepted(model), *refused(model))]
            for first in range(0, len(samples), BATCH):
                events += await answers(server, samples[first : first + BATCH])
    return events


async def answers(server: RunningServer, values: list[dict]) -> list[dict]:
    async with connected(server) as client:
        for value in values:
            await client.socket.send(json.dumps(value))
        await client.send("conversation.item.retrieve", item_id="nobody", event_id="the last")
        while (await client.until("error"))["error"].get("event_id") != "the last":
            await asyncio.sleep(0)
        return client.events


@pytest.mark.asyncio(loop_scope="module")
async def test_their_python_types_take_all_that_is_sent(sent):
    assert len(sent) > 1000 and len({event["type"] for event in sent}) > 15
    for event in sent:
        SERVER_EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


@pytest.mark.npm("node", "npm")
@pytest.mark.asyncio(loop_scope="module")
async def test_their_schemas_in_node_take_all_that_is_sent(sent):
    lines = "\n".join(json.dumps(event) for event in sent)
    command = [shutil.which("node"), str(installed("validate_events.mjs"))]
    run = await asyncio.to_thread(
        subprocess.run, command, input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    seen = json.loads(run.stdout)
    assert seen["wrong"] == []
    assert seen["checked"] > 1000 and len(seen["types"]) > 15
