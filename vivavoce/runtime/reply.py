"""A reply as it is being made: rows for a coroutine, handed over by the thread that steps."""

import asyncio
import weakref
from collections import deque
from typing import Protocol, Self

from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import Row

TAKEN_TOGETHER = 4  # rows after which the engine is told that they were taken
Delivery = tuple["Reply", Row | BaseException | None, FinishReason | None]


class ReplyEngine(Protocol):
    """What a reply tells the engine that makes it."""

    def due_by(self, sequence: Sequence, moment: float) -> None:
        """Its next row is needed by this moment."""

    def taken(self, sequence: Sequence, rows: int) -> None:
        """So many rows were read."""

    async def stop(self, sequence: Sequence) -> None:
        """No more rows are wanted; the sequence stays."""

    def forget(self, sequence: Sequence) -> None:
        """The same, from wherever a reply is forgotten: on any thread, waiting for nothing."""


class Reply:
    """The rows of one reply, to be read with `async for`.

    `async with` stops the reply when its block is left, by whatever way; so do `aclose` and forgetting the object.
    """

    def __init__(self, engine: ReplyEngine, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.finish: FinishReason | None = None
        self._engine = engine
        self._loop = loop
        self._rows: deque[Row] = deque()
        self._error: BaseException | None = None
        self._waits: tuple[int, asyncio.Future[None]] | None = None  # for how many rows somebody waits
        self._taken = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        rows = await self.several(1, most=1)
        if not rows:
            raise StopAsyncIteration
        return rows[0]

    async def several(self, count: int, most: int | None = None) -> list[Row]:
        """The rows that are there, `count` at least, unless the reply is over. Who waits is woken once for all."""
        count = min(count, self.sequence.most_unread or count)
        if len(self._rows) < count and self.finish is None:
            ready: asyncio.Future[None] = self._loop.create_future()
            self._waits = (count, ready)
            try:
                await ready
            finally:
                self._waits = None
        if not self._rows and self._error is not None:
            error, self._error = self._error, None
            raise error
        rows = [self._rows.popleft() for _ in range(min(most or len(self._rows), len(self._rows)))]
        self._note_taken(len(rows))
        return rows

    def needed_by(self, moment: float) -> None:
        """The next row is needed by this moment, on the event loop's clock; at once unless told."""
        self._engine.due_by(self.sequence, moment)

    async def aclose(self) -> None:
        """Stop the reply now. Its rows so far stay in the sequence."""
        if self.finish is None:
            await self._engine.stop(self.sequence)

    def __del__(self) -> None:
        if self.finish is None:
            self._engine.forget(self.sequence)

    def _note_taken(self, rows: int) -> None:
        """Tell the engine now and then that it may go on; a reply that is never made to wait needs no telling."""
        self._taken += rows
        most = self.sequence.most_unread
        if most is not None and self._taken >= min(TAKEN_TOGETHER, most):
            taken, self._taken = self._taken, 0
            self._engine.taken(self.sequence, taken)

    def _deliver(self, item: Row | BaseException | None, finish: FinishReason | None) -> None:
        """Called on the event loop's thread."""
        if isinstance(item, BaseException):
            self._error = item
        elif item is not None:
            self._rows.append(item)
        if finish is not None:
            self.finish = finish
        if self._waits is not None:
            count, ready = self._waits
            if (finish is not None or len(self._rows) >= count) and not ready.done():
                ready.set_result(None)


class WeakReply:
    """Reaches a reply without keeping it alive: a consumer that forgot it is gone."""

    def __init__(self, reply: Reply) -> None:
        self.sequence = reply.sequence
        self.loop = reply._loop
        self._reply = weakref.ref(reply)

    @property
    def reply(self) -> Reply | None:
        """The reply, if anybody still wants it."""
        return self._reply()

    def deliver(self, item: Row | BaseException | None, finish: FinishReason | None) -> bool:
        """Hand something to the reply on its own thread. False: nobody is there to take it."""
        reply = self._reply()
        return reply is not None and hand_over(self.loop, [(reply, item, finish)])


def hand_over(loop: asyncio.AbstractEventLoop, deliveries: list[Delivery]) -> bool:
    """Deliver on the event loop's thread, all with one wake-up; False: it is closed."""

    def deliver() -> None:
        for reply, item, finish in deliveries:
            reply._deliver(item, finish)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return False
    return True
