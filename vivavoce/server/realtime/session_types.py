"""Sessions in Realtime events: the parameters a client may send, and the session object in force.

`Maybe` fields distinguish an absent field (`UNSET`, never encoded) from an explicit null. Classes named `…Params` are
sent by clients: every field is optional, and the names of the beta protocol are included. The others are sent by the
server and are always complete.
"""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from vivavoce.server.wire import JsonObject

T = TypeVar("T")
Maybe: TypeAlias = T | UnsetType | None

Modality = Literal["text", "audio"]
Modalities = Annotated[list[Modality], Meta(min_length=1)]
TokenLimit = Annotated[int, Meta(ge=1, le=4096)] | Literal["inf"]
Include = list[Literal["item.input_audio_transcription.logprobs"]]
Binary = Literal["raw", "opus"]
SessionType = Literal["realtime", "transcription"]


def value_or(value: Maybe[T], default: T) -> T:
    """The value of a field, or the default where it is absent or null."""
    return default if value is None or isinstance(value, UnsetType) else value


# Audio

FormatName = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
SampleRate = Literal[8_000, 16_000, 24_000, 48_000]


class AudioFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """PCM rates other than 24 kHz are an extension."""

    type: FormatName | None = "audio/pcm"
    rate: Maybe[SampleRate] = UNSET


BetaFormat = Literal["pcm16", "g711_ulaw", "g711_alaw"]


class VoiceId(Struct, frozen=True, forbid_unknown_fields=True):
    id: str


Voice = str | VoiceId
Speed = Annotated[float, Meta(ge=0.25, le=1.5)]
Temperature = Annotated[float, Meta(ge=0, le=2)]


NoiseStrength = Annotated[float, Meta(ge=0, le=1)]


