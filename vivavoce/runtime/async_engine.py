"""The interface to an `Engine` that a task of the deadline executor steps: for coroutines and for plain threads."""

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import Future
from typing import Self, TypeVar

from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import PlaybackDeadline, Sequence, rows_in_common
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import VivaError
from vivavoce.models.interface import Row
from vivavoce.runtime.engine_task import DUE_NOW, EngineTask, settle
from vivavoce.runtime.reply import BlockingReply, Receiver, Reply

Result = TypeVar("Result")


class AsyncEngine(EngineTask):
    """The asynchronous interface to an `Engine`, and a blocking one. All calls take effect between two steps.

    Coroutines use it as `async with` and await `open`, `generate`, …; threads without an event loop use `start`,
    `call`, `submit`, `prefill`, `stream` and `shutdown`. Both may be used concurrently. Its arguments are those of
    `EngineTask`.
    """

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close_engine()

    async def close_engine(self) -> None:
        """`shutdown` on another thread."""
        await asyncio.to_thread(self.shutdown)

    async def warm_up(self) -> None:
        """Capture CUDA graphs, if the device has them, before the first reply."""
        await self._call(lambda: self.on_stream(self._engine.warm_up))

    async def open(self, rows: Iterable[Row] = ()) -> Sequence:
        """A new sequence; its rows are computed in the background."""
        return await self._call(lambda: self._engine.open(rows), self._close)

    async def append(self, sequence: Sequence, rows: Iterable[Row]) -> None:
        """Add rows to a sequence that is not generating."""
        await self._call(lambda: self._engine.append(sequence, rows))

    def due_by(self, sequence: Sequence, moment: float) -> None:
        """Set the deadline of the next row of a sequence, on the event loop's clock."""
        previous, self._due[sequence.id] = self._due.get(sequence.id, DUE_NOW), moment
        if moment < previous:
            self._executor.wake(self)

    async def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same rows, whose pages it shares."""
        return await self._call(lambda: self._engine.fork(sequence), self._close)

    async def fork_at(self, sequence: Sequence, length: int, rows: Sequential[Row]) -> Sequence:
        """A second sequence that shares the first `length` rows, and has these after them; it is one command.

        Rows that the first one still had to prefill are left to the second.
        """

        def fork() -> Sequence:
            forked = self._engine.fork(sequence)
            sequence.needs_prefill = False
            try:
                self._engine.rewind(forked, length)
                self._engine.append(forked, rows)
            except Exception:
                self._engine.close(forked)
                raise
            return forked

        return await self._call(fork, self._close)

    async def replace_rows(self, sequence: Sequence, rows: Sequential[Row]) -> None:
        """Give a sequence that is not generating these rows; what it has in common with them is kept."""

        def replace() -> None:
            length = rows_in_common(sequence.rows, list(rows))
            self._engine.rewind(sequence, length)
            self._engine.append(sequence, rows[length:])

        await self._call(replace)

    async def rewind(self, sequence: Sequence, length: int) -> None:
        """Remove the rows from `length` on; a reply in progress ends as cancelled."""

        def rewind() -> None:
            self._end_reply(sequence, "cancelled")
            self._engine.rewind(sequence, length)

        await self._call(rewind)

    async def stop(self, sequence: Sequence) -> None:
        """End its reply as cancelled; its rows stay."""
        await self._call(lambda: self._end_reply(sequence, "cancelled"))

    def suspend(self, sequence: Sequence) -> None:
        """Let its reply wait until `resume`: no client would hear it."""
        self._post(lambda: self._engine.suspend(sequence))

    def resume(self, sequence: Sequence, seconds: float) -> None:
        """Continue its suspended reply, of which this many seconds have been played."""
        self._due.pop(sequence.id, None)
        self._post(lambda: self._engine.resume(sequence, seconds))

    async def close(self, sequence: Sequence) -> None:
        """Close a sequence; a reply in progress ends as cancelled."""
        await self._call(lambda: self._close(sequence))

    async def generate(
        self,
        sequence: Sequence,
        generation: Generation,
        max_unread: int | None = None,
        speculation: Speculation | None = None,
        listener: PlaybackDeadline | None = None,
    ) -> Reply:
        """Start a reply. With `max_unread`, it pauses while that many rows are unread.

        With a `listener`, whose progress is reported by `report_playback`, rows are generated as playback needs them.
        """
        loop = asyncio.get_running_loop()

        def start() -> Reply:
            self._engine.generate(sequence, generation, max_unread, speculation, listener)
            return self._reply(sequence, loop)

        return await self._call(start, lambda reply: self._end_reply(reply.sequence, "cancelled"))

    async def answer(
        self,
        past: Sequence | None,
        rows: Sequential[Row],
        same: int,
        generation: Generation,
        max_unread: int | None = None,
        listener: PlaybackDeadline | None = None,
        after: Sequence | None = None,
    ) -> Reply:
        """Start a reply to these rows on a new sequence, whose first `same` rows are those of `past`.

        It is one command: fork, append and generate as three commands would wait for a step each.
        """
        loop = asyncio.get_running_loop()

        def start() -> Reply:
            engine = self._engine
            sequence = engine.open() if past is None else engine.fork(past)
            try:
                engine.rewind(sequence, min(same, len(sequence)))
                engine.append(sequence, rows[len(sequence) :])
                engine.generate(sequence, generation, max_unread, listener=listener, after=after)
            except Exception:
                engine.close(sequence)
                raise
            return self._reply(sequence, loop)

        return await self._call(start, lambda reply: self._close(reply.sequence))

    def _reply(self, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> Reply:
        return self._register(Reply(self, sequence, loop))

    # The blocking interface, for threads without an event loop.

    def discard(self, sequence: Sequence) -> None:
        """Close a sequence without waiting for it; safe in a finalizer."""
        self.post(lambda: self._close(sequence))

    def prefill(self, sequence: Sequence) -> "Future[Sequence]":
        """A future that is done when all rows of a sequence are cached, or has the error of the failed step.

        Its callbacks run on the engine's thread, between two steps.
        """
        done: Future[Sequence] = Future()

        def watch() -> None:
            if not sequence.is_open or not sequence.pending:
                settle(done, None if sequence.is_open else VivaError(f"sequence {sequence.id} is closed"), sequence)
                return
            sequence.needs_prefill = True
            first = self._prefills.setdefault(sequence.id, done)
            if first is not done:
                first.add_done_callback(lambda other: settle(done, other.exception(), sequence))

        self.call(watch)
        return done

    def stream(
        self,
        sequence: Sequence,
        generation: Generation,
        max_unread: int | None = None,
        speculation: Speculation | None = None,
        listener: PlaybackDeadline | None = None,
    ) -> BlockingReply:
        """As `generate`; the rows are read with `for`."""

        def start() -> BlockingReply:
            self._engine.generate(sequence, generation, max_unread, speculation, listener)
            return self._register(BlockingReply(self, sequence))

        return self.call(start)

    def deliver_to(self, receiver: Receiver, generation: Generation) -> None:
        """Start a reply of the receiver's sequence; rows are delivered on the engine's thread. For use within `call`.

        The reply is stopped when the receiver is garbage-collected.
        """
        self._engine.generate(receiver.sequence, generation)
        self._register(receiver)

    def report_playback(self, sequence: Sequence, seconds: float) -> None:
        """Report that playback of its reply has reached this many seconds; used from the next step on."""
        self._commands.put(lambda: self._engine.report_playback(sequence, seconds))

    def taken(self, sequence: Sequence, rows: int) -> None:
        """Report that rows of its reply were read. The executor is woken only if the reply is paused."""
        self._commands.put(lambda: self._engine.take(sequence, rows))
        if sequence.is_paused:  # checked after the put: a reply that pauses later sees the command
            self._executor.wake(self)

    def report_first_audio(self, sequence: Sequence) -> None:
        """Report that the first audio of its reply has been decoded; the reply no longer rests for it."""
        self._post(lambda: self._engine.report_playback(sequence, 0.0))

    async def _call(self, action: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Run an action between two steps. If the caller is cancelled it is still run, and then undone if it can be.

        A session that disconnects is cancelled, often twice, while it opens or closes a sequence: neither may leak.
        """
        done = self.submit(action)
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            if undo is not None:
                done.add_done_callback(lambda future: self._undo(future, undo))
            raise

    def _undo(self, future: "Future[Result]", undo: Callable[[Result], None]) -> None:
        if future.exception() is None:
            result = future.result()
            self._post(lambda: undo(result))

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Step on the calling thread until the condition holds, if it is lent to the executor."""
        self._executor.wait_for(is_ready)

    def forget(self, sequence: Sequence) -> None:
        """Stop its reply without waiting; safe in a finalizer."""
        self._post(lambda: self._end_reply(sequence, "cancelled"))
