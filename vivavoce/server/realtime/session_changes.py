"""The session object of a client that sends no parameters, and the changes that a client makes to it."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import TypeVar

from msgspec import UNSET, UnsetType, convert
from msgspec.structs import asdict, replace

from vivavoce.dialogue.settings import ConversationSettings, NoiseSettings, TurnSettings
from vivavoce.server.host import STOCK_VOICES, ModelAbilities
from vivavoce.server.realtime.audio_formats import WireFormat, wire_format
from vivavoce.server.realtime.mcp_types import McpTool
from vivavoce.server.realtime.session_checks import chosen_detector, supported_tools
from vivavoce.server.realtime.session_settings import DETECTORS, detector_type, noise_settings, voice_name
from vivavoce.server.realtime.session_types import (
    AudioInput,
    AudioInputParams,
    AudioOutput,
    AudioOutputParams,
    AudioParams,
    FunctionTool,
    Maybe,
    Modality,
    NoiseReduction,
    RealtimeSessionObject,
    ResponseOptions,
    SemanticVad,
    ServerVad,
    SessionAudio,
    SessionObject,
    SessionParams,
    SessionType,
    ToolChoice,
    Transcription,
    TranscriptionSessionAudio,
    TranscriptionSessionObject,
    TurnDetection,
    TurnDetectionParams,
    VivaSession,
    value_or,
)
from vivavoce.server.wire import WireError

Options = TypeVar("Options", bound=ResponseOptions)
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


def overridden(session: SessionParams, change: SessionParams) -> SessionParams:
    """The session parameters with the fields that a change sets."""
    fields = {name: value for name, value in asdict(change).items() if value is not UNSET}
    return replace(session, **fields)


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
    return _wire_noise(noise_settings(change, noise_settings(current or NoiseReduction())))


def _wire_noise(noise: NoiseSettings) -> NoiseReduction:
    return NoiseReduction(noise.microphone, noise.strength)


def _merged_turn(current: TurnDetection | None, change: TurnDetectionParams, defaults: TurnSettings) -> TurnDetection:
    present = detector_type(current, defaults)
    kind = chosen_detector(change, present)
    if current is None or kind != present:
        if current is not None and change.type is UNSET:  # what is absent stays
            defaults = replaced(
                defaults, create_response=current.create_response, interrupt_response=current.interrupt_response
            )
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
