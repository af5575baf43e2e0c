"""Local chat with tools and schemas: whatever the model would write, calls and JSON are valid."""

import json
from dataclasses import replace

import pytest

from tests.s2s.small_parts import small_chat
from vivavoce.cascade.interfaces import ChatCall, ChatText
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.device import pick
from vivavoce.dialogue.settings import ConversationSettings, Tool
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Sampling
from vivavoce.errors import InputError
from vivavoce.models.chat_template import CHATML, ChatTokenizer
from vivavoce.models.llama import Llama
from vivavoce.models.tokenizers import TextTokenizer

pytest.importorskip("llguidance")
OPTIONS = LocalChatOptions(sampling=Sampling(temperature=1.0, top_k=0), cache_rows=2048)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
ROOM = {"type": "object", "properties": {"room": {"enum": [3, 4]}}, "required": ["room"], "additionalProperties": False}
TOOLS = (Tool("book", "Books a room.", ROOM), Tool("ring", "Rings.", {}))
QUESTION = [{"role": "user", "content": "A room, please."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
async def chat(folder):
    model, _ = Llama.load(folder)
    engine = Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=2048))
    async with LocalChat(engine, ChatTokenizer(TextTokenizer.load(folder), WITH_TOOLS), OPTIONS) as chat:
        yield chat


async def reply(chat, settings):
    pieces = [piece async for piece in chat.reply(QUESTION, settings)]
    calls = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ChatCall)]
    return "".join(piece.text for piece in pieces if isinstance(piece, ChatText)), calls


@pytest.mark.parametrize(("choice", "names"), [("required", {"book", "ring"}), ("book", {"book"}), ("ring", {"ring"})])
async def test_a_required_call_is_valid_though_the_weights_are_random(chat, choice, names):
    settings = ConversationSettings(tools=TOOLS, tool_choice=choice)
    for temperature in (0.0, 0.7, 1.5):
        words, calls = await reply(chat, replace(settings, temperature=temperature))
        assert not words and len(calls) == 1
        name, arguments = calls[0]
        assert name in names and arguments in ([{"room": 3}, {"room": 4}] if name == "book" else [{}])


async def test_without_a_choice_of_tools_the_model_may_talk(chat):
    words, calls = await reply(chat, ConversationSettings(tools=TOOLS, max_output_tokens=20))
    assert words and not calls
    words, calls = await reply(chat, ConversationSettings(tools=TOOLS, tool_choice="none", max_output_tokens=20))
    assert words and not calls


async def test_a_written_reply_follows_a_schema(chat):
    schema = {
        "type": "object",
        "properties": {"guests": {"type": "integer", "minimum": 1, "maximum": 9}, "late": {"type": "boolean"}},
        "required": ["guests", "late"],
        "additionalProperties": False,
    }
    words, calls = await reply(chat, ConversationSettings(output_schema=schema, tools=TOOLS, modality="text"))
    values = json.loads(words)
    assert 1 <= values["guests"] <= 9 and isinstance(values["late"], bool) and not calls


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (ConversationSettings(tools=TOOLS, tool_choice="sing"), "no tool 'sing'"),
        (ConversationSettings(tools=(Tool("book", "", {"type": "array"}),)), "cannot be followed"),
        (ConversationSettings(output_schema={"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
    ],
)
async def test_what_cannot_be_followed_is_refused_and_the_next_reply_is_made(chat, settings, complaint):
    with pytest.raises(InputError, match=complaint):
        await reply(chat, settings)
    words, _ = await reply(chat, ConversationSettings(max_output_tokens=8))
    assert words
