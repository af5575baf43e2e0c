"""Long conversations: facts of the first minute stay in the prompt, which stays short."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from vivavoce.audio.player import SimulatedClock
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.chat_messages import text_of
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.summary import ChatSummary
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue import summary
from vivavoce.dialogue.events import ReplyDone
from vivavoce.dialogue.items import Message, TextPart, ToolCall, ToolOutput
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, Truncation
from vivavoce.dialogue.summary import SUMMARISE, estimated_tokens
from vivavoce.errors import VivaError

CONTEXT = 2000
FACT = re.compile(r"The code of (\w+) is (\d+)\.")
WRITTEN = ConversationSettings(modality="text", instructions="Be kind.")


class HonestChat:
    """Answers with a few words, and sums up by writing down all facts that it reads."""

    context_tokens = CONTEXT

    def __init__(self, failures=0):
        self.failures, self.prompts, self.summaries = failures, [], []

    async def reply(self, messages, settings):
        text = "\n".join(text_of(each) for each in messages if each["content"])
        if messages[0]["content"] == SUMMARISE:
            self.summaries.append(text)
            if len(self.summaries) <= self.failures:
                raise VivaError("no summary today")
            await asyncio.sleep(0)
            facts = " ".join(f"The code of {name} is {code}." for name, code in FACT.findall(text))
            yield ChatText(facts or "They talked.")
        else:
            self.prompts.append(text)
            yield ChatText("I see, thank you for telling me about it.")
        yield ChatEnd("stop")


class NoVoice:
    rate = 24_000

    async def speak(self, text, voice, speed):
        yield np.zeros(0, np.float32)


class NoListener:
    async def transcribe(self, samples, rate, language=None):
        raise AssertionError("nothing is spoken here")


class Call:
    """A conversation in writing, on a virtual clock."""

    def __init__(self, chat, settings=WRITTEN):
        backend = CascadeBackend(WholeTurns(NoListener()), chat, NoVoice())
        self.chat, self.clock = chat, SimulatedClock()
        self.conversation = LiveConversation(backend, settings, DialogueOptions(), clock=self.clock)
        self._events = aiter(self.conversation.events())

    @property
    def summary(self) -> ChatSummary:
        return self.conversation._state.summary

    async def say(self, text, seconds=15.0):
        self.clock.advance(seconds)
        item, _ = self.conversation.add(Message("user", (TextPart(text),)))
        self.conversation.reply()
        async with asyncio.timeout(30):
            while not isinstance(event := await anext(self._events), ReplyDone):
                pass
            assert event.reason == "completed"
            while self.summary.is_running:  # it is written while the user is silent
                await asyncio.sleep(0)
        return item


async def test_facts_of_the_first_minute_are_known_after_three_hours():
    call = Call(HonestChat())
    facts = {f"room{number}": str(1000 + 7 * number) for number in range(40)}
    names = list(facts)
    for start in range(0, 40, 10):
        await call.say(" ".join(f"The code of {name} is {facts[name]}." for name in names[start : start + 10]))
    assert call.clock.now() <= 61
    while call.clock.now() < 3 * 3600:
        now = f"It is {call.clock.now():.0f} seconds now, and the weather has not changed since I last looked. "
        await call.say(now * 3, seconds=60.0)
    assert len(call.chat.summaries) > 5
    assert dict(FACT.findall(call.chat.prompts[-1])) == facts
    assert call.chat.prompts[-1].startswith("Be kind.") and "It is 10740 seconds now" in call.chat.prompts[-1]
    assert max(map(estimated_tokens, call.chat.prompts)) < CONTEXT
    assert max(map(estimated_tokens, call.chat.summaries)) < CONTEXT
    await call.conversation.close()


async def test_a_summary_that_fails_leaves_the_history_and_is_tried_again_later(caplog):
    call = Call(HonestChat(failures=2))
    await call.say("The code of desk is 42.")
    while len(call.chat.summaries) < 3:
        await call.say("Nothing new, just so that this conversation gets longer than the model likes it to be. " * 3)
        assert "The code of desk is 42." in call.chat.prompts[-1], "nothing is lost meanwhile"
    sizes = [estimated_tokens(text) for text in call.chat.summaries]
    assert sizes[1] > 1.1 * sizes[0], "not at every turn"
    failures = [record for record in caplog.records if "could not be summed up" in record.message]
    assert len(failures) == 2 and all(record.exc_info for record in failures)
    await call.say("And now?")
    assert "The code of desk is 42." in call.chat.prompts[-1] and summary.EARLIER in call.chat.prompts[-1]
    await call.conversation.close()


async def test_a_model_that_hangs_or_writes_nothing_or_too_much_is_bounded(monkeypatch, caplog):
    class Odd(HonestChat):
        def __init__(self, text):
            super().__init__()
            self.text = text

        async def reply(self, messages, settings):
            if messages[0]["content"] != SUMMARISE:
                async for piece in super().reply(messages, settings):
                    yield piece
                return
            if self.text is None:
                await asyncio.Event().wait()
            yield ChatText(self.text)

    monkeypatch.setattr(summary, "MAX_SECONDS", 0.01)
    for text, is_failure in ((None, True), (" \n", True), ("x" * 10_000_000, False)):
        caplog.clear()
        call = Call(Odd(text))
        for _ in range(16):
            await call.say("A sentence that is said again and again, until the history is too long for the model. " * 4)
        assert bool([each for each in caplog.records if "could not be summed up" in each.message]) is is_failure
        assert len(call.summary.text) == (0 if is_failure else summary.MAX_CHARACTERS)
        await call.conversation.close()


async def test_a_history_that_must_stay_whole_is_not_summed_up():
    call = Call(HonestChat(), replace(WRITTEN, truncation=Truncation(is_allowed=False)))
    for _ in range(20):
        await call.say("Many words that are said again and again, until it is too long for the model. " * 4)
    assert call.chat.summaries == [] and call.chat.prompts[-1].count("Many words") == 80
    await call.conversation.close()


async def test_what_a_client_deletes_is_forgotten():
    call = Call(HonestChat())
    secret = await call.say("The code of safe is 99.")
    await call.say("The code of door is 11.")
    while not call.chat.summaries:
        await call.say("Nothing new, just so that this conversation gets longer than the model likes it to be. " * 3)
    await call.say("Now?")
    assert "safe is 99" in call.chat.prompts[-1] and summary.EARLIER in call.chat.prompts[-1]
    call.conversation.delete(secret.id)
    await call.say("And now?")
    assert "safe is 99" not in call.chat.prompts[-1] and "door is 11" in call.chat.prompts[-1]
    await call.conversation.close()


@pytest.mark.parametrize("turns", [1, 5])
async def test_calls_stay_with_their_outputs(turns):
    call = Call(HonestChat())
    for number in range(turns):
        await call.say("Look it up, please.")
        call.conversation.add(ToolCall(f"call_{number}", "look", '{"at": 1}'))
        call.conversation.add(ToolOutput(f"call_{number}", f"The code of shelf{number} is {number}. " + "words " * 800))
    await call.say("Thanks.")
    messages = call.summary.messages(call.conversation.items, "", {})
    called = [each["tool_call_id"] for each in messages if each["role"] == "tool"]
    asked = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    assert called == asked and "Output of a function" not in str(messages)
    assert all(f"shelf{number} is {number}" in str(messages) for number in range(turns))
    await call.conversation.close()
