"""Dynamic batching: jobs of many sessions, run in batches by a task of the deadline executor, most urgent first."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vivavoce.errors import VivaError
from vivavoce.log import FailureLog
from vivavoce.runtime.executor import Actions, DeadlineExecutor, Task

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
    which it neither starts nor closes. With `workers`, up to so many batches are run at a time, where the executor has
    threads for them; `work` must allow that.
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
        workers: int = 1,
    ) -> None:
        self.name, self.max_batch, self.workers = name, max_batch, workers
        self._leaves_job = leaves_jobs if callable(leaves_jobs) else lambda job: bool(leaves_jobs)
        self.batches = self.jobs = 0
        self.busy = 0.0
        """Total seconds of all batches, also of those that were run at the same time."""
        self.batch_deadline = float("inf")
        """The earliest deadline of the jobs of the batch that was started last, on the executor's clock."""
        self.work, self._kind = work, kind or (lambda job: None)
        self._early, self._gives_way = early, gives_way or (lambda: False)
        self._waiting: list[_Waiting[Job, Result]] = []
        self._actions = Actions()
        self._lock = threading.Lock()
        self._executor = executor
        self._is_open = False
        self._running = 0  # batches
        self._more_workers = [_Worker(self) for _ in range(workers - 1)]
        self._batch_failures = FailureLog(logger)

    def start(self) -> None:
        """Start running jobs."""
        self._is_open = True
        for task in self._tasks:
            self._executor.add(task)

    @property
    def _tasks(self) -> list[Task]:
        return [self, *self._more_workers]

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
        self._wake_workers()

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
        for task in self._tasks:
            self._executor.remove(task)
        self._actions.run_all()

    # A task of the executor.

    def due(self) -> float | None:
        """Deadline of the most urgent job."""
        return float("-inf") if self._actions else self._job_due()

    def do_next(self) -> None:
        """Run the waiting actions and one batch."""
        self._actions.run_all()
        self._run_batch()

    def _job_due(self) -> float | None:
        with self._lock:
            first = min((waiting.deadline for waiting in self._waiting), default=None)
            if first is None or self._early is None:
                return first
            gives_way = self._gives_way()
            if not gives_way and len(self._fullest()) >= self.max_batch:
                return min(first, self._executor.now())
            return first - self._early / (2 if gives_way else 1) + self._executor.early

    def _run_batch(self) -> None:
        taken = self._next()
        if not taken:
            return
        self._wake_workers()
        started = self._executor.now()
        try:
            batch = [waiting for waiting in taken if waiting.start()]
            if batch:
                self._do(batch)
        finally:
            with self._lock:
                self._running, self.busy = self._running - 1, self.busy + self._executor.now() - started
        _settle(batch)

    def _wake_workers(self) -> None:
        """Have the other workers look at the jobs that wait while a batch is being run."""
        if self._more_workers and self._running and self._waiting:
            for worker in self._more_workers:
                self._executor.wake(worker)

    def _next(self) -> list[_Waiting[Job, Result]]:
        with self._lock:
            if not self._waiting:
                return []
            self._waiting.sort(key=lambda waiting: waiting.deadline)
            batch = self._candidates()[: self.max_batch]
            taken = set(map(id, batch))
            self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
            self.batch_deadline = batch[0].deadline
            self.batches, self.jobs = self.batches + 1, self.jobs + len(batch)
            self._running += 1
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


class _Worker:
    """A further task of a batcher, which runs a batch while another one is being run.

    Refers to the batcher weakly, as executors do to their tasks.
    """

    def __init__(self, batcher: DynamicBatcher[Any, Any]) -> None:
        self.name = batcher.name
        self._batcher = weakref.ref(batcher)

    def due(self) -> float | None:
        """Deadline of the most urgent job; None while no batch is being run: the batcher itself takes the next one."""
        batcher = self._batcher()
        return batcher._job_due() if batcher is not None and batcher._running else None

    def do_next(self) -> None:
        """Run one batch."""
        batcher = self._batcher()
        if batcher is not None:
            batcher._run_batch()


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
