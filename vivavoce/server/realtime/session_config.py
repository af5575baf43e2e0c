"""The session object in force: changed by its client, checked against the abilities of the model."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from vivavoce.dialogue.settings import ConversationSettings, HostedTool
from vivavoce.server.host import Host, abilities_of
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.realtime.audio_formats import WireFormat, wire_format
from vivavoce.server.realtime.items import (
    ConversationItem,
    ItemReference,
    ResponseParams,
    VivaResponseParams,
    image_param,
)
from vivavoce.server.realtime.mcp_types import McpTool
from vivavoce.server.realtime.prompts import PromptFolder
from vivavoce.server.realtime.session_changes import Options, default_session, merged
from vivavoce.server.realtime.session_checks import (
    NO_SERVERS,
    check_output_schema,
    refuse_unsupported,
    supported_tools,
    unsupported,
)
from vivavoce.server.realtime.session_settings import conversation_settings, detector_type, output_format
from vivavoce.server.realtime.session_types import (
    Binary,
    RealtimeSessionObject,
    ResponseOptions,
    SessionObject,
    SessionParams,
    SessionType,
    ToolChoiceMcp,
    TranscriptionSessionObject,
    VivaSession,
    value_or,
)
from vivavoce.server.wire import JsonObject, WireError

if TYPE_CHECKING:
    from vivavoce.server.realtime.hosted_tools import HostedTools


class Configuration:
    """A session object that is always complete and valid."""

    def __init__(
        self,
        host: Host,
        model: str,
        kind: SessionType = "realtime",
        change: SessionParams | None = None,
        prompts: PromptFolder | None = None,
        mcp: AllowedServers = NO_SERVERS,
        idle_timeout_ms: int | None = None,
    ) -> None:
        """`mcp` are the MCP servers that its clients may name; `idle_timeout_ms` holds unless they choose another."""
        self._mcp = mcp
        self.hosted: HostedTools | None = None
        """Adds the tools of MCP servers to the settings."""
        self._base, self._voices, self._abilities = host.settings, tuple(host.voices), abilities_of(host)
        if idle_timeout_ms is not None:
            turn = replaced(self._base.turn, idle_timeout_ms=idle_timeout_ms)
            self._base = replaced(self._base, turn=turn)
        self._models = [model, *(card.id for card in host.models if card.id != model)]
        self._prompts = prompts
        self.session = default_session(self._base, model, kind)
        if change is not None:
            self.session = self.changed(change)

    def changed(self, change: ResponseOptions, param: str = "session") -> SessionObject:
        """The session object after a change; WireError where it cannot be made."""
        session, refused = self.changed_but_for_tools(change, param)
        if refused:
            raise refused[0]
        return session

    def changed_but_for_tools(
        self, change: ResponseOptions, param: str = "session"
    ) -> tuple[SessionObject, list[WireError]]:
        """The session object after a change, without the tools that are refused, and their errors."""
        kind = getattr(change, "type", UNSET)
        is_transcription = kind == "transcription" or (kind is UNSET and self.is_transcription)
        detector = detector_type(self.session.audio.input.turn_detection, self._base.turn)
        refuse_unsupported(change, is_transcription, detector, self._abilities, self._models, param)
        tools, refused = supported_tools(value_or(change.tools, []), self._abilities, param, self._mcp)
        change = self._with_prompt(change, param)
        return merged(self.session, change, self._base.turn, self._voices, param, tools), refused

    def _with_prompt(self, change: Options, param: str) -> Options:
        """The change with the text of its stored prompt as instructions, unless it has instructions of its own."""
        if isinstance(change.prompt, UnsetType) or not isinstance(change.instructions, UnsetType):
            return change
        if change.prompt is None:
            has_prompt = getattr(self.session, "prompt", None) is not None
            return replace(change, instructions=self._base.instructions) if has_prompt else change
        if self._prompts is None:
            raise unsupported(f"{param}.prompt", "The server has no folder of prompts; send instructions.")
        return replace(change, instructions=self._prompts.text(change.prompt, f"{param}.prompt"))

    def check_images(self, items: Sequence[ConversationItem | ItemReference], params: Sequence[str]) -> None:
        """WireError where items of a client have pictures and the model does not see; `params` are their paths."""
        param = None if self._abilities.images else image_param(items, params)
        if param is not None:
            raise unsupported(param, "The model sees no images; a cascade does, by a chat endpoint that sees.")

    def settings(self, session: SessionObject | None = None) -> ConversationSettings:
        """The conversation settings of this session object, or of another."""
        session = session or self.session
        settings = conversation_settings(session, self._base, self._voices)
        if self.hosted is None or not isinstance(session, RealtimeSessionObject):
            return settings
        hosted = self.hosted.tools(settings.tools, mcp_tools(session))
        choice = session.tool_choice
        if isinstance(choice, ToolChoiceMcp):
            names = [tool.name for tool in hosted if _is_named(tool.hosted, choice)]
            # A tool that is not listed yet cannot be called.
            named = names[0] if choice.name and names else "required" if names else "auto"
            settings = replaced(settings, tool_choice=named)
        return replaced(settings, tools=(*settings.tools, *hosted))

    def output_schema(self, params: ResponseParams, settings: ConversationSettings) -> JsonObject | None:
        """The JSON schema of a response; WireError where the model or the modality cannot follow it."""
        schema = value_or(value_or(params.viva, VivaResponseParams()).json_schema, None)
        if schema is not None:
            check_output_schema(schema, settings.modality, self._abilities)
        return schema

    @property
    def input_format(self) -> WireFormat:
        return wire_format(self.session.audio.input.format)

    @property
    def output_format(self) -> WireFormat:
        return output_format(self.session)

    @property
    def binary(self) -> Binary | None:
        """The encoding of binary audio frames; None: audio is sent in events."""
        return value_or(self.session.viva, VivaSession()).binary or None

    @property
    def is_transcription(self) -> bool:
        return isinstance(self.session, TranscriptionSessionObject)

    @property
    def ends_turns(self) -> bool:
        """Whether the server detects the end of a turn; otherwise the client commits it."""
        return self.session.audio.input.turn_detection is not None


def mcp_tools(session: SessionObject) -> list[McpTool]:
    """The MCP servers of a session."""
    tools = session.tools if isinstance(session, RealtimeSessionObject) else []
    return [tool for tool in tools if isinstance(tool, McpTool)]


def without_secrets(session: SessionObject) -> SessionObject:
    """The session object as clients see it: without the keys and headers of its MCP servers."""
    if not mcp_tools(session) or not isinstance(session, RealtimeSessionObject):
        return session
    return replace(session, tools=[tool.shown if isinstance(tool, McpTool) else tool for tool in session.tools])


def _is_named(tool: HostedTool | None, choice: ToolChoiceMcp) -> bool:
    """Whether a choice names this tool, or all tools of its server."""
    return tool is not None and tool.server == choice.server_label and value_or(choice.name, tool.name) == tool.name
