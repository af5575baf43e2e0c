"""Interface of a conversation: the calls it takes. The events it emits are in `events.py`.

A `Conversation` takes audio and commands and emits events in order. It knows no socket, and its clock is passed in, so
that an hour of conversation can be simulated in a minute, deterministically.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vivavoce.dialogue.events import Event
from vivavoce.dialogue.items import Content, HostedCall, Item, Samples
from vivavoce.dialogue.settings import ConversationSettings


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
