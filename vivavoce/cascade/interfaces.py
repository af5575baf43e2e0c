"""The parts of a cascade: recogniser, chat model and synthesiser, and what a chat model streams."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from vivavoce.dialogue.backend import TurnTranscript
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings

OnWords = Callable[[str], None]


class LiveRecognition(Protocol):
    """Recognition of one turn while it lasts."""

    def hear(self, samples: Samples) -> None:
        """Add the next samples, 16 kHz."""
        ...

    async def transcript(self) -> TurnTranscript:
        """The transcript so far; more samples may follow."""
        ...

    def close(self) -> None:
        """Drop the turn."""
        ...


class CascadeRecogniser(Protocol):
    """Speech recognition of live turns."""

    def open(self, settings: RecognitionSettings, on_words: OnWords | None = None) -> LiveRecognition:
        """Start the recognition of a turn; `on_words` may get its words so far, now and then."""
        ...


class Synthesiser(Protocol):
    """Text to speech."""

    rate: int

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Stream the sound at `rate`; closing the iterator stops the synthesis."""
        ...


@runtime_checkable
class PausableSpeech(Protocol):
    """Speech in progress that can be paused within a piece, from the event loop."""

    def pause(self) -> None:
        """Compute nothing more of it until `resume`."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


@runtime_checkable
class StyledSynthesiser(Synthesiser, Protocol):
    """A synthesiser whose speaking style the user can change."""

    def with_user_requests(self, messages: Sequence[str]) -> Synthesiser:
        """The synthesiser in the style that these user messages request, if any."""
        ...


@dataclass(frozen=True)
class ChatText:
    """The next words of a chat reply."""

    text: str


@dataclass(frozen=True)
class ChatCall:
    """The next part of a tool call; the first part of each has an id and a name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ChatEnd:
    """The end of a chat reply: its reason, and its usage where the endpoint reports it."""

    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache already."""


ChatPiece = ChatText | ChatCall | ChatEnd


class ChatModel(Protocol):
    """A chat model, local or remote."""

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Stream the reply; closing the iterator stops it."""
        ...


@runtime_checkable
class LimitedChatModel(ChatModel, Protocol):
    """A chat model whose limit is known."""

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its reply together."""
        ...


class ChatPrompt(Protocol):
    """The prompt of a conversation's next reply, read by the chat model while the user speaks."""

    async def read(self, messages: Sequence[dict[str, Any]], words: str, settings: ConversationSettings) -> None:
        """Read the messages and the first words of the user's next one, unless replies need the model."""
        ...

    async def close(self) -> None:
        """Release its memory."""
        ...


@runtime_checkable
class ReadingChatModel(ChatModel, Protocol):
    """A chat model that can read a prompt before it is complete; replies then begin sooner and are the same."""

    def open_prompt(self) -> ChatPrompt:
        """The prompt of a new conversation."""
        ...
