"""The audio front end of all conversations of a process, computed by worker threads beside the event loop.

A worker takes what has arrived for its conversations, computes it together (`FrontEndBatch`), and hands all results to
the event loop in one call. It starts as soon as there is audio: batches form from what arrives while it computes.
Changes of what is played wait in the same queue as the audio, so that both take effect in the order of the calls.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from threadpoolctl import ThreadpoolController

from vivavoce.audio.resample import check_rate
from vivavoce.audio.rows import FEW
from vivavoce.audio.vad import RATE, WINDOW, VoiceActivity, voice_activity
from vivavoce.dialogue.events import Samples
from vivavoce.dialogue.front_end import Deliver, EchoRemover, checked
from vivavoce.dialogue.front_end_batch import BatchedStream, FrontEndBatch, HeardChunk, InputChunk, Operation
from vivavoce.log import log_failure
from vivavoce.nn.process_settings import one_torch_thread

logger = logging.getLogger(__name__)

MAX_WAITING_OPERATIONS = 64  # changes of what is played that wait for audio; more wake the worker
MANY_CORES = 8
WARM_UP_WINDOWS = 4  # TorchScript compiles during the first calls

Detectors = tuple[VoiceActivity, EchoRemover | None]


@dataclass(eq=False)
class ServedFrontEnd:
    """The front end of one conversation; also its `PlayedOutput`. For its event loop."""

    worker: "FrontEndWorker"
    detectors: Detectors
    rates: tuple[int, int]
    deliver: Deliver
    loop: asyncio.AbstractEventLoop
    operations: list[Operation] = field(default_factory=list)
    """Guarded by the worker's lock."""
    stream: BatchedStream | None = None
    """Of the worker."""
    pending: int = 0
    """Samples passed to the worker whose windows were not delivered."""
    is_closed: bool = False
    _failure: BaseException | None = None
    _drained: list[tuple[int, "asyncio.Future[None]"]] = field(default_factory=list)

    def hear(self, samples: Samples, now: float) -> None:
        """Take the next samples; `now` is the capture time of the last, or later."""
        self._raise_failure()
        chunk = InputChunk(checked(samples), now)
        self.pending += len(chunk.samples)
        self.worker.submit(self, chunk)

    @property
    def unprocessed_seconds(self) -> float:
        """Seconds of audio that are still to be processed."""
        return self.pending / self.rates[0]

    async def drain(self, max_seconds: float = 0.0) -> None:
        """Wait until no more than these seconds of audio are still to be processed."""
        limit = int(max_seconds * self.rates[0])
        if self.pending > limit and not self.is_closed:
            drained = self.loop.create_future()
            self._drained.append((limit, drained))
            await drained
        self._raise_failure()

    def close(self) -> None:
        """Drop what is pending."""
        if not self.is_closed:
            self.is_closed = True
            self.pending = 0
            self._wake()
            self.worker.remove(self)

    def set_gain(self, moment: float, gain: float) -> None:
        """Set the gain of the output from this moment on."""
        self.worker.submit(self, lambda timeline: timeline.set_gain(moment, gain))

    def play(self, moment: float, samples: Samples, now: float) -> None:
        """Add samples that are played from this moment on, or after the samples before them."""
        if self.detectors[1] is not None:  # without echo cancellation nothing reads them
            self.worker.submit(self, lambda timeline: timeline.play(moment, samples, now))

    def stop(self, moment: float) -> None:
        """Drop the output from this moment on."""
        self.worker.submit(self, lambda timeline: timeline.stop(moment))

    def receive(self, samples: int, heard: list[HeardChunk] | BaseException) -> None:
        """Deliver results of the worker, on the event loop."""
        if self.is_closed:
            return
        self.pending -= samples
        try:
            if isinstance(heard, BaseException):
                raise heard
            for chunk in heard:
                self.deliver(*chunk)
        except Exception as error:  # raised to the conversation's next caller; other conversations go on
            log_failure(logger, error, "the audio front end of a conversation failed")
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        waiting, self._drained = self._drained, []
        for limit, drained in waiting:
            if self.pending > limit:
                self._drained.append((limit, drained))
            elif not drained.done():
                drained.set_result(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class FrontEndWorker:
    """A thread that computes the front ends of its conversations."""

    def __init__(self, name: str) -> None:
        self.sessions = 0
        self._changed = threading.Condition()
        self._pending: dict[ServedFrontEnd, None] = {}
        self._removed: list[ServedFrontEnd] = []
        self._has_audio = self._is_waiting = self._is_stopped = False
        self._batches: dict[Detectors, FrontEndBatch] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, session: ServedFrontEnd, operation: Operation) -> None:
        """Queue an operation of a conversation. Audio wakes the thread."""
        with self._changed:
            session.operations.append(operation)
            self._pending[session] = None
            if isinstance(operation, InputChunk) or len(session.operations) > MAX_WAITING_OPERATIONS:
                self._has_audio = True
                if self._is_waiting:
                    self._changed.notify()

    def remove(self, session: ServedFrontEnd) -> None:
        """Drop what is pending of a conversation, and its state."""
        with self._changed:
            self.sessions -= 1
            self._pending.pop(session, None)
            session.operations.clear()
            self._removed.append(session)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def warm_up(self, detectors: Detectors) -> None:
        """Compile everything before the first conversation; on any thread, before there are conversations."""
        batch = self._batch(detectors)
        streams = [batch.join(rate, rate) for rate in (24_000, RATE) for _ in range(FEW)]
        noise = np.random.default_rng(0).normal(0, 0.1, (WARM_UP_WINDOWS, 2 * WINDOW)).astype(np.float32)
        with one_torch_thread():
            for number, chunk in enumerate(noise):
                moment = number * 0.064
                for stream in streams:
                    stream.timeline.play(moment, noise[0], moment)
                batch.process([(stream, [InputChunk(chunk, moment)]) for stream in streams])
        for stream in streams:
            batch.leave(stream)

    def _run(self) -> None:
        with one_torch_thread():
            while (work := self._next()) is not None:
                results = self._compute(work)
                for loop in {session.loop for session, _, _ in results}:
                    mine = [each for each in results if each[0].loop is loop]
                    try:
                        loop.call_soon_threadsafe(_deliver, mine)
                    except RuntimeError as error:  # it was closed without closing its conversations
                        log_failure(logger, error, "results of the audio front end were dropped: no event loop")

    def _next(self) -> list[tuple[ServedFrontEnd, list[Operation]]] | None:
        """Wait for audio, and take all that is pending."""
        with self._changed:
            self._is_waiting = True
            self._changed.wait_for(lambda: self._has_audio or self._is_stopped)
            self._is_waiting = False
            if self._is_stopped:
                return None
            work = [(session, session.operations) for session in self._pending]
            for session, _ in work:
                session.operations = []
            self._pending, self._has_audio = {}, False
            removed, self._removed = self._removed, []
        for session in removed:
            if session.stream is not None:
                self._batch(session.detectors).leave(session.stream)
                session.stream = None
        return work

    def _compute(
        self, work: Sequence[tuple[ServedFrontEnd, list[Operation]]]
    ) -> list[tuple[ServedFrontEnd, int, list[HeardChunk] | BaseException]]:
        results: list[tuple[ServedFrontEnd, int, list[HeardChunk] | BaseException]] = []
        for detectors in {session.detectors for session, _ in work}:
            mine = [(session, operations) for session, operations in work if session.detectors == detectors]
            for (session, operations), heard in zip(mine, self._heard(detectors, mine), strict=True):
                samples = sum(len(each.samples) for each in operations if isinstance(each, InputChunk))
                results.append((session, samples, heard))
        return results

    def _heard(
        self, detectors: Detectors, work: Sequence[tuple[ServedFrontEnd, list[Operation]]]
    ) -> Sequence[list[HeardChunk] | BaseException]:
        try:
            batch = self._batch(detectors)
            for session, _ in work:
                session.stream = session.stream or batch.join(*session.rates)
            return batch.process([(session.stream, operations) for session, operations in work if session.stream])
        except Exception as error:  # found in which conversation it is: only that one fails
            if len(work) == 1:
                return [error]
            log_failure(logger, error, "a batch of the audio front end failed; its conversations are tried one by one")
            return [self._heard(detectors, [each])[0] for each in work]

    def _batch(self, detectors: Detectors) -> FrontEndBatch:
        if detectors not in self._batches:
            self._batches[detectors] = FrontEndBatch(*detectors)
        return self._batches[detectors]


