"""The events a server sends, and their encoding. The event log sets their `event_id`."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vivavoce.server.realtime.items import ConversationItem, Response
from vivavoce.server.realtime.session_types import SessionObject
from vivavoce.server.wire import ErrorDetail, WireError


class ServerEvent(Struct, kw_only=True, tag_field="type"):
    event_id: str = ""


class Error(ServerEvent, tag="error"):
    error: ErrorDetail


class SessionCreated(ServerEvent, tag="session.created"):
    session: SessionObject


class SessionUpdated(ServerEvent, tag="session.updated"):
    session: SessionObject


class SessionResumed(ServerEvent, tag="viva.session.resumed"):
    """Our extension: the first event of a connection that resumes a session."""

    session: SessionObject
    lost_events: int
    received_audio_ms: int
    last_client_event_id: str | None


class VivaWarning(ServerEvent, tag="viva.warning"):
    """Our extension: a problem that ends nothing, for clients that set `session.viva.warnings`."""

    code: str
    message: str
    response_id: str | None


class VivaCallStarted(ServerEvent, tag="viva.call.started"):
    """Our extension: the session is a telephone call; the names that its provider has for it."""

    provider: str
    provider_call_id: str
    stream_id: str


class VivaCallProgress(ServerEvent, tag="viva.call.progress"):
    """Our extension: the progress of an outgoing call or of a transfer.

    `status` is ringing, early_media, answered, transfer, or a tone that was heard: ringback, busy, congestion or
    special_information; `status_code` is the response of SIP that says so.
    """

    status: str
    status_code: int | None


class VivaCallAnsweredBy(ServerEvent, tag="viva.call.answered_by"):
    """Our extension: what has answered an outgoing call: person, machine, beep (a machine records) or silence."""

    answer: str


class VivaCallEnded(ServerEvent, tag="viva.call.ended"):
    """Our extension: why a telephone call has ended, and the response of SIP that refused it."""

    reason: str
    status_code: int | None


class ConversationObject(Struct):
    id: str
    object: Literal["realtime.conversation"] = "realtime.conversation"


class ConversationCreated(ServerEvent, tag="conversation.created"):
    conversation: ConversationObject


class ConversationItemAdded(ServerEvent, tag="conversation.item.added"):
    previous_item_id: str | None
    item: ConversationItem


class ConversationItemDone(ServerEvent, tag="conversation.item.done"):
    previous_item_id: str | None
    item: ConversationItem


class ConversationItemRetrieved(ServerEvent, tag="conversation.item.retrieved"):
    item: ConversationItem


class ConversationItemTruncated(ServerEvent, tag="conversation.item.truncated"):
    item_id: str
    audio_end_ms: int
    content_index: int = 0


class ConversationItemDeleted(ServerEvent, tag="conversation.item.deleted"):
    item_id: str


# The user's audio


class InputAudioBufferSpeechStarted(ServerEvent, tag="input_audio_buffer.speech_started"):
    item_id: str
    audio_start_ms: int


class InputAudioBufferSpeechStopped(ServerEvent, tag="input_audio_buffer.speech_stopped"):
    item_id: str
    audio_end_ms: int


class InputAudioBufferCommitted(ServerEvent, tag="input_audio_buffer.committed"):
    item_id: str
    previous_item_id: str | None


class InputAudioBufferCleared(ServerEvent, tag="input_audio_buffer.cleared"):
    pass


class InputAudioBufferDtmfEventReceived(ServerEvent, tag="input_audio_buffer.dtmf_event_received"):
    """A key of the caller's telephone; when it was received, as a Unix time."""

    event: str
    received_at: int


class InputAudioBufferTimeoutTriggered(ServerEvent, tag="input_audio_buffer.timeout_triggered"):
    item_id: str
    audio_start_ms: int
    audio_end_ms: int


class Logprob(Struct):
    """A token of a transcript, its bytes and the logarithm of its probability."""

    token: str
    bytes: list[int]
    logprob: float


class TranscriptionDelta(ServerEvent, tag="conversation.item.input_audio_transcription.delta"):
    item_id: str
    delta: str
    content_index: int = 0
    logprobs: list[Logprob] | UnsetType = UNSET


class DetectedLanguage(Struct):
    code: str


class DurationUsage(Struct, tag_field="type", tag="duration"):
    seconds: float


class TranscriptionCompleted(ServerEvent, tag="conversation.item.input_audio_transcription.completed"):
    item_id: str
    transcript: str
    usage: DurationUsage
    content_index: int = 0
    languages: list[DetectedLanguage] | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET


