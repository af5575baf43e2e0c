"""The deadline executor: the earliest deadline first, and nothing long before its deadline."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from vivavoce.runtime.executor import DeadlineExecutor, ThreadPerTaskExecutor, earliest_deadline, executor_for


class TaskList:
    """Work with these deadlines; records the order in which it is done."""

    name = "viva-chores"

    def __init__(self, done, *due: float) -> None:
        self.left, self.done = sorted(due), done
        self.is_empty = threading.Event()

    def due(self):
        return self.left[0] if self.left else None

    def do_next(self):
        self.done.append(self.left.pop(0))
        if not self.left:
            self.is_empty.set()


class FrozenExecutor(DeadlineExecutor):
    """An executor whose clock stands still."""

    def now(self) -> float:
        return 100.0


def test_tasks_are_run_by_deadline():
    done: list[float] = []
    tasks = [TaskList(done, 1.0, 4.0, 5.0), TaskList(done, 2.0, 3.0, 6.0)]
    executor = FrozenExecutor("viva-test")
    for each in tasks:
        executor.add(each)
    executor.start()
    for each in tasks:
        assert each.is_empty.wait(10)
    executor.close()
    assert done == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_work_is_not_started_long_before_its_deadline():
    done: list[float] = []
    soon, later = TaskList(done, 100.4), TaskList(done, 100.6)
    executor = FrozenExecutor("viva-test", early=0.5)
    executor.add(later)
    executor.add(soon)
    executor.start()
    assert soon.is_empty.wait(10)
    executor.remove(soon)
    executor.close()
    assert done == [100.4] and later.left == [100.6]


def test_two_threads_run_two_tasks_concurrently_but_never_one():
    meeting = threading.Barrier(2, timeout=60)

    class MeetingTask:
        def __init__(self):
            self.todo, self.inside = 5, 0
            self.is_done = threading.Event()

        def due(self):
            return 0.0 if self.todo else None

        def do_next(self):
            self.inside += 1
            assert self.inside == 1
            meeting.wait()
            self.inside -= 1
            self.todo -= 1
            if not self.todo:
                self.is_done.set()

    executor, tasks = DeadlineExecutor("viva-test", threads=2), [MeetingTask(), MeetingTask()]
    for task in tasks:
        executor.add(task)
    executor.start()
    for task in tasks:
        assert task.is_done.wait(10)
    executor.close()


def test_without_work_there_is_no_deadline():
    assert earliest_deadline([TaskList([])]) == (float("inf"), None)


def test_a_thread_per_task_does_not_wait_for_the_others():
    met, executor = threading.Barrier(2), ThreadPerTaskExecutor("viva-test")

    class MeetingTask(TaskList):
        """Finishes only while another task runs too, on a thread of its name."""

        def __init__(self, name, done):
            super().__init__(done, 0.0)
            self.name = name

        def do_next(self):
            met.wait(10)
            self.done.append(threading.current_thread().name)
            super().do_next()

    done: list[object] = []
    tasks = [MeetingTask("viva-one", done), MeetingTask("viva-two", done)]
    executor.start()
    for task in tasks:
        executor.add(task)
    assert all(task.is_empty.wait(10) for task in tasks)
    executor.remove(tasks[0])
    executor.wake(tasks[0])
    executor.close()
    assert {"viva-one", "viva-two"} <= set(done)


def test_threads_end_when_idle_and_start_again_when_woken():
    done: list[float] = []
    tasks, executor = TaskList(done, 0.0), DeadlineExecutor("viva-test", linger=0.02)
    executor.start()
    executor.add(tasks)
    assert tasks.is_empty.wait(10)
    for thread in list(executor._threads):
        thread.join(10)
        assert not thread.is_alive()
    tasks.is_empty.clear()
    tasks.left.append(1.0)
    executor.wake(tasks)
    assert tasks.is_empty.wait(10) and done == [0.0, 1.0]
    executor.close()


def test_a_task_that_fails_leaves_the_thread_to_the_others():
    class Fails:
        name, failures = "viva-failing", 0

        def due(self):
            return None if self.failures else -1.0

        def do_next(self):
            self.failures += 1
            raise ArithmeticError

    fails, tasks = Fails(), TaskList([], 0.0)
    executor = DeadlineExecutor("viva-test")
    executor.add(fails)
    executor.add(tasks)
    executor.start()
    assert tasks.is_empty.wait(10) and fails.failures == 1
    executor.close()


def test_a_garbage_collected_task_is_removed():
    executor, tasks = DeadlineExecutor("viva-test"), TaskList([], 0.0)
    executor.start()
    executor.add(tasks)
    assert tasks.is_empty.wait(10)
    gone = weakref.ref(tasks)
    del tasks
    while gone() is not None:
        gc.collect()
    assert executor.tasks == []
    executor.close()


@pytest.mark.parametrize("make", [DeadlineExecutor, ThreadPerTaskExecutor])
def test_no_thread_is_left_when_the_last_task_is_removed(make):
    executor = make("viva-leaves")
    tasks = [TaskList([], 0.0), TaskList([], 0.0)]
    for task in tasks:
        task.name = "viva-leaves"
    executor.start()
    for task in tasks:
        executor.add(task)
    assert all(task.is_empty.wait(10) for task in tasks)
    for task in tasks:
        executor.remove(task)
    assert "viva-leaves" not in [thread.name for thread in threading.enumerate()]


def test_no_wake_up_is_lost():
    class Counter:
        name, asked, done = "viva-counter", 0, 0

        def due(self):
            return None if self.done == self.asked else 0.0

        def do_next(self):
            self.done = self.asked

    executor, counter = DeadlineExecutor("viva-test", threads=2, linger=0.0002), Counter()
    executor.start()
    executor.add(counter)
    for _ in range(3000):
        counter.asked += 1
        executor.wake(counter)
        for _ in range(100_000):
            if counter.done == counter.asked:
                break
            time.sleep(0)
        assert counter.done == counter.asked
    executor.close()


def test_the_models_of_a_device_share_its_executor():
    cpu = executor_for(torch.device("cpu"))
    assert executor_for(torch.device("cpu")) is cpu and cpu.is_open
    assert executor_for(torch.device("meta")) is not cpu


BUSY = """
import torch
from vivavoce.runtime.executor import executor_for

