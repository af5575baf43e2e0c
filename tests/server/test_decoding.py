"""Errors of events that are not events of the protocol: their code, the path of the field, and what would be right."""

import json

import pytest

from tests.server.harness import connected
from vivavoce.server.realtime.client_events import MAX_EVENT_ID, decode_client_event
from vivavoce.server.wire import WireError


def refusal(message: str) -> WireError:
    with pytest.raises(WireError) as refused:
        decode_client_event(message)
    return refused.value


@pytest.mark.parametrize(
    ("session", "param", "code", "words"),
    [
        ({"instructions": 5}, "session.instructions", "invalid_type", "expected a string, but got an integer"),
        ({"tool_choice": "any"}, "session.tool_choice", "invalid_value", "'none'"),
        (
            {"audio": {"input": {"format": {"rate": 11_025}}}},
            "session.audio.input.format.rate",
            "invalid_value",
            "8000, 16000, 24000, and 48000",
        ),
        ({"max_output_tokens": 5000}, "session.max_output_tokens", "integer_above_max_value", "<= 4096, but got 5000"),
    ],
)
def test_the_error_names_the_field_and_what_it_takes(session, param, code, words):
    error = refusal(json.dumps({"type": "session.update", "event_id": "mine", "session": session}))
    assert (error.param, error.code, error.event_id) == (param, code, "mine") and words in str(error)


def test_the_types_of_items_are_named():
    item = {"type": "message", "role": "user", "content": [{"type": "input_video"}]}
    error = refusal(json.dumps({"type": "conversation.item.create", "item": item}))
    assert error.param == "item.content[0].type" and "'input_text'" in str(error)


def test_parts_must_fit_the_role():
    item = {"type": "message", "role": "system", "content": [{"type": "input_audio", "audio": ""}]}
    error = refusal(json.dumps({"type": "conversation.item.create", "item": item}))
    assert error.code == "invalid_value" and "a system message cannot have input_audio parts" in str(error)


@pytest.mark.parametrize("message", ["", "{", "NaN", '{"type": "\ud800"}', '{"type": "\\ud800 "}', '{"x": ' * 50_000])
def test_what_is_no_json(message):
    assert refusal(message).code == "invalid_json"


@pytest.mark.parametrize("message", ["[]", "3", '"text"', "null", "[" * 50_000])
def test_what_is_no_object(message):
    assert refusal(message).code == "invalid_event"


@pytest.mark.parametrize("id", [7, "x" * (MAX_EVENT_ID + 1), ["mine"]])
def test_an_event_id_that_is_none_is_refused_and_not_repeated(id):
    error = refusal(json.dumps({"type": "response.cancel", "event_id": id}))
    assert error.param == "event_id" and error.event_id is None


async def test_what_could_not_be_sent_back_changes_nothing(server):
    """A schema nested almost as deeply as can be decoded: taken or refused, the session works after it."""
    async with connected(server) as client:
        await client.until("session.created")
        outcomes = set()
        for depth in range(10, 1100, 30):
            tool = '{"name": "deep", "parameters": {"x": %s}}' % ("[" * depth + "]" * depth)
            await client.socket.send(f'{{"type": "session.update", "session": {{"tools": [{tool}]}}}}')
            await client.send("session.update", session={"instructions": str(depth)})
            while (event := await client.next())["type"] != "session.updated" or (
                event["session"]["instructions"] != str(depth)
            ):
                outcomes.add(event["type"])
        assert outcomes >= {"session.updated", "error"}