@contextmanager
def one_numpy_thread() -> Iterator[None]:
    """Products of numpy use the calling thread alone in the block.

    They are small here, and the threads of OpenBLAS, one for each core, spin between them.
    """
    pools = [pool for pool in ThreadpoolController().lib_controllers if "numpy" in pool.filepath]
    before = [pool.num_threads for pool in pools]
    for pool in pools:
        pool.set_num_threads(1)
    try:
        yield
    finally:
        for pool, threads in zip(pools, before, strict=True):
            pool.set_num_threads(threads)


class FrontEndService:
    """Front ends for the conversations of a process; enter it, or `close` it at the end."""

    def __init__(self, workers: int | None = None) -> None:
        """Start this number of threads; None: two where there are cores to spare, as 200 sessions keep one busy."""
        workers = workers or (2 if (os.cpu_count() or 1) >= MANY_CORES else 1)
        self._settings = ExitStack()
        self._workers = [FrontEndWorker(f"audio front end {number}") for number in range(workers)]

    async def __aenter__(self) -> Self:
        self._settings.enter_context(one_numpy_thread())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def open(
        self,
        activity: VoiceActivity | None,
        echo: EchoRemover | None,
        rates: tuple[int, int],
        deliver: Deliver,
    ) -> ServedFrontEnd:
        """The front end of a conversation with these rates of input and output; `deliver` is called on this loop."""
        for rate in rates:
            check_rate(rate)
        worker = min(self._workers, key=lambda each: each.sessions)
        worker.sessions += 1
        detectors = activity or voice_activity(), echo
        return ServedFrontEnd(worker, detectors, rates, deliver, asyncio.get_running_loop())

    async def warm_up(self, activity: VoiceActivity | None, echo: EchoRemover | None) -> None:
        """Compile everything before the first conversation."""
        for worker in self._workers:
            await asyncio.to_thread(worker.warm_up, (activity or voice_activity(), echo))

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.stop()
        self._settings.close()


def _deliver(results: Sequence[tuple[ServedFrontEnd, int, list[HeardChunk] | BaseException]]) -> None:
    for session, samples, heard in results:
        session.receive(samples, heard)
