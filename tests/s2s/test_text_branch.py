"""Tool calls in the text branch of MOSS-Speech, on random weights: whatever they say, calls follow their schemas."""

import asyncio
import copy
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.dialogue.voices import silence, talk
from tests.s2s.small_parts import SpeechParts, small_speech
from tests.s2s.test_moss_speech import Caller
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, ReplyPlan, Spoke, Wrote
from vivavoce.dialogue.events import ReplyAudio, ReplyDone
from vivavoce.dialogue.items import HostedCall, Item, Message, TextPart, ToolCall, ToolOutput
from vivavoce.dialogue.settings import ConversationSettings, HostedTool, Tool
from vivavoce.errors import CheckpointError
from vivavoce.models.moss_speech.cpu import CpuMossSpeech
from vivavoce.s2s.options import MossSpeechOptions, checkpoint_options
from vivavoce.s2s.text_branch import NO_CALL, call_turn, offer, output_turn

pytest.importorskip("llguidance")
TABLE = {
    "type": "object",
    "properties": {"seats": {"type": "integer", "minimum": 1, "maximum": 12}, "place": {"enum": ["inside", "garden"]}},
    "required": ["seats", "place"],
    "additionalProperties": False,
}
SHORT_TEXT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "now": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOLS = (Tool("book_table", "Books a table.", TABLE), Tool("wake", "Calls a room.", SHORT_TEXT), Tool("open_door"))
SCHEMAS = {"book_table": TABLE, "wake": SHORT_TEXT, "open_door": {"type": "object", "maxProperties": 0}}
SETTINGS = ConversationSettings(max_output_tokens=12, tools=TOOLS)
QUESTION = talk(1.0, seed=3)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="module")
def exchanged(parts) -> SpeechParts:
    """The same model, whose text head has the first letters of a call and of none exchanged."""
    model = copy.deepcopy(parts.model)
    rows = [parts.tokenizer.encode(letter)[0] for letter in ("<", NO_CALL[0])]
    model.text_lm_head.weight.data[rows] = parts.model.text_lm_head.weight.data[rows[::-1]]
    return replace(parts, model=model)


async def replied(pipeline, settings=SETTINGS, history=(), sound=QUESTION):
    """The pieces of a reply to a spoken question."""
    state = pipeline.open(lambda *_: None)
    state.set_history(history, settings)
    state.listen(sound.astype(np.float32))
    reply = state.reply(ReplyPlan("item_reply", settings, played=lambda: 0.0))
    async with asyncio.timeout(120):
        pieces = [piece async for piece in reply.pieces()]
    reply.drop()
    await state.close()
    return pieces


def calls_of(pieces):
    """The names and arguments of calls, all of which are valid; the pieces of a reply with calls have nothing else."""
    assert isinstance(pieces[-1], Ended)
    names = [piece.name for piece in pieces if isinstance(piece, CallBegan)]
    arguments = [json.loads(piece.delta) for piece in pieces if isinstance(piece, CallArguments)]
    assert len(names) == len(arguments)
    for name, values in zip(names, arguments, strict=True):
        Draft202012Validator(SCHEMAS[name]).validate(values)
    assert not names or not any(isinstance(piece, Spoke | Wrote) for piece in pieces)
    return list(zip(names, arguments, strict=True))


def sound_of(pieces):
    return np.concatenate([piece.samples for piece in pieces if isinstance(piece, Spoke)])


async def test_a_call_or_speech_and_without_a_call_the_speech_of_a_session_without_tools(parts, exchanged):
    outcomes = []
    for each in (parts, exchanged):
        async with each.pipeline(calls_tools=True) as pipeline:
            pieces = await replied(pipeline)
            plain = await replied(pipeline, replace(SETTINGS, tools=()))
            none = await replied(pipeline, replace(SETTINGS, tool_choice="none"))
            used = len(pipeline.core.scheduler.sequences)
        assert used == 0, "all branches are closed"
        np.testing.assert_array_equal(sound_of(none), sound_of(plain))
        calls = calls_of(pieces)
        outcomes.append(bool(calls))
        if not calls:
            np.testing.assert_array_equal(sound_of(pieces), sound_of(plain))
    assert sorted(outcomes) == [False, True]


