"""Interface of conversation backends: one speech-to-speech model, or a cascade of recogniser, chat and synthesizer.

A `ConversationBackend` is shared by all conversations and opens a `ConversationState` for each. The state is given the
history, receives the user's turn as it arrives, and makes replies as streams of pieces. Its calls return at once and
take effect in order.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from vivavoce.dialogue.events import ConversationSettings, Item, Samples, Usage
from vivavoce.errors import InputError

OnTranscript = Callable[[str, str | Exception, bool], None]
"""Told of the user's words: their item, the whole text so far or why there is none, and whether it is final."""


@dataclass(frozen=True)
class Spoke:
    """The next sound of a reply, at the pipeline's output rate."""

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
    """The next part of the arguments of the call begun last."""

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
    hears_turn: bool = True
    """Whether it answers to the open turn too."""
    past: Sequence[Item] | None = None
    """What it answers to, instead of the history: then it leaves nothing in the mind."""
    max_ahead: float | None = None
    """Seconds of sound that it may be made ahead of what was played; None: all."""


class ReplyStream(Protocol):
    """A reply being made. It is held until `release`: the mind can still be told that the user goes on."""

    def pieces(self) -> AsyncIterator[Piece]:
        """What it consists of, as it is made."""
        ...

    def release(self, turn: str | None) -> None:
        """It is meant. The open turn, as far as this reply has heard it, becomes the item of this id."""
        ...

    def drop(self) -> None:
        """No more of it is wanted. Before its release, nothing of it was; after, `remember` tells what remains."""
        ...

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""
        ...


class ConversationState(Protocol):
    """One conversation's share of a pipeline."""

    def remember(self, past: Sequence[Item], settings: ConversationSettings) -> None:
        """The past is this, whatever was before: items cut, added, taken away; other instructions."""
        ...

    def listen(self, samples: Samples) -> None:
        """The next sound of the user's open turn, which begins with the first, at the pipeline's input rate."""
        ...

    def forget_turn(self) -> None:
        """The open turn was nothing."""
        ...

    def keep_turn(self, item: str) -> None:
        """The open turn is over and becomes this item; no reply has been made to it yet."""
        ...

    def reply(self, plan: ReplyPlan) -> ReplyStream:
        """Begin a reply to the past and the open turn, if there is one; held."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


class ConversationBackend(Protocol):
    """Shared by all conversations."""

    input_rate: int
    output_rate: int
    transcribes: bool
    """Whether its minds tell what the user said by themselves."""

    def open(self, heard: OnTranscript) -> ConversationState:
        """A mind without a past."""
        ...


class ReplyTranscriber(Protocol):
    """Hears words in a sound: for captions, and for moderation where the model only speaks."""

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said."""
        ...


@dataclass(frozen=True)
class EndpointRef:
    """An address such as `http://host:8000/v1`, the key it wants, and what its fleet calls it."""

    url: str
    key: str | None = None
    name: str = ""


class Resolver(Protocol):
    """Who is to be asked this time; a pool has several."""

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """A place; `gone` is the one that did not answer. VivaError where there is none."""
        ...


@dataclass(frozen=True)
class Address:
    """Always the same place."""

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
