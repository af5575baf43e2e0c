"""Threads that share duties: what is due first is done first, and what can wait, waits."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from vivavoce.runtime.executor import DeadlineExecutor, ThreadPerTaskExecutor, earliest_deadline, executor_for


class Chores:
    """Things to do at their times; notes the order they are done in."""

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


class Clockwork(DeadlineExecutor):
    """Workers whose time stands still."""

    def now(self) -> float:
        return 100.0


def test_whatever_is_due_first_is_done_first_among_all_duties():
    done: list[float] = []
    chores = [Chores(done, 1.0, 4.0, 5.0), Chores(done, 2.0, 3.0, 6.0)]
    workers = Clockwork("viva-test")
    for each in chores:
        workers.add(each)
    workers.start()
    for each in chores:
        assert each.is_empty.wait(10)
    workers.close()
    assert done == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_is_due_much_later_waits_until_it_is_time():
    done: list[float] = []
    soon, later = Chores(done, 100.4), Chores(done, 100.6)
    workers = Clockwork("viva-test", early=0.5)
    workers.add(later)
    workers.add(soon)
    workers.start()
    assert soon.is_empty.wait(10)
    workers.remove(soon)
    workers.close()
    assert done == [100.4] and later.left == [100.6]


def test_two_threads_do_two_duties_at_once_but_never_one():
    meeting = threading.Barrier(2, timeout=60)

    class Meets:
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

    workers, duties = DeadlineExecutor("viva-test", threads=2), [Meets(), Meets()]
    for duty in duties:
        workers.add(duty)
    workers.start()
    for duty in duties:
        assert duty.is_done.wait(10)
    workers.close()


def test_nothing_to_do_is_nobody():
    assert earliest_deadline([Chores([])]) == (float("inf"), None)


def test_a_worker_for_each_duty_does_not_wait_for_the_others():
    met, workers = threading.Barrier(2), ThreadPerTaskExecutor("viva-test")

    class Meets(Chores):
        """Done only when another is at it too, on a thread of its own name."""

        def __init__(self, name, done):
            super().__init__(done, 0.0)
            self.name = name

        def do_next(self):
            met.wait(10)
            self.done.append(threading.current_thread().name)
            super().do_next()

    done: list[object] = []
    duties = [Meets("viva-one", done), Meets("viva-two", done)]
    workers.start()
    for duty in duties:
        workers.add(duty)
    assert all(duty.is_empty.wait(10) for duty in duties)
    workers.remove(duties[0])
    workers.wake(duties[0])
    workers.close()
    assert {"viva-one", "viva-two"} <= set(done)


def test_threads_end_when_idle_and_start_again_when_woken():
    done: list[float] = []
    chores, workers = Chores(done, 0.0), DeadlineExecutor("viva-test", linger=0.02)
    workers.start()
    workers.add(chores)
    assert chores.is_empty.wait(10)
    for thread in list(workers._threads):
        thread.join(10)
        assert not thread.is_alive()
    chores.is_empty.clear()
    chores.left.append(1.0)
    workers.wake(chores)
    assert chores.is_empty.wait(10) and done == [0.0, 1.0]
    workers.close()


def test_a_task_that_fails_leaves_the_thread_to_the_others():
    class Fails:
        name, failures = "viva-failing", 0

        def due(self):
            return None if self.failures else -1.0

        def do_next(self):
            self.failures += 1
            raise ArithmeticError

    fails, chores = Fails(), Chores([], 0.0)
    workers = DeadlineExecutor("viva-test")
    workers.add(fails)
    workers.add(chores)
    workers.start()
    assert chores.is_empty.wait(10) and fails.failures == 1
    workers.close()


def test_a_task_that_is_dropped_is_gone():
    workers, chores = DeadlineExecutor("viva-test"), Chores([], 0.0)
    workers.start()
    workers.add(chores)
    assert chores.is_empty.wait(10)
    gone = weakref.ref(chores)
    del chores
    while gone() is not None:
        gc.collect()
    assert workers.tasks == []
    workers.close()


@pytest.mark.parametrize("make", [DeadlineExecutor, ThreadPerTaskExecutor])
def test_no_thread_is_left_when_the_last_task_is_removed(make):
    workers = make("viva-leaves")
    tasks = [Chores([], 0.0), Chores([], 0.0)]
    for task in tasks:
        task.name = "viva-leaves"
    workers.start()
    for task in tasks:
        workers.add(task)
    assert all(task.is_empty.wait(10) for task in tasks)
    for task in tasks:
        workers.remove(task)
    assert "viva-leaves" not in [thread.name for thread in threading.enumerate()]


def test_wakes_of_many_threads_are_never_lost():
    class Counter:
        name, asked, done = "viva-counter", 0, 0

        def due(self):
            return None if self.done == self.asked else 0.0

        def do_next(self):
            self.done = self.asked

    workers, counter = DeadlineExecutor("viva-test", threads=2, linger=0.0002), Counter()
    workers.start()
    workers.add(counter)
    for _ in range(3000):
        counter.asked += 1
        workers.wake(counter)
        for _ in range(100_000):
            if counter.done == counter.asked:
                break
            time.sleep(0)
        assert counter.done == counter.asked
    workers.close()


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
