"""Interface of a conversation: the calls it takes and the events it emits.

A `Conversation` takes audio and commands and emits events in order. It knows no socket, and its clock is passed in, so
that an hour of conversation can be simulated in a minute, deterministically.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # door processes import this module and must not load torch
    from vivavoce.engine.sampling import Sampling

Samples = NDArray[np.float32]
"""Mono samples in [-1, 1]."""

Role = Literal["system", "user", "assistant"]
EndReason = Literal["completed", "turn_detected", "client_cancelled", "max_output_tokens", "content_filter", "failed"]


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
    partial_seconds: float | None = None
    """Seconds of speech between two transcripts of an open turn; None: a turn is transcribed at its end."""

    @property
    def language(self) -> str | None:
        """The language, where only one may be spoken."""
        return self.languages[0] if len(self.languages) == 1 else None


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
    transcribe_input: bool = False
    recognition: RecognitionSettings = field(default_factory=RecognitionSettings)


@dataclass(frozen=True)
class TextPart:
    """Written words."""

    text: str


@dataclass(frozen=True)
class AudioPart:
    """Spoken words: the sound at `rate`, and what was said where it is known."""

    samples: Samples
    rate: int
    transcript: str | None = None


@dataclass(frozen=True)
class ImagePart:
    """A picture for models that see."""

    url: str
    """A data URI of a PNG or JPEG."""
    detail: Literal["auto", "low", "high"] = "auto"


Part = TextPart | AudioPart | ImagePart


@dataclass(frozen=True)
class Message:
    """A message of one role."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class HostedCall:
    """How far a call that the server makes has come."""

    tool: HostedTool
    state: Literal["asked", "approved", "denied", "running", "completed", "failed"]
    """Where approval is needed, one item asks for it, and another is the call itself."""
    output: str | None = None
    error: tuple[str, int, str] | None = None
    """Its kind, code and message."""
    approval_request: str | None = None
    """The item that asked for it."""


@dataclass(frozen=True)
class ToolCall:
    """A function call by the model; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str
    hosted: HostedCall | None = None


@dataclass(frozen=True)
class ToolOutput:
    """The result of a function call."""

    call_id: str
    output: str


Content = Message | ToolCall | ToolOutput


@dataclass(frozen=True)
class Item:
    """One entry of the history, in the order of the conversation."""

    id: str
    content: Content
    is_complete: bool = True


@dataclass(frozen=True)
class Usage:
    """Rows of the model that a reply used."""

    input_text: int = 0
    input_audio: int = 0
    output_text: int = 0
    output_audio: int = 0
    cached_text: int = 0
    """Input rows that were in the KV cache already."""
    cached_audio: int = 0


# Events of a conversation, in order. `reply` is the id of the reply an event belongs to.


@dataclass(frozen=True)
class SpeechStarted:
    """The user started to speak, at this many milliseconds of input, prefix included."""

    item: str
    audio_start_ms: int


@dataclass(frozen=True)
class SpeechStopped:
    """The user's turn is over."""

    item: str
    audio_end_ms: int


@dataclass(frozen=True)
class TurnCommitted:
    """The user's turn became an item, after `previous`."""

    item: Item
    previous: str | None


@dataclass(frozen=True)
class TurnTimedOut:
    """The idle timeout passed without speech."""

    item: str
    audio_start_ms: int
    audio_end_ms: int


@dataclass(frozen=True)
class TokenLogprob:
    """A token of a transcript and the logarithm of its probability."""

    text: str
    data: bytes
    """Its bytes; a token may be a part of a character."""
    logprob: float


@dataclass(frozen=True)
class InputTranscript:
    """The transcript of the user's turn so far; `is_final` once, with the whole text."""

    item: str
    text: str
    is_final: bool
    seconds: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    languages: tuple[str, ...] = ()
    """Codes of the languages that were detected."""


@dataclass(frozen=True)
class InputTranscriptFailed:
    """The user's turn could not be transcribed, and why."""

    item: str
    message: str


@dataclass(frozen=True)
class ReplyStarted:
    """A reply was released; held replies emit nothing."""

    reply: str
    is_filler: bool = False
    """Whether it only fills the time until the next one, and is not part of the history."""


@dataclass(frozen=True)
class ReplyItemStarted:
    """The reply's next item; `previous` is its predecessor in the history."""

    reply: str
    item: str
    kind: Literal["message", "tool_call"]
    previous: str | None
    tool_name: str | None = None
    call_id: str | None = None
    hosted: HostedCall | None = None


@dataclass(frozen=True)
class ReplyAudio:
    """The next samples of a reply, at the conversation's output rate."""

    reply: str
    item: str
    samples: Samples
    gain: float = 1.0
    """Below 1 while the user talks over it: ducked until the overlap is classified. It also holds for sound emitted
    before; an event without samples only changes the gain, also after the reply is done."""


@dataclass(frozen=True)
class ReplyText:
    """The next words of a reply: its text, or what its sound says."""

    reply: str
    item: str
    delta: str
    at: float | None = None
    """Seconds into the item's sound where the words begin; None in a reply without sound."""


