"""Interface of conversation backends: one speech-to-speech model, or a cascade of recogniser, chat and synthesizer.

A `ConversationBackend` is shared by all conversations and opens a `ConversationState` for each. The state is given the
history, receives the audio of the user's turn, and generates replies as streams of pieces. Its calls do not block and
take effect in order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

from vivavoce.dialogue.events import TokenLogprob, Usage
from vivavoce.dialogue.items import Item, Samples
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings
from vivavoce.errors import InputError, public_message


@dataclass(frozen=True)
class TurnTranscript:
    """What was said in a turn."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of its tokens, where they were asked for."""
    languages: tuple[str, ...] = ()
    """Codes of the languages that were detected; empty: not known."""


OnTranscript = Callable[[str, TurnTranscript | Exception], None]
"""Called with the transcript of a user turn: its item, and the transcript or the error."""


@dataclass(frozen=True)
class Spoke:
    """The next samples of a reply, at the backend's output rate."""

    samples: Samples


@dataclass(frozen=True)
class Wrote:
    """The next words of a reply; in a spoken one, those of the sound that follows, unless `at` is set."""

    text: str
    at: float | None = None
    """Seconds into the reply's sound where the words begin; None: at the end of the sound so far."""


@dataclass(frozen=True)
class CallBegan:
    """The reply starts a function call."""

    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of the arguments of the call that began last."""

    delta: str


@dataclass(frozen=True)
class Ended:
    """The reply is complete, cut at its maximum length, or failed. Always the last piece."""

    reason: Literal["completed", "max_output_tokens", "failed"]
    error: str | None = None


Piece = Spoke | Wrote | CallBegan | CallArguments | Ended


@dataclass(frozen=True)
class ReplyPlan:
    """The input of a reply: its settings, the history it answers and its limits."""

    item: str
    """The id of its item in the history."""
    settings: ConversationSettings
    played: Callable[[], float]
    """Seconds of its sound that have been played."""
    includes_turn: bool = True
    """Whether the open turn is part of its input."""
    past: Sequence[Item] | None = None
    """Items that replace the history as its input."""
    is_out_of_band: bool = False
    """Whether it is not part of the history."""
    max_ahead: float | None = None
    """Seconds of sound that may be generated ahead of playback; None: no limit."""

    @property
    def continues_history(self) -> bool:
        """Whether it answers the history and becomes part of it; otherwise the state stores nothing of it."""
        return self.past is None and not self.is_out_of_band


class ReplyStream(Protocol):
    """A reply being generated. It is held until `release`, as the user may still go on speaking."""

    def pieces(self) -> AsyncIterator[Piece]:
        """The pieces, each as soon as it is generated."""
        ...

    def release(self, turn: str | None) -> None:
        """The reply will be played. The part of the open turn in its input becomes the item of this id."""
        ...

    def drop(self) -> None:
        """Stop generating. Before release nothing of it remains; after, the next history says what remains."""
        ...

    @property
    def usage(self) -> Usage:
        """Rows used so far."""
        ...


class ConversationState(Protocol):
    """One conversation's state in a backend."""

    def set_history(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """Replace the history and the settings: items may have been cut, added or removed."""
        ...

    def listen(self, samples: Samples) -> None:
        """The next samples of the user's open turn at the backend's input rate; the first ones open it."""
        ...

    def discard_turn(self) -> None:
        """Drop the open turn."""
        ...

    def commit_turn(self, item: str) -> None:
        """End the open turn, which becomes this item; it has no reply yet."""
        ...

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply to the history and the open turn, if any; it is held until its release."""
        ...

    def pause(self) -> None:
        """No client is connected: its replies wait, so that they delay no others, until `resume`."""
        ...

    def resume(self) -> None:
        """A client is connected again: its replies continue where they were."""
        ...

    async def close(self) -> None:
        """Drop its replies and release its memory."""
        ...


class ConversationBackend(Protocol):
    """Shared by all conversations."""

    input_rate: int
    output_rate: int
    transcribes: bool
    """Whether its conversations report transcripts of the user through `on_transcript`."""

    def open(self, on_transcript: OnTranscript) -> ConversationState:
        """The state of a new conversation."""
        ...


MAX_QUEUED_PIECES = 16


class PieceQueue(asyncio.Queue[Piece]):
    """Bounded queue of pieces from a backend to the dialogue."""

    def __init__(self) -> None:
        super().__init__(MAX_QUEUED_PIECES)

    async def until_ended(self) -> AsyncIterator[Piece]:
        """Iterate over the pieces, up to and including `Ended`."""
        while True:
            piece = await self.get()
            yield piece
            if isinstance(piece, Ended):
                return


def failed(error: Exception) -> Ended:
    """The last piece of a reply that failed with this error."""
    return Ended("failed", public_message(error))


class ReplyTranscriber(Protocol):
    """Transcribes speech: for captions, and for moderation where the model only speaks."""

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The transcript."""
        ...


@dataclass(frozen=True)
class RecognitionAbilities:
    """Which settings of transcription a recogniser follows; the others are refused."""

    prompts: bool = True
    """Whether it takes a prompt and keywords."""
    logprobs: bool = True
    partials: bool = True
    """Whether turns can be transcribed while they last."""
    languages: tuple[str, ...] = ()
    """Codes of those it knows; empty: not known."""


@runtime_checkable
class TurnTranscriber(ReplyTranscriber, Protocol):
    """A recogniser that follows settings."""

    @property
    def abilities(self) -> RecognitionAbilities:
        """Which settings it follows."""
        ...

    async def transcribe_turn(self, samples: Samples, rate: int, settings: RecognitionSettings) -> TurnTranscript:
        """The transcript of a turn, or of its first part."""
        ...


async def transcribe_turn(
    transcriber: ReplyTranscriber, samples: Samples, rate: int, settings: RecognitionSettings
) -> TurnTranscript:
    """The transcript of a turn, under the settings as far as the transcriber follows any."""
    if isinstance(transcriber, TurnTranscriber):
        return await transcriber.transcribe_turn(samples, rate, settings)
    return TurnTranscript(await transcriber.transcribe(samples, rate, settings.language))


@dataclass(frozen=True)
class EndpointRef:
    """An address such as `http://host:8000/v1`, its key, and its name in the cluster."""

    url: str
    key: str | None = None
    name: str = ""


class Resolver(Protocol):
    """Resolves the endpoint of the next request; a pool has several."""

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """An endpoint; `gone` is the one that did not answer. VivaError where there is none."""
        ...


@dataclass(frozen=True)
class Address:
    """A fixed endpoint."""

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        if not is_address(self.url) or not urlsplit(self.url).hostname:
            raise InputError(f"an address begins with http:// or https://, not {self.url!r}")

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """The address."""
        return EndpointRef(self.url, self.key)


def is_address(name: str) -> bool:
    """Whether a model's name is an address rather than a folder."""
    return name.startswith(("http://", "https://"))