@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
async def test_a_bias_decides_between_a_call_and_none_but_not_on_required_calls(parts, exchanged, bias):
    for each in (parts, exchanged):
        async with each.pipeline(calls_tools=True, no_call_bias=bias) as pipeline:
            assert bool(calls_of(await replied(pipeline))) is (bias < 0)
            assert len(calls_of(await replied(pipeline, replace(SETTINGS, tool_choice="required")))) == 1


@pytest.mark.full
@pytest.mark.parametrize("instructions", ["", "You are a hotel.", "Be brief.", "帮助客人。"])
async def test_required_calls_are_valid_and_as_many_as_allowed(parts, exchanged, instructions):
    for each in (parts, exchanged):
        async with each.pipeline(calls_tools=True) as pipeline:
            required = replace(SETTINGS, tool_choice="required", instructions=instructions)
            assert len(calls_of(await replied(pipeline, required))) == 1
            (named,) = calls_of(await replied(pipeline, replace(required, tool_choice="wake")))
            assert named[0] == "wake"
            several = calls_of(await replied(pipeline, replace(required, parallel_tool_calls=True)))
            assert 1 <= len(several) <= 8
            one = replace(required, tool_choice="auto", parallel_tool_calls=False)
            assert len(calls_of(await replied(pipeline, one))) <= 1


async def test_the_cpu_implementation_decides_as_the_plain_one(parts, exchanged):
    for each in (parts, exchanged):
        decided = []
        for model in (each.model, CpuMossSpeech(each.model)):
            async with replace(each, model=model).pipeline(calls_tools=True) as pipeline:
                required = replace(SETTINGS, tool_choice="required")
                decided.append([calls_of(await replied(pipeline, settings)) for settings in (SETTINGS, required)])
        assert decided[0] == decided[1] and decided[0][1]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("steps", [0, 1, 5, 9, 10])
async def test_a_reply_that_is_dropped_before_its_decision_leaves_no_page_behind(parts, choice, steps):
    settings = replace(SETTINGS, tool_choice=choice)
    async with parts.pipeline(calls_tools=True) as pipeline:
        state = pipeline.open(lambda *_: None)
        state.set_history((), settings)
        state.listen(QUESTION.astype(np.float32))
        reply = state.reply(ReplyPlan("item_reply", settings, played=lambda: 0.0))
        async with asyncio.timeout(120):
            while pipeline.core.steps < steps:
                await asyncio.sleep(0)
        reply.drop()
        await state.close()
        assert not pipeline.core.scheduler.sequences
        assert pipeline.core.scheduler.pool.free == pipeline.core.scheduler.pool.size


@pytest.mark.full
async def test_a_choice_that_names_no_tool_fails_and_auto_goes_on_in_speech(parts):
    async with parts.pipeline(calls_tools=True) as pipeline:
        pieces = await replied(pipeline, replace(SETTINGS, tool_choice="sing"))
        assert pieces == [Ended("failed", "there is no tool 'sing', which tool_choice names")]
        contradiction = (Tool("odd", "", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),)
        spoken = await replied(pipeline, replace(SETTINGS, tools=contradiction))
        assert len(sound_of(spoken)) > 0 and spoken[-1].reason != "failed"


@pytest.mark.full
async def test_branches_of_several_sessions_run_together_and_alone_alike(parts, exchanged):
    questions = [talk(0.8, seed=seed) for seed in range(3)]
    for each in (parts, exchanged):
        async with each.pipeline(calls_tools=True) as pipeline:
            alone = [calls_of(await replied(pipeline, sound=sound)) for sound in questions]
            mixed = [replied(pipeline, sound=sound) for sound in questions]
            plain = [replied(pipeline, replace(SETTINGS, tools=()), sound=sound) for sound in questions]
            results = await asyncio.gather(*mixed, *plain)
        assert [calls_of(pieces) for pieces in results[:3]] == alone
        assert all(len(sound_of(pieces)) > 0 for pieces in results[3:])


