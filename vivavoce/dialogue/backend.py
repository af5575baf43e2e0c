"""Interface of conversation backends: one speech-to-speech model, or a cascade of recogniser, chat and synthesizer.

A `ConversationBackend` is shared by all conversations and opens a `ConversationState` for each. The state is given the
history, receives the user's turn as it arrives, and makes replies as streams of pieces. Its calls return at once and
take effect in order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from vivavoce.dialogue.events import ConversationSettings, Item, Samples, Usage
from vivavoce.errors import InputError, VivaError

OnTranscript = Callable[[str, str | Exception, bool], None]
"""Called with the user's words: their item, the whole text so far or the error, and whether it is final."""


@dataclass(frozen=True)
class Spoke:
    """The next samples of a reply, at the backend's output rate."""

    samples: Samples


@dataclass(frozen=True)
class Wrote:
    """The next words of a reply; in a spoken one, those of the sound that comes next unless `at` says otherwise."""

    text: str
    at: float | None = None
    """Seconds into the reply's sound where the words begin; None: where its sound stands."""


@dataclass(frozen=True)
class CallBegan:
    """The reply calls a function."""

    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of the arguments of the call that began last."""

    delta: str


@dataclass(frozen=True)
class Ended:
    """The reply is whole, cut at its longest, or failed. Always the last piece."""

    reason: Literal["completed", "max_output_tokens", "failed"]
    error: str | None = None


Piece = Spoke | Wrote | CallBegan | CallArguments | Ended


@dataclass(frozen=True)
class ReplyPlan:
    """What a reply is made for."""

    item: str
    """The id its words will have in the history."""
    settings: ConversationSettings
    played: Callable[[], float]
    """Seconds of its sound that have been played."""
    includes_turn: bool = True
    """Whether it answers to the open turn too."""
    past: Sequence[Item] | None = None
    """Items it answers to instead of the history; the conversation state then keeps nothing of it."""
    max_ahead: float | None = None
    """Seconds of sound that it may be made ahead of what was played; None: all."""


class ReplyStream(Protocol):
    """A reply being made. It is held until `release`: until then the user may still go on speaking."""

    def pieces(self) -> AsyncIterator[Piece]:
        """What it consists of, as it is made."""
        ...

    def release(self, turn: str | None) -> None:
        """The reply will be heard. The open turn, as far as this reply has heard it, becomes the item of this id."""
        ...

    def drop(self) -> None:
        """Stop making it. Before its release nothing of it remains; after, the next history says what remains."""
        ...

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""
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
        """End the open turn, which becomes this item; no reply has been made to it yet."""
        ...

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Start a reply to the history and the open turn, if there is one; held."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


class ConversationBackend(Protocol):
    """Shared by all conversations."""

    input_rate: int
    output_rate: int
    transcribes: bool
    """Whether its conversations report what the user said by themselves."""

    def open(self, heard: OnTranscript) -> ConversationState:
        """The state of a new conversation."""
        ...


MAX_QUEUED_PIECES = 16


class PieceQueue(asyncio.Queue[Piece]):
    """Pieces that a backend has made and the dialogue has not taken yet."""

    def __init__(self) -> None:
        super().__init__(MAX_QUEUED_PIECES)

    async def until_ended(self) -> AsyncIterator[Piece]:
        """The pieces as they come, `Ended` the last."""
        while True:
            piece = await self.get()
            yield piece
            if isinstance(piece, Ended):
                return


def failed(error: Exception) -> Ended:
    """The end of a reply that failed with this error."""
    return Ended("failed", str(error) if isinstance(error, VivaError) else f"{type(error).__name__}: {error}")


class ReplyTranscriber(Protocol):
    """Transcribes speech: for captions, and for moderation where the model only speaks."""

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said."""
        ...


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
