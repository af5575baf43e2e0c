"""Events that a conversation emits, in order."""

from dataclasses import dataclass
from typing import Literal

from vivavoce.dialogue.items import HostedCall, Item, Samples

EndReason = Literal["completed", "turn_detected", "client_cancelled", "max_output_tokens", "content_filter", "failed"]
IgnoredReason = Literal["other_speaker", "not_addressed"]
OverlapKind = Literal["interruption", "continuation", "backchannel", "noise", "bystander", "echo", "other_speaker"]


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
    silence_ms: int
    """Of silence that ended it."""


@dataclass(frozen=True)
class TurnCommitted:
    """The user's turn became an item, after `previous`."""

    item: Item
    previous: str | None


@dataclass(frozen=True)
class TurnIgnored:
    """A turn that is dropped, and not answered: of another speaker, or not spoken to the machine."""

    item: str
    reason: IgnoredReason = "other_speaker"


@dataclass(frozen=True)
class OverlapJudged:
    """What a sound over a reply with some speech in it was taken for; the first two kinds stop the reply."""

    verdict: OverlapKind


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
class SpeakerSegment:
    """What one speaker said in a turn; seconds into its sound."""

    speaker: str
    text: str
    start: float
    end: float


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
    segments: tuple[SpeakerSegment, ...] = ()
    """Of a final one, by speaker, where they were asked for."""


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
    | TurnIgnored
    | OverlapJudged
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
