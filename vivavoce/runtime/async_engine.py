"""The driver of an `Engine`: a task of the executor that steps it, for coroutines and for plain threads.

A step advances every sequence that has work; the most urgent of them decides when it is taken.
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
from vivavoce.engine.sequence import FinishReason, PlaybackDeadline, Sequence
from vivavoce.engine.speculative import Speculation
from vivavoce.engine.step import Failure, StepResult
from vivavoce.errors import VivaError
from vivavoce.models.interface import Row
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.runtime.executor import Actions, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import BlockingReply, Delivery, Receiver, Reply, WeakReply, hand_over

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AnyReply = TypeVar("AnyReply", bound=Receiver)
DUE_NOW = float("-inf")
FIRST_AUDIO_SECONDS = 0.3  # until the rows of a first sound are needed; sound that is needed sooner goes first


class AsyncEngine:
    """The asynchronous interface to an `Engine`, and a blocking one. All calls take effect between two steps.

    Coroutines use it as `async with` and await `open`, `generate`, …; threads without an event loop use `start`,
    `call`, `submit`, `prefill`, `stream` and `shutdown`. Both may be used at once. It is a task of the executor
    `workers`; unless one is given, of that which all models of its device share. An `eager` one steps whenever there is
    work and has deadlines only for its rank among other tasks; else steps wait until a deadline is near. While
    `gives_way` is true it takes no step; `after_step` is called after every step, on the thread that stepped.
    """

    name = "viva-engine"

    def __init__(
        self,
        engine: Engine,
        workers: DeadlineExecutor | None = None,
        eager: bool = False,
        gives_way: Callable[[], bool] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._gives_way = gives_way or (lambda: False)
        self._after_step = after_step
        self._engine, self._is_eager = engine, eager
        self._commands = Actions()
        self._replies: dict[int, WeakReply] = {}
        self._due: dict[int, float] = {}  # by sequence; others are due at once
        self._executor = workers or executor_for(engine.runner.device)
        self._cuda_stream = CudaStream(engine.runner.device, urgent=True)
        self._prefills: dict[int, Future[Sequence]] = {}
        self._is_started = self._is_closed = False
        self._stepped = float("-inf")  # when the last step ended
        self._thread: int | None = None  # identity of the thread that is in `do_next`

    @property
    def engine(self) -> Engine:
        """The engine itself. Only `call`, `submit` and `post` may change it while this drives it."""
        return self._engine

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close_engine()

    async def close_engine(self) -> None:
        """As `shutdown`."""
        await asyncio.to_thread(self.shutdown)

    def start(self) -> None:
        """Begin to step."""
        self._is_started = True
        self._executor.add(self)

    def shutdown(self) -> None:
        """End every reply as cancelled and stop stepping; returns when no step is under way. Twice does nothing."""
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
        """Capture what will be replayed, where the device does that, before the first reply."""
        await self._call(lambda: self.on_stream(self._engine.warm_up))

    def on_stream(self, action: Callable[[], Result]) -> Result:
        """The result of an action that computes on the engine's CUDA stream. Use it within `call`."""
        with self._cuda_stream():
            return action()

    async def open(self, rows: Iterable[Row] = ()) -> Sequence:
        """A new sequence; its rows are computed in the background."""
        return await self._call(lambda: self._engine.open(rows), self._close)

    async def append(self, sequence: Sequence, rows: Iterable[Row]) -> None:
        """Add rows to a sequence that is not generating."""
        await self._call(lambda: self._engine.append(sequence, rows))

    def due_by(self, sequence: Sequence, moment: float) -> None:
        """What this sequence has to do must be done by this moment, on the event loop's clock."""
        before, self._due[sequence.id] = self._due.get(sequence.id, DUE_NOW), moment
        if moment < before:
            self._executor.wake(self)

    async def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence that shares the first one's past."""
        return await self._call(lambda: self._engine.fork(sequence), self._close)

    async def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the rows from `length` on; a reply under way ends as cancelled."""

        def rewind() -> None:
            self._end_reply(sequence, "cancelled")
            self._engine.rewind(sequence, length)

        await self._call(rewind)

    async def stop(self, sequence: Sequence) -> None:
        """End its reply as cancelled; the rows so far stay."""
        await self._call(lambda: self._end_reply(sequence, "cancelled"))

    async def close(self, sequence: Sequence) -> None:
        """Forget a sequence; a reply under way ends as cancelled."""
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
        """Start a reply. With `max_unread`, it pauses while so many rows are unread.

        With a `listener`, whose progress is reported by `heard`, rows come by when they are needed for playback.
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
        """Start a reply to these rows on a sequence of its own, whose first `same` rows are those of `past`.

        It is one command: a fork, more rows and a reply by three commands would wait for a step each.
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
        if not self._is_running() and done.cancel():  # meanwhile, and nothing runs commands any more
            raise VivaError("the engine is not running")
        return done

    def call(self, action: Callable[[], Result]) -> Result:
        """The result of an action that is run between two steps. An action may itself `call`."""
        return action() if self._is_own_thread else self.submit(action).result()

    def post(self, action: Callable[[], None]) -> None:
        """Run an action between two steps without waiting for it, from any thread, also amid a step."""

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
        """Done when all rows of a sequence have been computed; holds the error of the step in which they failed.

        Callbacks of the future run on the engine's thread, between two steps.
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
        """Start a reply whose rows are read with `for`; as `generate`."""

        def start() -> BlockingReply:
            self._engine.generate(sequence, generation, max_unread, speculation, listener)
            return self._register(BlockingReply(self, sequence))

        return self.call(start)

    def deliver_to(self, receiver: Receiver, generation: Generation) -> None:
        """Start a reply of the receiver's sequence, whose rows it gets on the engine's thread. Use it within `call`.

        The reply is stopped when the receiver is dropped.
        """
        self._engine.generate(receiver.sequence, generation)
        self._register(receiver)

    def _is_running(self) -> bool:
        return self._is_started and not self._is_closed and self._executor.is_open

    @property
    def _is_own_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def report_playback(self, sequence: Sequence, seconds: float) -> None:
        """The listener of its reply has played so much of it by now; it counts from the next step on."""
        self._commands.put(lambda: self._engine.report_playback(sequence, seconds))

    def taken(self, sequence: Sequence, rows: int) -> None:
        """Rows of its reply were read. The executor is woken only if the reply is paused."""
        self._commands.put(lambda: self._engine.take(sequence, rows))
        if sequence.is_paused:  # read after the put: a reply that pauses later finds the command
            self._executor.wake(self)

    def report_first_audio(self, sequence: Sequence) -> None:
        """The first sound of its reply has been made, so that the reply need not rest for it any longer."""
        self._post(lambda: self._engine.report_playback(sequence, 0.0))

    async def _call(self, action: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Run on the engine's thread, between steps. If the caller is cancelled it is run all the same, or undone.

        A session that disconnects is cancelled, often twice, while it opens or closes a sequence: neither may be lost.
        """
        done = self.submit(action)
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            if undo is not None:
                done.add_done_callback(lambda made: self._undo(made, undo))
            raise

    def _undo(self, made: "Future[Result]", undo: Callable[[Result], None]) -> None:
        if made.exception() is None:
            result = made.result()
            self._post(lambda: undo(result))

    def _post(self, action: Callable[[], None]) -> None:
        """Run on the engine's thread some time soon, without waiting."""
        self._commands.put(action)
        self._executor.wake(self)

    def forget(self, sequence: Sequence) -> None:
        """Stop its reply without waiting; safe in a finalizer."""
        self._post(lambda: self._end_reply(sequence, "cancelled"))

    # A task of the executor: commands as they come, and a step when one is due.

    def due(self) -> float | None:
        """When the next row of the most urgent sequence is needed."""
        if self._commands:
            return DUE_NOW
        if self._gives_way():
            return None
        rests = self._engine.rests
        if rests:
            return self._executor.now() + rests + self._executor.early
        busy = (each for each in self._engine.scheduler.sequences.values() if each.has_work)
        due = min((self._due.get(each.id, _due(each)) for each in busy), default=None)
        if due is None or not self._is_eager:
            return due
        # After a step, what has waited for longer than since its end goes first.
        return min(max(due, self._stepped), self._stepped + self._executor.early)

    def do_next(self) -> None:
        """Run the commands that wait, and step if it is time."""
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
            with self._cuda_stream(
                waits=False
            ):  # a step begun ahead goes on, while the rows of this one are handed over
                result = self._engine.advance()
                made = [emission.sequence for emission in result.emissions]
                if any(sequence.states is not None or sequence.hidden is not None for sequence in made):
                    self._cuda_stream.wait()  # other streams may read these
        except Exception as error:  # of the CUDA stream itself: no row of the step can be trusted
            result = self._all_failed(result, error)
        self._stepped = self._executor.now()
        self._hand_over(result.emissions)
        self._hand_over_failures(result.failures)
        self._end_finished_prefills()
        if self._after_step is not None:
            self._after_step()

    def _hand_over(self, emissions: list[Emission]) -> None:
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
            if not hand_over(loop, some):
                for reply, _, _ in some:
                    self._replies.pop(reply.sequence.id, None)
                    self._engine.stop(reply.sequence)

    def _end_reply(self, sequence: Sequence, finish: FinishReason) -> None:
        handle = self._replies.pop(sequence.id, None)
        if handle is not None:
            self._engine.stop(sequence)
            handle.deliver(None, finish)

    def _all_failed(self, result: StepResult, error: Exception) -> StepResult:
        """The result of a step whose CUDA stream failed: every sequence that it advanced, or would have, failed."""
        busy = (sequence for sequence in self._engine.scheduler.sequences.values() if sequence.has_work)
        hit = dict.fromkeys([*(emission.sequence for emission in result.emissions), *busy])
        return StepResult(failures=[*result.failures, *(self._engine.fail(sequence, error) for sequence in hit)])

    def _hand_over_failures(self, failures: list[Failure]) -> None:
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
    """The default deadline of a sequence: when its listener runs dry; at once if it has none."""
    listener, dry = sequence.listener, sequence.playback_end
    if listener is None or dry is None:
        return DUE_NOW
    return listener.since + FIRST_AUDIO_SECONDS if sequence.awaits_first_audio else dry
