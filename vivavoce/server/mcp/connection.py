"""One connection to an MCP server, over streamable HTTP or to a program; everything it sends is bounded.

The official client is used. It follows redirects only within the origin of the address, which the operator allowed.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vivavoce.engine.schema_limits import check_schema
from vivavoce.errors import InputError, optional_packages
from vivavoce.log import log_failure
from vivavoce.server.mcp import bounded_lines
from vivavoce.server.mcp.allowed import Program

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
LIST_SECONDS = 10.0
CALL_SECONDS = 60.0
CLOSE_SECONDS = 10.0
MAX_RESPONSE_BYTES = 4 << 20
MAX_LISTED_TOOLS = 1000  # read before they are filtered
MAX_DESCRIPTION = 4096
MAX_OUTPUT = 64 * 1024
MAX_MESSAGE = 500
CUT = "\n(The rest of the output is left out: it is too long.)"
BOUNDED_LINES = (sys.executable, "-I", "-S", bounded_lines.__file__)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class RemoteTool:
    """A tool of an MCP server."""

    name: str
    description: str
    schema: dict[str, Any]
    is_read_only: bool
    annotations: dict[str, Any] | None = None


class McpFailure(Exception):
    """A call or listing that failed; the fields are those of the protocol's error object."""

    def __init__(self, message: str, kind: str = "protocol_error", code: int = 0) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.kind, self.code = kind, code


class McpConnection:
    """A connection that is opened when it is first needed, and again after it failed."""

    def __init__(
        self, target: str | Program, headers: Mapping[str, str] | None = None, call_seconds: float = CALL_SECONDS
    ) -> None:
        self._target, self._headers, self._call_seconds = target, headers or {}, call_seconds
        self._lock = asyncio.Lock()
        self._open: tuple[Any, asyncio.Event] | None = None  # the client, and the event that ends its task
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def list_tools(self) -> list[RemoteTool]:
        """Its tools, with what is not a valid tool left out; McpFailure where they cannot be listed."""
        with self._failing("its tools could not be listed"):
            client = await self._connected()
            async with asyncio.timeout(LIST_SECONDS):
                return await self._list(client)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The output of a call as text; McpFailure where it fails."""
        with self._failing("the call failed"):
            client = await self._connected()
            async with asyncio.timeout(self._call_seconds):
                result = await client.call_tool(name, arguments)
        text = _text_of(result)
        if result.is_error:
            raise McpFailure(text or "the tool reported an error", "tool_execution_error")
        return text

    async def close(self) -> None:
        """End the connection, and the program where it is one."""
        self._is_closed = True
        self._abandon()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    def _abandon(self) -> None:
        """Let the open connection end; the next request opens another."""
        if self._open is not None:
            self._open[1].set()
            self._open = None

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn what the client library raises into McpFailure. A server that hangs or breaks off is left."""
        try:
            yield
        except McpFailure:
            raise
        except TimeoutError as error:
            self._abandon()
            raise McpFailure(f"{what}: the MCP server did not answer in time") from error
        except Exception as error:
            self._abandon()
            raise _failure(what, error) from error

    async def _connected(self) -> Any:
        """The client of the open connection; its context is entered and left by one task, as anyio requires."""
        async with self._lock:
            if self._is_closed:
                raise McpFailure("the connection is closed")
            if self._open is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                end = asyncio.Event()
                task = asyncio.create_task(self._hold_open(ready, end))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._open = await ready, end
            return self._open[0]

    async def _hold_open(self, ready: "asyncio.Future[Any]", end: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_SECONDS):
                    client = await stack.enter_async_context(_client(self._target, self._headers))
                if ready.cancelled():
                    return
                ready.set_result(client)
                await end.wait()
        except Exception as error:  # of connecting: raised to the caller; later: the next call connects again
            if not ready.done():
                ready.set_exception(error)
            else:
                log_failure(logger, error, "a connection to an MCP server was lost")

    async def _list(self, client: Any) -> list[RemoteTool]:
        tools: list[RemoteTool] = []
        cursor, seen = None, 0
        while True:
            page = await client.list_tools(cursor=cursor)
            seen += max(1, len(page.tools))
            if seen > MAX_LISTED_TOOLS:
                raise McpFailure(f"the server lists more than {MAX_LISTED_TOOLS} tools")
            tools += [tool for each in page.tools if (tool := _valid_tool(each)) is not None]
            cursor = page.next_cursor
            if cursor is None:
                return tools


@contextlib.asynccontextmanager
async def _client(target: str | Program, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    with optional_packages():
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    if isinstance(target, Program):
        bounded = [*BOUNDED_LINES, str(MAX_RESPONSE_BYTES), *target.command]
        program = StdioServerParameters(command=bounded[0], args=bounded[1:])
        with open(os.devnull, "w", encoding="utf8") as nowhere:  # it may write what was said
            async with Client(stdio_client(program, nowhere)) as client:
                yield client
        return
    sent = {**headers, "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)  # calls have timeouts of their own
    async with (
        httpx2.AsyncClient(headers=sent, timeout=timeout, transport=_bounded_transport()) as http,
        Client(streamable_http_client(target, http_client=http)) as client,
    ):
        yield client


def _bounded_transport() -> Any:
    """A transport whose responses end with an error where they are too long, or compressed."""
    import httpx2

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            received = 0
            async for chunk in self._inner:
                received += len(chunk)
                if received > MAX_RESPONSE_BYTES:
                    raise httpx2.ReadError(f"a response of more than {MAX_RESPONSE_BYTES >> 20} MiB")
                yield chunk

        async def aclose(self) -> None:
            await self._inner.aclose()

    class BoundedTransport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise httpx2.ReadError("a compressed response, which was not asked for")
            response.stream = BoundedStream(response.stream)
            return response

    return BoundedTransport()


def _valid_tool(tool: Any) -> RemoteTool | None:
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    try:
        check_schema(schema, "the schema of a tool")
    except InputError as error:
        log_failure(logger, error, "a tool of an MCP server is left out")
        return None
    if not _NAME.fullmatch(tool.name):
        logger.warning("a tool of an MCP server is left out: its name is not a name")
        return None
    hints = None if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
    is_read_only = bool(hints and hints.get("readOnlyHint"))
    return RemoteTool(tool.name, (tool.description or "")[:MAX_DESCRIPTION], schema, is_read_only, hints)


def _text_of(result: Any) -> str:
    """The text of a result; other contents are named, as the model cannot see them."""
    parts = [part.text if part.type == "text" else f"({part.type} content)" for part in result.content]
    text = "\n".join(parts)
    return text if len(text) <= MAX_OUTPUT else text[:MAX_OUTPUT] + CUT


def _failure(what: str, error: BaseException) -> McpFailure:
    """The first cause that names a status or a protocol error; the text of others may name files of this machine."""
    for cause in _causes(error):
        if (status := getattr(getattr(cause, "response", None), "status_code", None)) is not None:
            return McpFailure(f"{what}: the MCP server answered {status}", "http_error", int(status))
        if type(cause).__name__ == "MCPError":
            details = cause.error  # type: ignore[attr-defined]
            return McpFailure(f"{what}: {details.message}", "protocol_error", int(details.code))
    first = next(_causes(error))
    return McpFailure(f"{what}: {type(first).__name__}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, else the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _causes(each)
    else:
        yield error
