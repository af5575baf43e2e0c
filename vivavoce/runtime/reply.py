"""Streams of a reply's rows: delivered by the engine's thread, read by a coroutine or by a plain thread."""

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, Self

from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import Row

ROWS_PER_NOTICE = 4  # rows read before the engine is notified of it
Item = Row | BaseException | None
Delivery = tuple["Receiver", Item, FinishReason | None]


class ReplyEngine(Protocol):
    """What a reply needs of its engine. All but `stop` return immediately and may be called on any thread."""

    def due_by(self, sequence: Sequence, moment: float) -> None:
        """Set the deadline of the next row."""

    def taken(self, sequence: Sequence, rows: int) -> None:
        """Report that rows were read."""

    async def stop(self, sequence: Sequence) -> None:
        """End the reply; the sequence stays open."""

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Step on the calling thread until the condition holds, if it is lent to the engine's executor."""

    def forget(self, sequence: Sequence) -> None:
        """As `stop`, without waiting; safe in a finalizer."""


class Receiver(Protocol):
    """Receives the rows of a reply."""

    @property
    def sequence(self) -> Sequence:
        """The sequence of the reply."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop on which `deliver` is called; None: it is called on the engine's thread."""
        ...

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end. Must not raise."""


class _UnfinishedReply:
    """Base of both kinds of reply. The reply is stopped when the object is garbage-collected."""

    def __init__(self, engine: ReplyEngine, sequence: Sequence) -> None:
        self.sequence = sequence
        self.finish: FinishReason | None = None
        self._engine = engine
        self._read = 0

    def needed_by(self, moment: float) -> None:
        """Set the deadline of the next row, on the executor's clock; the default is now."""
        self._engine.due_by(self.sequence, moment)

    def __del__(self) -> None:
        if self.finish is None:
            self._engine.forget(self.sequence)

    def _note_read(self, rows: int) -> None:
        """Report read rows to the engine, every few rows, if the reply has a `max_unread`."""
        self._read += rows
        max_unread = self.sequence.max_unread
        if max_unread is not None and self._read >= min(ROWS_PER_NOTICE, max_unread):
            read, self._read = self._read, 0
            self._engine.taken(self.sequence, read)


class Reply(_UnfinishedReply):
    """The rows of one reply, to be read with `async for`.

    The reply is stopped at the end of an `async with` block, by `aclose`, and when the object is garbage-collected.
    """

    def __init__(self, engine: ReplyEngine, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(engine, sequence)
        self.loop: asyncio.AbstractEventLoop | None = loop
        self._rows: deque[Row] = deque()
        self._error: BaseException | None = None
        self._waits: tuple[int, asyncio.Future[None]] | None = None  # rows that the reader waits for, and its future

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
        """All unread rows, at least `count` unless the reply ends before. The reader is woken once for all of them."""
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
        """Stop the reply. Its rows stay in the sequence."""
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

    An error of the reply is raised after the rows before it. The reply is stopped, without waiting, by `close` and when
    the object is garbage-collected; a thread that waits for a row is then released.
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
            self._engine.wait_for(lambda: not self._items.empty())
            item, finish = self._items.get()
            self._is_read = finish is not None
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._note_read(1)
                return item
        raise StopIteration

    def close(self) -> None:
        """Stop the reply. Its rows stay in the sequence."""
        if self.finish is None:
            self._engine.forget(self.sequence)

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Take a row, an error or the end. Called on the engine's thread."""
        if finish is not None:
            self.finish = finish
        self._items.put((item, finish))


class WeakReply:
    """A weak reference to a reply."""

    def __init__(self, reply: Receiver) -> None:
        self.sequence = reply.sequence
        self.loop = reply.loop
        self._reply: weakref.ref[Receiver] = weakref.ref(reply)

    @property
    def reply(self) -> Receiver | None:
        """The reply, unless it was garbage-collected."""
        return self._reply()

    def deliver(self, item: Item, finish: FinishReason | None) -> None:
        """Deliver to the reply on its event loop, if both still exist."""
        reply = self._reply()
        if reply is not None:
            deliver_all(self.loop, [(reply, item, finish)])


def deliver_all(loop: asyncio.AbstractEventLoop | None, deliveries: Iterable[Delivery]) -> bool:
    """Deliver on the event loop, with one wake-up, or directly if there is none; False: the loop is closed."""

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
