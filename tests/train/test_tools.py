"""Dialogues in which the desk calls functions, and their examples: the layout is that of the engine's text branch."""

import json

import numpy as np
import pytest

from vivavoce.dialogue.items import ToolCall
from vivavoce.engine.constraints import CallSchema, GrammarCompiler
from vivavoce.engine.schema_limits import check_schema
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt, Turn
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.s2s.text_branch import NO_CALL, call_turn, offer, output_turn
from vivavoce.train.front_desk import language, tool_dialogues
from vivavoce.train.front_desk.mandarin_values import number_words
from vivavoce.train.front_desk.tools import OTHERS, TOOLS, ToolDialogueState
from vivavoce.train.lm import train_tokenizer
from vivavoce.train.lm.batches import REPLY_TEXT, LMBatches, LMBatchOptions
from vivavoce.train.lm.corpus import pseudo_data
from vivavoce.train.lm.dialogue_plan import DialoguePlan
from vivavoce.train.lm.initial_model import make_config
from vivavoce.train.lm.recipe import TINY
from vivavoce.train.lm.tool_examples import (
    DECISION_SHARES,
    DECLINED,
    INCOMPLETE,
    ROLES,
    Offers,
    decision_of,
    kind_of_decision,
    offer_text,
    returned,
    tool_instructions,
    written,
)

ENGLISH = language("en", 2)
PLAN = DialoguePlan(
    spoken=4, written=2, general=2, read=2, versions=1, held_out=2, held_out_general=1, tools=120, edition=2
)
TOOLS_ALONE = {"speech_tools": 0.5, "text_tools": 0.5}
PLAIN = LMBatchOptions(
    late_system=0.0, no_system=1.0, other_system=0.0, tool_instructions=0.0, interrupted=0.0, position_gap=0.0
)


def _exchange(intent, state=None, **slots):
    state = state or ToolDialogueState()
    return state.exchange(intent, "…", tuple(slots.items()), ENGLISH)


def test_a_booking_is_made_when_what_it_needs_is_known():
    state = ToolDialogueState()
    asked = _exchange("table", state, time="a quarter to nine", day="on friday")
    assert asked.call == NO_CALL and asked.reply.endswith("For how many people?")
    made = _exchange("give_people", state, people="four")
    assert json.loads(made.call) == {
        "name": "book_table",
        "arguments": {"people": 4, "time": "8:45", "day": "friday"},
    }
    assert made.output == '{"status": "booked"}'
    assert made.reply == "A table for four on friday at a quarter to nine. Your table is booked."


@pytest.mark.parametrize(
    ("intent", "slots", "name", "arguments"),
    [
        ("room", {"nights": "three", "name": "Baker"}, "book_room", {"nights": 3, "name": "Baker"}),
        ("order", {"dish": "beef steak"}, "order", {"dish": "beef steak"}),
        ("price", {"dish": "ice cream"}, "look_up", {"subject": "ice cream"}),
        ("breakfast", {}, "look_up", {"subject": "breakfast"}),
        ("restaurant_hours", {}, "look_up", {"subject": "restaurant hours"}),
    ],
)
def test_what_is_called(intent, slots, name, arguments):
    made = _exchange(intent, **slots)
    assert json.loads(made.call) == {"name": name, "arguments": arguments}
    properties = TOOLS[name].parameters["properties"]
    assert list(json.loads(made.call)["arguments"]) == [each for each in properties if each in arguments]


def test_the_reply_has_the_price_that_was_looked_up():
    lines = [line[0] for line in tool_dialogues("train", 600, 1, (1, 1), ENGLISH) if line[0].intent == "price"]
    euros = {json.loads(each.output)["euros"] for each in lines}
    assert len(euros) > 10 and {each.reply.split(" is ")[1] for each in lines} >= {"twenty four euros."}


def test_a_price_is_said_in_the_words_and_the_currency_of_the_language():
    lines = [line[0] for line in tool_dialogues("train", 300, 1, (1, 1), language("zh", 2))]
    prices = [line for line in lines if line.intent == "price"]
    for line in prices:
        words = number_words(json.loads(line.output)["yuan"])
        assert line.reply.endswith(f"一份{words}元。")
    assert len({line.reply for line in prices}) > 10
    assert {json.loads(line.output)["found"] for line in lines if line.intent == "room_price"} == {
        "3150 yuan a night, with breakfast"
    }


@pytest.mark.parametrize(
    ("intent", "slots", "kind"),
    [
        ("table", {"people": "four"}, INCOMPLETE),
        ("table", {"people": "four", "time": "half past seven"}, "book_table"),
        ("decline", {}, DECLINED),
        ("thanks", {}, NO_CALL),
    ],
)
def test_the_kind_of_a_decision(intent, slots, kind):
    assert kind_of_decision(_exchange(intent, **slots)) == kind


def test_what_is_declined_without_tools_is_a_turn_without_a_call(batches):
    declined = [
        (line, number)
        for line, number in batches._decisions["text"][DECLINED]
        if not any(exchange.call for exchange in batches.data.dialogues[line])
    ]
    assert declined and all(number == 0 for _, number in declined)


def test_every_turn_is_a_call_or_none_and_nearly_all_kinds_occur():
    lines = tool_dialogues("held_out", 300, 0, (1, 3), ENGLISH)
    decisions = [decision_of(exchange) for line in lines for exchange in line]
    assert set(decisions) == {*TOOLS, NO_CALL}
    assert {kind_of_decision(exchange) for line in lines for exchange in line} == DECISION_SHARES.keys()
    assert all(bool(exchange.output) == (exchange.call != NO_CALL) for line in lines for exchange in line)
    assert lines == tool_dialogues("held_out", 300, 0, (1, 3), ENGLISH)


