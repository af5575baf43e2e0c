"""The deadline executor: threads that run the tasks of a device, earliest deadline first.

On a machine with few cores, one thread that always runs the most urgent task beats several that compete for the
processor: audio that is needed now does not wait for audio that is needed in a second. Work that is not urgent waits,
so that more of it can be batched.
"""

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import torch

from vivavoce.cores import usable_cores
from vivavoce.nn.process_settings import torch_threads

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
EARLY_SECONDS = 0.9  # before its deadline, at which work is started; the later, the larger the batches
AS_EARLY_AS_POSSIBLE = 3600.0
LINGER_SECONDS = 5.0  # without work, after which a thread ends
MAX_CPU_THREADS = 3


class Task(Protocol):
    """A source of work, run a piece at a time by one thread at a time."""

    name: str

    def due(self) -> float | None:
        """Deadline of the most urgent work, on the clock of `DeadlineExecutor.now`; None: no work."""
        ...

    def do_next(self) -> None:
        """Do one piece of work."""
        ...


class DeadlineExecutor:
    """Runs tasks on at most `threads` threads. Call `wake` whenever a task may have become more urgent.

    Threads are started when there is work, and end after `linger` seconds without work or when the last task is
    removed. Tasks are referenced weakly: a task may be garbage-collected without being removed.
    """

    def __init__(
        self, name: str, threads: int = 1, early: float = EARLY_SECONDS, linger: float = LINGER_SECONDS
    ) -> None:
        self.name, self.early, self.linger = name, early, linger
        self.max_threads = threads
        self._references: list[weakref.ref[Task]] = []
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        # Threads are woken by a queue, not by the condition: its `put` takes no lock, and `wake` may be called by a
        # finalizer that interrupts a thread which holds one.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._current = threading.local()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether the executor has been started and not closed."""
        return self._is_open

    @property
    def tasks(self) -> list[Task]:
        """The tasks that still exist, in the order of `add`."""
        return [task for reference in self._references if (task := reference()) is not None]

    def now(self) -> float:
        """The clock of deadlines."""
        return time.monotonic()

    def start(self) -> None:
        """Start running tasks."""
        self._is_open = True
        _open_executors.add(self)
        self.wake()

    def add(self, task: Task) -> None:
        """Add a task; the caller keeps it alive."""
        with self._changed:
            self._references = [weakref.ref(each) for each in (*self.tasks, task)]
        self.wake()

    def remove(self, task: Task) -> None:
        """Run a task no more; returns when no other thread is running it."""
        with self._changed:
            self._discard(task)
            if getattr(self._current, "task", None) != id(task):
                self._changed.wait_for(lambda: id(task) not in self._busy)
            is_last = not self.tasks
        if is_last:
            self._wait_for_threads()
        self.wake()

    def close(self) -> None:
        """Stop, after the current pieces of work."""
        self._is_open = False
        self._wait_for_threads()

    @contextmanager
    def lend_thread(self) -> Iterator[None]:
        """Within the block, the calling thread runs due work while it waits by `wait_for`, and wakes no other for it.

        For callers that do nothing but wait: on few cores, a second thread with an OpenMP team of its own costs more
        than it gains.
        """
        self._current.is_lent = True
        try:
            yield
        finally:
            self._current.is_lent = False
            with self._changed:
                _, task = earliest_deadline(self._waiting_tasks())
            if task is not None:
                self.wake()

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Run due work on a lent thread until the condition holds or other threads have to meet it."""
        if not self._is_lent:
            return
        while not is_ready():
            with self._changed:
                due, task = earliest_deadline(self._waiting_tasks())
                if task is None or not self._is_open or due - self.now() > self.early:
                    break
                self._busy.add(id(task))
            self._run_piece(task)
        else:
            return
        self._wake()

    @property
    def _is_lent(self) -> bool:
        return getattr(self._current, "is_lent", False)

    def wake(self, task: Task | None = None) -> None:
        """Look for due work again, of this task if one is given. Never waits for a lock."""
        if not self._is_lent:
            self._wake(task)

    def _wake(self, task: Task | None = None) -> None:
        self._wakeups.put(None)
        if not self._idle and len(self._threads) < self.max_threads and id(task) not in self._busy:
            self._start_thread()

    def _waiting_tasks(self) -> list[Task]:
        """The tasks that no thread runs. With the lock held: a running task must not be asked."""
        return [each for each in self.tasks if id(each) not in self._busy]

    def _discard(self, task: Task) -> None:
        self._references = [weakref.ref(each) for each in self.tasks if each is not task]

    def _start_thread(self) -> None:
        if not self._changed.acquire(blocking=False):
            return  # the holder of the lock looks at the wake-ups after releasing it
        try:
            if self._is_open and len(self._threads) < self.max_threads and self.tasks:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._threads.add(thread)
                thread.start()
        finally:
            self._changed.release()

    def _wait_for_threads(self) -> None:
        """Wake the threads, which have nothing left to run, and wait until they have ended."""
        self._wakeups.put(None)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._run_piece(task)
            del task  # a waiting thread must not keep a task alive

    def _run_piece(self, task: Task) -> None:
        """Run one piece of work of a task that is marked as busy."""
        self._current.task = id(task)
        torch_threads.apply()
        try:
            task.do_next()
        except Exception:  # the thread runs the other tasks too
            logger.exception("the task %s failed", task.name)
        self._current.task = None
        with self._changed:
            self._busy.discard(id(task))
            self._changed.notify_all()

    def _next(self) -> Task | None:
        """The most urgent task, once it is due; None: the thread should end."""
        while True:
            self._forget_wakeups()
            with self._changed:
                due, task = earliest_deadline(self._waiting_tasks())
                wait = due - self.now() - self.early
                if not self._is_open or not self.tasks:
                    self._leave()
                    return None
                if task is not None and wait <= 0:
                    self._busy.add(id(task))
                    self._share_work()
                    return task
                task = None
                self._idle += 1
            is_woken = self._wait(min(wait, self.linger))
            with self._changed:
                self._idle -= 1
                if not is_woken and wait > self.linger and self._end_idle():
                    return None

    def _leave(self) -> None:
        self._threads.discard(threading.current_thread())
        if self._threads:
            self._wakeups.put(None)  # for the other threads, which should end too

    def _end_idle(self) -> bool:
        """Sign this thread off unless there is a wake-up: once it is signed off, `wake` starts another."""
        self._threads.discard(threading.current_thread())
        if self._wakeups.empty():
            return True
        self._threads.add(threading.current_thread())
        return False

    def _share_work(self) -> None:
        """Have another thread wait for the tasks that this one does not run, if they have work."""
        due, task = earliest_deadline(self._waiting_tasks())
        if task is None:
            return
        if self._idle:
            self._wakeups.put(None)
        elif len(self._threads) < self.max_threads and due - self.now() <= self.early:
            self._start_thread()

    def _wait(self, seconds: float) -> bool:
        """Wait for a wake-up; False: none came."""
        try:
            self._wakeups.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def _forget_wakeups(self) -> None:
        with suppress(queue.Empty):
            while not self._wakeups.empty():
                self._wakeups.get_nowait()


class ThreadPerTaskExecutor(DeadlineExecutor):
    """One thread per task: tasks that mostly wait for a device need not take turns."""

    def __init__(self, name: str, early: float = EARLY_SECONDS, linger: float = LINGER_SECONDS) -> None:
        super().__init__(name, 0, early, linger)
        self._executors: weakref.WeakKeyDictionary[Task, DeadlineExecutor] = weakref.WeakKeyDictionary()

    def add(self, task: Task) -> None:
        """Add a task, with a thread of its own; the caller keeps it alive."""
        executor = self._executors[task] = DeadlineExecutor(task.name, 1, self.early, self.linger)
        executor.start()
        executor.add(task)

    def remove(self, task: Task) -> None:
        """Run a task no more; returns when no other thread is running it."""
        executor = self._executors.pop(task, None)
        if executor is not None:
            executor.remove(task)
            executor.close()

    @contextmanager
    def lend_thread(self) -> Iterator[None]:
        """Does nothing: every task has a thread of its own, which waits for the device."""
        yield

    def close(self) -> None:
        """Stop, after the current pieces of work."""
        self._is_open = False
        for executor in list(self._executors.values()):
            executor.close()

    def wake(self, task: Task | None = None) -> None:
        """Look for due work of this task again."""
        executor = self._executors.get(task) if task is not None else None
        if executor is not None:
            executor.wake()


class Actions:
    """A queue of actions that a task runs between its pieces of work. Adding one takes no lock."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return not self._actions.empty()

    def put(self, action: Callable[[], None]) -> None:
        """Add an action, which must not raise."""
        self._actions.put(action)

    def submit(self, action: Callable[[], Result]) -> "Future[Result]":
        """Add an action; the future has its result."""
        done: Future[Result] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._actions.put(run)
        return done

    def run_all(self) -> None:
        """Run all waiting actions."""
        with suppress(queue.Empty):
            while not self._actions.empty():
                self._actions.get_nowait()()


