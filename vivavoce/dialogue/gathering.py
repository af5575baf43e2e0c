"""Small jobs of many conversations: the urgent first, some together, each failing alone."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from vivavoce.engine.workers import Workers
from vivavoce.errors import VivaError

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Job, Result]):
    deadline: float
    job: Job
    done: "Future[Result]"


class Gathering(Generic[Job, Result]):
    """Jobs come one by one and are worked on in batches of at most `most`. A job that fails fails alone.

    With `kind`, only jobs of the same kind are worked on together: others would wait for one another and gain nothing.
    They are done on a thread of their own, or are a duty of `workers` that others started and will close.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        most: int = 16,
        kind: Callable[[Job], Hashable] | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.name, self.most = name, most
        self.batches = self.jobs = 0
        self._work, self._kind = work, kind or (lambda job: None)
        self._waiting: list[_Waiting[Job, Result]] = []
        self._list = threading.Lock()
        self._workers, self._owns_workers = workers or Workers(name), workers is None
        self._is_open = False

    def start(self) -> None:
        """Begin to work."""
        self._is_open = True
        if self._owns_workers:
            self._workers.start()
        self._workers.add(self)

    @property
    def waiting(self) -> int:
        """Jobs that nobody works on yet."""
        return len(self._waiting)

    async def do(self, job: Job, urgency: float = 0.0) -> Result:
        """The result of one job, for which `urgency` seconds are left; of those waiting, what is due first is done."""
        waiting = _Waiting[Job, Result](self._workers.now() + urgency, job, Future())
        with self._list:
            if not self._is_open:
                raise VivaError(f"{self.name} is not running")
            self._waiting.append(waiting)
        self._workers.wake()
        return await asyncio.wrap_future(waiting.done)

    async def close(self) -> None:
        """Stop; jobs that wait fail."""
        with self._list:
            if not self._is_open:
                return
            self._is_open = False
            left, self._waiting = self._waiting, []
        for waiting in left:
            if waiting.done.set_running_or_notify_cancel():
                waiting.done.set_exception(VivaError(f"{self.name} was closed"))
        await asyncio.to_thread(self._workers.remove, self)
        if self._owns_workers:
            await asyncio.to_thread(self._workers.close)

    # A duty of the workers.

    def due(self) -> float | None:
        """When the most urgent job must be done."""
        with self._list:
            return min((waiting.deadline for waiting in self._waiting), default=None)

    def do_next(self) -> None:
        """Do the most urgent jobs."""
        batch = [waiting for waiting in self._next() if waiting.done.set_running_or_notify_cancel()]
        if batch:
            self._do(batch)

    def _next(self) -> list[_Waiting[Job, Result]]:
        with self._list:
            if not self._waiting:
                return []
            self._waiting.sort(key=lambda waiting: waiting.deadline)
            kind = self._kind(self._waiting[0].job)
            alike = [waiting for waiting in self._waiting if self._kind(waiting.job) == kind]
            batch = alike[: self.most]
            self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
            self.batches, self.jobs = self.batches + 1, self.jobs + len(batch)
            return batch

    def _do(self, batch: list[_Waiting[Job, Result]]) -> None:
        try:
            results = self._work([waiting.job for waiting in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].done.set_exception(error)
            else:
                for waiting in batch:
                    self._do([waiting])
            return
        for waiting, result in zip(batch, results, strict=True):
            waiting.done.set_result(result)
