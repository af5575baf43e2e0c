"""Long calls of a speech-to-speech model: what was said first stays in its prompt, summed up."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.test_summary import HonestChat
from tests.dialogue.voices import silence, talk
from tests.s2s.small_parts import SpeechParts, small_speech
from tests.s2s.test_moss_speech import Caller
from vivavoce.audio.player import SimulatedClock
from vivavoce.cascade.interfaces import ChatText
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.summary import ChatSummaryWriter
from vivavoce.dialogue import summary
from vivavoce.dialogue.events import ReplyDone
from vivavoce.dialogue.items import Message, TextPart
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, Truncation
from vivavoce.models.llama import chat_file
from vivavoce.s2s.moss_speech import load_speech
from vivavoce.s2s.options import MossSpeechOptions

FACT = re.compile(r"k\d+=\d+")
WRITTEN = ConversationSettings(modality="text", instructions="Be kind.", max_output_tokens=2)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


class Call:
    """A conversation in writing with a speech-to-speech model, on a virtual clock."""

    def __init__(self, pipeline, settings=WRITTEN):
        self.pipeline, self.clock = pipeline, SimulatedClock()
        self.conversation = LiveConversation(pipeline, settings, DialogueOptions(), clock=self.clock)
        self._events = aiter(self.conversation.events())
        self.state = self.conversation._state

    async def say(self, text, seconds=15.0):
        self.clock.advance(seconds)
        item, _ = self.conversation.add(Message("user", (TextPart(text),)))
        self.conversation.reply()
        async with asyncio.timeout(120):
            while not isinstance(event := await anext(self._events), ReplyDone):
                pass
            assert event.reason in ("completed", "max_output_tokens")
            await self.settle()
        return item

    async def settle(self):
        """Wait for commands, and for a summary: it is written while the user is silent."""
        while self.state._summary.is_running:
            await asyncio.sleep(0.001)
        done = asyncio.Event()

        async def is_last() -> None:
            done.set()

        self.state._enqueue(is_last)
        await done.wait()
        if self.state._summary.is_running:
            await self.settle()

    @property
    def prompt(self):
        """The text of the rows in the engine."""
        return self.pipeline.tokenizer.decode([row[0] for row in self.state._sequence.rows])


class FactChat(HonestChat):
    """Sums up by writing down all facts that it reads, such as `k7=13`."""

    async def reply(self, messages, settings):
        text = "\n".join(each["content"] for each in messages)
        assert messages[0]["content"] == summary.SUMMARISE
        self.summaries.append(text)
        yield ChatText(" ".join(FACT.findall(text)) or "They talked.")


async def test_facts_of_the_first_minute_are_in_the_prompt_after_three_hours(parts):
    chat, facts = FactChat(), [f"k{number}={number + 50}" for number in range(40)]
    async with parts.pipeline(context=1800, summary_writer=ChatSummaryWriter(chat)) as pipeline:
        call = Call(pipeline)
        for start in range(0, 40, 10):
            await call.say(" ".join(facts[start : start + 10]))
        assert call.clock.now() <= 61
        while call.clock.now() < 3 * 3600:
            await call.say(f"It is {call.clock.now():.0f} seconds now, and the weather is fine.", seconds=360.0)
        assert len(chat.summaries) > 2
        assert FACT.findall(call.prompt) == facts
        assert call.prompt.count("Be kind.") == 1
        assert f"It is {call.clock.now() - 360:.0f} seconds now" in call.prompt
        assert len(call.prompt) < 1800 and all("seconds now" in text for text in chat.summaries[1:])
        await call.conversation.close()
        assert not pipeline.core.scheduler.sequences


async def test_without_a_writer_the_model_itself_sums_up_in_a_branch_of_the_sequence(parts):
    async with parts.pipeline(context=900, writes_summaries=True) as pipeline:
        call = Call(pipeline)
        while not call.state._summary.text:
            await call.say("A sentence that is said again and again, until it is too long.")
            assert call.clock.now() < 60 * 15, "a summary was written"
        assert summary.EARLIER in call.prompt and call.prompt.count("again and again") <= 4
        assert len(pipeline.core.scheduler.sequences) == 1, "the branch is closed"
        first = call.conversation.items[0]
        call.conversation.delete(first.id)
        await call.settle()
        assert summary.EARLIER not in call.prompt, "what a client deletes is forgotten"
        await call.conversation.close()
        assert not pipeline.core.scheduler.sequences


class FixedTranscriber:
    async def transcribe(self, samples, rate, language=None):
        return "k1=51 is what I said"


async def test_spoken_turns_are_transcribed_for_the_summary(parts):
    chat = FactChat()
    async with parts.pipeline(
        context=420, summary_writer=ChatSummaryWriter(chat), captioner=FixedTranscriber()
    ) as pipeline:
        caller = Caller.on(pipeline, settings=ConversationSettings(max_output_tokens=12))
        state, turns = caller.conversation._state, 0
        while not state._summary.text:
            turns += 1
            await caller.hear(np.concatenate([silence(0.3), talk(1.5), silence(0.6)]))
            await caller.until(ReplyDone, turns)
            await caller.settled()
            while state._summary.is_running:
                await asyncio.sleep(0.001)
            assert turns < 9, "a summary was written"
        assert "user: k1=51 is what I said" in chat.summaries[0] and set(state._summary.text.split()) == {"k1=51"}
        await caller.settled()
        assert summary.EARLIER in pipeline.tokenizer.decode([row[0] for row in state._sequence.rows])
        await caller.close()


@pytest.mark.published
@pytest.mark.full
async def test_a_published_chat_model_sums_up_a_call_of_mini_speech(published_model):
    """Which facts survive is a matter of the chat model (docs/tools.md): here it keeps the most prominent ones."""
    facts = "My name is Anna Keller from Zurich. My room is 214. I leave on Friday. I am vegetarian. My car is a Volvo."
    async with (
        LocalChat.load(str(chat_file(published_model("qwen2.5-coder-0.5b-instruct")))) as chat,
        load_speech(
            "mini-speech", "cpu", options=MossSpeechOptions(summary_writer=ChatSummaryWriter(chat), threads=1)
        ) as pipeline,
    ):
        settings = replace(WRITTEN, truncation=Truncation(max_tokens=400))
        call = Call(pipeline, settings)
        await call.say(facts)
        while not call.state._summary.text:
            await call.say("And how is the weather going to be in the afternoon, do you know?", seconds=720.0)
            assert call.clock.now() < 6 * 3600, "a summary was written"
        while call.clock.now() < 3 * 3600:
            await call.say("Thank you.", seconds=720.0)
        assert summary.EARLIER in call.prompt and facts not in call.prompt
        assert sum(word in call.prompt for word in ("Keller", "Zurich", "214", "Friday", "Volvo")) >= 3
        await call.conversation.close()
