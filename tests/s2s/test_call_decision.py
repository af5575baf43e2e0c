"""Decisions on tool calls apart from the reply: what they read, what counts as a call, and what follows."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.s2s.small_parts import small_chat
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.call_decision import BIASES, EXAMPLES, NO_CALL, decided_calls, decision_messages
from vivavoce.cascade.interfaces import ChatCall, ChatText
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.device import pick
from vivavoce.dialogue.settings import ConversationSettings, Tool
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY
from vivavoce.models.chat_template import CHATML, ChatTokenizer
from vivavoce.models.llama import Llama
from vivavoce.models.tokenizers import TextTokenizer

pytest.importorskip("llguidance")
NULLABLE = {"type": ["string", "null"]}
ROOM = {
    "type": "object",
    "properties": {"room": {"enum": [3, 4]}, "name": {"type": "string", "maxLength": 4}, "note": NULLABLE},
    "required": ["room", "note"],
    "additionalProperties": False,
}
TOOLS = (Tool("book", "Books a room.", ROOM), Tool("ring", "Rings.", {}))
QUESTION = [{"role": "system", "content": "You are a desk."}, {"role": "user", "content": "A room, please."}]


def calls_in(text):
    return [(call.name, json.loads(call.arguments)) for call in decided_calls(text, TOOLS)]


def test_values_that_were_not_said_are_left_out_and_a_call_without_a_required_one_is_not_made():
    assert calls_in('book {"room": 3, "name": null, "note": null}') == [("book", {"room": 3, "note": None})]
    assert calls_in('book {"room": null, "name": "Mo", "note": null}') == []
    assert calls_in(NO_CALL) == []


def test_several_calls_are_made_each_once_and_one_that_was_cut_is_not():
    text = 'ring {}\nbook {"room": 4, "name": "Mo", "note": "x"}\nring {}\nbook {"room": 3, "na'
    assert calls_in(text) == [("ring", {}), ("book", {"room": 4, "name": "Mo", "note": "x"})]


def test_examples_are_decisions_on_their_own_tools():
    for _, tools, turns in EXAMPLES:
        for words, decision in turns:
            has_values = decision != NO_CALL and json.loads(decision.partition(" ")[2])
            required = {tool.name: tool.parameters["required"] for tool in tools}
            is_whole = has_values and all(has_values[each] is not None for each in required[decision.split()[0]])
            assert len(list(decided_calls(decision, tools))) == bool(is_whole), words


def test_a_prompt_begins_alike_for_all_words_and_has_the_conversation():
    asked = [
        *QUESTION,
        {"role": "assistant", "content": "Which one?"},
        {"role": "user", "content": "Four."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ring", "arguments": "{}"}}]},
        {"role": "tool", "content": "rung"},
        {"role": "user", "content": "Thank you."},
    ]
    first, last = (decision_messages(each, TOOLS) for each in (QUESTION, asked))
    assert first[:-1] == last[:-1] and last[-1]["content"].startswith(first[-1]["content"])
    assert last[-1]["content"].splitlines()[-6:] == [
        "User: A room, please.", "Assistant: Which one?", "User: Four.", "Called: ring {}", "Result: rung",
        "User: Thank you.",
    ]  # fmt: skip
    assert 'book(room: {"enum": [3, 4]}, name: ' in last[-1]["content"] and "You are a desk." in last[-1]["content"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
async def chat(folder, monkeypatch):
    monkeypatch.setattr("vivavoce.cascade.call_decision.EXAMPLES", EXAMPLES[:0])  # letters are its tokens: all is long
    model, _ = Llama.load(folder)
    engine = Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=8192))
    tokenizer = ChatTokenizer(TextTokenizer.load(folder), "{{ tools | tojson if tools }}" + CHATML)
    options = LocalChatOptions(sampling=GREEDY, max_output_tokens=12, max_json_tokens=120)
    async with LocalChat(engine, tokenizer, options) as chat:
        yield chat


async def reply(chat, settings, messages=QUESTION):
    pieces = [piece async for piece in chat.reply(messages, settings)]
    calls = [piece for piece in pieces if isinstance(piece, ChatCall)]
    return "".join(piece.text for piece in pieces if isinstance(piece, ChatText)), calls, pieces[-1]


@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
async def test_what_is_called_is_not_answered_and_what_is_not_is_answered_as_without_tools(chat, monkeypatch, bias):
    monkeypatch.setitem(BIASES, NO_CALL, bias)
    settings = ConversationSettings(tools=TOOLS, parallel_tool_calls=False)
    words, calls, end = await reply(chat, settings)
    plain, _, plain_end = await reply(chat, replace(settings, tools=()))
    if bias > 0:
        assert words == plain and not calls
        assert end.prompt_tokens > plain_end.prompt_tokens and end.completion_tokens > plain_end.completion_tokens
    else:
        assert len(calls) == 1 and not words and calls[0].name in ("book", "ring")
        assert set(json.loads(calls[0].arguments)) <= {"room", "name", "note"}


@pytest.mark.parametrize("waits", [0, 1, 30])
async def test_a_held_reply_that_is_closed_leaves_neither_it_nor_the_decision_running(chat, waits):
    pieces = chat.reply(QUESTION, ConversationSettings(tools=TOOLS))
    first = asyncio.create_task(anext(pieces))
    for _ in range(waits):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await pieces.aclose()
    await chat.engine.close(await chat.engine.open())  # commands run in order: those of the closed reply are over
    assert not any(each.is_generating for each in chat.core.scheduler.sequences.values())
    assert {each.id for each in chat._cached} == set(chat.core.scheduler.sequences)


async def test_what_was_called_is_not_generated_as_a_reply(chat, monkeypatch):
    monkeypatch.setitem(BIASES, NO_CALL, -1000.0)
    _, calls, _ = await reply(chat, ConversationSettings(tools=TOOLS))
    assert calls and not any(each.is_generating for each in chat.core.scheduler.sequences.values())


async def test_words_and_calls_after_an_output_are_not_decided_apart(chat, monkeypatch):
    async def decide(*_):
        raise AssertionError

    monkeypatch.setattr(chat, "_decide", decide)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ring", "arguments": "{}"}}]}
    after = [*QUESTION, call, {"role": "tool", "content": "rung"}]
    settings = ConversationSettings(tools=TOOLS)
    await reply(chat, settings, after)
    await reply(chat, replace(settings, tool_choice="none"))
    _, calls, _ = await reply(chat, replace(settings, tool_choice="ring"))
    assert [each.name for each in calls] == ["ring"]
    with pytest.raises(AssertionError):
        await reply(chat, settings)


async def test_a_model_that_calls_by_its_template_decides_nothing_apart(chat):
    chat.options = replace(chat.options, decides_apart=False)
    assert len(chat.prompt_starts(QUESTION[:1], "A room", ConversationSettings(tools=TOOLS))) == 1


async def test_prompts_are_read_as_soon_as_tools_are_set(chat):
    conversation = CascadeBackend(None, chat, SimpleNamespace(rate=24_000)).open(lambda *_: None)
    plain = ConversationSettings(instructions=QUESTION[0]["content"])
    conversation.set_history((), plain)
    assert conversation._prompt._task is None
    settings = replace(plain, tools=TOOLS)
    conversation.set_history((), settings)
    await conversation._prompt._task
    assert [each.rows for each in chat._prompts] == chat.prompt_starts(QUESTION[:1], "", settings)
    await conversation.close()
    assert not chat._prompts


async def test_both_prompts_are_read_while_the_user_speaks(chat):
    prompt, settings = chat.open_prompt(), ConversationSettings(tools=TOOLS)
    system, said = QUESTION[:1], QUESTION[1]["content"]
    decision, answer = chat.prompt_starts(system, said, settings)
    await prompt.read(system, said, settings)
    assert [each.rows for each in chat._prompts] == [decision, answer] and len(decision) > len(answer)
    await prompt.read(system, said, replace(settings, tools=()))
    assert [each.rows for each in chat._prompts] == [answer]
    await prompt.close()
    assert not chat._prompts