async def test_calls_and_outputs_are_part_of_the_prompt_in_the_words_of_the_template(parts):
    call = ToolCall("call_1", "wake", '{"name": "Zoë"}')
    hosted = replace(call, hosted=HostedCall(HostedTool("viva", "wake"), "completed", output="ok"))
    history = [
        Item("a", Message("user", (TextPart("hi"),))),
        *(Item("b", call), Item("c", ToolOutput("call_1", "done"))),
        *(Item("d", hosted), Item("e", replace(hosted, hosted=replace(hosted.hosted, state="asked", output=None)))),
    ]
    async with parts.pipeline(calls_tools=True) as pipeline:
        state = pipeline.open(lambda *_: None)
        rows = await state._rows_of_history(history, SETTINGS)
        await state.close()
    text = parts.tokenizer.decode([row[0] for row in rows])
    written = '<tool_call>\n{"name": "wake", "arguments": {"name": "Zoë"}}\n</tool_call>\n'
    assert text.count(written) == 2 and "<tool_response>\ndone\n</tool_response>" in text
    assert text.endswith("<tool_response>\nok\n</tool_response>\n")
    assert call_turn(ToolCall("c", "wake", "not JSON")).content.count("not JSON") == 1
    assert len(output_turn("x" * (10 << 20)).content) < 9000
    offered = offer(TOOLS).content
    assert [json.loads(line)["function"]["name"] for line in offered.splitlines() if line.startswith('{"type"')] == [
        *("book_table", "wake", "open_door")
    ]
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in offered


@pytest.mark.full
async def test_a_call_in_a_conversation_is_followed_by_speech_once_its_output_is_there(parts, exchanged):
    async with parts.pipeline(calls_tools=True) as pipeline, exchanged.pipeline(calls_tools=True) as other:
        calling = pipeline if calls_of(await replied(pipeline)) else other
        caller = Caller.on(calling, settings=replace(SETTINGS, tool_choice="wake"))
        await caller.hear(np.concatenate([silence(0.3), talk(1.0), silence(0.6)]))
        await caller.until(ReplyDone)
        call = caller.conversation.items[-1].content
        assert isinstance(call, ToolCall) and call.name == "wake" and caller.all(ReplyAudio) == []
        caller.conversation.add(ToolOutput(call.call_id, "awake"))
        caller.conversation.update(lambda settings: replace(settings, tool_choice="none"))
        caller.conversation.reply()
        await caller.until(ReplyDone, 2)
        assert len(caller.sound()) > 0 and isinstance(caller.conversation.items[-1].content, Message)
        await caller.close()


async def test_written_replies_follow_a_schema(parts):
    settings = replace(SETTINGS, modality="text", max_output_tokens=200, output_schema=TABLE, tool_choice="none")
    async with parts.pipeline() as pipeline:
        pieces = await replied(pipeline, settings)
    text = "".join(piece.text for piece in pieces if isinstance(piece, Wrote))
    Draft202012Validator(TABLE).validate(json.loads(text))


@pytest.mark.parametrize(("said", "asked", "expected"), [(True, None, True), (True, False, False), (False, True, True)])
def test_the_checkpoint_or_an_option_switches_the_branch_on(tmp_path, said, asked, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"tool_calls": said}))
    options = checkpoint_options(tmp_path, MossSpeechOptions(calls_tools=asked))
    assert options.calls_tools is expected and options.writes_summaries is False
    (tmp_path / "generation_config.json").write_text(json.dumps({"summaries": said}))
    options = checkpoint_options(tmp_path, MossSpeechOptions(writes_summaries=asked))
    assert options.writes_summaries is expected and options.calls_tools is False


def test_the_checkpoint_says_how_readily_it_calls(tmp_path):
    assert checkpoint_options(tmp_path, MossSpeechOptions()).no_call_bias == 0.0
    (tmp_path / "generation_config.json").write_text(json.dumps({"no_call_bias": 1.5}))
    assert checkpoint_options(tmp_path, MossSpeechOptions()).no_call_bias == 1.5
    (tmp_path / "generation_config.json").write_text(json.dumps({"no_call_bias": "much"}))
    with pytest.raises(CheckpointError, match="generation_config"):
        checkpoint_options(tmp_path, MossSpeechOptions())


WITHOUT_LLGUIDANCE = """
import sys
sys.modules["llguidance"] = None
from vivavoce import hub
from vivavoce.s2s.moss_speech import load_moss_speech
print(load_moss_speech(hub.resolve("mini-speech"), device="cpu").options.calls_tools)
"""


def test_a_plain_install_runs_a_checkpoint_that_calls_tools_without_its_calls():
    command = [sys.executable, "-c", WITHOUT_LLGUIDANCE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr
