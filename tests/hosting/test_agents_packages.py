"""The unmodified `@openai/agents` and `openai-agents` against `viva serve`: function tools, hosted MCP tools, `--tool`.

With mini-speech, whose calls a chat model decides on, and with a cascade.
"""

import asyncio
import json

import pytest

from tests.hosting.processes import chat_server, viva_serve
from tests.s2s.small_parts import small_asr, small_tts
from tests.server.node_packages import installed
from tests.server.test_mcp import TOKEN, http_server
from tests.server.test_openai_agents import Seen, is_raw, no_tracing

pytestmark = pytest.mark.full
DEADLINE = 120.0
__all__ = ["http_server", "no_tracing"]  # fixtures
SPOKEN = [
    "The desk says: table nine.",
    "The desk says: 9.",
    "The desk says: 42.",
    "You said: good evening. That is all.",
]


@pytest.fixture(scope="module", params=["cascade", "mini-speech"])
def served(request, tmp_path_factory, http_server):
    """The kind of a server and its address."""
    with chat_server() as chat:
        if request.param == "cascade":
            folder = tmp_path_factory.mktemp("cascade")
            (folder / "asr").mkdir()
            (folder / "tts").mkdir()
            asr, tts = small_asr(folder / "asr"), small_tts(folder / "tts")
            model = ("--chat", chat, "--asr", str(asr), "--tts", str(tts))
        else:
            model = ("--model", "mini-speech", "--tool-model", chat)
        tools = ("--allow-mcp", http_server, "--tool", "calculator")
        with viva_serve(*model, *tools, VIVA_CHAT_KEY="chat-secret") as address:
            yield request.param, f"ws://{address}/v1/realtime?model=gpt-realtime"


def check_answers(kind, answers):
    """Every answer is spoken; a cascade speaks the words of the chat model, a miniature its own."""
    assert all(answer["status"] == "completed" and answer["sound"] > 1000 for answer in answers)
    if kind == "cascade":
        assert [answer["words"].strip() for answer in answers] == SPOKEN


@pytest.mark.npm("node", "npm")
async def test_the_package_in_node(served, http_server):
    kind, address = served
    command = ["node", str(installed("agents_tools.mjs")), address, f"{http_server}/mcp", TOKEN]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    try:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    seen = json.loads(out)
    assert seen["errors"] == [] and seen["tools"] == ["add", "broken", "flood", "wait"]
    assert seen["booked"] == [3] and seen["hosted"] == [["add", "9"], ["calculate", "42"]]
    check_answers(kind, seen["answers"])


async def test_the_package_in_python(served, http_server):
    """Its realtime agents take function tools only, so the hosted tool is added by a message of its transport."""
    from agents import function_tool
    from agents.realtime import RealtimeAgent, RealtimeRunner
    from agents.realtime.model_inputs import RealtimeModelSendRawMessage

    kind, address = served
    booked = []

    def book(seats: int) -> str:
        """Books a table."""
        booked.append(seats)
        return "table nine"

    agent = RealtimeAgent(name="guide", instructions="Be brief.", tools=[function_tool(book)])
    runner = RealtimeRunner(agent, config={"model_settings": {"model_name": "gpt-realtime"}})
    seen, answers = Seen(), []
    async with await runner.run(model_config={"api_key": "unused", "url": address}) as session:

        async def ask(text):
            seen.clear()
            await session.send_message(text)
            while True:
                response = (await seen.until(session, is_raw("response.done"))).data.data["response"]
                if any(item["type"] == "message" for item in response["output"]):
                    break
            words = response["output"][-1]["content"][0]["transcript"]
            answers.append({"status": response["status"], "words": words, "sound": len(seen.audio())})

        await ask('call book {"seats": 3}')
        parameters = {"type": "object", "properties": {"seats": {"type": "integer"}}, "required": ["seats"]}
        function = {"type": "function", "name": "book", "description": "Books a table.", "parameters": parameters}
        hosted = {"type": "mcp", "server_label": "desk", "server_url": f"{http_server}/mcp", "authorization": TOKEN}
        tools = [function, {**hosted, "require_approval": "never"}]
        update = {"type": "session.update", "other_data": {"session": {"type": "realtime", "tools": tools}}}
        await session.model.send_event(RealtimeModelSendRawMessage(message=update))
        await seen.until(session, is_raw("mcp_list_tools.completed"))
        await ask('call add {"a": 4, "b": 5}')
        await ask('call calculate {"expression": "6 * 7"}')
        await ask("good evening")
    assert booked == [3]
    check_answers(kind, answers)
