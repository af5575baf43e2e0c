"""Responses that follow a JSON schema, over the wire, by a local chat model of random weights."""

import json

import pytest

from tests.s2s.small_parts import small_chat
from tests.server.harness import connected
from tests.server.test_live_conversation import Listener, LiveHost, Voice
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.session import LiveConversation
from vivavoce.engine.sampling import Sampling
from vivavoce.engine.schema_limits import MAX_SCHEMA_DEPTH
from vivavoce.server.host import ModelAbilities

pytest.importorskip("llguidance")
ORDER = {
    "type": "object",
    "properties": {"dish": {"enum": ["soup", "curry"]}, "count": {"type": "integer", "minimum": 1, "maximum": 4}},
    "required": ["dish", "count"],
    "additionalProperties": False,
}


class SchemaHost(LiveHost):
    def __init__(self, chat, **options):
        super().__init__(**options)
        self.chat = chat

    @property
    def abilities(self):
        return ModelAbilities(json_schema=self.chat.follows_schemas)

    def open(self, settings, model):
        return LiveConversation(CascadeBackend(WholeTurns(Listener()), self.chat, Voice()), settings, self.options)


@pytest.fixture
async def served(running, tmp_path):
    options = LocalChatOptions(sampling=Sampling(temperature=1.2, top_k=0), cache_rows=1024)
    async with LocalChat.load(str(small_chat(tmp_path)), "cpu", options) as chat:
        yield await running(host=SchemaHost(chat))


async def test_a_written_response_follows_its_schema(served):
    async with connected(served) as client:
        options = {"output_modalities": ["text"], "conversation": "none", "viva": {"json_schema": ORDER}}
        response = await client.say("two soups, please", **options)
        order = json.loads(response["output"][0]["content"][0]["text"])
        assert order["dish"] in ("soup", "curry") and order["count"] in (1, 2, 3, 4)


def nested(levels):
    return {"items": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"viva": {"json_schema": ORDER}}, "written"),
        ({"output_modalities": ["text"], "viva": {"json_schema": nested(MAX_SCHEMA_DEPTH + 2)}}, "levels deep"),
        ({"output_modalities": ["text"], "viva": {"json_schema": 3}}, "object"),
    ],
)
async def test_schemas_that_cannot_be_honoured_are_refused(served, options, complaint):
    async with connected(served) as client:
        await client.send("response.create", response=options)
        error = await client.error()
        assert error["param"] == "response.viva.json_schema" and complaint in error["message"]
        contradiction = {"type": "integer", "minimum": 2, "maximum": 1}
        options = {"output_modalities": ["text"], "viva": {"json_schema": contradiction}}
        response = await client.say("well?", **options)
        assert response["status"] == "failed" and "Unsatisfiable" in response["status_details"]["error"]["message"]
        assert (await client.say("and now?", output_modalities=["text"]))["status"] != "failed"


async def test_a_tool_whose_schema_is_too_deep_is_refused_and_the_others_stay(served):
    async with connected(served) as client:
        bad = {"type": "function", "name": "bad", "parameters": nested(MAX_SCHEMA_DEPTH + 2)}
        good = {"type": "function", "name": "good", "parameters": ORDER}
        await client.send("session.update", session={"type": "realtime", "tools": [bad, good]})
        updated = await client.until("session.updated")
        assert [tool["name"] for tool in updated["session"]["tools"]] == ["good"]
        assert (await client.error())["param"] == "session.tools[0].parameters"
