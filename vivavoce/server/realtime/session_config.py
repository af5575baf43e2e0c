"""The session object in force: its defaults, the changes of a client, and the conversation settings it stands for."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import UNSET, UnsetType, convert
from msgspec.structs import asdict, replace

from vivavoce.dialogue.settings import (
    ConversationSettings,
    HostedTool,
    NoiseSettings,
    RecognitionSettings,
    Tool,
    Truncation,
    TurnSettings,
)
from vivavoce.server.host import STOCK_VOICES, Host, ModelAbilities, abilities_of, stand_in
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
from vivavoce.server.realtime.session_checks import (
    NO_SERVERS,
    check_output_schema,
    refuse_unsupported,
    supported_tools,
    unsupported,
)
from vivavoce.server.realtime.session_types import (
    AudioInput,
    AudioInputParams,
    AudioOutput,
    AudioOutputParams,
    AudioParams,
    Binary,
    FunctionTool,
    Maybe,
    Modality,
    NoiseReduction,
    RealtimeSessionObject,
    Reasoning,
    ResponseOptions,
    SemanticVad,
    ServerVad,
    SessionAudio,
    SessionObject,
    SessionParams,
    SessionType,
    TokenLimits,
    ToolChoice,
    ToolChoiceMcp,
    Transcription,
    TranscriptionSessionAudio,
    TranscriptionSessionObject,
    TurnDetection,
    TurnDetectionParams,
    VivaSession,
    Voice,
)
from vivavoce.server.realtime.session_types import Truncation as TruncationParams
from vivavoce.server.rest.languages import language_code
from vivavoce.server.wire import JsonObject, WireError

if TYPE_CHECKING:
    from vivavoce.server.realtime.hosted_tools import HostedTools

T = TypeVar("T")
Options = TypeVar("Options", bound=ResponseOptions)

DETECTORS: dict[str, Literal["silence", "semantic"]] = {"server_vad": "silence", "semantic_vad": "semantic"}
WHEN_NULL = {
    "instructions": "",
    "output_modalities": ["audio"],
    "tools": [],
    "tool_choice": "auto",
    "max_output_tokens": "inf",
    "truncation": "auto",
}
"""What null means for a field of the session that cannot be null."""
TOP_LEVEL = (*WHEN_NULL, "parallel_tool_calls", "prompt", "reasoning", "include", "tracing", "temperature")
BETA_RENAMED = {"modalities": "output_modalities", "max_response_output_tokens": "max_output_tokens"}
BETA_MOVED = {  # names of the beta protocol, and where they are under `audio`
    "input_audio_format": ("input", "format"),
    "input_audio_transcription": ("input", "transcription"),
    "input_audio_noise_reduction": ("input", "noise_reduction"),
    "turn_detection": ("input", "turn_detection"),
    "output_audio_format": ("output", "format"),
    "voice": ("output", "voice"),
    "speed": ("output", "speed"),
}


DEFAULT_NOISE = NoiseSettings()


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
        detection = self.session.audio.input.turn_detection
        detector = "server_vad" if detection is None else str(detection.__struct_config__.tag)
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


def overridden(session: SessionParams, change: SessionParams) -> SessionParams:
    """The session parameters with the fields that a change sets."""
    fields = {name: value for name, value in asdict(change).items() if value is not UNSET}
    return replace(session, **fields)


def value_or(value: Maybe[T], default: T) -> T:
    """The value of a field, or the default where it is absent or null."""
    return default if value is None or isinstance(value, UnsetType) else value


def default_session(settings: ConversationSettings, model: str, kind: SessionType = "realtime") -> SessionObject:
    """The complete session object of a client that sends no parameters."""
    is_transcribed = settings.transcribe_input or kind == "transcription"
    audio_input = AudioInput(
        format=WireFormat().as_wire(),
        transcription=Transcription(model="default") if is_transcribed else None,
        noise_reduction=None if (noise := settings.noise_reduction) is None else _wire_noise(noise),
        turn_detection=_turn_detection(settings.turn),
    )
    if kind == "transcription":
        return TranscriptionSessionObject(include=None, audio=TranscriptionSessionAudio(audio_input))
    return RealtimeSessionObject(
        model=model,
        output_modalities=[settings.modality],
        instructions=settings.instructions,
        tools=[],
        tool_choice=convert(settings.tool_choice, ToolChoice),
        max_output_tokens=settings.max_output_tokens or "inf",
        tracing=None,
        truncation="auto",
        prompt=None,
        include=None,
        audio=SessionAudio(
            audio_input, AudioOutput(WireFormat().as_wire(), settings.voice or "default", settings.speed)
        ),
    )


def merged(
    session: SessionObject,
    change: ResponseOptions,
    turn: TurnSettings,
    voices: Sequence[str],
    param: str = "session",
    tools: Sequence[FunctionTool | McpTool] | None = None,
) -> SessionObject:
    """The session after a change; fields that are absent stay. `turn` holds the defaults of turn detection, `tools` the
    tools of the change where they were checked before."""
    change = without_beta_names(change)
    if tools is None:
        tools, refused = supported_tools(value_or(change.tools, []), ModelAbilities(), param)
        if refused:
            raise refused[0]
    if isinstance(change, SessionParams):
        session = _of_type(session, change.type, f"{param}.type")
        if (viva := value_or(change.viva, None)) is not None:
            changes = {name: value for name, value in asdict(viva).items() if value is not UNSET}
            session = replace(session, viva=replace(value_or(session.viva, VivaSession()), **changes))
    names = {name for name in TOP_LEVEL if hasattr(session, name)}
    fields = {name: value for name in names if (value := getattr(change, name, UNSET)) is not UNSET}
    if fields.get("tools"):
        fields["tools"] = list(tools)
    session = replace(
        session, **{name: WHEN_NULL.get(name) if value is None else value for name, value in fields.items()}
    )
    audio = value_or(change.audio, AudioParams())
    session = replace(
        session, audio=replace(session.audio, input=_merged_input(session.audio.input, audio.input, turn))
    )
    if isinstance(session, RealtimeSessionObject):
        # ["text", "audio"] of the beta protocol is ["audio"] now
        modalities: list[Modality] = ["audio"] if "audio" in session.output_modalities else ["text"]
        output = _merged_output(session.audio.output, audio.output, voices, f"{param}.audio.output")
        session = replace(session, output_modalities=modalities, audio=replace(session.audio, output=output))
    return session


def without_beta_names(change: Options) -> Options:
    """The change with the fields of the beta protocol renamed; where both names are set, the present one wins."""
    fields = {new: getattr(change, old) for old, new in BETA_RENAMED.items() if getattr(change, new) is UNSET}
    moved = {old: value for old in BETA_MOVED if (value := getattr(change, old, UNSET)) is not UNSET}
    if moved:
        audio = value_or(change.audio, AudioParams())
        sides = {
            "input": value_or(audio.input, AudioInputParams()),
            "output": value_or(audio.output, AudioOutputParams()),
        }
        for old, value in moved.items():
            side, name = BETA_MOVED[old]
            if getattr(sides[side], name) is UNSET:
                sides[side] = replace(sides[side], **{name: value})
        fields["audio"] = replace(audio, **sides)
    return replace(change, **fields)


def _of_type(session: SessionObject, kind: SessionType | UnsetType, param: str) -> SessionObject:
    """The session, or a transcription session made of it."""
    if kind is UNSET or kind == session.__struct_config__.tag:
        return session
    if kind != "transcription":
        raise WireError(f"this is a transcription session; it cannot become {kind!r}", param=param)
    audio_input = session.audio.input
    audio_input = replace(audio_input, transcription=audio_input.transcription or Transcription(model="default"))
    return TranscriptionSessionObject(
        include=session.include,
        audio=TranscriptionSessionAudio(audio_input),
        viva=session.viva,
    )


def _merged_input(current: AudioInput, change: Maybe[AudioInputParams], turn: TurnSettings) -> AudioInput:
    change = value_or(change, AudioInputParams())
    result = current if change.transcription is UNSET else replace(current, transcription=change.transcription)
    if change.noise_reduction is not UNSET:
        result = replace(result, noise_reduction=_merged_noise(current.noise_reduction, change.noise_reduction))
    if (format := value_or(change.format, None)) is not None:
        result = replace(result, format=wire_format(format).as_wire())
    if change.turn_detection is None:
        return replace(result, turn_detection=None)
    if change.turn_detection is not UNSET:
        detection = _merged_turn(current.turn_detection, change.turn_detection, turn)
        result = replace(result, turn_detection=detection)
    return result


def _merged_noise(current: NoiseReduction | None, change: NoiseReduction | None) -> NoiseReduction | None:
    if change is None:
        return None
    return _wire_noise(_noise_settings(change, _noise_settings(current or NoiseReduction())))


def _wire_noise(noise: NoiseSettings) -> NoiseReduction:
    return NoiseReduction(noise.microphone, noise.strength)


def _noise_settings(noise: NoiseReduction, default: NoiseSettings = DEFAULT_NOISE) -> NoiseSettings:
    return NoiseSettings(value_or(noise.type, default.microphone), value_or(noise.strength, default.strength))


def _merged_turn(current: TurnDetection | None, change: TurnDetectionParams, defaults: TurnSettings) -> TurnDetection:
    present = "server_vad" if current is None else str(current.__struct_config__.tag)
    kind = value_or(change.type, present)
    if current is None or kind != present:
        current = _turn_detection(replaced(defaults, detector=DETECTORS[kind]))
    assert current is not None
    fields = {name: getattr(change, name) for name in current.__struct_fields__}
    return replace(
        current,
        **{
            name: value
            for name, value in fields.items()
            if value is not UNSET and (value is not None or name == "idle_timeout_ms")
        },
    )


def _turn_detection(turn: TurnSettings) -> TurnDetection | None:
    if turn.detector == "none":
        return None
    if turn.detector == "semantic":
        return SemanticVad(turn.eagerness, turn.create_response, turn.interrupt_response)
    return ServerVad(
        threshold=turn.threshold,
        prefix_padding_ms=turn.prefix_padding_ms,
        silence_duration_ms=turn.silence_duration_ms,
        idle_timeout_ms=turn.idle_timeout_ms,
        create_response=turn.create_response,
        interrupt_response=turn.interrupt_response,
    )


def _merged_output(
    current: AudioOutput, change: Maybe[AudioOutputParams], voices: Sequence[str], param: str
) -> AudioOutput:
    change = value_or(change, AudioOutputParams())
    if (voice := value_or(change.voice, None)) is not None:
        if voice_name(voice) not in (*voices, *STOCK_VOICES, "default"):
            known = ", ".join(voices) or "only the default one"
            raise WireError(f"there is no voice {voice_name(voice)!r}; known voices: {known}", param=f"{param}.voice")
        current = replace(current, voice=voice)
    if (format := value_or(change.format, None)) is not None:
        current = replace(current, format=wire_format(format).as_wire())
    return replace(current, speed=value_or(change.speed, current.speed))


def conversation_settings(
    session: SessionObject, base: ConversationSettings, voices: Sequence[str]
) -> ConversationSettings:
    """The conversation settings of a session object."""
    transcription, noise = session.audio.input.transcription, session.audio.input.noise_reduction
    settings = replaced(
        base,
        turn=turn_settings(session.audio.input.turn_detection, base.turn),
        noise_reduction=None if noise is None else _noise_settings(noise),
        transcribe_input=transcription is not None,
        recognition=_recognition(transcription or Transcription(), bool(session.include)),
    )
    if isinstance(session, TranscriptionSessionObject):
        return replaced(settings, turn=replaced(settings.turn, create_response=False, interrupt_response=False))
    output, limit, choice = session.audio.output, session.max_output_tokens, session.tool_choice
    voice = voice_name(output.voice)
    return replaced(
        settings,
        instructions=session.instructions,
        modality=session.output_modalities[0],
        voice=voice if voice in voices else stand_in(voice, voices) or base.voice,
        speed=output.speed,
        max_output_tokens=None if limit == "inf" else limit,
        tools=tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {})
            for tool in session.tools
            if isinstance(tool, FunctionTool)
        ),
        tool_choice=choice if isinstance(choice, str) else choice.name or "required",
        parallel_tool_calls=value_or(session.parallel_tool_calls, None),
        reasoning_effort=value_or(value_or(session.reasoning, Reasoning()).effort, None),
        temperature=value_or(session.temperature, None),
        truncation=_truncation(session.truncation),
    )


PARTIAL_SECONDS = {"minimal": 0.5, "low": 0.8, "medium": 1.2, "high": 2.0, "xhigh": 3.0}
"""By `delay`: seconds of speech between two transcripts of a turn that is not over."""


DIARIZE = "-diarize"
"""Ends the names of models whose transcripts come in segments with a speaker."""


def is_by_speaker(transcription: Transcription) -> bool:
    """Whether a client asks for the speakers of its turns."""
    return str(transcription.model).endswith(DIARIZE)


def _recognition(transcription: Transcription, with_logprobs: bool) -> RecognitionSettings:
    named = [transcription.language] if transcription.language else value_or(transcription.languages, [])
    delay = value_or(transcription.delay, None)
    return RecognitionSettings(
        languages=tuple(map(language_code, named)),
        prompt=value_or(transcription.prompt, ""),
        keywords=tuple(value_or(transcription.keywords, [])),
        with_logprobs=with_logprobs,
        with_speakers=is_by_speaker(transcription),
        partial_seconds=None if delay is None else PARTIAL_SECONDS[delay],
    )


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


def _truncation(value: TruncationParams) -> Truncation:
    if isinstance(value, str):
        return Truncation(is_allowed=value == "auto")
    limits = value_or(value.token_limits, TokenLimits())
    return Truncation(True, value.retention_ratio, value_or(limits.post_instructions, None))


def turn_settings(detection: TurnDetection | None, base: TurnSettings) -> TurnSettings:
    """The turn settings of a session object."""
    if detection is None:
        return replaced(base, detector="none")
    return replaced(base, detector=DETECTORS[str(detection.__struct_config__.tag)], **asdict(detection))


def output_format(session: SessionObject) -> WireFormat:
    """The format of the audio of responses."""
    return wire_format(session.audio.output.format) if isinstance(session, RealtimeSessionObject) else WireFormat()


def voice_name(voice: Voice) -> str:
    return voice if isinstance(voice, str) else voice.id
