"""A turn of the user while it lasts, and once it is answered: where that was too early, the user goes on, the reply is
taken back, and both parts become one turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.vad import WINDOW_MS
from vivavoce.dialogue.history import History
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.reply import ActiveReply

JOIN_WITHIN_MS = 2000
MAX_HEARD_SECONDS = 0.8  # of the reply; after more of it the user may be answering it
MAX_JOINED_SECONDS = 30.0


@dataclass
class OpenTurn:
    """The user's turn while it lasts."""

    item: str
    prefix: list[Samples]
    windows: list[Samples] = field(default_factory=list)
    waiting: list[Samples] = field(default_factory=list)
    """Audio received while a reply is held, not yet passed to the backend."""
    joined: int = 0
    """Windows at its beginning that are of the turn before."""
    pause: int = 0
    """Windows up to its last likely end."""

    @property
    def sound(self) -> Samples:
        """The audio of the turn so far."""
        return np.concatenate([np.zeros(0, np.float32), *self.windows])


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn whose end was detected, and the reply to it."""

    item: str
    windows: Sequence[Samples]
    ended_ms: int
    """Milliseconds of input when it ended."""
    reply: ActiveReply
    pause: int = 0
    """Windows up to its likely end, where a turn model hears it; 0: all."""
    finished: float | None = None
    """The turn model's probability that it is finished, if known."""

    @property
    def sound(self) -> Samples:
        """Its audio up to the likely end."""
        return np.concatenate(self.windows[: self.pause or None])

    def goes_on(self, start_ms: int, start: float, within_ms: int, history: History) -> bool:
        """Whether speech that starts here, in milliseconds of input and by the clock, belongs to this turn.

        It does while hardly anything of the reply was heard. Not where the reply called a function, which cannot be
        taken back, nor where the client has added items since.
        """
        reply = self.reply
        is_in_progress = not reply.is_over or reply.playback.is_playing(start)
        is_soon = start_ms - self.ended_ms < within_ms and reply.playback.position(start) < MAX_HEARD_SECONDS
        is_short = len(self.windows) * WINDOW_MS <= MAX_JOINED_SECONDS * 1e3
        has_called = reply.item != reply.spoken_item
        last = [item.id for item in history.items[-2:]]
        is_last = last[-1:] == [self.item] or last == [self.item, reply.spoken_item]
        return is_in_progress and is_soon and is_short and is_last and not has_called
