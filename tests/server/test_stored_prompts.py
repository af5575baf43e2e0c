"""Stored prompts by the unmodified `openai` package: found by id and version, their variables filled in, or refused."""

import openai
import pytest

from tests.server.scripted import ScriptedHost
from tests.server.test_openai_python import until
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions


@pytest.fixture
async def server(running, tmp_path):
    (tmp_path / "desk.md").write_text("Greet {{guest}} in {{ language }}, {{guest}}!\n", encoding="utf8")
    (tmp_path / "desk@2.txt").write_text("Be brief.", encoding="utf8")
    (tmp_path.parent / "outside.md").write_text("Secret.", encoding="utf8")
    return await running(prompts=str(tmp_path), host=ScriptedHost(settings=ConversationSettings("The server's own.")))


@pytest.fixture
async def connection(server):
    client = openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused")
    async with client, client.realtime.connect(model="any") as connection:
        yield connection


async def test_a_prompt_gives_the_instructions(connection, server):
    variables = {"guest": "Ann {{language}}", "language": {"type": "input_text", "text": "French"}}
    await connection.session.update(session={"type": "realtime", "prompt": {"id": "desk", "variables": variables}})
    session = (await until(connection, "session.updated")).session
    assert session.instructions == "Greet Ann {{language}} in French, Ann {{language}}!"
    assert session.prompt.id == "desk" and server.host.opened[-1].settings.instructions == session.instructions
    await connection.session.update(session={"type": "realtime", "prompt": {"id": "desk", "version": "2"}})
    assert (await until(connection, "session.updated")).session.instructions == "Be brief."
    both = {"prompt": {"id": "desk", "version": "2"}, "instructions": "Mine."}
    await connection.session.update(session={"type": "realtime", **both})
    assert (await until(connection, "session.updated")).session.instructions == "Mine."
    await connection.session.update(session={"type": "realtime", "prompt": None})
    assert (await until(connection, "session.updated")).session.instructions == "The server's own."


async def test_a_response_has_a_prompt_of_its_own(connection, server):
    await connection.response.create(response={"prompt": {"id": "desk", "version": "2"}})
    await until(connection, "response.done")
    assert server.host.opened[-1].reply_settings[-1].instructions == "Be brief."
    assert server.host.opened[-1].settings.instructions == "The server's own."


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ({"id": "nobody"}, "invalid_value", "session.prompt.id"),
        ({"id": "desk", "version": "3"}, "invalid_value", "session.prompt.id"),
        ({"id": "../outside"}, "invalid_value", "session.prompt.id"),
        ({"id": "desk", "version": "/../../outside"}, "invalid_value", "session.prompt.id"),
        (
            {"id": "desk", "variables": {"guest": "Ann"}},
            "missing_required_parameter",
            "session.prompt.variables.language",
        ),
        ({"id": "desk", "version": "2", "variables": {"x": "y"}}, "unknown_parameter", "session.prompt.variables.x"),
        (
            {"id": "desk", "variables": {"guest": {"type": "input_image", "detail": "low"}, "language": "French"}},
            "unknown_parameter",
            "session.prompt.variables.guest",
        ),
    ],
)
async def test_a_prompt_that_cannot_be_used_is_refused_by_name(connection, prompt, code, param):
    await connection.session.update(session={"type": "realtime", "prompt": prompt})
    error = (await until(connection, "error")).error
    assert (error.code, error.param) == (code, param)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="prompts"):
        ServerOptions(prompts=str(tmp_path / "nowhere")).check()