@dataclass(frozen=True)
class ToolArguments:
    """The next part of a tool call's arguments."""

    reply: str
    item: str
    delta: str


@dataclass(frozen=True)
class ReplyItemDone:
    """An item of the reply is complete, or was cut."""

    reply: str
    item: Item


@dataclass(frozen=True)
class ReplyDone:
    """Exactly one for every ReplyStarted."""

    reply: str
    reason: EndReason
    usage: Usage
    error: str | None = None


@dataclass(frozen=True)
class OutputCleared:
    """Drop the sound of this reply that was not played yet."""

    reply: str


@dataclass(frozen=True)
class ItemTruncated:
    """An item was cut to the part that was played."""

    item: Item
    audio_end_ms: int


@dataclass(frozen=True)
class ItemRetracted:
    """An item was removed as the user went on with the turn that it belongs to."""

    item: str


@dataclass(frozen=True)
class Warned:
    """A problem the client may want to know of; the conversation goes on."""

    code: str
    message: str
    reply: str | None = None
    """The reply that has it."""


Event = (
    SpeechStarted
    | SpeechStopped
    | TurnCommitted
    | TurnTimedOut
    | InputTranscript
    | InputTranscriptFailed
    | ReplyStarted
    | ReplyItemStarted
    | ReplyAudio
    | ReplyText
    | ToolArguments
    | ReplyItemDone
    | ReplyDone
    | OutputCleared
    | ItemTruncated
    | ItemRetracted
    | Warned
)


@dataclass(frozen=True)
class Announcement:
    """Given words for a reply, such as a greeting."""

    text: str
    speak: Callable[[str], AsyncGenerator[Samples, None]]
    """Makes their sound, at the conversation's output rate."""


@dataclass(frozen=True)
class ReplyRequest:
    """A reply requested by the client, with the settings it overrides."""

    settings: ConversationSettings | None = None
    is_out_of_band: bool = False
    """Not part of the history."""
    input: Sequence[Content] | None = None
    """What it answers; None: the history."""
    announcement: Announcement | None = None
    """The words of the reply, where the model is not asked for them."""
    is_protected: bool = False
    """Whether speech over it does not interrupt it."""
    is_filler: bool = False
    """Whether it only fills the time until another: it is not part of the history, and is played before it."""


class Conversation(Protocol):
    """One session. Calls do not block; their results are emitted as `events`.

    A call with invalid input raises `InputError` and changes nothing.
    """

    input_rate: int
    output_rate: int

    @property
    def settings(self) -> ConversationSettings:
        """The current settings."""
        ...

    @property
    def items(self) -> Sequence[Item]:
        """The history."""
        ...

    def events(self) -> AsyncIterator[Event]:
        """The events, until the conversation is closed; for a single reader."""
        ...

    def hear(self, samples: Samples) -> None:
        """Process the next samples of the user's audio, at `input_rate`."""
        ...

    @property
    def unprocessed_seconds(self) -> float:
        """Seconds of the user's audio that are still to be processed."""
        ...

    async def drain_input(self, max_seconds: float = 0.0) -> None:
        """Wait until no more than these seconds of the user's audio are still to be processed.

        A call that is to follow all audio before it, such as `commit`, follows a `drain_input()`; a caller with much
        audio waits now and then, so that it does not pile up.
        """
        ...

    def played(self, reply: str, milliseconds: int) -> None:
        """The client has played this much of a reply: if interrupted, the history keeps no more of it."""
        ...

    def update(self, change: Callable[[ConversationSettings], ConversationSettings]) -> None:
        """Change the settings."""
        ...

    def commit(self) -> Item:
        """End the user's turn; `InputError` where there is no audio."""
        ...

    def clear_input(self) -> None:
        """Discard the audio since the last turn."""
        ...

    def add(self, content: Content, id: str | None = None, after: str | None = None) -> tuple[Item, str | None]:
        """A new item and its predecessor; `after` "root" puts it first, None last."""
        ...

    def item(self, id: str) -> Item:
        """An item with its audio."""
        ...

    def delete(self, id: str) -> None:
        """Remove an item from the history."""
        ...

    def update_call(self, id: str, hosted: HostedCall) -> Item:
        """Store how far a call that the server makes has come."""
        ...

    def answer_calls(self) -> None:
        """Reply to the outputs of calls as soon as no other reply is generated.

        While the user speaks nothing is started: the reply to the turn has the outputs in its history.
        """
        ...

    def truncate(self, id: str, audio_end_ms: int) -> Item:
        """Cut a spoken reply to the part that was played: sound, words and the model's context."""
        ...

    def reply(self, request: ReplyRequest | None = None) -> str:
        """Start a reply; returns its id. `InputError` while another is generated."""
        ...

    def cancel(self, reply: str | None = None) -> None:
        """Stop a reply; `InputError` where none is in progress."""
        ...

    def pause(self) -> None:
        """No client is connected: replies wait until `resume`."""
        ...

    def resume(self) -> None:
        """A client is connected again."""
        ...

    async def close(self) -> None:
        """End the conversation and all its replies."""
        ...
