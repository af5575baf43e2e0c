"""The task of the deadline executor that steps an `Engine`: its commands, its deadline, its steps and their delivery.

A step advances every sequence that has work; its deadline is that of the most urgent one.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vivavoce.engine.engine import Emission, Engine
from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.engine.step import Failure, StepResult
from vivavoce.errors import VivaError
from vivavoce.nn.cuda_graphs import CudaStream
from vivavoce.runtime.executor import Actions, DeadlineExecutor, executor_for
from vivavoce.runtime.reply import Delivery, Receiver, WeakReply, deliver_all

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AnyReply = TypeVar("AnyReply", bound=Receiver)
DUE_NOW = float("-inf")
FIRST_AUDIO_SECONDS = 0.3  # deadline for the rows of a first audio, so that audio needed sooner goes first


class EngineTask:
    """A task of the executor `executor`, by default the one that all models of the device share; it steps an engine.

    If `eager`, it steps whenever there is work, and deadlines only rank it among other tasks; otherwise steps wait
    until a deadline is near. While `gives_way` is true it does not step; `after_step` is called after every step, on
    the thread that stepped.
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

    # Commands: actions that are run between two steps.

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

    def _post(self, action: Callable[[], None]) -> None:
        """Run an action that does not raise between two steps, without waiting."""
        self._commands.put(action)
        self._executor.wake(self)

    def on_stream(self, action: Callable[[], Result]) -> Result:
        """Run an action on the engine's CUDA stream. To be used within `call`."""
        with self._cuda_stream():
            return action()

    def _is_running(self) -> bool:
        return self._is_started and not self._is_closed and self._executor.is_open

    @property
    def _is_own_thread(self) -> bool:
        return self._thread == threading.get_ident()

    # What ends with its sequence: replies and prefills. Called between two steps.

    def _register(self, reply: AnyReply) -> AnyReply:
        self._replies[reply.sequence.id] = WeakReply(reply)
        self._due.pop(reply.sequence.id, None)
        return reply

    def _end_reply(self, sequence: Sequence, finish: FinishReason) -> None:
        handle = self._replies.pop(sequence.id, None)
        if handle is not None:
            self._engine.stop(sequence)
            handle.deliver(None, finish)

    def _end_prefill(self, sequence_id: int, error: Exception) -> None:
        done = self._prefills.pop(sequence_id, None)
        if done is not None and done.set_running_or_notify_cancel():
            done.set_exception(error)

    def _close(self, sequence: Sequence) -> None:
        self._end_reply(sequence, "cancelled")
        self._end_prefill(sequence.id, VivaError(f"sequence {sequence.id} was closed"))
        self._engine.close(sequence)
        self._due.pop(sequence.id, None)

    # The executor's task: commands as they arrive, and steps when they are due.

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
            settle(self._prefills.pop(sequence_id), None, sequences[sequence_id])


def settle(done: "Future[Result]", error: BaseException | None, result: Result) -> None:
    """Give a future its error, or its result; one that was cancelled stays so."""
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
