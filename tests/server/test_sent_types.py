"""Whatever a client sends, what it is sent is of the types of OpenAI's packages, for Python and for Node."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import pytest_asyncio

from tests.server.harness import RunningServer, connected
from tests.server.node_packages import installed, npm_folder
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


@pytest.mark.npm("node", "npm")
@pytest.mark.full
@pytest.mark.asyncio(loop_scope="module")
async def test_the_types_of_the_javascript_client_take_all_that_is_sent(sent, tmp_path):
    events = [plain(event) for event in sent if not event["type"].startswith("viva.")]
    assert await type_checked("RealtimeServerEvent", events, tmp_path) > 50


@pytest.mark.npm("node", "npm")
@pytest.mark.full
async def test_the_types_of_both_clients_take_the_same_client_events(tmp_path):
    """So what `test_openai_types.py` shows of each parameter holds for both."""
    events = [plain(sample.value) for model in CLIENT_EVENTS.values() for sample in accepted(model)]
    assert await type_checked("RealtimeClientEvent", events, tmp_path) > 300


async def type_checked(name: str, events: list[dict], folder: Path) -> int:
    """How many different events the TypeScript compiler takes, which refuses fields that the types do not have."""
    distinct = list({shape(event): event for event in events}.values())
    file, modules = folder / "events.ts", npm_folder() / "node_modules"
    lines = ",\n".join(json.dumps(event) for event in distinct)
    file.write_text(
        f"import type {{ {name} }} from '{modules}/openai/resources/realtime/realtime';\n"
        f"export const events: {name}[] = [\n{lines}\n];\n"
    )
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    command = ["node", str(modules / "typescript" / "bin" / "tsc"), *options, str(file)]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[:5000]
    return len(distinct)


def plain(value):
    """A value without what OpenAI's server sends and these types lack: nulls for undefined, the session's identity."""
    if isinstance(value, dict):
        is_session = str(value.get("object")).endswith("session")
        untyped = {"viva", "object", "id", "expires_at"} if is_session else {"viva"}
        return {name: plain(inner) for name, inner in value.items() if name not in untyped and inner is not None}
    return [plain(each) for each in value] if isinstance(value, list) else value


def shape(value) -> object:
    """What two values of the same type and fields have in common; tags count, other strings do not."""
    if isinstance(value, dict):
        tags = {name: inner for name, inner in value.items() if name in ("type", "status", "role", "object", "code")}
        return (*((name, shape(inner)) for name, inner in sorted(value.items())), *sorted(map(str, tags.items())))
    if isinstance(value, list):
        return tuple({shape(each): None for each in value})
    return type(value).__name__
