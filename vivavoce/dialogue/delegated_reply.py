"""A spoken reply that is held until a second one, which is written, has decided whether tools are called instead."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, Piece, ReplyStream, Wrote
from vivavoce.dialogue.events import Usage
from vivavoce.dialogue.settings import ConversationSettings


def may_call(settings: ConversationSettings) -> bool:
    """Whether a reply may call a tool."""
    return bool(settings.tools) and settings.tool_choice != "none" and settings.output_schema is None


class DelegatedReply:
    """A `ReplyStream`: the calls of the decision, or the inner reply."""

    def __init__(self, inner: ReplyStream, decision: ReplyStream, must_call: bool) -> None:
        self._inner, self._decision, self._must_call = inner, decision, must_call
        self._is_call = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of the one or the other. A decider that fails leaves the reply to speech, unless a call is due."""
        async with aclosing(_pieces_of(self._decision)) as decided:
            async for piece in decided:
                if isinstance(piece, CallBegan | CallArguments):
                    self._is_call = True
                    yield piece
                elif isinstance(piece, Ended):
                    if self._is_call or (self._must_call and piece.reason == "failed"):
                        yield piece
                        return
                elif isinstance(piece, Wrote) and not self._is_call:
                    break
        self._decision.drop()
        async for piece in self._inner.pieces():
            yield piece

    def release(self, turn: str | None) -> None:
        """Play it."""
        self._inner.release(turn)
        self._decision.release(turn)

    def drop(self) -> None:
        """Stop both."""
        self._inner.drop()
        self._decision.drop()

    @property
    def usage(self) -> Usage:
        """That of the reply which was taken."""
        return self._decision.usage if self._is_call else self._inner.usage


async def _pieces_of(stream: ReplyStream) -> AsyncGenerator[Piece, None]:
    async for piece in stream.pieces():
        yield piece
