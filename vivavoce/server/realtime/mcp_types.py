"""MCP in Realtime events: the tool of a session that names a server, and the errors of its calls."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from vivavoce.errors import InputError
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.realtime.session_types import Maybe
from vivavoce.server.tools.selection import LABEL
from vivavoce.server.wire import JsonObject, WireError

MAX_SERVERS = 8
MAX_HEADERS = 32
NOT_FORWARDED = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding", "upgrade", "te")

Label = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
Header = Annotated[str, Meta(max_length=8192, pattern=r"^[^\r\n\x00]*$")]
HeaderName = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9-]+$")]


class McpToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Tools by name, or by whether they are annotated as read-only; both conditions hold where both are given."""

    tool_names: Maybe[list[str]] = UNSET
    read_only: Maybe[bool] = UNSET

    def matches(self, name: str, is_read_only: bool) -> bool:
        """Whether a tool is among them."""
        is_named = self.tool_names is None or self.tool_names is UNSET or name in self.tool_names
        return is_named and (self.read_only in (None, UNSET) or self.read_only == is_read_only)


class McpApprovalFilter(Struct, frozen=True, forbid_unknown_fields=True):
    always: Maybe[McpToolFilter] = UNSET
    never: Maybe[McpToolFilter] = UNSET


class McpTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server whose tools the model may call."""

    type: Literal["mcp"]
    server_label: Label
    server_url: str
    server_description: Maybe[str] = UNSET
    authorization: Maybe[Header] = UNSET
    headers: Maybe[Annotated[dict[HeaderName, Header], Meta(max_length=MAX_HEADERS)]] = UNSET
    allowed_tools: Maybe[list[str] | McpToolFilter] = UNSET
    require_approval: Maybe[Literal["always", "never"] | McpApprovalFilter] = UNSET

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers of requests to the server."""
        headers = dict(self.headers or {})
        if isinstance(self.authorization, str):
            headers["Authorization"] = f"Bearer {self.authorization}"
        refused = next((name for name in headers if name.lower() in NOT_FORWARDED), None)
        if refused is not None:
            raise WireError(f"The header {refused!r} cannot be set.", param="headers")
        return headers

    def allows(self, name: str, is_read_only: bool) -> bool:
        """Whether the model may call this tool of the server."""
        allowed = self.allowed_tools
        if isinstance(allowed, McpToolFilter):
            return allowed.matches(name, is_read_only)
        return not isinstance(allowed, list) or name in allowed

    def needs_approval(self, name: str, is_read_only: bool) -> bool:
        """Whether calls of this tool wait for the client's approval; they do unless the client says otherwise."""
        rule = self.require_approval
        if isinstance(rule, McpApprovalFilter):
            if isinstance(rule.never, McpToolFilter) and rule.never.matches(name, is_read_only):
                return False
            return not isinstance(rule.always, McpToolFilter) or rule.always.matches(name, is_read_only)
        return rule != "never"

    @property
    def shown(self) -> "McpTool":
        """The tool as it is told back: without secrets."""
        return replace(self, authorization=UNSET, headers=UNSET)


class ListedTool(Struct, omit_defaults=True):
    """A tool in an `mcp_list_tools` item."""

    name: str
    description: str
    input_schema: JsonObject
    annotations: JsonObject | UnsetType = UNSET


class McpCallError(Struct):
    type: str
    message: str
    code: int | UnsetType = UNSET


def check_servers(tools: Sequence[McpTool], allowed: AllowedServers, param: str) -> None:
    """WireError for servers that are not allowed, too many, or of the same label."""
    if len(tools) > MAX_SERVERS:
        raise WireError(f"A session has at most {MAX_SERVERS} MCP servers.", param=param)
    if len({tool.server_label for tool in tools}) < len(tools):
        raise WireError("Two MCP servers have the same server_label.", param=param)
    for tool in tools:
        if tool.server_label == LABEL:
            raise WireError(f"The server_label {LABEL!r} is that of built-in tools.", param=f"{param}.server_label")
        try:
            allowed.target(tool.server_url)
        except InputError as error:
            raise WireError(str(error), param=f"{param}.server_url") from error
        _ = tool.sent_headers
