"""The dynamic batcher: batches, deadlines, kinds, cancellation, and jobs that fail alone."""

import asyncio
import threading

import pytest

from vivavoce.errors import VivaError
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import DeadlineExecutor


@pytest.fixture
def executor():
    started = DeadlineExecutor("viva-test")
    started.start()
    yield started
    started.close()


class Worker:
    """Doubles numbers once its gate is open; notes the batches."""

    def __init__(self, executor, max_batch=16, kind=None, leaves_jobs=False):
        self.gate, self.entered, self.batches = threading.Event(), threading.Event(), []
        self.batcher = DynamicBatcher("viva-test", self.work, executor, max_batch, kind=kind, leaves_jobs=leaves_jobs)
        self.batcher.start()

    def work(self, jobs):
        self.entered.set()
        self.gate.wait(10)
        self.batches.append(list(jobs))
        if 13 in jobs:
            raise ValueError("13")
        return [2 * job for job in jobs]

    async def busy(self):
        first = asyncio.ensure_future(self.batcher.do(0))
        await asyncio.to_thread(self.entered.wait, 10)
        return first


async def test_waiting_jobs_are_batched_by_deadline(executor):
    worker = Worker(executor, max_batch=3)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.batcher.do(number, urgency=-number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert await asyncio.gather(first, *rest) == [0, 2, 4, 6, 8, 10]
    assert worker.batches == [[0], [5, 4, 3], [2, 1]]
    assert (worker.batcher.jobs, worker.batcher.batches) == (6, 3)
    await worker.batcher.close()


async def test_a_batch_has_one_kind_that_of_the_earliest_deadline(executor):
    worker = Worker(executor, max_batch=3, kind=lambda job: job % 2)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.batcher.do(number, urgency=-number)) for number in range(1, 10)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert await asyncio.gather(first, *rest) == [2 * number for number in range(10)]
    assert worker.batches == [[0], [9, 7, 5], [8, 6, 4], [3, 1], [2]]
    await worker.batcher.close()


async def test_a_failing_job_fails_alone_where_a_failing_pass_leaves_job_state_unchanged(executor):
    worker = Worker(executor, leaves_jobs=True)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.batcher.do(number)) for number in (1, 13, 3)]
    await asyncio.sleep(0)
    worker.gate.set()
    one, error, three = await asyncio.gather(*rest, return_exceptions=True)
    assert (one, three) == (2, 6) and isinstance(error, ValueError)
    assert await first == 0
    await worker.batcher.close()


async def test_jobs_whose_state_a_failing_pass_may_have_changed_are_not_retried(executor):
    worker = Worker(executor)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.batcher.do(number)) for number in (1, 13, 3)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert all(isinstance(error, ValueError) for error in await asyncio.gather(*rest, return_exceptions=True))
    assert await first == 0
    assert worker.batches == [[0], [1, 13, 3]]
    assert await worker.batcher.do(4) == 8
    await worker.batcher.close()


async def test_too_few_results_fail_their_jobs_and_not_the_thread(executor):
    batcher = DynamicBatcher("viva-test", lambda jobs: [], executor, 2)
    batcher.start()
    with pytest.raises(ValueError, match="shorter"):
        await batcher.do(1)
    with pytest.raises(ValueError, match="shorter"):
        await batcher.do(2)
    await batcher.close()


async def test_a_cancelled_job_is_not_run(executor):
    worker = Worker(executor)
    first = await worker.busy()
    left = asyncio.ensure_future(worker.batcher.do(7))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    worker.gate.set()
    await first
    await worker.batcher.close()
    assert not any(7 in batch for batch in worker.batches)


async def test_jobs_waiting_at_close_fail(executor):
    worker = Worker(executor, max_batch=1)
    first = await worker.busy()
    waiting = asyncio.ensure_future(worker.batcher.do(1))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(worker.batcher.close())
    async with asyncio.timeout(10):
        while worker.batcher.waiting:  # on another thread, it takes them before it waits for the first
            await asyncio.sleep(0.001)
    worker.gate.set()
    await closing
    assert await first == 0
    with pytest.raises(VivaError):
        await waiting
    with pytest.raises(VivaError, match="not running"):
        await worker.batcher.do(1)


async def test_with_early_jobs_wait_until_a_batch_is_full_or_one_is_due_and_give_way(executor):
    batches, first_sounds = [], [True]

    def work(jobs):
        batches.append(sorted(jobs))
        return jobs

    def batcher(early):
        return DynamicBatcher("viva-test", work, executor, 2, early=early, gives_way=lambda: bool(first_sounds))

    patient = batcher(early=0.01)
    patient.start()
    jobs = [asyncio.ensure_future(patient.do(number, urgency=60.0 + number)) for number in range(3)]
    await asyncio.sleep(0.05)
    assert batches == []
    first_sounds.clear()
    patient.wake()
    assert await asyncio.gather(*jobs[:2]) == [0, 1]
    assert batches == [[0, 1]] and not jobs[2].done()
    assert await patient.do(3, urgency=0.0) == 3
    assert await jobs[2] == 2 and batches[1:] == [[2, 3]]
    await patient.close()


async def test_with_two_workers_jobs_that_wait_during_a_batch_are_run_beside_it():
    executor = DeadlineExecutor("viva-test", threads=2)
    executor.start()
    both_running, batches = threading.Barrier(2), []

    def work(jobs):
        batches.append(list(jobs))
        both_running.wait(10)
        return [2 * job for job in jobs]

    batcher = DynamicBatcher("viva-test", work, executor, max_batch=1, workers=2)
    batcher.start()
    assert await asyncio.gather(*(batcher.do(number, urgency=-number) for number in range(6))) == [0, 2, 4, 6, 8, 10]
    assert len(batches) == batcher.batches == batcher.jobs == 6
    await batcher.close()
    assert not executor.tasks
    executor.close()


async def test_with_two_workers_waiting_jobs_still_share_a_batch():
    executor = DeadlineExecutor("viva-test", threads=2)
    executor.start()
    gate, running, batches = threading.Event(), threading.Semaphore(0), []

    def work(jobs):
        batches.append(list(jobs))
        running.release()
        gate.wait(10)
        return jobs

    batcher = DynamicBatcher("viva-test", work, executor, workers=2)
    batcher.start()
    jobs = []
    for number in (1, 2):
        jobs.append(asyncio.ensure_future(batcher.do(number)))
        assert await asyncio.to_thread(running.acquire, timeout=10)
    jobs += [asyncio.ensure_future(batcher.do(number)) for number in (3, 4, 5)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*jobs) == [1, 2, 3, 4, 5]
    assert batches == [[1], [2], [3, 4, 5]]
    await batcher.close()
    executor.close()
