"""The way of a reply's pieces from who makes them to who plays them."""

import asyncio
from collections.abc import AsyncIterator

from vivavoce.dialogue.pipeline import Ended, Piece
from vivavoce.errors import VivaError

MOST_WAITING = 16


class PieceQueue(asyncio.Queue[Piece]):
    """Pieces that were made and not taken yet; who is far ahead of the player waits."""

    def __init__(self) -> None:
        super().__init__(MOST_WAITING)

    async def until_ended(self) -> AsyncIterator[Piece]:
        """The pieces as they come, `Ended` the last."""
        while True:
            piece = await self.get()
            yield piece
            if isinstance(piece, Ended):
                return


def failed(error: Exception) -> Ended:
    """The end of a reply that this kept from being made."""
    return Ended("failed", str(error) if isinstance(error, VivaError) else f"{type(error).__name__}: {error}")
