"""A machine whose seconds are the processor's: waiting costs nothing, work costs what it needs."""

import asyncio
import time

import pytest

from vivavoce.bench.virtual_time import VirtualDevice, VirtualLoop, VirtualWorkers
from vivavoce.dialogue.gathering import Gathering


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_an_hour_of_waiting_is_over_at_once_and_takes_an_hour(loop):
    async def wait():
        begun = loop.time()
        await asyncio.gather(*(asyncio.sleep(minutes * 60) for minutes in (60, 10, 30)))
        return loop.time() - begun

    begun = time.monotonic()
    assert loop.run_until_complete(wait()) == pytest.approx(3600, abs=1)
    assert time.monotonic() - begun < 60


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_work_takes_as_long_as_the_processor_needs_and_others_go_on_beside_it(loop):
    workers = VirtualWorkers(loop)
    workers.start()
    gathering = Gathering("viva-test", lambda jobs: [busy(job) for job in jobs], most=1, workers=workers)
    gathering.start()
    ticks: list[float] = []

    async def tick():
        while True:
            ticks.append(loop.time())
            await asyncio.sleep(0.01)

    async def work():
        ticking = asyncio.ensure_future(tick())
        begun = loop.time()
        await asyncio.gather(gathering.do(0.05), gathering.do(0.05))
        took = loop.time() - begun
        ticking.cancel()
        await gathering.close()
        return took

    took = loop.run_until_complete(work())
    assert 0.1 <= took < 0.5, "one after another"
    assert len(ticks) > 8, "the event loop has a core of its own"
    assert workers.worked >= 0.1 > loop.worked


def test_a_slower_machine_takes_longer():
    def took(slowdown: float) -> float:
        loop = VirtualLoop(slowdown)

        async def work():
            begun = loop.time()
            busy(0.05)
            return loop.time() - begun

        try:
            return loop.run_until_complete(work())
        finally:
            loop.close()

    assert took(3.0) == pytest.approx(3 * took(1.0), rel=0.3)


@pytest.mark.parametrize(("fills", "takes"), [(0.5, 0.1), (1.0, 0.2)])
def test_what_is_on_a_device_at_once_is_slowed_where_it_overfills_it(fills, takes):
    loop = VirtualLoop(slowdown=0.0)
    device, told = VirtualDevice(loop), []

    async def compute():
        for _ in range(2):
            device.spend(0.1, fills)
            device.begin(device.asked(), lambda: told.append(loop.time()))
        begun = loop.time()
        await asyncio.sleep(1.0)
        return [moment - begun for moment in told]

    try:
        assert loop.run_until_complete(compute()) == pytest.approx([takes, takes])
        assert device.busy == pytest.approx(takes)
    finally:
        loop.close()
