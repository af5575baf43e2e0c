"""The conversation settings that a session object stands for."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Literal

from msgspec.structs import asdict

from vivavoce.dialogue.settings import (
    ConversationSettings,
    NoiseSettings,
    RecognitionSettings,
    Tool,
    Truncation,
    TurnSettings,
)
from vivavoce.server.host import stand_in
from vivavoce.server.realtime.audio_formats import WireFormat, wire_format
from vivavoce.server.realtime.session_types import (
    FunctionTool,
    NoiseReduction,
    RealtimeSessionObject,
    Reasoning,
    SessionObject,
    TokenLimits,
    Transcription,
    TranscriptionSessionObject,
    TurnDetection,
    Voice,
    value_or,
)
from vivavoce.server.realtime.session_types import Truncation as TruncationParams
from vivavoce.server.rest.languages import language_code

DETECTORS: dict[str, Literal["silence", "semantic"]] = {"server_vad": "silence", "semantic_vad": "semantic"}
DEFAULT_NOISE = NoiseSettings()
PARTIAL_SECONDS = {"minimal": 0.5, "low": 0.8, "medium": 1.2, "high": 2.0, "xhigh": 3.0}
"""By `delay`: seconds of speech between two transcripts of a turn that is not over."""
DIARIZE = "-diarize"
"""Ends the names of models whose transcripts come in segments with a speaker."""


def conversation_settings(
    session: SessionObject, base: ConversationSettings, voices: Sequence[str]
) -> ConversationSettings:
    """The conversation settings of a session object."""
    transcription, noise = session.audio.input.transcription, session.audio.input.noise_reduction
    settings = replaced(
        base,
        turn=turn_settings(session.audio.input.turn_detection, base.turn),
        noise_reduction=None if noise is None else noise_settings(noise),
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


def detector_type(detection: TurnDetection | None, default: TurnSettings) -> str:
    """The type of the turn detection in force; where there is none, that of the server's default."""
    if detection is not None:
        return str(detection.__struct_config__.tag)
    return "semantic_vad" if default.detector == "semantic" else "server_vad"


def turn_settings(detection: TurnDetection | None, base: TurnSettings) -> TurnSettings:
    """The turn settings of a session object."""
    if detection is None:
        return replaced(base, detector="none")
    return replaced(base, detector=DETECTORS[detector_type(detection, base)], **asdict(detection))


def noise_settings(noise: NoiseReduction, default: NoiseSettings = DEFAULT_NOISE) -> NoiseSettings:
    return NoiseSettings(value_or(noise.type, default.microphone), value_or(noise.strength, default.strength))


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


def is_by_speaker(transcription: Transcription) -> bool:
    """Whether a client asks for the speakers of its turns."""
    return str(transcription.model).endswith(DIARIZE)


def _truncation(value: TruncationParams) -> Truncation:
    if isinstance(value, str):
        return Truncation(is_allowed=value == "auto")
    limits = value_or(value.token_limits, TokenLimits())
    return Truncation(True, value.retention_ratio, value_or(limits.post_instructions, None))


def output_format(session: SessionObject) -> WireFormat:
    """The format of the audio of responses."""
    return wire_format(session.audio.output.format) if isinstance(session, RealtimeSessionObject) else WireFormat()


def voice_name(voice: Voice) -> str:
    return voice if isinstance(voice, str) else voice.id
