"""Threads that share several duties: whatever is due first is done first, and what can wait, waits for company.

On a machine of few cores one thread that always does the most urgent thing beats several that fight for the processor:
a chunk of sound that somebody waits for does not stand behind another that is needed in a second.
"""

import threading
import time
from typing import Protocol

EARLY_SECONDS = 0.9  # before it is due, work is begun; the later, the more of it is done together


class Task(Protocol):
    """Work of one kind, a piece at a time, done by one thread at a time."""

    name: str

    def due(self) -> float | None:
        """Deadline of the most urgent work, by `DeadlineExecutor.now`; None: there is none."""
        ...

    def do_next(self) -> None:
        """Do one piece of it. Never raises."""
        ...


class DeadlineExecutor:
    """Threads for duties. Call `wake` whenever a duty may have become more urgent."""

    def __init__(self, name: str, threads: int = 1, early: float = EARLY_SECONDS) -> None:
        self.name, self.early = name, early
        self._duties: list[Task] = []
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether they work."""
        return self._is_open

    def now(self) -> float:
        """The time that duties are due by."""
        return time.monotonic()

    def start(self) -> None:
        """Begin to work."""
        self._is_open = True
        for thread in self._threads:
            thread.start()

    def add(self, duty: Task) -> None:
        """One more duty."""
        with self._changed:
            self._duties.append(duty)
            self._changed.notify_all()

    def remove(self, duty: Task) -> None:
        """A duty is no more; returns when nobody is at it."""
        with self._changed:
            if duty in self._duties:
                self._duties.remove(duty)
            self._changed.wait_for(lambda: id(duty) not in self._busy)

    def close(self) -> None:
        """Stop, when what is being done is done."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def wake(self, duty: Task | None = None) -> None:
        """Something may have become due, of this duty if one is named."""
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while (duty := self._next()) is not None:
            duty.do_next()
            with self._changed:
                self._busy.discard(id(duty))
                self._changed.notify_all()

    def _next(self) -> Task | None:
        """The most urgent duty, once it is time for it; None: it is over."""
        with self._changed:
            while self._is_open:
                due, duty = most_urgent([duty for duty in self._duties if id(duty) not in self._busy])
                if duty is not None and due - self.now() <= self.early:
                    self._busy.add(id(duty))
                    return duty
                self._changed.wait(None if duty is None else due - self.now() - self.early)
            return None


class ThreadPerTaskExecutor(DeadlineExecutor):
    """A thread for every duty: where they only wait for a device they need not take turns, nor wake one another."""

    def __init__(self, name: str, early: float = EARLY_SECONDS) -> None:
        super().__init__(name, 0, early)
        self._own: dict[int, DeadlineExecutor] = {}

    def add(self, duty: Task) -> None:
        """One more duty, and its thread."""
        own = self._own[id(duty)] = DeadlineExecutor(duty.name, 1, self.early)
        own.start()
        own.add(duty)

    def remove(self, duty: Task) -> None:
        """A duty is no more; returns when nobody is at it."""
        own = self._own.pop(id(duty), None)
        if own is not None:
            own.remove(duty)
            own.close()

    def close(self) -> None:
        """Stop, when what is being done is done."""
        self._is_open = False
        for own in self._own.values():
            own.close()

    def wake(self, duty: Task | None = None) -> None:
        """Something of this duty may have become due."""
        own = self._own.get(id(duty))
        if own is not None:
            own.wake()


def most_urgent(duties: list[Task]) -> tuple[float, Task | None]:
    """The duty that is due first, and when."""
    found = [(due, place) for place, duty in enumerate(duties) if (due := duty.due()) is not None]
    if not found:
        return float("inf"), None
    due, place = min(found)
    return due, duties[place]
