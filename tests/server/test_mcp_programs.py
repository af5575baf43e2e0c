"""MCP programs: those of others, from PyPI, and those that write without end."""

import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest

from vivavoce.server.mcp import bounded_lines
from vivavoce.server.mcp.allowed import Program
from vivavoce.server.mcp.bounded_lines import copy_lines
from vivavoce.server.mcp.connection import BOUNDED_LINES, McpConnection, McpFailure


@pytest.mark.parametrize(
    ("lines", "is_whole"),
    [
        ([b"one\n", b"two\n"], True),
        ([b"x" * 1000 + b"\n"] * 500, True),
        ([b"a\n", b"x" * 1001 + b"\n"], False),
        ([b"x" * 10_000_000], False),
        ([b"y" * 600, b"y" * 600, b"\n"], False),
        ([b"no newline"], True),
        ([], True),
    ],
)
def test_lines_are_copied_up_to_their_limit(lines, is_whole, monkeypatch):
    for size in (7, 600, 65_536):
        monkeypatch.setattr(bounded_lines, "PIECE_BYTES", size)
        target = io.BytesIO()
        assert copy_lines(io.BufferedReader(io.BytesIO(b"".join(lines))), target, 1000) is is_whole
        if is_whole:
            assert target.getvalue() == b"".join(lines)
        assert all(len(line) <= 1000 for line in target.getvalue().split(b"\n"))


def test_a_program_that_writes_without_end_is_ended():
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    command = [*BOUNDED_LINES, "100000", sys.executable, "-c", endless]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1 and len(ended.stdout) <= 100_000
    command = [*BOUNDED_LINES, "100", "cat"]
    echo = subprocess.run(command, input=b"one\ntwo\n", capture_output=True, timeout=60, check=False)
    assert echo.returncode == 0 and echo.stdout == b"one\ntwo\n"


@pytest.mark.full
async def test_a_program_that_floods_is_left():
    pytest.importorskip("mcp")
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    flooding = McpConnection(Program("flood", (sys.executable, "-c", endless)))
    with pytest.raises(McpFailure):
        await flooding.list_tools()
    await flooding.close()


def third_party(module: str, *arguments: str) -> McpConnection:
    """A program from PyPI; it gets the search path of this process, which programs do not inherit."""
    pytest.importorskip("mcp")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module.replace('_', '-')} is not installed")
    path = os.environ.get("PYTHONPATH", "")
    return McpConnection(Program("other", ("env", f"PYTHONPATH={path}", sys.executable, "-m", module, *arguments)))


@pytest.mark.full
async def test_the_time_server_of_pypi():
    clock = third_party("mcp_server_time", "--local-timezone", "Europe/Berlin")
    names = {tool.name: tool for tool in await clock.list_tools()}
    assert names["get_current_time"].schema["required"] == ["timezone"]
    converted = await clock.call(
        "convert_time", {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"}
    )
    assert json.loads(converted)["time_difference"] == "-3.5h"
    with pytest.raises(McpFailure):
        await clock.call("get_current_time", {"timezone": "Mars/Base"})
    await clock.close()


@pytest.mark.full
async def test_the_fetch_server_of_pypi(site):
    fetch = third_party("mcp_server_fetch", "--ignore-robots-txt", "--allow-private-ips")
    assert [tool.name for tool in await fetch.list_tools()] == ["fetch"]
    assert "GET /found" in await fetch.call("fetch", {"url": f"{site}/found", "raw": True})
    with pytest.raises(McpFailure):
        await fetch.call("fetch", {"url": "http://127.0.0.1:1/"})
    await fetch.close()
