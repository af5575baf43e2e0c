"""MCP tools over the wire: real MCP servers in processes of their own, over stdio and HTTP, and hostile ones."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.harness import DEADLINE, connected, free_port
from tests.server.openai_types import SERVER_EVENTS
from tests.server.test_live_conversation import Listener, LiveHost, Voice
from tests.server.test_openai_agents_js import installed
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.session import LiveConversation
from vivavoce.errors import InputError
from vivavoce.server.mcp import connection
from vivavoce.server.mcp.allowed import AllowedServers, Program

PROGRAM = Path(__file__).with_name("mcp_program.py")
TOKEN = "desk-token"
STDIO = f"desk={sys.executable} {PROGRAM}"
pytest.importorskip("mcp")


class CallingChat:
    """Calls what it is told to (`call add {"a": 1}`), several separated by `;`, and repeats outputs."""

    async def reply(self, messages, settings):
        last = messages[-1]
        calls = re.findall(r"call (\S+) (\{.*?\})", last["content"] or "") if last["role"] == "user" else []
        names = {tool.name for tool in settings.tools}
        for index, (name, arguments) in enumerate(calls):
            assert name in names, f"{name} is not among {names}"
            yield ChatCall(index, f"call_{index}", name, arguments)
        if not calls:
            outputs = [each["content"] for each in messages if each["role"] == "tool"]
            yield ChatText(f"Outputs: {'; '.join(outputs)}." if outputs else f"You said {last['content']}.")
        yield ChatEnd("stop", 5, 7)


class CallingHost(LiveHost):
    def open(self, settings, model):
        backend = CascadeBackend(WholeTurns(Listener()), CallingChat(), Voice())
        self.opened.append(LiveConversation(backend, settings, self.options))
        return self.opened[-1]


@contextlib.asynccontextmanager
async def talking(server):
    """A client whose events are checked by the types of the `openai` package."""
    async with connected(server) as client:
        yield client
        for event in client.events:
            SERVER_EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


@pytest.fixture
async def allowing(running):
    async def start(*allowed):
        return await running(host=CallingHost(), allow_mcp=allowed)

    return start


@pytest.fixture(scope="module")
def http_server():
    """The address of an MCP server over HTTP that wants a token; `/away` redirects to another port."""
    port = free_port()
    elsewhere = "http://127.0.0.1:1/mcp"
    process = subprocess.Popen([sys.executable, PROGRAM, "http", str(port), TOKEN, elsewhere])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def tool(url="stdio:desk", **fields):
    return {"type": "mcp", "server_label": "desk", "server_url": url, "require_approval": "never", **fields}


async def listed(client, *tools):
    """Send the tools of a session; the list item that the server makes of them, and the event that ends it."""
    session = {"type": "realtime", "output_modalities": ["text"], "tools": list(tools)}
    await client.send("session.update", session=session)
    added = await client.until("conversation.item.added")
    assert added["item"]["type"] == "mcp_list_tools" and added["item"]["tools"] == []
    assert (await client.until("mcp_list_tools.in_progress"))["item_id"] == added["item"]["id"]
    end = await client.until("mcp_list_tools.completed", "mcp_list_tools.failed")
    done = client.of_type("conversation.item.done")[-1]["item"]
    assert end["item_id"] == done["id"] == added["item"]["id"]
    return done, end["type"].rpartition(".")[2]


def text_of(response):
    return response["output"][-1]["content"][0]["text"]


async def answered(client, request):
    """Say something that makes the model call tools; the mcp_call items, and the answer to their outputs."""
    first = await client.say(request)
    assert first["status"] == "completed"
    answer = await client.until("response.done")
    ends = [event["item"] for event in client.of_type("conversation.item.done")]
    return [item for item in ends if item["type"] == "mcp_call"], text_of(answer["response"])


@pytest.mark.full
async def test_a_tool_of_a_program_is_listed_called_and_answered(allowing):
    async with talking(await allowing(STDIO)) as client:
        item, outcome = await listed(client, tool())
        assert outcome == "completed" and item["server_label"] == "desk"
        add = next(each for each in item["tools"] if each["name"] == "add")
        assert add["description"] == "Adds two numbers." and add["annotations"]["readOnlyHint"]
        assert add["input_schema"]["required"] == ["a", "b"]
        await client.send("conversation.item.retrieve", item_id=item["id"])
        assert (await client.until("conversation.item.retrieved"))["item"] == item
        (call,), answer = await answered(client, 'call add {"a": 2, "b": 3}')
        assert (call["name"], call["server_label"], call["output"], call["error"]) == ("add", "desk", "5", None)
        assert json.loads(call["arguments"]) == {"a": 2, "b": 3} and answer == "Outputs: 5."
        kinds = [event["type"] for event in client.events]
        order = [
            "response.output_item.added",
            "response.mcp_call_arguments.delta",
            "response.mcp_call_arguments.done",
            "response.output_item.done",
            "response.done",
            "response.mcp_call.in_progress",
            "response.mcp_call.completed",
        ]
        positions = [kinds.index(kind) for kind in order]
        assert positions == sorted(positions) and "response.function_call_arguments.done" not in kinds
        await client.send("conversation.item.retrieve", item_id=call["id"])
        assert (await client.until("conversation.item.retrieved"))["item"]["output"] == "5"


async def test_a_tool_of_an_address_needs_its_token_which_is_never_sent_back(allowing, http_server):
    async with talking(await allowing(f"{http_server}/mcp")) as client:
        _, outcome = await listed(client, tool(f"{http_server}/mcp", authorization="wrong"))
        assert outcome == "failed"
        item, outcome = await listed(client, tool(f"{http_server}/mcp", authorization=TOKEN))
        assert outcome == "completed" and len(item["tools"]) == 4 and item["tools"][0]["name"] == "add"
        assert TOKEN not in json.dumps(client.events) and "wrong" not in json.dumps(client.events)
        (call,), answer = await answered(client, 'call add {"a": 20, "b": 3}')
        assert call["output"] == "23" and answer == "Outputs: 23."
        await client.send("session.update", session={"type": "realtime", "tools": []})
        assert (await client.until("session.updated"))["session"]["tools"] == []
        assert (await client.say("hello"))["status"] == "completed"


async def test_calls_together_are_answered_together_and_errors_are_given_to_the_model(allowing, http_server):
    async with talking(await allowing(http_server)) as client:
        await listed(client, tool(f"{http_server}/mcp", authorization=TOKEN))
        calls, answer = await answered(client, 'call add {"a": 1, "b": 1} call wait {"seconds": 0.2} call broken {}')
        assert {call["name"]: call["output"] for call in calls} == {"add": "2", "wait": "waited", "broken": None}
        failed = next(call for call in calls if call["name"] == "broken")
        assert failed["error"]["type"] == "tool_execution_error" and "broken" in failed["error"]["message"]
        assert client.of_type("response.mcp_call.failed")[0]["item_id"] == failed["id"]
        assert answer.startswith("Outputs: 2; waited; Error: ")


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_waits_for_approval_where_it_is_required(allowing, http_server, approve):
    async with talking(await allowing(http_server)) as client:
        options = {"require_approval": {"never": {"read_only": True}}, "allowed_tools": ["add", "wait"]}
        await listed(client, tool(f"{http_server}/mcp", authorization=TOKEN, **options))
        (free,), _ = await answered(client, 'call add {"a": 1, "b": 1}')
        assert free["output"] == "2" and free["approval_request_id"] is None
        response = await client.say('call wait {"seconds": 0}')
        (request,) = response["output"]
        assert (request["type"], request["name"]) == ("mcp_approval_request", "wait")
        assert len(client.of_type("response.mcp_call.in_progress")) == 1
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve}
        await client.send("conversation.item.create", item=answer)
        text = text_of((await client.until("response.done"))["response"])
        calls = [event["item"] for event in client.of_type("conversation.item.done")]
        made = [item for item in calls if item["type"] == "mcp_call" and item["name"] == "wait"]
        if approve:
            assert made[0]["approval_request_id"] == request["id"] and made[0]["output"] == "waited"
            assert text == "Outputs: 2; waited."
        else:
            assert made == [] and "not approved" in text
        await client.send("conversation.item.create", item=answer)
        assert "no approval request" in (await client.error())["message"], "it is answered once"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"server_url": "http://192.0.2.7/mcp"}, "session.tools[0].server_url"),
        ({"server_url": "stdio:other"}, "session.tools[0].server_url"),
        ({"server_url": "stdio:desk", "headers": {"Host": "inside"}}, "headers"),
        ({"server_url": "stdio:desk", "headers": {"X-A": "a\r\nb"}}, "session.tools[0].headers[...]"),
        ({"server_url": "stdio:desk", "server_label": "a b"}, "session.tools[0].server_label"),
        ({"connector_id": "connector_gmail"}, "session.tools[0].connector_id"),
        ({"server_url": "stdio:desk", "surprise": 1}, "session.tools[0].surprise"),
    ],
)
async def test_servers_that_are_not_allowed_are_refused_and_other_tools_stay(allowing, fields, param):
    async with talking(await allowing(STDIO)) as client:
        bad = {"type": "mcp", "server_label": "desk", **fields}
        good = {"type": "function", "name": "ring"}
        await client.send("session.update", session={"type": "realtime", "tools": [bad, good]})
        updated = await client.until("session.updated")
        assert [each["name"] for each in updated["session"]["tools"]] == ["ring"]
        assert (await client.error())["param"].replace("[...]", "") == param.replace("[...]", "")


async def test_without_allow_mcp_every_server_is_refused(server):
    async with connected(server) as client:
        await client.send("session.update", session={"type": "realtime", "tools": [tool()]})
        assert "--allow-mcp" in (await client.error())["message"]


@pytest.mark.full
async def test_hostile_servers_are_bounded(allowing, http_server, monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 3.0)
    allowed = (STDIO, f"many={sys.executable} {PROGRAM} many", f"mute={sys.executable} {PROGRAM} mute", http_server)
    async with talking(await allowing(*allowed)) as client:
        for url in ("stdio:many", f"{http_server}/away", "stdio:mute"):
            _, outcome = await listed(client, tool(url, authorization=TOKEN))
            assert outcome == "failed", url
        assert (await client.say("hello"))["status"] == "completed"
        await listed(client, tool(f"{http_server}/mcp", authorization=TOKEN))
        (flood,), answer = await answered(client, "call flood {}")
        assert flood["output"] is None and flood["error"]["type"] == "protocol_error" and len(answer) < 1000
        (_, call), answer = await answered(client, 'call add {"a": 1, "b": 2}')
        assert call["output"] == "3", "the connection is opened again"


@pytest.mark.full
async def test_a_call_that_hangs_fails_after_its_time(monkeypatch):
    hanging = connection.McpConnection(Program("desk", (sys.executable, str(PROGRAM))), call_seconds=0.5)
    with pytest.raises(connection.McpFailure, match="in time"):
        await hanging.call("wait", {"seconds": 600})
    text = await asyncio.wait_for(connection.McpConnection.call(hanging, "add", {"a": 1, "b": 2}), 20)
    assert text == "3"
    await hanging.close()


def test_addresses_admit_paths_below_them_and_nothing_else():
    allowed = AllowedServers.read(["https://tools.example/v1", "http://127.0.0.1:9000", "clock=viva-clock --zone UTC"])
    for good in ("https://tools.example/v1", "https://tools.example:443/v1/mcp?x=1", "http://127.0.0.1:9000/mcp"):
        assert allowed.target(good) == good
    assert allowed.target("stdio:clock") == Program("clock", ("viva-clock", "--zone", "UTC"))
    for bad in (
        "http://tools.example/v1",
        "https://tools.example/v10",
        "https://tools.example/v1/../admin",
        "https://tools.example/v1/%2e%2e/admin",
        "https://tools.example/v1/%252e%252e/admin",
        "https://user@tools.example/v1",
        "https://tools.example.attacker.example/v1",
        "http://127.0.0.1:9001/mcp",
        "http://[::1/mcp",
        "stdio:sh",
        "file:///etc/passwd",
    ):
        with pytest.raises(InputError):
            allowed.target(bad)
    for nonsense in ("ftp://host", "just a command", "=x", "https://"):
        with pytest.raises(InputError):
            AllowedServers.read([nonsense])


@pytest.mark.full
@pytest.mark.npm("node", "npm")
@pytest.mark.parametrize("approval", ["never", "always"])
async def test_the_unmodified_agents_package_in_node_uses_a_hosted_tool(allowing, http_server, approval):
    server = await allowing(http_server)
    address = f"{server.ws}/v1/realtime?model=any"
    command = ["node", str(installed("agents_mcp.mjs")), address, f"{http_server}/mcp", TOKEN, approval]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    try:
        out, err = await asyncio.wait_for(process.communicate(), 3 * DEADLINE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    seen = json.loads(out)
    assert seen["errors"] == [] and seen["tools"] == ["add", "broken", "flood", "wait"]
    assert [(call["name"], call["output"]) for call in seen["calls"]] == [("add", "9")]
    assert seen["answer"] == "Outputs: 9." and seen["approvals"] == (approval == "always")
