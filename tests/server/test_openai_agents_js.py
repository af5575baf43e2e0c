"""The unmodified `@openai/agents` package in Node against our server, over its WebSocket transport."""

import asyncio
import base64
import json
from pathlib import Path

import pytest

from tests.server.harness import DEADLINE, drop_connections
from tests.server.node_packages import installed
from tests.server.scripted import pitch, watermark
from vivavoce.server.realtime.audio_formats import WireFormat, decode

RATE = 24_000

pytestmark = pytest.mark.npm("node", "npm")


@pytest.fixture(scope="module")
def script() -> Path:
    return installed("agents_turns.mjs")


@pytest.fixture
def run(server, script):
    """What the client saw in a scenario."""

    async def start(scenario: str) -> dict:
        command = ["node", str(script), f"{server.ws}/v1/realtime?model=any", scenario]
        process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
        try:
            if scenario == "reconnect":
                assert await asyncio.wait_for(process.stdout.readline(), DEADLINE) == b'"connected"\n'
                drop_connections(server)
            out, err = await asyncio.wait_for(process.communicate(), 3 * DEADLINE)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
        return json.loads(out)

    return start


def sound(seen: dict):
    return decode(b"".join(base64.b64decode(piece) for piece in seen["audio"]), WireFormat())


def words(seen: dict, role: str) -> list[str]:
    parts = [part for item in seen["history"] if item.get("role") == role for part in item["content"]]
    return [part.get("transcript") or part.get("text") for part in parts]


async def test_text_turn(run):
    seen = await run("text")
    assert seen["errors"] == []
    assert words(seen, "user") == ["good evening"] and words(seen, "assistant") == ["You said: good evening"]


async def test_audio_turn_with_the_users_words(run):
    seen = await run("audio")
    assert seen["errors"] == []
    assert words(seen, "user") == ["tone 500"] and words(seen, "assistant") == ["You said: tone 500"]
    assert abs(pitch(sound(seen), RATE) - watermark("You said: tone 500")) < 5


async def test_tool_call(run):
    seen = await run("tool")
    assert seen["errors"] == []
    assert words(seen, "assistant") == ["You said: rain here"]
    calls = [item for item in seen["history"] if item["type"] == "function_call"]
    assert [(call["name"], call["output"]) for call in calls] == [("weather", "rain here")]


async def test_barge_in(run):
    seen = await run("bargeIn")
    assert seen["errors"] == []
    assert seen["done"][0]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert len(sound(seen)) / RATE < 4.0
    assert words(seen, "assistant")[0].startswith("You said: a long"), "the words that were heard are kept"


async def test_a_dropped_connection_is_opened_again(run):
    seen = await run("reconnect")
    assert words(seen, "assistant") == ["You said: good evening"]


async def test_interrupt_by_hand(run):
    seen = await run("interrupt")
    assert seen["errors"] == []
    assert seen["done"][0]["status"] == "cancelled"


async def test_a_wrong_request_is_an_error_and_the_session_goes_on(run):
    seen = await run("error")
    assert len(seen["errors"]) == 1 and "nonsense" in seen["errors"][0]
    assert words(seen, "assistant") == ["You said: still there?"]