def earliest_deadline(tasks: list[Task]) -> tuple[float, Task | None]:
    """The earliest deadline and its task; infinity and None without work."""
    deadlines = [(due, index) for index, task in enumerate(tasks) if (due := task.due()) is not None]
    if not deadlines:
        return float("inf"), None
    due, index = min(deadlines)
    return due, tasks[index]


_open_executors: "weakref.WeakSet[DeadlineExecutor]" = weakref.WeakSet()


@atexit.register
def _close_executors() -> None:
    """The interpreter kills daemon threads when it ends; one that is inside torch then would abort the process."""
    for executor in list(_open_executors):
        executor.close()


_shared: dict[tuple[int, str, int | None], DeadlineExecutor] = {}
_shared_lock = threading.Lock()


def executor_for(device: torch.device) -> DeadlineExecutor:
    """The executor shared by all models of this process on a device; never closed: its threads end with the last task.

    A CPU has a few threads, which take tasks by deadline. Other devices have a thread per task: threads mostly wait
    for the device, on which work that is started early does not delay urgent work.
    """
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    key = (os.getpid(), device.type, index)  # a forked process does not have its parent's threads
    with _shared_lock:
        executor = _shared.get(key)
        if executor is None:
            if device.type == "cpu":
                executor = DeadlineExecutor("viva-model", min(MAX_CPU_THREADS, usable_cores()))
            else:
                executor = ThreadPerTaskExecutor("viva", early=AS_EARLY_AS_POSSIBLE)
            executor.start()
            _shared[key] = executor
        return executor
