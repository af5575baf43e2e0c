"""Tool calls of a speech-to-speech backend, made by a chat model that reads the transcript."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.stage import ScriptedBackend, Stage, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.audio.player import SimulatedClock
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.tool_delegate import ToolDelegate
from vivavoce.dialogue.events import ReplyAudio, ReplyDone
from vivavoce.dialogue.items import AudioPart, Message, ToolCall
from vivavoce.dialogue.session import LiveConversation
from vivavoce.dialogue.settings import Tool
from vivavoce.errors import InputError

TOOLS = (Tool("look", "Looks it up.", {}),)


class FixedTranscriber:
    async def transcribe(self, samples, rate, language=None):
        return "where is it"


class Decider:
    """Calls a tool, talks, or fails; keeps what it was asked."""

    def __init__(self, kind):
        self.kind, self.asked = kind, []

    async def reply(self, messages, settings):
        self.asked.append([(each["role"], each["content"]) for each in messages])
        if self.kind == "fail":
            raise InputError("the decider is gone")
        if self.kind == "call":
            yield ChatCall(0, "call_1", "look", '{"at": ')
            yield ChatCall(0, None, None, "1}")
        else:
            yield ChatText("I would say")
            yield ChatText(" so.")
        yield ChatEnd("stop", 5, 7)


async def turn(kind, **settings):
    """A spoken turn on a stage whose backend's calls are delegated."""
    clock, decider = SimulatedClock(), Decider(kind)
    backend = ScriptedBackend(spoken(1.0, "It is here. "), clock=clock)
    delegate = ToolDelegate(backend, decider, FixedTranscriber())
    conversation = LiveConversation(delegate, replace(with_turn(), **settings), input_rate=16_000, clock=clock)
    stage = Stage(backend, conversation, clock)
    stage._reader = asyncio.get_running_loop().create_task(stage._read())
    await stage.hear(np.concatenate([silence(0.5), talk(1.5, seed=5), silence(3.0)]))
    return stage, decider


async def test_a_call_of_the_decider_takes_the_place_of_speech():
    stage, decider = await turn("call", tools=TOOLS)
    user, call = stage.conversation.items
    assert isinstance(user.content.parts[0], AudioPart)
    assert call.content == ToolCall("call_1", "look", '{"at": 1}') and call.is_complete
    assert stage.all(ReplyAudio) == [] and stage.all(ReplyDone)[-1].reason == "completed"
    assert decider.asked[-1][-1] == ("user", "where is it")
    await stage.close()
    stage.check()


@pytest.mark.parametrize(("kind", "settings"), [("talk", {"tools": TOOLS}), ("call", {}), ("fail", {"tools": TOOLS})])
async def test_otherwise_the_speech_model_answers_in_its_own_words(kind, settings):
    stage, decider = await turn(kind, **settings)
    _, answer = stage.conversation.items
    assert isinstance(answer.content, Message) and answer.content.parts[0].transcript == "It is here. "
    assert len(stage.all(ReplyAudio)) > 0 and stage.all(ReplyDone)[-1].reason == "completed"
    assert bool(decider.asked) == bool(settings), "without tools nobody is asked"
    await stage.close()
    stage.check()


async def test_a_call_that_must_be_made_fails_with_its_decider():
    stage, _ = await turn("fail", tools=TOOLS, tool_choice="required")
    assert stage.all(ReplyDone)[-1].reason == "failed" and stage.all(ReplyAudio) == []
    await stage.close()
    stage.check()
