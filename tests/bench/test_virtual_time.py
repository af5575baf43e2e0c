"""The virtual clock: waiting is skipped, work takes its CPU time."""

import asyncio
import time

import pytest

from vivavoce.bench.simulation import VirtualDevice, VirtualExecutor, VirtualLoop
from vivavoce.runtime.batcher import DynamicBatcher


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_an_hour_of_waiting_is_skipped_and_advances_the_clock_by_an_hour(loop):
    async def wait():
        started = loop.time()
        await asyncio.gather(*(asyncio.sleep(minutes * 60) for minutes in (60, 10, 30)))
        return loop.time() - started

    started = time.monotonic()
    assert loop.run_until_complete(wait()) == pytest.approx(3600, abs=1)
    assert time.monotonic() - started < 60


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_work_takes_its_cpu_time_while_the_event_loop_continues(loop):
    executor = VirtualExecutor(loop)
    executor.start()
    batcher = DynamicBatcher("viva-test", lambda jobs: [busy(job) for job in jobs], executor, max_batch=1)
    batcher.start()
    ticks: list[float] = []

    async def tick():
        while True:
            ticks.append(loop.time())
            await asyncio.sleep(0.01)

    async def work():
        ticking = asyncio.ensure_future(tick())
        started = loop.time()
        await asyncio.gather(batcher.do(0.05), batcher.do(0.05))
        took = loop.time() - started
        ticking.cancel()
        await batcher.close()
        return took

    took = loop.run_until_complete(work())
    assert 0.1 <= took < 0.5, "one after another"
    assert len(ticks) > 8, "the event loop has a core of its own"
    assert executor.worked >= 0.1 > loop.worked


def test_a_slower_machine_takes_longer():
    def took(slowdown: float) -> float:
        loop = VirtualLoop(slowdown)

        async def work():
            started = loop.time()
            busy(0.05)
            return loop.time() - started

        try:
            return loop.run_until_complete(work())
        finally:
            loop.close()

    assert took(3.0) == pytest.approx(3 * took(1.0), rel=0.3)


def done_on_a_device(works):
    """End time of each work item (seconds, occupancy) if all start together, and the total device time."""
    loop = VirtualLoop(slowdown=0.0)
    device, callbacks = VirtualDevice(loop), {}

    async def compute():
        started = loop.time()
        for number, (seconds, fills) in enumerate(works):
            device.spend(seconds, fills)
            device.start(
                device.take_requested(), lambda number=number: callbacks.update({number: loop.time() - started})
            )
        await asyncio.sleep(2.0)
        return [callbacks[number] for number in range(len(works))]

    try:
        return loop.run_until_complete(compute()), device.busy
    finally:
        loop.close()


@pytest.mark.parametrize(("works", "takes"), [([(0.1, 0.5)], [0.1]), ([(0.1, 1.0)] * 2, [0.2, 0.2])])
def test_work_that_fills_the_device_is_serialised(works, takes):
    done, busy = done_on_a_device(works)
    assert done == pytest.approx(takes)
    assert busy == pytest.approx(max(takes))


def test_small_work_waits_for_large_more_than_large_for_small():
    (small, large), busy = done_on_a_device([(0.1, 0.1), (1.0, 0.9)])
    assert small > 2 * 0.1
    assert 1.0 < large < 1.1
    assert busy == pytest.approx(large)
