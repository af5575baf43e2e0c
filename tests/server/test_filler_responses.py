"""Fillers over the wire: a response beside the conversation, which refuses no response of the client."""

import asyncio
from dataclasses import replace

import numpy as np

from tests.server.harness import connected
from tests.server.test_live_conversation import RATE, Listener, LiveHost, Voice
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.fillers import FILLERS, FillerVoice
from vivavoce.dialogue.session import DialogueOptions, LiveConversation

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


async def speak(text, voice, speed):
    yield np.full(RATE // 4, 0.05, np.float32)


async def test_a_filler_is_a_response_of_its_own_and_the_answer_follows_it(running):
    host = LiveHost(options=replace(DialogueOptions(), fillers=FillerVoice(speak, seconds=0.1)))
    async with connected(await running(host=host)) as client:
        await client.send("session.update", session={"type": "realtime", "tools": [TOOL]})
        (call,) = (await client.say("the weather, please"))["output"]
        filler = (await client.until("response.created"))["response"]
        assert filler["metadata"] == {"viva": "filler"} and filler["conversation_id"] is None
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        await client.send("conversation.item.create", item=output)
        await client.send("response.create")
        done = [(await client.until("response.done"))["response"] for _ in range(2)]
        assert done[0]["id"] == filler["id"] and done[0]["status"] == "completed"
        assert done[0]["output"][0]["content"][0]["transcript"] == FILLERS["en"][0]
        assert done[1]["output"][0]["content"][0]["transcript"].strip() == "You said: rain."
        order = [event["response_id"] for event in client.of_type("response.output_audio.delta")]
        assert order == sorted(order, key=[filler["id"], done[1]["id"]].index), "one after the other"
        said = [item.content for item in host.opened[-1].items]
        assert FILLERS["en"][0] not in str(said)


class WaitingChat:
    """Answers when it is told to."""

    def __init__(self):
        self.may_answer = asyncio.Event()

    async def reply(self, messages, settings):
        await self.may_answer.wait()
        yield ChatText("Here I am.")
        yield ChatEnd("stop", 5, 7)


class WaitingHost(LiveHost):
    chat = None

    def open(self, settings, model):
        self.opened.append(
            LiveConversation(CascadeBackend(WholeTurns(Listener()), self.chat, Voice()), settings, self.options)
        )
        return self.opened[-1]


async def test_a_slow_chat_model_is_covered_and_its_answer_is_not_lost(running):
    host = WaitingHost(options=replace(DialogueOptions(), fillers=FillerVoice(speak, seconds=0.1)))
    host.chat = WaitingChat()
    async with connected(await running(host=host)) as client:
        await client.send("response.create")
        asked = (await client.until("response.created"))["response"]["id"]
        filler = (await client.until("response.done"))["response"]
        assert filler["id"] != asked and filler["metadata"] == {"viva": "filler"}
        host.chat.may_answer.set()
        answers = [(await client.until("response.done"))["response"]]
        while answers[-1]["id"] != asked:  # a second filler may have begun
            answers.append((await client.until("response.done"))["response"])
        assert answers[-1]["output"][0]["content"][0]["transcript"].strip() == "Here I am."
