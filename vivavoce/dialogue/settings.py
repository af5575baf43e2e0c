"""Settings of a conversation that a client may choose, and the tools it may offer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # door processes import this module and must not load torch
    from vivavoce.engine.sampling import Sampling


@dataclass(frozen=True)
class TurnSettings:
    """When a turn is over, and what may interrupt a reply. Milliseconds, as on the wire."""

    detector: Literal["none", "silence", "semantic"] = "silence"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: int | None = None


@dataclass(frozen=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    hosted: "HostedTool | None" = None
    """Set where the server makes the calls, and not the client."""

    @classmethod
    def plain(cls, name: str, description: str, required: tuple[str, ...] = (), /, **kinds: str) -> "Tool":
        """A tool whose arguments have plain types, such as `integer`."""
        properties = {argument: {"type": kind} for argument, kind in kinds.items()}
        return cls(name, description, {"type": "object", "properties": properties, "required": list(required)})


@dataclass(frozen=True)
class HostedTool:
    """A tool of an MCP server, which may have another name for it than the model."""

    server: str
    name: str
    needs_approval: bool = False


@dataclass(frozen=True)
class Truncation:
    """How a history that is too long for the model is shortened."""

    is_allowed: bool = True
    """Otherwise a reply to such a history fails."""
    retention_ratio: float | None = None
    """The share that is kept; None: the server's own."""
    max_tokens: int | None = None
    """Of the history without the instructions; None: as many as the model takes."""


@dataclass(frozen=True)
class RecognitionSettings:
    """How the user's speech is transcribed."""

    languages: tuple[str, ...] = ()
    """Those that may be spoken, as codes; of several the likeliest is detected, of none any."""
    prompt: str = ""
    """Text that precedes the speech as context: names, spellings, style."""
    keywords: tuple[str, ...] = ()
    with_logprobs: bool = False
    """Whether transcripts have the log-probabilities of their tokens."""
    with_speakers: bool = False
    """Whether transcripts come in segments of one speaker each."""
    partial_seconds: float | None = None
    """Seconds of speech between two transcripts of an open turn; None: a turn is transcribed at its end."""

    @property
    def language(self) -> str | None:
        """The language, where only one may be spoken."""
        return self.languages[0] if len(self.languages) == 1 else None


@dataclass(frozen=True)
class NoiseSettings:
    """How noise is suppressed in the user's audio."""

    microphone: Literal["near_field", "far_field"] = "near_field"
    """Both are treated alike."""
    strength: float = 1.0
    """From 0 to 1."""


@dataclass(frozen=True)
class ConversationSettings:
    """Settings that a client may choose. Every field can change between replies."""

    instructions: str = ""
    turn: TurnSettings = field(default_factory=TurnSettings)
    modality: Literal["audio", "text"] = "audio"
    voice: str | None = None
    speed: float = 1.0
    sampling: "Sampling | None" = None
    max_output_tokens: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None
    output_schema: Mapping[str, Any] | None = None
    """A JSON schema that a written reply has to follow."""
    reasoning_effort: str | None = None
    temperature: float | None = None
    """Replaces that of `sampling`."""
    truncation: Truncation = field(default_factory=Truncation)
    noise_reduction: NoiseSettings | None = None
    """None: noise is not suppressed."""
    transcribe_input: bool = False
    recognition: RecognitionSettings = field(default_factory=RecognitionSettings)
