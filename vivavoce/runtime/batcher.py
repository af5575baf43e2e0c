"""Dynamic batching: jobs of many sessions, run in batches by a task of the deadline executor, most urgent first."""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from vivavoce.errors import VivaError
from vivavoce.log import FailureLog
from vivavoce.runtime.executor import Actions, DeadlineExecutor

logger = logging.getLogger(__name__)
Job = TypeVar("Job")
Result = TypeVar("Result")
Returned = TypeVar("Returned")


@dataclass(eq=False)
class _Waiting(Generic[Job, Result]):
    deadline: float
    job: Job
    done: "asyncio.Future[Result] | Future[Result]"
    result: Result | Exception | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the result is delivered on; None: any thread."""
        return self.done.get_loop() if isinstance(self.done, asyncio.Future) else None

    def start(self) -> bool:
        """Whether the job is to be run. A future of `submit` cannot be cancelled afterwards: its result may hold slots
        that the caller must release."""
        if isinstance(self.done, Future):
            return self.done.set_running_or_notify_cancel()
        return not self.done.cancelled()

    def settle(self) -> None:
        """Set the result of the future, unless the coroutine that waits for it was cancelled."""
        if self.done.done():
            return
        if isinstance(self.result, Exception):
            self.done.set_exception(self.result)
        else:
            self.done.set_result(self.result)  # type: ignore[arg-type]  # None only where that is the result


class DynamicBatcher(Generic[Job, Result]):
    """Runs jobs that are submitted one by one in batches of at most `max_batch`, by the function `work`.

    `leaves_jobs` says whether a failed batch leaves the state of its jobs unchanged, for all jobs or per job. Such jobs
    are then run one by one, and only those that fail again fail; the others fail with the batch. With `kind`, only jobs
    of the same kind share a batch. With `early`, a job waits for others until this many seconds before its deadline, or
    until a batch is full; while `gives_way` is true, until half as many. It is a task of `executor`,
    which it neither starts nor closes.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        executor: DeadlineExecutor,
        max_batch: int = 16,
        kind: Callable[[Job], Hashable] | None = None,
        early: float | None = None,
        gives_way: Callable[[], bool] | None = None,
        leaves_jobs: bool | Callable[[Job], bool] = False,
    ) -> None:
        self.name, self.max_batch = name, max_batch
        self._leaves_job = leaves_jobs if callable(leaves_jobs) else lambda job: bool(leaves_jobs)
        self.batches = self.jobs = 0
        self.busy = 0.0
        """Total seconds of all batches."""
        self.work, self._kind = work, kind or (lambda job: None)
        self._early, self._gives_way = early, gives_way or (lambda: False)
        self._waiting: list[_Waiting[Job, Result]] = []
        self._actions = Actions()
        self._lock = threading.Lock()
        self._executor = executor
        self._is_open = self._is_working = False
        self._batch_failures = FailureLog(logger)

    def start(self) -> None:
        """Start running jobs."""
        self._is_open = True
        self._executor.add(self)

    @property
    def waiting(self) -> int:
        """Jobs that have not been started."""
        return len(self._waiting)

    def wake(self) -> None:
        """Check again whether a batch is due: `gives_way` may have become false."""
        self._executor.wake(self)

    async def do(self, job: Job, urgency: float = 0.0) -> Result:
        """The result of a job that is needed within `urgency` seconds."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._enqueue(job, urgency, done)
        return await done

    def submit(self, job: Job, urgency: float = 0.0) -> "Future[Result]":
        """As `do`, for callers without an event loop. A job that is cancelled before it is started is not run."""
        done: Future[Result] = Future()
        self._enqueue(job, urgency, done)
        return done

    def call(self, action: Callable[[], Returned]) -> Returned:
        """The result of an action that is run between two batches, on their thread."""
        with self._lock:
            if not self._is_open:
                raise VivaError(f"{self.name} is not running")
            done = self._actions.submit(action)
        self._executor.wake(self)
        self._executor.wait_for(done.done)
        return done.result()

    def _enqueue(self, job: Job, urgency: float, done: "asyncio.Future[Result] | Future[Result]") -> None:
        waiting = _Waiting(self._executor.now() + urgency, job, done)
        with self._lock:
            if not self._is_open:
                raise VivaError(f"{self.name} is not running")
            self._waiting.append(waiting)
        self._executor.wake(self)

    async def close(self) -> None:
        """`shutdown` on another thread."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stop; waiting jobs fail. Returns when no batch is running. A second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            rejected, self._waiting = self._waiting, []
        for waiting in rejected:
            waiting.result = VivaError(f"{self.name} was closed")
        _settle([waiting for waiting in rejected if waiting.start()])
        self._executor.remove(self)
        self._actions.run_all()

    # A task of the executor.

    def due(self) -> float | None:
        """Deadline of the most urgent job."""
        if self._actions:
            return float("-inf")
        with self._lock:
            first = min((waiting.deadline for waiting in self._waiting), default=None)
            if first is None or self._early is None:
                return first
            gives_way = self._gives_way()
            if not gives_way and len(self._fullest()) >= self.max_batch:
                return min(first, self._executor.now())
            return first - self._early / (2 if gives_way else 1) + self._executor.early

    def do_next(self) -> None:
        """Run the waiting actions and one batch."""
        self._actions.run_all()
        batch = [waiting for waiting in self._next() if waiting.start()]
        if batch:
            started, self._is_working = self._executor.now(), True
            self._do(batch)
            self.busy, self._is_working = self.busy + self._executor.now() - started, False
            _settle(batch)

    def _next(self) -> list[_Waiting[Job, Result]]:
        with self._lock:
            if not self._waiting:
                return []
            self._waiting.sort(key=lambda waiting: waiting.deadline)
            batch = self._candidates()[: self.max_batch]
            taken = set(map(id, batch))
            self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
            self.batches, self.jobs = self.batches + 1, self.jobs + len(batch)
            return batch

    def _candidates(self) -> list[_Waiting[Job, Result]]:
        """Jobs of one kind for the next batch: that of the most urgent job, or the most common if none is urgent."""
        first = self._waiting[0]
        if self._early is not None and first.deadline - self._executor.now() > self._early:
            return self._fullest()
        kind = self._kind(first.job)
        return [waiting for waiting in self._waiting if self._kind(waiting.job) == kind]

    def _fullest(self) -> list[_Waiting[Job, Result]]:
        """The jobs of the most common kind."""
        kinds: dict[Hashable, list[_Waiting[Job, Result]]] = {}
        for waiting in self._waiting:
            kinds.setdefault(self._kind(waiting.job), []).append(waiting)
        return max(kinds.values(), key=len, default=[])

    def _do(self, batch: list[_Waiting[Job, Result]]) -> None:
        try:
            results = self.work([waiting.job for waiting in batch])
            for waiting, result in zip(batch, results, strict=True):
                waiting.result = result
            return
        except Exception as error:
            self._log(error, len(batch))
            for waiting in batch:
                waiting.result = error
        if len(batch) > 1:  # outside the handler, whose traceback holds the memory of the failed batch
            for waiting in batch:
                if self._leaves_job(waiting.job):
                    self._do([waiting])

    def _log(self, error: Exception, jobs: int) -> None:
        """Log the failure of a job always, of a batch once in a while: one that only batches have recurs with each."""
        if jobs == 1:
            logger.error("%s: a job failed", self.name, exc_info=error)
        else:
            self._batch_failures.log(error, "%s: a batch of %d jobs failed", self.name, jobs)


def _settle(batch: Sequence[_Waiting[Job, Result]]) -> None:
    """Deliver results, with one wake-up for each event loop: a wake-up costs as much as a job."""

    def settle(some: list[_Waiting[Job, Result]]) -> None:
        for waiting in some:
            waiting.settle()

    by_loop: dict[asyncio.AbstractEventLoop | None, list[_Waiting[Job, Result]]] = {}
    for waiting in batch:
        by_loop.setdefault(waiting.loop, []).append(waiting)
    for loop, some in by_loop.items():
        if loop is None:
            settle(some)
            continue
        with suppress(RuntimeError):  # the loop is closed, and its coroutines are gone
            loop.call_soon_threadsafe(settle, some)
