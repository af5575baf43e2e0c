"""`viva bench tool-calls` against the real server on a real socket, and how calls are compared."""

import json

import jsonschema
import numpy as np
import pytest

from tests.bench.test_tools import Host
from tests.server.harness import RunningServer
from tests.server.test_live_conversation import RATE
from vivavoce.audio.io import float_to_pcm16
from vivavoce.bench.described_tools import DESCRIBED_TOOLS
from vivavoce.bench.tool_requests import (
    INSTRUCTIONS,
    ScoredRequest,
    SpokenRequest,
    _ask,
    _scored,
    drawn_requests,
    figures,
    is_right,
)
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.s2s.text_branch import NO_CALL
from vivavoce.server.config import ServerOptions
from vivavoce.train.front_desk.answers import Exchange
from vivavoce.train.front_desk.tools import TOOLS, written_call
from vivavoce.train.lm.tool_examples import EVALUATED_TOOLS


class Waiter:
    """Calls `order` in sessions that have it, or answers in words."""

    def __init__(self):
        self.prompts = []

    async def reply(self, messages, settings):
        self.prompts.append(messages[0])
        if any(tool.name == "order" for tool in settings.tools):
            yield ChatCall(0, "call_1", "order", '{"dish": "Salmon"}')
        else:
            yield ChatText("Here you are.")
        yield ChatEnd("stop", 5, 7)


def request(text, call):
    pcm = float_to_pcm16(np.full(RATE // 4, 0.1, np.float32)).tobytes()
    return SpokenRequest(Exchange("order", text, "", (), call), "voice", pcm)


async def test_a_request_is_asked_with_the_desks_tools_and_its_call_is_scored():
    host, chat = Host(), Waiter()
    host.chat = chat
    salmon = written_call("order", {"dish": "grilled salmon"})
    asked = [request("the salmon", salmon), request("hello", NO_CALL)]
    async with RunningServer(host, ServerOptions(opens_per_minute=1e5)) as server:
        calls = [await _ask(f"{server.ws}/v1/realtime", None, each, INSTRUCTIONS, EVALUATED_TOOLS) for each in asked]
    assert all("front desk of a restaurant" in str(prompt) for prompt in chat.prompts)
    assert calls == [(written_call("order", {"dish": "Salmon"}),)] * 2
    scored = [
        ScoredRequest(each, made, is_right(each.exchange.call, made)) for each, made in zip(asked, calls, strict=True)
    ]
    found = figures(scored)
    assert found["right_calls"] == 1 and found["right_without_call"] == 0
    assert [entry["said"] for entry in found["wrong"]] == ["hello"]


def test_described_tools_take_what_the_desks_own_take():
    """Every right call is valid for them, so that the same requests are scored by the same calls."""
    parameters = {tool.name: tool.parameters for tool in DESCRIBED_TOOLS}
    assert [tool.name for tool in DESCRIBED_TOOLS if tool.name in TOOLS] == sorted(TOOLS, key=list(parameters).index)
    for exchange in drawn_requests(120, 0, seed=0):
        name, arguments = (json.loads(exchange.call)[key] for key in ("name", "arguments"))
        if name in ("order", "look_up"):  # their values are listed, by the names that guests use
            (key,) = arguments
            assert any(
                is_right(exchange.call, [written_call(name, {key: value})])
                for value in parameters[name]["properties"][key]["enum"]
            )
        else:
            jsonschema.validate(arguments, parameters[name])


def test_a_request_without_a_reply_is_wrong_and_ends_nothing():
    scored = _scored("ws://127.0.0.1:1/v1/realtime", None, request("hello", NO_CALL), "", EVALUATED_TOOLS)
    assert not scored.is_right and scored.failure
    found = figures([scored])
    assert found["failed"] == 1 and found["right_without_call"] == 0 and found["wrong"][0]["failure"]


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"people": 4, "time": "8:30", "day": "friday"}, True),
        ({"people": "four", "time": "half past eight", "day": "on Friday"}, True),
        ({"people": 4, "time": "20:30", "day": "Friday", "name": ""}, True),
        ({"people": 4, "time": "8:30 PM", "day": "this Friday", "name": None}, True),
        ({"people": 4, "time": "8:30"}, False),
        ({"people": 4, "time": "8:30", "day": "friday", "name": "Guest"}, False),
        ({"people": 14, "time": "8:30", "day": "friday"}, False),
        ({"people": 4, "time": "8:15", "day": "friday"}, False),
    ],
)
def test_arguments_may_be_written_in_several_ways_but_must_be_those_that_were_said(arguments, right):
    expected = written_call("book_table", {"people": 4, "time": "8:30", "day": "friday"})
    assert is_right(expected, [written_call("book_table", arguments)]) == right


def test_another_tool_two_calls_or_a_call_where_none_is_right_are_wrong():
    room, table = written_call("book_room", {"nights": 2}), written_call("book_table", {"people": 2, "time": "8:00"})
    assert is_right(room, [room])
    assert not is_right(room, [table]) and not is_right(room, [room, room]) and not is_right(room, [])
    assert is_right(NO_CALL, []) and not is_right(NO_CALL, [room])


def test_subjects_are_found_at_the_beginning_of_what_is_looked_up():
    expected = written_call("look_up", {"subject": "wifi"})
    assert is_right(expected, [written_call("look_up", {"subject": "Wi-Fi password"})])
    assert not is_right(expected, [written_call("look_up", {"subject": "menu"})])
    hours = written_call("look_up", {"subject": "restaurant hours"})
    assert is_right(hours, [written_call("look_up", {"subject": "restaurant"})])
    assert not is_right(hours, [written_call("look_up", {"subject": "room price"})])
    soup = written_call("look_up", {"subject": "onion soup"})
    assert is_right(soup, [written_call("look_up", {"subject": "price of the onion soup"})])


def test_requests_are_distinct_and_of_both_kinds_and_the_same_for_a_seed():
    drawn = drawn_requests(40, 20, seed=3)
    assert drawn == drawn_requests(40, 20, seed=3)
    assert len({each.user for each in drawn}) == 60
    assert sum(each.call == NO_CALL for each in drawn) == 20
    assert {json.loads(each.call)["name"] for each in drawn if each.call != NO_CALL} == {
        *("book_table", "book_room", "order", "look_up")
    }
