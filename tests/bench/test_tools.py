"""`viva bench tools` against the real server on a real socket, with a chat model that follows `tool_choice`."""

from dataclasses import replace

import numpy as np
import pytest

from tests.server.harness import RunningServer
from tests.server.test_live_conversation import RATE, Listener, LiveHost, Voice
from vivavoce.audio.io import float_to_pcm16
from vivavoce.bench.tools import SilenceMeter, _measure
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.fillers import FillerVoice
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.server.config import ServerOptions


class ObedientChat:
    """Calls the function that `tool_choice` names, and the first one where it is `eager`."""

    def __init__(self, is_eager):
        self.is_eager = is_eager

    async def reply(self, messages, settings):
        names = [tool.name for tool in settings.tools]
        if settings.tool_choice in names or (names and self.is_eager and settings.tool_choice == "auto"):
            yield ChatCall(0, "call_1", names[0], "{}")
        else:
            yield ChatText("Here you are.")
        yield ChatEnd("stop", 5, 7)


class Host(LiveHost):
    chat = None

    def open(self, settings, model):
        backend = CascadeBackend(WholeTurns(Listener()), self.chat, Voice())
        self.opened.append(LiveConversation(backend, settings, self.options))
        return self.opened[-1]


async def speak(text, voice, speed):
    yield np.full(RATE // 10, 0.05, np.float32)


SOUNDS = [float_to_pcm16(np.full(RATE // 4, 0.1, np.float32)).tobytes()] * 2


@pytest.mark.parametrize("is_eager", [False, True])
async def test_questions_are_asked_with_and_without_tools_and_a_slow_tool_is_waited_for(is_eager):
    host = Host(options=replace(DialogueOptions(), fillers=FillerVoice(speak, seconds=0.1)))
    host.chat = ObedientChat(is_eager)
    async with RunningServer(host, ServerOptions(opens_per_minute=1e5)) as server:
        result = await _measure(f"{server.ws}/v1/realtime", None, SOUNDS, tool_seconds=0.5)
    assert result["questions"] == 2 and result["needless_calls"] == (2 if is_eager else 0)
    assert result["compared"] == (0 if is_eager else 2) and (result["difference_ms"] is None) == is_eager
    assert result["max_silence_seconds"] > 0
    called = [item for item in host.opened[-1].items if type(item.content).__name__ == "ToolOutput"]
    assert len(called) == 1


async def test_a_server_that_ignores_the_choice_is_reported():
    host = Host()
    host.chat = ObedientChat(is_eager=False)
    host.chat.reply = lambda messages, settings: ObedientChat(False).reply(messages, replace(settings, tools=()))
    async with RunningServer(host, ServerOptions(opens_per_minute=1e5)) as server:
        result = await _measure(f"{server.ws}/v1/realtime", None, SOUNDS[:1], tool_seconds=0.0)
    assert "called no tool" in result["tool_failure"] and result["max_silence_seconds"] is None
    assert result["compared"] == 1


def test_silence_is_what_is_between_sounds_that_are_played_one_after_another():
    playback = SilenceMeter(10.0)
    for now, seconds in ((10.5, 1.0), (10.6, 1.0), (12.0, 0.5), (13.9, 1.0)):
        playback.play(now, seconds)
    assert playback.max_silence == pytest.approx(13.9 - 13.0)
