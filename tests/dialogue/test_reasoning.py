"""What a chat model thinks aloud is neither spoken nor remembered."""

import itertools
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dialogue.test_cascade import Listener, converse, serve, words
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.remote import ChatEndpoint
from vivavoce.cascade.sentences import CLOSE_TAG, OPEN_TAG, ReasoningFilter
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.backend import ReplyPlan, Wrote
from vivavoce.dialogue.events import ReplyDone, ReplyText
from vivavoce.dialogue.items import Message, TextPart
from vivavoce.dialogue.settings import ConversationSettings

__all__ = ["serve"]  # a fixture

PIECES = st.sampled_from([OPEN_TAG, CLOSE_TAG, "<", "</", "<thi", "nk>", ">", " ", "\n", "a", "Well, ", "</th", "ink>"])
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def filtered(chunks: list[str]) -> str:
    reasoning = ReasoningFilter()
    return "".join([*map(reasoning.push, chunks), reasoning.flush()])


def reference(text: str) -> str:
    """The same on the whole text, by a regular expression."""
    kept, end = "", 0
    for block in re.finditer(r"<think>.*?(?:</think>|\Z)|</think>", text, re.DOTALL):
        kept += _trimmed(kept, text[end : block.start()], end)
        end = block.end()
    return kept + _trimmed(kept, text[end:], end)


def _trimmed(kept: str, text: str, begin: int) -> str:
    return text.lstrip() if begin and not kept.strip() else text


@given(TEXTS, st.lists(st.integers(0, 60), max_size=10))
def test_any_chunking_of_any_text_gives_the_text_without_its_blocks(text, cuts):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[begin:end] for begin, end in itertools.pairwise(places)]
    assert filtered(chunks) == filtered(list(text)) == reference(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>Hm.</think>\n\nYes.", "Yes."),
        ("Yes. <think>Hm.</think>No.", "Yes. No."),
        ("<think></think>Yes.", "Yes."),
        ("<think>for ever", ""),
        ("I think</think>Yes.", "I thinkYes."),
        ("1 < 2 and <b>", "1 < 2 and <b>"),
        ("a <thin", "a <thin"),
        ("  Yes.", "  Yes."),
    ],
)
def test_blocks_go_and_everything_else_stays(text, left):
    assert filtered([text]) == filtered(list(text)) == left


async def test_nothing_is_said_while_a_model_thinks(serve):
    endpoint = serve(words("<th", "ink>Is it ", "noon? No.</", "think>\n\nIt is ", "one <", " two. Bye"))

    def play(conversation):
        conversation.add(Message("user", (TextPart("What time is it?"),)))
        conversation.reply()

    events, voice, items, _ = await converse(endpoint, play)
    assert voice.said == ["It is one < two.", "Bye"]
    assert "".join(event.delta for event in events if isinstance(event, ReplyText)) == "It is one < two. Bye"
    assert items[-1].content.parts[0].transcript == "It is one < two. Bye"


async def test_a_thought_that_never_ends_is_an_empty_reply(serve):
    endpoint = serve(words("<think>", "Hm. ", "Or so?", reason="length"))
    events, voice, items, _ = await converse(endpoint, lambda conversation: conversation.reply())
    assert next(event for event in events if isinstance(event, ReplyDone)).reason == "max_output_tokens"
    assert not voice.said and not any(isinstance(event, ReplyText) for event in events)
    assert not any("Hm" in str(item) for item in items)


async def test_fields_of_reasoning_are_ignored_and_calls_keep_their_place(serve):
    call = {"index": 0, "id": "c", "function": {"name": "book", "arguments": "{}"}}
    deltas = [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "content": None},
        {"content": "Wait <", "reasoning_content": "Hm."},
        {"tool_calls": [call]},
    ]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    endpoint = serve([*chunks, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}])
    pieces = [piece async for piece in ChatEndpoint(endpoint.url, "m").reply([], ConversationSettings())]
    said = [ChatText("Wait "), ChatText("<")]
    assert pieces == [*said, ChatCall(0, "c", "book", "{}"), ChatEnd("tool_calls", 0, 0)]


class QuietVoice:
    """Keeps what it is given to say."""

    rate = 16_000

    def __init__(self):
        self.said = []

    async def speak(self, text, voice, speed):
        self.said.append(text)
        yield np.full(160, 0.1, np.float32)


THOUGHTS = ("Zounds, zinc? ", "zero < zwei. ", "\n\nzebra\n", "zig</thi", "zag <think zip ", "z. " * 40)
ANSWERS = ("Yes. ", "It is one < two. ", "We open at 7, for 3 <b>. ", "\n\nOf course! ", "A table: done. ")


def scripted_reply(random: Random) -> tuple[list[dict], str]:
    """Deltas of a reply that thinks in tags and in fields, cut anywhere; and its answer."""
    text, answer = "", ""
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.8:
            text += f"{OPEN_TAG}{''.join(random.choices(THOUGHTS, k=random.randint(0, 3)))}{CLOSE_TAG}"
        spoken = random.choice(ANSWERS)
        text, answer = text + spoken, answer + spoken
    if random.random() < 0.2:
        text += f"{OPEN_TAG}{random.choice(THOUGHTS)}"  # ends while it thinks
    cuts = sorted({0, len(text), *(random.randrange(len(text)) for _ in range(8))})
    deltas = [{"content": text[begin:end]} for begin, end in itertools.pairwise(cuts)]
    for field in random.sample(["reasoning", "reasoning_content"], random.randint(0, 2)):
        deltas.insert(random.randrange(len(deltas) + 1), {field: random.choice(THOUGHTS)})
    return deltas, answer


async def test_no_thought_is_spoken_in_a_thousand_replies(serve):
    random, endpoint = Random(26), serve([])
    voice = QuietVoice()
    backend = CascadeBackend(WholeTurns(Listener()), ChatEndpoint(endpoint.url, "m"), voice)
    state = backend.open(lambda *_: None)
    settings = ConversationSettings(instructions="Be brief.")
    for _ in range(1000):
        deltas, answer = scripted_reply(random)
        endpoint.chunks = [*({"choices": [{"delta": delta}]} for delta in deltas), *words()]
        voice.said.clear()
        reply = state.reply(ReplyPlan("item_reply", settings, played=lambda: 0.0, includes_turn=False))
        written = "".join([piece.text async for piece in reply.pieces() if isinstance(piece, Wrote)])
        reply.drop()
        assert written.split() == answer.split() and " ".join(voice.said).split() == answer.split()
        assert "z" not in " ".join(voice.said).lower()
    await state.close()
