"""The tools that the server calls for one session: its own, and those of MCP servers, which are listed first.

The client approves calls of MCP tools where they need it. A call runs beside the conversation: the response that asked
for it ends, the user may go on talking, and when all calls that run have an output, a reply to them is started.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from vivavoce.dialogue.conversation import Conversation
from vivavoce.dialogue.history import new_id
from vivavoce.dialogue.items import HostedCall, Item, Message, ToolCall, ToolOutput
from vivavoce.dialogue.settings import HostedTool, Tool
from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.mcp.connection import McpConnection, McpFailure, RemoteTool
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.items import McpApprovalResponseItem, McpListToolsItem, wire_item
from vivavoce.server.realtime.mcp_types import ListedTool, McpTool
from vivavoce.server.tools.interface import BuiltInTool, CallingSession
from vivavoce.server.tools.selection import LABEL, call_tool
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

MAX_TOOLS = 128  # of one server, after its filter
MAX_RUNNING = 8  # calls at a time
REQUEST_SECONDS = 1.0  # after an output, in which stock clients ask for the response that is made anyway


@dataclass
class HostedServer:
    """An MCP server of the session, and what it listed."""

    tool: McpTool
    connection: McpConnection
    item: McpListToolsItem
    tools: list[RemoteTool] = field(default_factory=list)


class HostedTools:
    """The tools of one session. Methods do not block; results are sent as events."""

    def __init__(
        self,
        conversation: Conversation,
        allowed: AllowedServers,
        send: Callable[[events.ServerEvent], None],
        on_listed: Callable[[], None],
        built_in: Sequence[BuiltInTool],
        session: CallingSession,
        reply_with: Callable[[str], str | None],
    ) -> None:
        """`on_listed` is called when the tools of the session have changed; `reply_with` finds the reply in progress
        that has an item."""
        self._reply_with = reply_with
        self._built_in, self._session = built_in, session
        self._conversation, self._allowed, self._send, self._on_listed = conversation, allowed, send, on_listed
        self._servers: dict[str, HostedServer] = {}
        self._items: dict[str, McpListToolsItem] = {}
        self._running: set[str] = set()
        self._unanswered: set[str] = set()  # calls with an output
        self._outputs = 0  # for which no response was requested
        self._last_output = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self, tools: Sequence[McpTool]) -> None:
        """Connect to the servers that are new or changed, and list their tools; leave those that are gone."""
        wanted = {tool.server_label: tool for tool in tools}
        for label, server in list(self._servers.items()):
            if wanted.get(label) != server.tool:
                del self._servers[label]
                self._start(server.connection.close())
        for label, tool in wanted.items():
            if label not in self._servers:
                connection = McpConnection(self._allowed.target(tool.server_url), tool.sent_headers)
                item = McpListToolsItem(id=new_id("mcpl"), server_label=label, tools=[])
                self._servers[label] = HostedServer(tool, connection, item)
                self._start(self._list(self._servers[label]))

    def tools(self, own: Sequence[Tool], wanted: Sequence[McpTool]) -> tuple[Tool, ...]:
        """Our own tools and those of these servers, as far as they are listed; a name that is taken gets a label."""
        names = {tool.name for tool in own}
        offered = [
            Tool(tool.name, tool.description, tool.schema, HostedTool(LABEL, tool.name)) for tool in self._built_in
        ]
        for server in (self._servers.get(tool.server_label) for tool in wanted):
            offered += [_tool(server.tool, remote) for remote in server.tools] if server is not None else []
        found: list[Tool] = []
        for tool in offered:
            assert tool.hosted is not None
            name = tool.name if tool.name not in names else f"{tool.hosted.server}_{tool.name}"
            if name not in names:
                names.add(name)
                found.append(replace(tool, name=name))
        return tuple(found)

    def item(self, id: str) -> McpListToolsItem | None:
        """A list of tools, which is an item for clients and not part of the history."""
        return self._items.get(id)

    def answers_already(self) -> bool:
        """Whether a request for a response, which stock clients send after each output, is answered as it is.

        One that follows something new of the client is a request of its own.
        """
        is_recent = asyncio.get_running_loop().time() - self._last_output < REQUEST_SECONDS
        if not self._outputs or not (self._running or is_recent) or self._has_new_input():
            return False
        self._outputs -= 1
        return True

    def _has_new_input(self) -> bool:
        """Whether the client has added anything after the last call with an output."""
        for item in reversed(self._conversation.items):
            content = item.content
            if isinstance(content, ToolCall) and content.hosted is not None:
                return False
            if isinstance(content, ToolOutput) or (isinstance(content, Message) and content.role != "assistant"):
                return True
        return False

    def make_call(self, item: Item, output_index: int) -> None:
        """Start a call that the model has asked for."""
        self._running.add(item.id)
        self._start(self._call(item, output_index))

    def answer_approval(self, answer: McpApprovalResponseItem) -> None:
        """Make the call that was approved, or tell the model that it was not."""
        id = answer.approval_request_id
        item = next((each for each in self._conversation.items if each.id == id), None)
        call = item.content if item is not None else None
        if not isinstance(call, ToolCall) or call.hosted is None or call.hosted.state != "asked":
            raise WireError(f"There is no approval request '{id}' that waits.", param="item.approval_request_id")
        answer.id = answer.id or new_id("mcpr")
        for event in (events.ConversationItemAdded, events.ConversationItemDone):
            self._send(event(id, answer))
        if not answer.approve:
            self._conversation.update_call(id, replace(call.hosted, state="denied"))
            self._conversation.answer_calls()
            return
        self._conversation.update_call(id, replace(call.hosted, state="approved"))
        hosted = replace(call.hosted, state="running", approval_request=id)
        approved, previous = self._conversation.add(replace(call, hosted=hosted), new_id("mcp"))
        self._send(events.ConversationItemAdded(previous, wire_item(approved)))
        self.make_call(approved, 0)

    async def close(self) -> None:
        """End all calls and connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.connection.close() for server in self._servers.values()))

    async def _list(self, server: HostedServer) -> None:
        item, previous = server.item, self._conversation.items[-1].id if self._conversation.items else None
        id = item.id or ""
        self._items[id] = item
        self._send(events.ConversationItemAdded(previous, item))
        self._send(events.McpListToolsInProgress(id))
        try:
            listed = [each for each in await server.connection.list_tools() if _is_allowed(server.tool, each)]
            if len(listed) > MAX_TOOLS:
                raise McpFailure(f"the server has {len(listed)} tools; {MAX_TOOLS} are the limit: name allowed_tools")
        except McpFailure as error:
            log_failure(logger, error, "the tools of an MCP server could not be listed")
            self._send(events.ConversationItemDone(previous, item))
            self._send(events.McpListToolsFailed(id))
            return
        server.tools = listed
        item.tools = [
            ListedTool(tool.name, tool.description, tool.schema, tool.annotations or UNSET) for tool in listed
        ]
        if self._servers.get(server.tool.server_label) is server:
            self._on_listed()
        self._send(events.ConversationItemDone(previous, item))
        self._send(events.McpListToolsCompleted(id))

    async def _call(self, item: Item, output_index: int) -> None:
        call = item.content
        assert isinstance(call, ToolCall)
        assert call.hosted is not None
        self._send(events.McpCallInProgress(item.id, output_index))
        try:
            output = await self._output(call.hosted.tool, call.arguments)
            hosted = replace(call.hosted, state="completed", output=output)
        except McpFailure as error:
            log_failure(logger, error, "a call of a tool failed")
            hosted = replace(call.hosted, state="failed", error=(error.kind, error.code, str(error)))
        finally:
            self._running.discard(item.id)
        self._finish(item.id, hosted, output_index)

    async def _output(self, tool: HostedTool, arguments: str) -> str:
        server = self._servers.get(tool.server)
        if server is None and tool.server != LABEL:
            raise McpFailure(f"the session has no MCP server {tool.server!r}")
        if len(self._running) > MAX_RUNNING:
            raise McpFailure(f"{MAX_RUNNING} calls are in progress; this one was not made")
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            raise McpFailure("the arguments are not JSON") from error
        if not isinstance(values, dict):
            raise McpFailure("the arguments are not an object")
        if server is None:
            return await call_tool(self._built_in, tool.name, values, self._session)
        return await server.connection.call(tool.name, values)

    def _finish(self, id: str, hosted: HostedCall, output_index: int) -> None:
        """Tell the outcome of a call, and answer it; the item may have been deleted meanwhile."""
        try:
            item = self._conversation.update_call(id, hosted)
        except InputError:
            return
        items = [each.id for each in self._conversation.items]
        at = items.index(id)
        is_done = hosted.state == "completed"
        self._send((events.McpCallCompleted if is_done else events.McpCallFailed)(id, output_index))
        self._send(events.ConversationItemDone(items[at - 1] if at else None, wire_item(item)))
        now = asyncio.get_running_loop().time()
        is_first = not self._running and now - self._last_output > REQUEST_SECONDS
        self._outputs, self._last_output = 1 if is_first else self._outputs + 1, now
        self._unanswered.add(id)
        self._answer()

    def note_sent(self, event: events.ServerEvent) -> None:
        """Follow the events of the session: outputs are answered when the response that asked for them is over."""
        if isinstance(event, events.ResponseDone) and self._unanswered:
            asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        """Reply to the outputs, unless a call runs, or the response that made one goes on and may make another."""
        if not self._unanswered or self._running or any(map(self._reply_with, self._unanswered)):
            return
        self._unanswered.clear()
        try:
            self._conversation.answer_calls()
        except VivaError as error:  # the conversation was closed
            log_failure(logger, error, "the output of a tool could not be answered")

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_allowed(tool: McpTool, remote: RemoteTool) -> bool:
    return tool.allows(remote.name, remote.is_read_only)


def _tool(server: McpTool, remote: RemoteTool) -> Tool:
    needs_approval = server.needs_approval(remote.name, remote.is_read_only)
    hosted = HostedTool(server.server_label, remote.name, needs_approval)
    return Tool(remote.name, remote.description, remote.schema, hosted)
