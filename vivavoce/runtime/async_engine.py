"""The driver of an `Engine`: a task of the deadline executor that steps it, for coroutines and for plain threads.

A step advances every sequence that has work; its deadline is that of the most urgent one.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import Future
from typing import Self, TypeVar

from vivavoce.engine.engine import Emission, Engine
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import FinishReason, PlaybackDeadline, Sequence, rows_in_common
from vivavoce.engine.speculative import Speculation
from vivavoce.engine.step import Failure, StepResult
from vivavoce.errors import VivaError
from vivavoce.models.interface import Row
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.runtime.executor import Actions, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import BlockingReply, Delivery, Receiver, Reply, WeakReply, deliver_all

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AnyReply = TypeVar("AnyReply", bound=Receiver)
DUE_NOW = float("-inf")
FIRST_AUDIO_SECONDS = 0.3  # deadline for the rows of a first audio, so that audio needed sooner goes first


class AsyncEngine:
    """The asynchronous interface to an `Engine`, and a blocking one. All calls take effect between two steps.

    Coroutines use it as `async with` and await `open`, `generate`, …; threads without an event loop use `start`,
    `call`, `submit`, `prefill`, `stream` and `shutdown`. Both may be used concurrently. It is a task of the executor
    `executor`, by default the one that all models of the device share. If `eager`, it steps whenever there is work, and
    deadlines only rank it among other tasks; otherwise steps wait until a deadline is near. While `gives_way` is true
    it does not step; `after_step` is called after every step, on the thread that stepped.
    """

    name = "viva-engine"

    def __init__(
        self,
        engine: Engine,
        executor: DeadlineExecutor | None = None,
        eager: bool = False,
        gives_way: Callable[[], bool] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._gives_way = gives_way or (lambda: False)
        self._after_step = after_step
        self._engine, self._is_eager = engine, eager
        self._commands = Actions()
        self._replies: dict[int, WeakReply] = {}
        self._due: dict[int, float] = {}  # by sequence; others are due now
        self._executor = executor or executor_for(engine.runner.device)
        self._cuda_stream = CudaStream(engine.runner.device, urgent=True)
        self._prefills: dict[int, Future[Sequence]] = {}
        self._is_started = self._is_closed = False
        self._step_end = float("-inf")  # of the last step
        self._thread: int | None = None  # identity of the thread that runs `do_next`

    @property
    def engine(self) -> Engine:
        """The engine. While this drives it, only actions of `call`, `submit` and `post` may change it."""
        return self._engine

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close_engine()

    async def close_engine(self) -> None:
        """`shutdown` on another thread."""
        await asyncio.to_thread(self.shutdown)

    def start(self) -> None:
        """Start stepping."""
        self._is_started = True
        self._executor.add(self)

    def shutdown(self) -> None:
        """End every reply as cancelled and stop stepping; returns when no step is running. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._executor.remove(self)
        self._commands.run_all()
        for handle in list(self._replies.values()):
            self._end_reply(handle.sequence, "cancelled")
        for sequence_id in list(self._prefills):
            self._end_prefill(sequence_id, VivaError("the engine was closed"))

    async def warm_up(self) -> None:
        """Capture CUDA graphs, if the device has them, before the first reply."""
        await self._call(lambda: self.on_stream(self._engine.warm_up))

    def on_stream(self, action: Callable[[], Result]) -> Result:
        """Run an action on the engine's CUDA stream. To be used within `call`."""
        with self._cuda_stream():
            return action()

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

    def _close(self, sequence: Sequence) -> None:
        self._end_reply(sequence, "cancelled")
        self._end_prefill(sequence.id, VivaError(f"sequence {sequence.id} was closed"))
        self._engine.close(sequence)
        self._due.pop(sequence.id, None)

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

        return await self._call(start)

    async def answer(
        self,
        past: Sequence | None,
        rows: Sequential[Row],
        same: int,
        generation: Generation,
        max_unread: int | None = None,
        listener: PlaybackDeadline | None = None,
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
                engine.generate(sequence, generation, max_unread, listener=listener)
            except Exception:
                engine.close(sequence)
                raise
            return self._reply(sequence, loop)

        return await self._call(start, lambda reply: self._close(reply.sequence))

    def _reply(self, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> Reply:
        return self._register(Reply(self, sequence, loop))

    def _register(self, reply: AnyReply) -> AnyReply:
        self._replies[reply.sequence.id] = WeakReply(reply)
        self._due.pop(reply.sequence.id, None)
        return reply

    # The blocking interface, for threads without an event loop.

    def submit(self, action: Callable[[], Result]) -> "Future[Result]":
        """Run an action on the engine's thread between two steps; it may use `engine`, `prefill` and `stream`."""
        if not self._is_running():
            raise VivaError("the engine is not running")
        done = self._commands.submit(action)
        self._executor.wake(self)
        if not self._is_running() and done.cancel():  # it was closed meanwhile, and no longer runs commands
            raise VivaError("the engine is not running")
        return done

    def call(self, action: Callable[[], Result]) -> Result:
        """The result of an action that is run between two steps. Actions may use `call` themselves."""
        if self._is_own_thread:
            return action()
        done = self.submit(action)
        self._executor.wait_for(done.done)
        return done.result()

    def post(self, action: Callable[[], None]) -> None:
        """Run an action between two steps without waiting for it; from any thread, also during a step."""

        def run() -> None:
            try:
                action()
            except Exception:
                logger.exception("an action posted to the engine failed")

        self._post(run)

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
                _settle(done, None if sequence.is_open else VivaError(f"sequence {sequence.id} is closed"), sequence)
                return
            sequence.needs_prefill = True
            first = self._prefills.setdefault(sequence.id, done)
            if first is not done:
                first.add_done_callback(lambda other: _settle(done, other.exception(), sequence))

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

    def _is_running(self) -> bool:
        return self._is_started and not self._is_closed and self._executor.is_open

    @property
    def _is_own_thread(self) -> bool:
        return self._thread == threading.get_ident()

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

    def _post(self, action: Callable[[], None]) -> None:
        """Run an action that does not raise between two steps, without waiting."""
        self._commands.put(action)
        self._executor.wake(self)

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Step on the calling thread until the condition holds, if it is lent to the executor."""
        self._executor.wait_for(is_ready)

    def forget(self, sequence: Sequence) -> None:
        """Stop its reply without waiting; safe in a finalizer."""
        self._post(lambda: self._end_reply(sequence, "cancelled"))

    # A task of the executor: commands as they arrive, and steps when they are due.

    def due(self) -> float | None:
        """Deadline of the most urgent sequence."""
        if self._commands:
            return DUE_NOW
        if self._gives_way():
            return None
        rest = self._engine.seconds_to_next_step
        if rest:
            return self._executor.now() + rest + self._executor.early
        busy = (each for each in self._engine.scheduler.sequences.values() if each.has_work)
        due = min((self._due.get(each.id, _due(each)) for each in busy), default=None)
        if due is None or not self._is_eager:
            return due
        # After a step, tasks that have been due since before its end go first.
        return min(max(due, self._step_end), self._step_end + self._executor.early)

    def do_next(self) -> None:
        """Run the waiting commands, and step if it is due."""
        self._thread = threading.get_ident()
        try:
            self._commands.run_all()
            self._step_if_due()
        finally:
            self._thread = None

    def _step_if_due(self) -> None:
        due = self.due()
        if due is None or due - self._executor.now() > self._executor.early:
            return
        result = StepResult()
        try:
            # Not waited for: a prelaunched step runs while the rows of this one are delivered.
            with self._cuda_stream(waits=False):
                result = self._engine.advance()
                sequences = [emission.sequence for emission in result.emissions]
                if any(sequence.states is not None or sequence.hidden is not None for sequence in sequences):
                    self._cuda_stream.wait()  # other streams may read these
        except Exception as error:  # of the CUDA stream itself: no row of the step can be trusted
            result = self._all_failed(result, error)
        self._step_end = self._executor.now()
        self._deliver(result.emissions)
        self._deliver_failures(result.failures)
        self._end_finished_prefills()
        if self._after_step is not None:
            self._after_step()

    def _deliver(self, emissions: list[Emission]) -> None:
        """Deliver rows to the readers of replies, with one wake-up for each event loop."""
        deliveries: dict[asyncio.AbstractEventLoop | None, list[Delivery]] = {}
        for emission in emissions:
            handle = self._replies.get(emission.sequence.id)
            if handle is None:
                continue
            reply = handle.reply
            if reply is None or emission.finish is not None:
                del self._replies[emission.sequence.id]
            if reply is None:
                self._engine.stop(emission.sequence)
            else:
                deliveries.setdefault(handle.loop, []).append((reply, emission.row, emission.finish))
        for loop, some in deliveries.items():
            if not deliver_all(loop, some):
                for reply, _, _ in some:
                    self._replies.pop(reply.sequence.id, None)
                    self._engine.stop(reply.sequence)

    def _end_reply(self, sequence: Sequence, finish: FinishReason) -> None:
        handle = self._replies.pop(sequence.id, None)
        if handle is not None:
            self._engine.stop(sequence)
            handle.deliver(None, finish)

    def _all_failed(self, result: StepResult, error: Exception) -> StepResult:
        """The result of a step whose CUDA stream failed: all sequences of the step fail, and all that have work."""
        busy = (sequence for sequence in self._engine.scheduler.sequences.values() if sequence.has_work)
        affected = dict.fromkeys([*(emission.sequence for emission in result.emissions), *busy])
        return StepResult(failures=[*result.failures, *(self._engine.fail(sequence, error) for sequence in affected)])

    def _deliver_failures(self, failures: list[Failure]) -> None:
        for failure in failures:
            handle = self._replies.pop(failure.sequence.id, None)
            if handle is not None:
                handle.deliver(failure.error, "error")
            self._end_prefill(failure.sequence.id, failure.error)

    def _end_finished_prefills(self) -> None:
        sequences = self._engine.scheduler.sequences
        finished = [each for each in self._prefills if each in sequences and not sequences[each].pending]
        for sequence_id in finished:
            _settle(self._prefills.pop(sequence_id), None, sequences[sequence_id])

    def _end_prefill(self, sequence_id: int, error: Exception) -> None:
        done = self._prefills.pop(sequence_id, None)
        if done is not None and done.set_running_or_notify_cancel():
            done.set_exception(error)


def _settle(done: "Future[Result]", error: BaseException | None, result: Result) -> None:
    if not done.set_running_or_notify_cancel():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _due(sequence: Sequence) -> float:
    """The default deadline of a sequence: when its playback runs out of audio; now if it has none."""
    listener, end = sequence.listener, sequence.playback_end
    if listener is None or end is None:
        return DUE_NOW
    return listener.since + FIRST_AUDIO_SECONDS if sequence.awaits_first_audio else end
