"""Threads that do small jobs of many conversations: the urgent first, some together, each failing alone."""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        most: int = 16,
        threads: int = 1,
        kind: Callable[[Job], Hashable] | None = None,
    ) -> None:
        self.name, self.most = name, most
        self.batches = self.jobs = 0
        self._work, self._kind = work, kind or (lambda job: None)
        self._waiting: list[_Waiting[Job, Result]] = []
        self._arrived = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        self._is_open = False

    def start(self) -> None:
        """Begin to work."""
        self._is_open = True
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that nobody works on yet."""
        return len(self._waiting)

    async def do(self, job: Job, urgency: float = 0.0) -> Result:
        """The result of one job, for which `urgency` seconds are left; of those waiting, what is due first is done."""
        waiting = _Waiting[Job, Result](time.monotonic() + urgency, job, Future())
        with self._arrived:
            if not self._is_open:
                raise VivaError(f"{self.name} is not running")
            self._waiting.append(waiting)
            self._arrived.notify()
        return await asyncio.wrap_future(waiting.done)

    async def close(self) -> None:
        """Stop; jobs that wait fail."""
        with self._arrived:
            if not self._is_open:
                return
            self._is_open = False
            left, self._waiting = self._waiting, []
            self._arrived.notify_all()
        for waiting in left:
            if waiting.done.set_running_or_notify_cancel():
                waiting.done.set_exception(VivaError(f"{self.name} was closed"))
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            running = [waiting for waiting in batch if waiting.done.set_running_or_notify_cancel()]
            if running:
                self._do(running)

    def _next(self) -> list[_Waiting[Job, Result]] | None:
        """The most urgent jobs; None: it is over."""
        with self._arrived:
            while self._is_open and not self._waiting:
                self._arrived.wait()
            if not self._is_open:
                return None
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
