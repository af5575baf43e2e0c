"""The engine behind an event loop: one thread steps, coroutines open sequences and read replies as they are made."""

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Self, TypeVar

from vivavoce.engine.engine import Emission, Engine
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import VivaError
from vivavoce.models.interface import Row

Result = TypeVar("Result")


class Reply:
    """The rows of one reply, to be read with `async for`.

    `async with` stops the reply when its block is left, by whatever way; so do `aclose` and forgetting the object.
    """

    def __init__(self, engine: "StreamingEngine", sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.finish: FinishReason | None = None
        self._engine = engine
        self._loop = loop
        self._rows: asyncio.Queue[Row | BaseException | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        if self.finish is not None and self._rows.empty():
            raise StopAsyncIteration
        item = await self._rows.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        self._engine._post(lambda: self._engine._engine.take(self.sequence))
        return item

    async def aclose(self) -> None:
        """Stop the reply now. Its rows so far stay in the sequence."""
        if self.finish is None:
            await self._engine._call(lambda: self._engine._end_reply(self.sequence, "cancelled"))

    def __del__(self) -> None:
        if self.finish is None:
            self._engine._post_stop(self.sequence)

    def _deliver(self, item: Row | BaseException | None, finish: FinishReason | None) -> None:
        """Called on the event loop's thread."""
        if item is not None:
            self._rows.put_nowait(item)
        if finish is not None:
            self.finish = finish
            self._rows.put_nowait(None)


class _WeakReply:
    """Reaches a reply without keeping it alive: a consumer that forgot it is gone."""

    def __init__(self, reply: Reply) -> None:
        self.sequence = reply.sequence
        self._loop = reply._loop
        self._reply = weakref.ref(reply)

    def deliver(self, item: Row | BaseException | None, finish: FinishReason | None) -> bool:
        """Hand something to the reply on its own thread. False: nobody is there to take it."""
        reply = self._reply()
        if reply is None:
            return False
        try:
            self._loop.call_soon_threadsafe(reply._deliver, item, finish)
        except RuntimeError:  # the event loop is closed
            return False
        return True


class StreamingEngine:
    """An async face for an `Engine`. All calls take effect between two steps of the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._replies: dict[int, _WeakReply] = {}
        self._thread = threading.Thread(target=self._work, name="viva-engine", daemon=True)
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close_engine()

    async def close_engine(self) -> None:
        """End every reply as cancelled and stop the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def open(self, rows: Iterable[Row] = ()) -> Sequence:
        """A new sequence; its rows are computed in the background."""
        return await self._call(lambda: self._engine.open(rows))

    async def append(self, sequence: Sequence, rows: Iterable[Row]) -> None:
        """Add rows to a sequence that is not generating."""
        await self._call(lambda: self._engine.append(sequence, rows))

    async def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence that shares the first one's past."""
        return await self._call(lambda: self._engine.fork(sequence))

    async def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the rows from `length` on; a reply under way ends as cancelled."""

        def rewind() -> None:
            self._end_reply(sequence, "cancelled")
            self._engine.rewind(sequence, length)

        await self._call(rewind)

    async def close(self, sequence: Sequence) -> None:
        """Forget a sequence; a reply under way ends as cancelled."""

        def close() -> None:
            self._end_reply(sequence, "cancelled")
            self._engine.close(sequence)

        await self._call(close)

    async def generate(
        self,
        sequence: Sequence,
        generation: Generation,
        most_unread: int | None = None,
        speculation: Speculation | None = None,
    ) -> Reply:
        """Start a reply. `most_unread` lets a slow consumer pause it instead of letting rows pile up."""
        reply = Reply(self, sequence, asyncio.get_running_loop())
        handle = _WeakReply(reply)

        def start() -> None:
            self._engine.generate(sequence, generation, most_unread, speculation)
            self._replies[sequence.id] = handle

        try:
            await self._call(start)
        except BaseException:
            reply.finish = "error"
            raise
        return reply

    async def _call(self, action: Callable[[], Result]) -> Result:
        """Run on the engine's thread, between steps."""
        if self._is_closed or not self._thread.is_alive():
            raise VivaError("the engine is not running")
        done: Future[Result] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except BaseException as error:
                    done.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(done)

    def _post(self, action: Callable[[], None]) -> None:
        """Run on the engine's thread some time soon; nobody waits."""
        self._commands.put(action)

    def _post_stop(self, sequence: Sequence) -> None:
        self._commands.put(lambda: self._end_reply(sequence, "cancelled"))

    def _work(self) -> None:
        """The engine's thread: commands as they come, then a step, for as long as there is work."""
        while self._run_commands():
            try:
                emissions = self._engine.step()
            except Exception as error:
                self._fail(error)
                continue
            for emission in emissions:
                self._hand_over(emission)
        for sequence_id in list(self._replies):
            self._end_reply(self._replies[sequence_id].sequence, "cancelled")

    def _run_commands(self) -> bool:
        """Run what is queued, waiting for a command only when there is nothing to step. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _hand_over(self, emission: Emission) -> None:
        handle = self._replies.get(emission.sequence.id)
        if handle is None:
            return
        if emission.finish is not None:
            del self._replies[emission.sequence.id]
        if not handle.deliver(emission.row, emission.finish):
            self._replies.pop(emission.sequence.id, None)
            self._engine.stop(emission.sequence)

    def _end_reply(self, sequence: Sequence, finish: FinishReason) -> None:
        handle = self._replies.pop(sequence.id, None)
        if handle is not None:
            self._engine.stop(sequence)
            handle.deliver(None, finish)

    def _fail(self, error: Exception) -> None:
        """A step that cannot be done ends the replies that were part of it, each with the error, and nothing else."""
        for handle in self._replies.values():
            self._engine.stop(handle.sequence)
            handle.deliver(error, "error")
        self._replies.clear()
        for sequence in self._engine.scheduler.sequences.values():
            sequence.is_wanted = False
