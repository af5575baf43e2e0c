"""Tool calls in streamed text: the same pieces however the text is cut."""

import json

import pytest

from vivavoce.cascade.interfaces import ChatCall, ChatText
from vivavoce.cascade.tool_calls import ToolCallReader, forced_start

CALL = '<tool_call>\n{"name": "book", "arguments": {"nights": 2, "name": "Zoë"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "ring", "arguments": {}}</tool_call>'


def read(text, size):
    reader = ToolCallReader(["book", "ring"])
    pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
    return pieces + reader.flush()


def words(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, ChatText))


def calls(pieces):
    found = [piece for piece in pieces if isinstance(piece, ChatCall)]
    assert [call.index for call in found] == list(range(len(found))) and len({call.call_id for call in found}) == len(
        found
    )
    return [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_separated_from_words_however_the_text_is_cut(size):
    pieces = read(f"One moment.\n{CALL}\n{OTHER}\n", size)
    assert calls(pieces) == [("book", {"nights": 2, "name": "Zoë"}), ("ring", {})]
    assert words(pieces).strip() == "One moment."


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_without_calls_passes(size):
    text = "2 < 3, and <b>bold</b> <tool is no tag"
    assert words(read(text, size)) == text


def test_a_call_that_was_cut_off_counts_if_it_is_complete_and_a_broken_one_is_left_out(caplog):
    assert calls(read('<tool_call>{"name": "ring", "arguments": {"room": 4}}', 5)) == [("ring", {"room": 4})]
    for broken in ('<tool_call>{"name": "ri', "<tool_call>ring</tool_call>", '<tool_call>["secret"]</tool_call>'):
        assert read(broken, 4) == []
    assert "not JSON" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(("choice", "rest"), [("required", 'ring", "arguments": {}}'), ("ring", "{}}")])
def test_a_required_call_is_started_for_the_model(choice, rest):
    assert calls(read(forced_start(choice) + rest, 6)) == [("ring", {})]
    assert forced_start("auto") == forced_start("none") == ""


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_objects_without_tags_are_calls_if_they_name_a_tool(size):
    bare = '{"name": "ring", "arguments": {"room": 4}}'
    pieces = read(f"\n{bare}\n{bare}\n{bare[:20]}", size)
    assert calls(pieces) == [("ring", {"room": 4})] and not words(pieces), "repeated calls are made once"
    for text in (
        '{"name": "other", "arguments": {}}',
        '{"a": 1} is JSON',
        '{"name": "ring"',
        f"Write {bare}",
        "{ well",
    ):
        pieces = read(text, size)
        assert words(pieces) == text and not calls(pieces)
