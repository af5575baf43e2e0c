"""A reply whose words are given, such as a greeting: only its sound is made."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from vivavoce.dialogue.backend import Ended, Piece, Spoke, Wrote
from vivavoce.dialogue.conversation import Announcement
from vivavoce.dialogue.events import Usage


class AnnouncementStream:
    """A `ReplyStream` of given words."""

    def __init__(self, announcement: Announcement, is_spoken: bool) -> None:
        self._announcement, self._is_spoken = announcement, is_spoken
        self._is_dropped = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """The words, and their sound as it is made."""
        yield Wrote(self._announcement.text)
        if self._is_spoken:
            async with aclosing(self._announcement.speak(self._announcement.text)) as sound:
                async for samples in sound:
                    if self._is_dropped:
                        return
                    yield Spoke(samples)
        yield Ended("completed")

    def release(self, turn: str | None) -> None:
        """Nothing is waited for."""

    def drop(self) -> None:
        """Stop."""
        self._is_dropped = True

    @property
    def usage(self) -> Usage:
        """No model was asked."""
        return Usage()
