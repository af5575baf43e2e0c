"""The tools that `--tool` switches on, and how a session calls them."""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.mcp.connection import CUT, McpFailure
from vivavoce.server.tools.calculator import calculator
from vivavoce.server.tools.clock import clock
from vivavoce.server.tools.documents import documents
from vivavoce.server.tools.hang_up import hang_up
from vivavoce.server.tools.http_request import http_request
from vivavoce.server.tools.interface import BuiltInTool, CallingSession
from vivavoce.server.tools.passages import TextEmbedder

logger = logging.getLogger(__name__)

LABEL = "viva"
"""What the built-in tools have as `server_label` on the wire."""
KINDS = "clock, clock=TIME_ZONE, calculator, folder=DIR, hang-up, http=HOST,HOST"
TAKES_VALUE = {"clock": None, "calculator": False, "folder": True, "hang-up": False, "http": True}
"""By the name of a tool: whether `=` and a value follow; None: they may."""
MAX_OUTPUT = 8192
CALL_SECONDS = 30.0


@functools.lru_cache(8)
def selected_tools(values: tuple[str, ...], embedding: str | None = None) -> tuple[BuiltInTool, ...]:
    """The tools of `--tool`; files are read once, also by the model `embedding`. InputError for what is no tool."""
    named = defaultdict[str, list[str]](list)
    for value in values:
        kind, equals, rest = value.partition("=")
        named[kind].append(rest)
        if kind not in TAKES_VALUE or (bool(equals) and not rest) or TAKES_VALUE[kind] not in (None, bool(rest)):
            raise InputError(f"there is no --tool {value!r}; known are {KINDS}")
    found: list[BuiltInTool] = []
    if "clock" in named:
        found.append(clock(named["clock"][-1]))
    if "calculator" in named:
        found.append(calculator())
    if "folder" in named:
        paths = [Path(each).expanduser() for each in named["folder"]]
        found.append(documents(paths, None if embedding is None else _embedder(embedding)))
    elif embedding is not None:
        raise InputError("--embedding is for --tool folder=DIR, which is not given")
    if "hang-up" in named:
        found.append(hang_up())
    if "http" in named:
        found.append(http_request([host.strip() for each in named["http"] for host in each.split(",")]))
    return tuple(found)


def _embedder(name: str) -> TextEmbedder:
    from vivavoce.server.hosting.embeddings import load_sentence_encoder  # torch is needed for this alone

    return load_sentence_encoder(name)


async def call_tool(tools: Sequence[BuiltInTool], name: str, arguments: dict[str, Any], session: CallingSession) -> str:
    """The output of a call; McpFailure where it fails, as calls of MCP tools do."""
    tool = next((each for each in tools if each.name == name), None)
    if tool is None:
        raise McpFailure(f"there is no tool {name!r}")
    try:
        async with asyncio.timeout(CALL_SECONDS):
            output = await tool.run(arguments, session)
    except InputError as error:
        raise McpFailure(str(error), "tool_execution_error") from error
    except TimeoutError as error:
        raise McpFailure("the tool did not answer in time", "tool_execution_error") from error
    except Exception as error:
        log_failure(logger, error, "a built-in tool failed")
        raise McpFailure("the tool failed", "tool_execution_error") from error
    return output if len(output) <= MAX_OUTPUT else output[:MAX_OUTPUT] + CUT
