"""Built-in tools over the wire: what a client sees of their calls, names that are taken, and the end of a call."""

import asyncio
import json

import pytest

from tests.dialogue.voices import talk
from tests.server.harness import connected
from tests.server.test_live_conversation import Listener, LiveHost, Voice, speaking
from tests.server.test_mcp import CallingChat, CallingHost, answered, talking, text_of
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.call_limit import MAX_CALLS
from vivavoce.dialogue.session import LiveConversation
from vivavoce.errors import InputError
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import ModelAbilities

WRITTEN = {"type": "realtime", "output_modalities": ["text"]}
FUNCTION = {"type": "function", "name": "calculate", "parameters": {"type": "object", "properties": {}}}


async def test_a_call_is_made_by_the_server_and_answered(running):
    async with talking(await running(host=CallingHost(), tools=("calculator", "clock=Asia/Tokyo"))) as client:
        created = await client.until("session.created")
        assert created["session"]["tools"] == [], "the session has the tools of the client"
        await client.send("session.update", session=WRITTEN)
        (call,), answer = await answered(client, 'call calculate {"expression": "6 * 7"}')
        assert (call["server_label"], call["name"], call["output"]) == ("viva", "calculate", "42")
        assert answer == "Outputs: 42."
        (_, failed), answer = await answered(client, 'call calculate {"expression": "9**9**9"}')
        assert failed["error"]["type"] == "tool_execution_error" and "too large" in failed["error"]["message"]
        assert answer.startswith("Outputs: 42; Error: ")
        assert client.of_type("mcp_list_tools.completed") == [], "nothing is listed that nobody asked for"


async def test_a_function_of_the_client_keeps_its_name(running):
    async with talking(await running(host=CallingHost(), tools=("calculator",))) as client:
        await client.send("session.update", session={**WRITTEN, "tools": [FUNCTION]})
        response = await client.say("call calculate {}")
        assert [item["type"] for item in response["output"]] == ["function_call"]
        (call,), _ = await answered(client, 'call viva_calculate {"expression": "1 + 1"}')
        assert (call["name"], call["output"]) == ("calculate", "2")


async def test_the_label_of_built_in_tools_is_reserved(running):
    async with connected(await running(host=CallingHost(), allow_mcp=("http://127.0.0.1:1",))) as client:
        tool = {"type": "mcp", "server_label": "viva", "server_url": "http://127.0.0.1:1"}
        await client.send("session.update", session={"type": "realtime", "tools": [tool]})
        assert (await client.error())["param"] == "session.tools[0].server_label"


@pytest.mark.parametrize("modality", ["text", "audio"])
async def test_hang_up_ends_the_session_after_the_goodbye(running, modality):
    server = await running(host=CallingHost(), tools=("hang-up",))
    async with talking(server) as client:
        await client.send("session.update", session={"type": "realtime", "output_modalities": [modality]})
        await client.say("call hang_up {}")
        assert await client.closed() == 1000
        first, goodbye = (event["response"] for event in client.of_type("response.done"))
        assert first["output"][0]["type"] == "mcp_call" and goodbye["status"] == "completed"
        assert "Say goodbye" in json.dumps(goodbye["output"])
        assert len(server.sessions) == 0


@pytest.mark.full
async def test_speech_calls_the_hang_up_off(running):
    server = await running(host=CallingHost(), tools=("hang-up",))
    async with connected(server) as client, speaking(client) as microphone:
        await client.say("call hang_up {}")
        await client.until("response.output_audio.delta")
        microphone.say(talk(1.5))
        await client.until("input_audio_buffer.speech_started")
        done = await client.until("response.done")
        while done["response"]["status"] != "completed":
            done = await client.until("response.done")
        assert (await client.say("hello"))["status"] == "completed", "the session goes on"
        assert len(server.sessions) == 1


class SlowChat(CallingChat):
    """Takes its time between two calls, the first of which has its output before the second is written."""

    async def reply(self, messages, settings):
        async for piece in super().reply(messages, settings):
            yield piece
            await asyncio.sleep(0.05)


class ScriptedChatHost(LiveHost):
    chat = SlowChat()

    def open(self, settings, model):
        backend = CascadeBackend(WholeTurns(Listener()), self.chat, Voice())
        self.opened.append(LiveConversation(backend, settings, self.options))
        return self.opened[-1]


async def test_calls_of_one_response_are_answered_once(running):
    async with talking(await running(host=ScriptedChatHost(), tools=("calculator",))) as client:
        await client.send("session.update", session=WRITTEN)
        request = " ".join(f'call calculate {{"expression": "{number} + 1"}}' for number in range(5))
        calls, answer = await answered(client, request)
        assert len(calls) == 5 and answer == "Outputs: 1; 2; 3; 4; 5."
        assert (await client.say("hello"))["status"] == "completed", "no other reply is in progress"
        assert len(client.of_type("response.done")) == 3


class TirelessChat:
    """Calls a tool as often as it is offered one; `again` decides on the arguments of the next call."""

    def __init__(self, again):
        self.again, self.calls = again, 0

    async def reply(self, messages, settings):
        if settings.tool_choice == "none":
            yield ChatText(f"I called {self.calls} times.")
        else:
            expression = self.again(self.calls)
            self.calls += 1
            yield ChatCall(0, f"call_{self.calls}", "calculate", json.dumps({"expression": expression}))
        yield ChatEnd("stop")


@pytest.mark.parametrize(("again", "count"), [(lambda _: "1 + 1", 2), (lambda number: f"1 + {number}", MAX_CALLS)])
async def test_a_model_that_calls_without_end_has_to_answer(running, again, count):
    host = ScriptedChatHost()
    host.chat = TirelessChat(again)
    async with connected(await running(host=host, tools=("calculator",))) as client:
        await client.send("session.update", session=WRITTEN)
        response = await client.say("Calculate.")
        while response["output"][-1]["type"] != "message":
            response = (await client.until("response.done"))["response"]
        assert text_of(response) == f"I called {count} times."


def test_a_model_that_calls_no_tools_is_refused():
    host = LiveHost()
    host.abilities = ModelAbilities(tools=False)
    with pytest.raises(InputError, match="--tool-model"):
        build_app(host, ServerOptions(tools=("clock",)))
    with pytest.raises(InputError, match="no --tool 'weather'"):
        build_app(LiveHost(), ServerOptions(tools=("weather",)))
