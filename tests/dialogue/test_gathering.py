"""Jobs of many, done together: batched, the urgent first, each failing alone."""

import asyncio
import threading

import pytest

from vivavoce.errors import VivaError
from vivavoce.runtime.batcher import DynamicBatcher


class Worker:
    """Doubles numbers once its gate is open; notes what came together."""

    def __init__(self, max_batch=16, kind=None, leaves_jobs=False):
        self.gate, self.entered, self.batches = threading.Event(), threading.Event(), []
        self.gathering = DynamicBatcher("viva-test", self.work, max_batch, kind=kind, leaves_jobs=leaves_jobs)
        self.gathering.start()

    def work(self, jobs):
        self.entered.set()
        self.gate.wait(10)
        self.batches.append(list(jobs))
        if 13 in jobs:
            raise ValueError("13")
        return [2 * job for job in jobs]

    async def busy(self):
        first = asyncio.ensure_future(self.gathering.do(0))
        await asyncio.to_thread(self.entered.wait, 10)
        return first


async def test_what_waits_is_done_together_and_the_urgent_first():
    worker = Worker(max_batch=3)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.gathering.do(number, urgency=-number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert await asyncio.gather(first, *rest) == [0, 2, 4, 6, 8, 10]
    assert worker.batches == [[0], [5, 4, 3], [2, 1]]
    assert (worker.gathering.jobs, worker.gathering.batches) == (6, 3)
    await worker.gathering.close()


async def test_only_what_is_alike_is_done_together_and_the_most_urgent_says_what():
    worker = Worker(max_batch=3, kind=lambda job: job % 2)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.gathering.do(number, urgency=-number)) for number in range(1, 10)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert await asyncio.gather(first, *rest) == [2 * number for number in range(10)]
    assert worker.batches == [[0], [9, 7, 5], [8, 6, 4], [3, 1], [2]]
    await worker.gathering.close()


async def test_a_job_that_fails_fails_alone_where_a_failing_pass_leaves_the_jobs_as_they_were():
    worker = Worker(leaves_jobs=True)
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.gathering.do(number)) for number in (1, 13, 3)]
    await asyncio.sleep(0)
    worker.gate.set()
    one, error, three = await asyncio.gather(*rest, return_exceptions=True)
    assert (one, three) == (2, 6) and isinstance(error, ValueError)
    assert await first == 0
    await worker.gathering.close()


async def test_jobs_that_a_failing_pass_may_have_used_up_are_not_done_again():
    worker = Worker()
    first = await worker.busy()
    rest = [asyncio.ensure_future(worker.gathering.do(number)) for number in (1, 13, 3)]
    await asyncio.sleep(0)
    worker.gate.set()
    assert all(isinstance(error, ValueError) for error in await asyncio.gather(*rest, return_exceptions=True))
    assert await first == 0
    assert worker.batches == [[0], [1, 13, 3]]
    assert await worker.gathering.do(4) == 8
    await worker.gathering.close()


async def test_too_few_results_fail_their_jobs_and_not_the_thread():
    gathering = DynamicBatcher("viva-test", lambda jobs: [], 2)
    gathering.start()
    with pytest.raises(ValueError, match="shorter"):
        await gathering.do(1)
    with pytest.raises(ValueError, match="shorter"):
        await gathering.do(2)
    await gathering.close()


async def test_a_job_nobody_waits_for_is_not_done():
    worker = Worker()
    first = await worker.busy()
    left = asyncio.ensure_future(worker.gathering.do(7))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    worker.gate.set()
    await first
    await worker.gathering.close()
    assert not any(7 in batch for batch in worker.batches)


async def test_jobs_that_wait_when_it_closes_fail():
    worker = Worker(max_batch=1)
    first = await worker.busy()
    waiting = asyncio.ensure_future(worker.gathering.do(1))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(worker.gathering.close())
    await asyncio.sleep(0)
    worker.gate.set()
    await closing
    assert await first == 0
    with pytest.raises(VivaError):
        await waiting
    with pytest.raises(VivaError, match="not running"):
        await worker.gathering.do(1)


async def test_jobs_wait_for_company_until_a_batch_is_full_or_one_is_due_and_give_way():
    batches, first_sounds = [], [True]

    def work(jobs):
        batches.append(sorted(jobs))
        return jobs

    def gathering(early):
        return DynamicBatcher("viva-test", work, 2, early=early, gives_way=lambda: bool(first_sounds))

    patient = gathering(early=0.01)
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
