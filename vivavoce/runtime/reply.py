"""Replies as they are generated: rows handed over by the thread that steps, to a coroutine or to a plain thread."""

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Protocol, Self

from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import Row

ROWS_PER_NOTICE = 4  # rows read before the engine is notified of it
Item = Row | BaseException | None
Delivery = tuple["Receiver", Item, FinishReason | None]


class ReplyEngine(Protocol):
    """What a reply needs of the engine that generates it. All but `stop` return at once, on any thread."""

    def due_by(self, sequence: Sequence, moment: float) -> None:
        """Its next row is needed by this moment."""

    def taken(self, sequence: Sequence, rows: int) -> None:
        """So many rows were read."""

    async def stop(self, sequence: Sequence) -> None:
        """End the reply; the sequence stays open."""

    def forget(self, sequence: Sequence) -> None:
        """As `stop`, without waiting; safe in a finalizer."""


class Receiver(Protocol):
    """Gets the rows of a reply."""

    @property
    def sequence(self) -> Sequence:
        """Whose reply it is."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """On whose thread `deliver` is called; None: on the thread that steps."""
        ...

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end. Must not raise."""


class _UnfinishedReply:
    """What both kinds of reply have in common. Dropping the object stops the reply."""

    def __init__(self, engine: ReplyEngine, sequence: Sequence) -> None:
        self.sequence = sequence
        self.finish: FinishReason | None = None
        self._engine = engine
        self._read = 0

    def needed_by(self, moment: float) -> None:
        """The next row is needed by this moment, on the executor's clock; unless set, at once."""
        self._engine.due_by(self.sequence, moment)

    def __del__(self) -> None:
        if self.finish is None:
            self._engine.forget(self.sequence)

    def _note_read(self, rows: int) -> None:
        """Notify the engine from time to time that a reply limited by `max_unread` may go on."""
        self._read += rows
        max_unread = self.sequence.max_unread
        if max_unread is not None and self._read >= min(ROWS_PER_NOTICE, max_unread):
            read, self._read = self._read, 0
            self._engine.taken(self.sequence, read)


class Reply(_UnfinishedReply):
    """The rows of one reply, to be read with `async for`.

    `async with` stops the reply when its block is left, by whatever way; so do `aclose` and dropping the object.
    """

    def __init__(self, engine: ReplyEngine, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, sequence)
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._rows: deque[Row] = deque()
        self._error: BaseException | None = None
        self._waits: tuple[int, asyncio.Future[None]] | None = None  # how many rows the reader waits for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        rows = await self.several(1, max_rows=1)
        if not rows:
            raise StopAsyncIteration
        return rows[0]

    async def several(self, count: int, max_rows: int | None = None) -> list[Row]:
        """The rows that are there, `count` at least unless the reply is over. The reader is woken once for all."""
        count = min(count, self.sequence.max_unread or count)
        if len(self._rows) < count and self.finish is None:
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waits = (count, ready)
            try:
                await ready
            finally:
                self._waits = None
        if not self._rows and self._error is not None:
            error, self._error = self._error, None
            raise error
        rows = [self._rows.popleft() for _ in range(min(max_rows or len(self._rows), len(self._rows)))]
        self._note_read(len(rows))
        return rows

    async def aclose(self) -> None:
        """Stop the reply now. Its rows so far stay in the sequence."""
        if self.finish is None:
            await self._engine.stop(self.sequence)

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end. Called on the event loop's thread."""
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


class BlockingReply(_UnfinishedReply):
    """The rows of one reply, to be read with `for` on a thread without an event loop.

    An error of the reply is raised after the rows before it. `close` stops the reply without waiting, as does dropping
    the object; a thread that waits for a row is released by it.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, engine: ReplyEngine, sequence: Sequence) -> None:
        super().__init__(engine, sequence)
        self._items: queue.SimpleQueue[tuple[Item, FinishReason | None]] = queue.SimpleQueue()
        self._is_read = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        while not self._is_read:
            item, finish = self._items.get()
            self._is_read = finish is not None
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._note_read(1)
                return item
        raise StopIteration

    def close(self) -> None:
        """Stop the reply. Its rows so far stay in the sequence."""
        if self.finish is None:
            self._engine.forget(self.sequence)

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end. Called on the thread that steps."""
        if finish is not None:
            self.finish = finish
        self._items.put((item, finish))


class WeakReply:
    """Reaches a reply without keeping it alive."""

    def __init__(self, reply: Receiver) -> None:
        self.sequence = reply.sequence
        self.loop = reply.loop
        self._reply: weakref.ref[Receiver] = weakref.ref(reply)

    @property
    def reply(self) -> Receiver | None:
        """The reply, unless its reader has dropped it."""
        return self._reply()

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Hand something to the reply on the thread that reads it, if it still exists."""
        reply = self._reply()
        if reply is not None:
            hand_over(self.loop, [(reply, item, finish)])


def hand_over(loop: asyncio.AbstractEventLoop | None, deliveries: Iterable[Delivery]) -> bool:
    """Deliver on the event loop's thread with one wake-up, or here if there is no loop; False: the loop is closed."""

    def deliver() -> None:
        for reply, item, finish in deliveries:
            reply.deliver(item, finish)

    if loop is None:
        deliver()
        return True
    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return False
    return True
