"""Parameters of sessions and responses that are valid in the protocol and that this server does not honour.

They are refused by name: a client must not believe that a setting is in force when it is not.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from vivavoce.dialogue.backend import RecognitionAbilities
from vivavoce.engine.schema_limits import check_schema
from vivavoce.errors import InputError
from vivavoce.server.host import ModelAbilities
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.realtime.mcp_types import McpTool, check_servers
from vivavoce.server.realtime.refusals import refusal
from vivavoce.server.realtime.session_types import (
    AudioInputParams,
    AudioParams,
    FunctionTool,
    Maybe,
    Reasoning,
    ResponseOptions,
    RetentionRatio,
    SemanticVad,
    ServerVad,
    SessionParams,
    Transcription,
    TurnDetectionParams,
)
from vivavoce.server.rest.languages import language_code
from vivavoce.server.wire import JsonObject, WireError

MAX_LISTED = 12
REALTIME_ONLY = (
    *("instructions", "output_modalities", "modalities", "tools", "tool_choice", "parallel_tool_calls"),
    *("max_output_tokens", "max_response_output_tokens", "output_audio_format", "voice", "speed", "temperature"),
    *("tracing", "truncation", "prompt", "reasoning"),
)
NO_SERVERS = AllowedServers()
DETECTOR_FIELDS = {
    "server_vad": {"type", *ServerVad.__struct_fields__},
    "semantic_vad": {"type", *SemanticVad.__struct_fields__},
}
SILENCE_FIELDS = DETECTOR_FIELDS["server_vad"] - DETECTOR_FIELDS["semantic_vad"]


def unsupported(param: str, why: str = "") -> WireError:
    """The error of a parameter that exists in the protocol, and not here."""
    return WireError(f"Unknown parameter: '{param}'.{why and f' {why}'}", "unknown_parameter", param)


def refuse_unsupported(
    change: ResponseOptions,
    is_transcription: bool,
    detector: str,
    abilities: ModelAbilities,
    models: Sequence[str],
    param: str,
) -> None:
    """WireError for the first parameter that would have no effect.

    `detector` is the type of turn detection in force, `models` the model of the session and the others.
    """
    if is_transcription:
        for name in REALTIME_ONLY:
            if _is_set(getattr(change, name, UNSET)):
                raise unsupported(f"{param}.{name}", "This is a transcription session.")
    if isinstance(change.reasoning, Reasoning) and _is_set(change.reasoning.effort) and not abilities.reasoning:
        raise unsupported(f"{param}.reasoning", "The model does not reason.")
    if change.tool_choice not in (UNSET, None, "auto", "none") and not abilities.tools:
        raise unsupported(f"{param}.tool_choice", "The model calls no tools.")
    if isinstance(change, SessionParams):
        _refuse_in_session(change, detector, abilities, models, param)
    elif isinstance(change.audio, AudioParams) and _is_set(change.audio.input):
        raise unsupported(f"{param}.audio.input", "It is a parameter of the session.")


def _refuse_in_session(
    change: SessionParams, detector: str, abilities: ModelAbilities, models: Sequence[str], param: str
) -> None:
    if change.include and not abilities.recognition.logprobs:
        raise unsupported(f"{param}.include", "The recogniser returns no log probabilities.")
    if isinstance(change.truncation, RetentionRatio) and not abilities.retention_ratio:
        raise unsupported(f"{param}.truncation", "The chat model truncates its history itself.")
    if isinstance(change.model, str) and change.model in models[1:]:
        raise WireError("The model of a session cannot be changed.", param=f"{param}.model")
    audio_input = change.audio.input if isinstance(change.audio, AudioParams) else UNSET
    if isinstance(audio_input, AudioInputParams):
        prefix = f"{param}.audio.input"
        _refuse_transcription(audio_input.transcription, abilities.recognition, f"{prefix}.transcription")
        _refuse_detection(audio_input.turn_detection, detector, f"{prefix}.turn_detection")
    _refuse_transcription(change.input_audio_transcription, abilities.recognition, f"{param}.input_audio_transcription")
    _refuse_detection(change.turn_detection, detector, f"{param}.turn_detection")


def _refuse_transcription(value: Maybe[Transcription], abilities: RecognitionAbilities, param: str) -> None:
    if not isinstance(value, Transcription):
        return
    for name in ("prompt", "keywords"):
        if getattr(value, name) and not abilities.prompts:
            raise unsupported(f"{param}.{name}", "The recogniser takes no prompt.")
    if value.delay and not abilities.partials:
        raise unsupported(f"{param}.delay", "The recogniser transcribes whole turns only.")
    if value.language and value.languages:
        raise unsupported(f"{param}.languages", "Name a language or several, not both.")
    named = [value.language] if value.language else value.languages or []
    if abilities.languages and named and not {language_code(each) for each in named} & set(abilities.languages):
        known = ", ".join(abilities.languages[:MAX_LISTED]) + (" …" if len(abilities.languages) > MAX_LISTED else "")
        name = "language" if value.language else "languages"
        raise WireError(f"The recogniser does not know {', '.join(named)}; it knows {known}.", param=f"{param}.{name}")


def chosen_detector(change: TurnDetectionParams, detector: str) -> str:
    """The type of turn detection after a change: without a type, the fields that only `server_vad` has choose it."""
    if not isinstance(change.type, UnsetType):
        return change.type
    return "server_vad" if any(_is_set(getattr(change, name)) for name in SILENCE_FIELDS) else detector


def _refuse_detection(value: Maybe[TurnDetectionParams], detector: str, param: str) -> None:
    if isinstance(value, TurnDetectionParams):
        kind = chosen_detector(value, detector)
        for name in value.__struct_fields__:
            if _is_set(getattr(value, name)) and name not in DETECTOR_FIELDS[kind]:
                raise unsupported(f"{param}.{name}", f"It is not a parameter of {kind}.")


def _supported_server(
    tool: dict[str, object], known: Sequence[McpTool], abilities: ModelAbilities, mcp: AllowedServers, param: str
) -> McpTool:
    """An MCP server of the client; WireError where it may not be reached."""
    if not abilities.tools:
        raise unsupported(param, "The model calls no tools; a cascade with a chat endpoint does.")
    if not param.startswith("session."):
        raise unsupported(f"{param}.type", "MCP servers are tools of the session.")
    if not mcp:
        raise unsupported(f"{param}.type", "No MCP server is allowed here; --allow-mcp names them.")
    for name in ("connector_id", "tunnel_id", "defer_loading", "allowed_callers"):
        if _is_set(tool.get(name)):
            raise unsupported(f"{param}.{name}")
    try:
        server = msgspec.convert({name: value for name, value in tool.items() if value is not None}, McpTool)
    except msgspec.ValidationError as error:
        raise refusal(error, McpTool, param) from None
    check_servers([*known, server], mcp, param)
    return server


def check_output_schema(schema: JsonObject, modality: str, abilities: ModelAbilities) -> None:
    """WireError for the schema of a response that is not written, or that the model cannot follow."""
    param = "response.viva.json_schema"
    if not abilities.json_schema:
        raise unsupported(param, "The model follows no schemas; local models do, with vivavoce[tools].")
    if modality != "text":
        raise WireError("A response with a schema is written: set output_modalities to ['text'].", param=param)
    try:
        check_schema(schema, "the schema")
    except InputError as error:
        raise WireError(str(error), param=param) from error


def _is_set(value: object) -> bool:
    return value is not None and value is not UNSET


def supported_tools(
    tools: Sequence[object], abilities: ModelAbilities, param: str, mcp: AllowedServers = NO_SERVERS
) -> tuple[list[FunctionTool | McpTool], list[WireError]]:
    """The tools that the model can call, and the errors of the others; `mcp` are the servers that may be reached."""
    supported: list[FunctionTool | McpTool] = []
    errors: list[WireError] = []
    for index, tool in enumerate(tools):
        at = f"{param}.tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") == "mcp":
            known = [each for each in supported if isinstance(each, McpTool)]
            try:
                supported.append(_supported_server(tool, known, abilities, mcp, at))
            except WireError as error:
                errors.append(error)
            continue
        try:
            function = msgspec.convert(tool, FunctionTool)
        except msgspec.ValidationError as error:
            errors.append(refusal(error, FunctionTool, at))
            continue
        try:
            check_schema(function.parameters or {}, "the schema")
        except InputError as error:
            errors.append(WireError(str(error), param=f"{at}.parameters"))
            continue
        if abilities.tools:
            supported.append(function)
        else:
            errors.append(unsupported(at, "The model calls no tools; a cascade with a chat endpoint does."))
    return supported, errors