def test_the_texts_are_those_of_the_text_branch():
    made = _exchange("order", dish="onion soup")
    call = json.loads(made.call)
    assert written(made) == call_turn(ToolCall("id", call["name"], json.dumps(call["arguments"]))).content
    assert returned(made) == output_turn(made.output).content
    for tool in (*TOOLS.values(), *OTHERS):
        check_schema(tool.parameters, tool.name)


def test_an_offer_has_the_tool_that_is_called_unless_it_is_withheld():
    offers, source, made = Offers(), np.random.default_rng(0), _exchange("order", dish="onion soup")
    drawn = [offers.draw(made, source) for _ in range(200)]
    assert all(('"name": "order"' in text) == (decided != NO_CALL) for text, decided in drawn)
    assert 0.03 < sum(decided == NO_CALL for _, decided in drawn) / 200 < 0.25


@pytest.fixture(scope="module")
def batches():
    data, _ = pseudo_data(PLAN, 64)
    backend = train_tokenizer([*data.written, offer_text(tuple(TOOLS.values()))], TINY.text_entries)
    tokenizer = TextTokenizer(backend)
    config = make_config(TINY, tokenizer, backend.get_vocab_size(), 64)
    return LMBatches(config, tokenizer, data, TOOLS_ALONE, options=PLAIN)


def test_a_decision_is_the_prompt_of_the_text_branch_and_what_is_decided(batches):
    tokenizer = batches.prompt.tokenizer
    prompt = MossSpeechPrompt(batches.config, tokenizer)
    source, seen = np.random.default_rng(1), set()
    for _ in range(60):
        example = batches.decision("text", source)
        rows = example.rows()
        decided = tokenizer.decode([int(row[0]) for row in rows if row[2] == REPLY_TEXT])
        seen.add(decided.partition('", "arguments')[0])
        text = tokenizer.decode([int(row[0]) for row in rows])
        offered = text[text.index("# Tools") : text.rindex("If no function is needed") + 40].split("\nassistant")[0]
        offered_rows = prompt.turn(Turn("system", offered.removesuffix("\n"))) + prompt.open_reply("text")
        end = next(i for i, row in enumerate(rows) if row[2] == REPLY_TEXT)
        assert [tuple(map(int, row[:2])) for row in rows[end - len(offered_rows) : end]] == offered_rows
    assert seen == {NO_CALL, *(f'<tool_call>\n{{"name": "{name}' for name in TOOLS)}


def test_most_decisions_are_made_under_instructions_of_sessions_with_tools(batches):
    source, texts = np.random.default_rng(2), []
    with_instructions = LMBatches(
        batches.config, batches.prompt.tokenizer, batches.data, TOOLS_ALONE, options=LMBatchOptions()
    )
    for _ in range(100):
        rows = with_instructions.decision("text", source).rows()
        texts.append(batches.prompt.tokenizer.decode([int(row[0]) for row in rows]))
    instructed = [text for text in texts if text.startswith(tuple(f"system\n{role}" for role in ROLES))]
    assert 45 < len(instructed) < 90
    assert sum("restaurant hours" in text.partition("# Tools")[0] for text in instructed) > 20


def test_instructions_are_drawn_by_their_seed():
    drawn = tool_instructions(200, seed=3)
    assert drawn == tool_instructions(200, seed=3) != tool_instructions(200, seed=4)
    assert len(set(drawn)) > 150 and max(map(len, drawn)) < 600
    assert all(text.startswith(ROLES) for text in drawn)


def test_a_conversation_has_the_call_and_its_output_before_the_reply(batches):
    line = next(line for line in batches.data.dialogues if line[-1].output)
    rows = batches.conversation(line, "text_text", np.random.default_rng(0)).rows()
    text = batches.prompt.tokenizer.decode([int(row[0]) for row in rows])
    asked, called = text.index(written(line[-1])), text.index(returned(line[-1]))
    assert asked < called < text.rindex(line[-1].reply)
    learned = batches.prompt.tokenizer.decode([int(row[0]) for row in rows if row[2] == REPLY_TEXT])
    assert "tool_call" not in learned and line[-1].reply in learned


def test_data_without_tools_has_no_decisions():
    data, _ = pseudo_data(DialoguePlan(spoken=4, written=2, general=2, read=2, versions=1, held_out=2), 64)
    tokenizer = TextTokenizer(train_tokenizer(data.written, TINY.text_entries))
    config = make_config(TINY, tokenizer, 320, 64)
    assert LMBatches(config, tokenizer, data).modes == [
        *("speech_speech", "speech_text", "text_speech", "text_text", "mixed", "transcribe", "read")
    ]


def test_the_offer_names_its_tools_in_the_published_words():
    text = offer(tuple(TOOLS.values())).content
    assert text.startswith("# Tools\n\nYou may call one or more functions") and text.count('"type": "function"') == 4


def test_the_mask_of_the_engine_allows_every_call_as_it_is_written(batches):
    pytest.importorskip("llguidance")
    tokenizer = batches.prompt.tokenizer
    compiler = GrammarCompiler(tokenizer.to_json(), batches.config.vocab_size, batches.config.eos_token_id)
    grammar = compiler.calls(
        [CallSchema(tool.name, tool.parameters) for tool in TOOLS.values()], max_calls=1, otherwise=NO_CALL
    )
    texts = {written(exchange) for line in batches.data.dialogues for exchange in line if exchange.call}
    assert len(texts) > 20
    for text in texts:
        matcher = grammar.start()
        for token in [*tokenizer.encode(text), batches.config.eos_token_id]:
            bits = matcher.allowed()
            assert bits[token // 32] >> (token % 32) & 1, (text, tokenizer.decode([token]))
            matcher.accept(token)