class NoiseReduction(Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are absent from a change stay as they are."""

    type: Maybe[Literal["near_field", "far_field"]] = UNSET
    strength: Maybe[NoiseStrength] = UNSET


class Transcription(Struct, frozen=True, forbid_unknown_fields=True):
    model: Maybe[str] = UNSET
    language: Maybe[str] = UNSET
    languages: Maybe[list[str]] = UNSET
    prompt: Maybe[str] = UNSET
    keywords: Maybe[list[str]] = UNSET
    delay: Maybe[Literal["minimal", "low", "medium", "high", "xhigh"]] = UNSET


Eagerness = Literal["low", "medium", "high", "auto"]
Threshold = Annotated[float, Meta(ge=0, le=1)]
PrefixPadding = Annotated[int, Meta(ge=0, le=5000)]
SilenceDuration = Annotated[int, Meta(ge=0, le=10_000)]
IdleTimeout = Annotated[int, Meta(ge=1000, le=600_000)]


class ServerVad(Struct, frozen=True, tag_field="type", tag="server_vad"):
    """Every field is sent: stock clients read `interrupt_response` to decide whether to cancel responses."""

    threshold: float
    prefix_padding_ms: int
    silence_duration_ms: int
    idle_timeout_ms: int | None
    create_response: bool
    interrupt_response: bool


class SemanticVad(Struct, frozen=True, tag_field="type", tag="semantic_vad"):
    eagerness: Eagerness
    create_response: bool
    interrupt_response: bool


TurnDetection = ServerVad | SemanticVad


class TurnDetectionParams(Struct, forbid_unknown_fields=True):
    """Fields of both detectors; those of the other detector are refused. Without a type the current one is changed,
    or `server_vad` is chosen by a field that only it has."""

    type: Literal["server_vad", "semantic_vad"] | UnsetType = UNSET
    threshold: Maybe[Threshold] = UNSET
    prefix_padding_ms: Maybe[PrefixPadding] = UNSET
    silence_duration_ms: Maybe[SilenceDuration] = UNSET
    idle_timeout_ms: Maybe[IdleTimeout] = UNSET
    eagerness: Maybe[Eagerness] = UNSET
    create_response: Maybe[bool] = UNSET
    interrupt_response: Maybe[bool] = UNSET


class AudioInput(Struct, frozen=True):
    format: AudioFormat
    transcription: Transcription | None
    noise_reduction: NoiseReduction | None
    turn_detection: TurnDetection | None


class AudioInputParams(Struct, forbid_unknown_fields=True):
    format: Maybe[AudioFormat | BetaFormat] = UNSET
    transcription: Maybe[Transcription] = UNSET
    noise_reduction: Maybe[NoiseReduction] = UNSET
    turn_detection: Maybe[TurnDetectionParams] = UNSET


class AudioOutput(Struct, frozen=True):
    format: AudioFormat
    voice: Voice
    speed: float


class AudioOutputParams(Struct, forbid_unknown_fields=True):
    format: Maybe[AudioFormat | BetaFormat] = UNSET
    voice: Maybe[Voice] = UNSET
    speed: Maybe[Speed] = UNSET


class AudioParams(Struct, forbid_unknown_fields=True):
    input: Maybe[AudioInputParams] = UNSET
    output: Maybe[AudioOutputParams] = UNSET


# Options of sessions and of single responses


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    type: Literal["function"] | None = "function"
    description: Maybe[str] = UNSET
    parameters: Maybe[JsonObject] = UNSET
    """A JSON schema."""


class ToolChoiceFunction(Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ToolChoiceMcp(Struct, frozen=True, tag_field="type", tag="mcp", forbid_unknown_fields=True):
    server_label: str
    name: Maybe[str] = UNSET


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceFunction | ToolChoiceMcp


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Maybe[Literal["minimal", "low", "medium", "high", "xhigh"]] = UNSET


class CacheBreakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["explicit"]
    ttl: Maybe[Literal["30m", "12h"]] = UNSET


class PromptText(Struct, frozen=True, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: Maybe[CacheBreakpoint] = UNSET


class PromptImage(Struct, frozen=True, tag_field="type", tag="input_image", forbid_unknown_fields=True):
    detail: Literal["low", "high", "auto", "original"]
    file_id: Maybe[str] = UNSET
    image_url: Maybe[str] = UNSET
    prompt_cache_breakpoint: Maybe[CacheBreakpoint] = UNSET


class PromptFile(Struct, frozen=True, tag_field="type", tag="input_file", forbid_unknown_fields=True):
    detail: Maybe[Literal["auto", "low", "high"]] = UNSET
    file_data: Maybe[str] = UNSET
    file_id: Maybe[str] = UNSET
    file_url: Maybe[str] = UNSET
    filename: Maybe[str] = UNSET
    prompt_cache_breakpoint: Maybe[CacheBreakpoint] = UNSET


class Prompt(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    variables: Maybe[dict[str, str | PromptText | PromptImage | PromptFile]] = UNSET
    version: Maybe[str] = UNSET


class TracingConfiguration(Struct, frozen=True, forbid_unknown_fields=True):
    group_id: Maybe[str] = UNSET
    metadata: Any = UNSET
    workflow_name: Maybe[str] = UNSET


class TokenLimits(Struct, frozen=True, forbid_unknown_fields=True):
    post_instructions: Maybe[Annotated[int, Meta(ge=0)]] = UNSET


class RetentionRatio(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: Maybe[TokenLimits] = UNSET


Tracing = Literal["auto"] | TracingConfiguration
Truncation = Literal["auto", "disabled"] | RetentionRatio


class ResponseOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of responses, in a session or for one response; below, the names of the beta protocol."""

    instructions: Maybe[str] = UNSET
    output_modalities: Maybe[Modalities] = UNSET
    tools: Maybe[list[JsonObject]] = UNSET
    """`FunctionTool`s and `McpTool`s: each is checked by itself, so that one that is refused leaves the others."""
    tool_choice: Maybe[ToolChoice] = UNSET
    parallel_tool_calls: Maybe[bool] = UNSET
    max_output_tokens: Maybe[TokenLimit] = UNSET
    prompt: Maybe[Prompt] = UNSET
    reasoning: Maybe[Reasoning] = UNSET
    audio: Maybe[AudioParams] = UNSET

    modalities: Maybe[Modalities] = UNSET
    max_response_output_tokens: Maybe[TokenLimit] = UNSET
    output_audio_format: Maybe[AudioFormat | BetaFormat] = UNSET
    voice: Maybe[Voice] = UNSET
    speed: Maybe[Speed] = UNSET
    temperature: Maybe[Temperature] = UNSET


# Sessions


class VivaParams(Struct, forbid_unknown_fields=True):
    """Our extension of the session object."""

    binary: Maybe[Binary] = UNSET
    """Audio in binary frames: in the format of the session (raw), or as Opus packets."""
    warnings: Maybe[bool] = UNSET
    """Whether problems that end nothing are sent as `viva.warning` events."""


class SessionParams(ResponseOptions, kw_only=True):
    type: SessionType | UnsetType = UNSET
    model: Maybe[str] = UNSET
    include: Maybe[Include] = UNSET
    tracing: Maybe[Tracing] = UNSET
    truncation: Maybe[Truncation] = UNSET
    viva: Maybe[VivaParams] = UNSET

    input_audio_format: Maybe[AudioFormat | BetaFormat] = UNSET
    input_audio_transcription: Maybe[Transcription] = UNSET
    input_audio_noise_reduction: Maybe[NoiseReduction] = UNSET
    turn_detection: Maybe[TurnDetectionParams] = UNSET


class VivaSession(Struct, frozen=True):
    binary: Maybe[Binary] = UNSET
    warnings: Maybe[bool] = UNSET
    resume_token: str | UnsetType = UNSET


class SessionAudio(Struct, frozen=True):
    input: AudioInput
    output: AudioOutput


class TranscriptionSessionAudio(Struct, frozen=True):
    input: AudioInput


class RealtimeSessionObject(Struct, frozen=True, kw_only=True, tag_field="type", tag="realtime"):
    object: Literal["realtime.session"] = "realtime.session"
    id: str | UnsetType = UNSET
    model: str
    output_modalities: list[Modality]
    instructions: str
    tools: list[Any]
    """`FunctionTool`s and `McpTool`s; both have a `type`, which no tag can be, as clients may leave it out."""
    tool_choice: ToolChoice
    parallel_tool_calls: Maybe[bool] = UNSET
    max_output_tokens: int | Literal["inf"]
    tracing: Tracing | None
    truncation: Truncation
    prompt: Prompt | None
    reasoning: Maybe[Reasoning] = UNSET
    include: Include | None
    audio: SessionAudio
    temperature: Maybe[float] = UNSET
    expires_at: int | UnsetType = UNSET
    viva: VivaSession | UnsetType = UNSET


class TranscriptionSessionObject(Struct, frozen=True, kw_only=True, tag_field="type", tag="transcription"):
    object: Literal["realtime.transcription_session"] = "realtime.transcription_session"
    id: str | UnsetType = UNSET
    include: Include | None
    audio: TranscriptionSessionAudio
    expires_at: int | UnsetType = UNSET
    viva: VivaSession | UnsetType = UNSET


SessionObject = RealtimeSessionObject | TranscriptionSessionObject
