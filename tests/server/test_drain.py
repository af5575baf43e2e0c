"""Stopping: no new sessions, replies finish, and every client is told why, also through door processes."""

import asyncio
import logging

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.server.harness import RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost
from tests.server.test_openai_python import says
from vivavoce.server.config import ServerOptions


class Stopping:
    """A server that is told to stop while its clients are connected."""

    def __init__(self, **options) -> None:
        self.server = RunningServer(ScriptedHost(), ServerOptions(**options))

    async def __aenter__(self) -> "Stopping":
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *error) -> None:
        await self.server.__aexit__(*error)

    def stop(self) -> None:
        self.server._server.should_exit = True

    @property
    def has_stopped(self) -> bool:
        return self.server._task.done()


@pytest.mark.parametrize("doors", [0, 1])
async def test_a_reply_is_heard_to_its_end_and_the_close_frame_says_why(doors):
    async with (
        Stopping(doors=doors, drain_seconds=15.0) as stopping,
        openai.AsyncOpenAI(base_url=f"{stopping.server.http}/v1", api_key="unused", max_retries=0) as client,
        connected(stopping.server) as idle,
        client.realtime.connect(model="any", max_retries=0) as talking,
    ):
        await idle.until("session.created")
        await talking.conversation.item.create(item=says("hello"))
        await talking.response.create()
        while (await talking.recv()).type != "response.output_audio.delta":
            pass
        stopping.stop()
        assert await idle.closed() == 1012 and idle.socket.close_reason == "the server is stopping"
        with pytest.raises(ConnectionClosed) as closed:  # noqa: PT012
            kinds = []
            while True:
                event = await talking.recv()
                kinds.append(event.type)
                if event.type == "response.done":
                    assert event.response.status == "completed"
        assert "response.done" in kinds
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1012, "the server is stopping")
        await eventually(lambda: stopping.has_stopped, "the server has stopped")


async def test_no_new_sessions_are_opened_meanwhile():
    async with Stopping(drain_seconds=15.0) as stopping, connected(stopping.server) as talking:
        await talking.send("conversation.item.create", item=says("a long one"))
        await talking.send("response.create")
        await talking.until("response.output_audio.delta")
        stopping.stop()
        await eventually(lambda: stopping.server.sessions.is_stopping, "it drains")
        async with httpx.AsyncClient(base_url=stopping.server.http) as http:
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200
        async with connected(stopping.server) as late:
            assert (await late.error())["code"] == "server_not_ready"
            assert await late.closed() == 1013
        await talking.send("response.cancel")
        assert await talking.closed() == 1012


@pytest.mark.parametrize("doors", [0, 1])
async def test_a_reply_without_an_end_is_cut_when_the_time_is_over(doors):
    async with Stopping(doors=doors, drain_seconds=0.3) as stopping, connected(stopping.server) as talking:
        await talking.send("conversation.item.create", item=says("please wait"))
        await talking.send("response.create")
        await talking.until("response.output_audio.delta")
        began = asyncio.get_running_loop().time()
        stopping.stop()
        assert await talking.closed() == 1012 and talking.socket.close_reason == "the server is stopping"
        assert asyncio.get_running_loop().time() - began >= 0.3


@pytest.mark.parametrize("doors", [0, 1])
async def test_refused_sockets_log_no_error(running, caplog, capfd, doors):
    server = await running(api_keys=("sk-test-1234567890",), doors=doors)
    with caplog.at_level(logging.INFO):
        for path in ("/v1/realtime", "/nowhere"):
            with pytest.raises(InvalidStatus):
                async with connected(server, key="sk-wrong-000000000", query=path.removeprefix("/v1/realtime")):
                    pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "ERROR" not in capfd.readouterr().err