class Busy:
    name = "viva-busy"
    pieces = 0

    def due(self):
        return 0.0

    def do_next(self):
        self.pieces += 1
        torch.tanh(torch.ones(300, 300) @ torch.ones(300, 300))

task = Busy()
executor_for(torch.device("cpu")).add(task)
while task.pieces < 3:
    pass
"""


def test_a_process_that_ends_while_a_task_computes_ends_cleanly():
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Threads(TaskList):
    """Records the threads that do the work."""

    def __init__(self, *due: float) -> None:
        super().__init__([], *due)
        self.threads: list[str] = []

    def do_next(self):
        self.threads.append(threading.current_thread().name)
        super().do_next()


def test_a_lent_thread_does_the_work_it_waits_for():
    executor = DeadlineExecutor("viva-test", threads=0)
    executor.start()
    task = Threads()
    executor.add(task)
    with executor.lend_thread():
        task.left = [1.0, 2.0]
        executor.wake(task)
        executor.wait_for(task.is_empty.is_set)
    executor.close()
    assert task.threads == [threading.current_thread().name] * 2


def test_work_that_a_lent_thread_leaves_is_done_by_the_executor():
    executor = DeadlineExecutor("viva-test")
    executor.start()
    task = Threads()
    executor.add(task)
    with executor.lend_thread():
        task.left = [1.0, 2.0]
        executor.wake(task)
        executor.wait_for(lambda: len(task.done) == 1)
    assert task.is_empty.wait(10)
    executor.close()
    assert task.done == [1.0, 2.0]


def test_a_lent_thread_leaves_work_that_is_not_due():
    executor = FrozenExecutor("viva-test", threads=0, early=0.5)
    executor.start()
    task = Threads()
    executor.add(task)
    with executor.lend_thread():
        task.left = [101.0]
        executor.wait_for(task.is_empty.is_set)  # returns: the caller waits by itself
    assert not task.threads
    executor.close()


def test_a_task_is_not_asked_for_its_deadline_while_another_thread_runs_it():
    begun, may_end, asked_while_running = threading.Event(), threading.Event(), []

    class LongTask(TaskList):
        """Its first piece of work lasts until it may end."""

        def due(self):
            if begun.is_set() and not may_end.is_set():
                asked_while_running.append(threading.current_thread().name)
            return super().due()

        def do_next(self):
            super().do_next()
            begun.set()
            may_end.wait(10)

    executor, task = DeadlineExecutor("viva-test"), LongTask([], 0.0)
    executor.add(task)
    executor.start()
    assert begun.wait(10)
    with executor.lend_thread():
        pass
    may_end.set()
    executor.remove(task)
    executor.close()
    assert asked_while_running == []
