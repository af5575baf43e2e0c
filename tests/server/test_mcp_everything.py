"""A real MCP server from npm, `@modelcontextprotocol/server-everything`, over stdio and over streamable HTTP."""

import contextlib
import os
import shutil
import socket
import subprocess

import pytest

from tests.server.harness import free_port
from tests.server.node_packages import npm_folder
from tests.server.test_mcp import allowing, answered, listed, talking, tool

pytestmark = [pytest.mark.full, pytest.mark.npm("node", "npm")]
__all__ = ["allowing"]  # a fixture
DEADLINE = 60.0


def command(transport):
    """Runs the server; programs get no more than their search path from us."""
    package = npm_folder() / "node_modules" / "@modelcontextprotocol" / "server-everything"
    return [shutil.which("node"), str(package / "dist" / "index.js"), transport]


@pytest.fixture
def address():
    """The address of the server over HTTP."""
    port = free_port()
    process = subprocess.Popen(
        command("streamableHttp"), env={**os.environ, "PORT": str(port)}, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stderr.readline()
        while line and "listening on port" not in line:
            line = process.stderr.readline()
        assert line, "the server ended"
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), DEADLINE)):
            yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.communicate()


async def check(client, url):
    """Its tools are listed, and one is called and answered."""
    item, outcome = await listed(client, tool(url, allowed_tools=["echo", "get-sum"]))
    assert outcome == "completed" and [each["name"] for each in item["tools"]] == ["echo", "get-sum"]
    (call,), answer = await answered(client, 'call get-sum {"a": 19, "b": 23}')
    assert call["error"] is None and "42" in call["output"] and "42" in answer
    calls, _ = await answered(client, 'call echo {"message": "table nine"}')
    assert "table nine" in calls[-1]["output"]


async def test_its_tools_are_called_over_http(allowing, address):
    async with talking(await allowing(address)) as client:
        await check(client, address)


async def test_its_tools_are_called_over_stdio(allowing):
    async with talking(await allowing(f"everything={' '.join(command('stdio'))}")) as client:
        await check(client, "stdio:everything")