class TranscriptionSegment(ServerEvent, tag="conversation.item.input_audio_transcription.segment"):
    """What one speaker said in a turn; seconds into the item."""

    item_id: str
    id: str
    text: str
    start: float
    end: float
    speaker: str = "A"
    content_index: int = 0


class TranscriptionFailed(ServerEvent, tag="conversation.item.input_audio_transcription.failed"):
    item_id: str
    error: ErrorDetail
    content_index: int = 0


# The server's audio, where the server plays it (WebRTC)


class OutputAudioBufferStarted(ServerEvent, tag="output_audio_buffer.started"):
    response_id: str


class OutputAudioBufferStopped(ServerEvent, tag="output_audio_buffer.stopped"):
    response_id: str


class OutputAudioBufferCleared(ServerEvent, tag="output_audio_buffer.cleared"):
    response_id: str


# Responses


class ResponseCreated(ServerEvent, tag="response.created"):
    response: Response


class ResponseDone(ServerEvent, tag="response.done"):
    response: Response


class RateLimit(Struct):
    name: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_seconds: float


class RateLimitsUpdated(ServerEvent, tag="rate_limits.updated"):
    """Sent after each response. Neither requests nor tokens are limited."""

    rate_limits: list[RateLimit] = []


class OutputItemEvent(ServerEvent):
    response_id: str
    output_index: int
    item: ConversationItem


class OutputItemAdded(OutputItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(OutputItemEvent, tag="response.output_item.done"):
    pass


class ItemEvent(ServerEvent):
    response_id: str
    item_id: str
    output_index: int


class ContentEvent(ItemEvent, kw_only=True):
    """An event about the only content part of a message."""

    content_index: int = 0


class ContentPartText(Struct, tag_field="type", tag="text"):
    text: str


class ContentPartAudio(Struct, tag_field="type", tag="audio"):
    transcript: str


class ContentPartAdded(ContentEvent, tag="response.content_part.added"):
    part: ContentPartText | ContentPartAudio


class ContentPartDone(ContentEvent, tag="response.content_part.done"):
    part: ContentPartText | ContentPartAudio


class OutputTextDelta(ContentEvent, tag="response.output_text.delta"):
    delta: str


class OutputTextDone(ContentEvent, tag="response.output_text.done"):
    text: str


class OutputAudioDelta(ContentEvent, tag="response.output_audio.delta"):
    delta: bytes


class OutputAudioDone(ContentEvent, tag="response.output_audio.done"):
    pass


class OutputAudioTranscriptDelta(ContentEvent, tag="response.output_audio_transcript.delta"):
    delta: str


class OutputAudioTranscriptDone(ContentEvent, tag="response.output_audio_transcript.done"):
    transcript: str


class FunctionCallArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    call_id: str
    delta: str


class FunctionCallArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    call_id: str
    name: str
    arguments: str


# MCP


class McpListToolsEvent(ServerEvent):
    item_id: str


class McpListToolsInProgress(McpListToolsEvent, tag="mcp_list_tools.in_progress"):
    pass


class McpListToolsCompleted(McpListToolsEvent, tag="mcp_list_tools.completed"):
    pass


class McpListToolsFailed(McpListToolsEvent, tag="mcp_list_tools.failed"):
    pass


class McpCallArgumentsDelta(ItemEvent, tag="response.mcp_call_arguments.delta"):
    delta: str
    obfuscation: str = ""


class McpCallArgumentsDone(ItemEvent, tag="response.mcp_call_arguments.done"):
    arguments: str


class McpCallEvent(ServerEvent):
    item_id: str
    output_index: int


class McpCallInProgress(McpCallEvent, tag="response.mcp_call.in_progress"):
    pass


class McpCallCompleted(McpCallEvent, tag="response.mcp_call.completed"):
    pass


class McpCallFailed(McpCallEvent, tag="response.mcp_call.failed"):
    pass


DEPTH_MARGIN = 32  # levels of nesting reserved for the stack frames between a handler and the encoder

_encoder = msgspec.json.Encoder()


def encode(event: ServerEvent) -> bytes:
    """The event as JSON, with `type` first."""
    return _encoder.encode(event)


def check_depth(value: object) -> None:
    """Raise RecursionError where a value is nested too deeply to be encoded later, from a deeper stack."""
    for _ in range(DEPTH_MARGIN):
        value = [value]
    _encoder.encode(value)


def error_event(error: WireError, event_id: str | None = None) -> Error:
    """An error event; `event_id` is that of the client event at fault."""
    return Error(error.detail(event_id or error.event_id))


def server_error(code: str, message: str) -> ErrorDetail:
    return ErrorDetail(type="server_error", code=code, message=message, param=None)
