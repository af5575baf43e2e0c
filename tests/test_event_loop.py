"""The quickest event loop there is runs what any other runs."""

import asyncio
import subprocess
import sys
import threading

import pytest

from vivavoce.runtime import event_loop as quick_loop


async def answer() -> tuple[int, str]:
    await asyncio.sleep(0)
    return 42, type(asyncio.get_running_loop()).__module__.split(".")[0]


async def failure() -> None:
    raise LookupError("as told")


def test_a_coroutine_is_run_to_its_end():
    assert quick_loop.run(answer())[0] == 42
    with pytest.raises(LookupError, match="as told"):
        quick_loop.run(failure())


def test_without_uvloop_it_is_asyncios(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert quick_loop.run(answer()) == (42, "asyncio")


ENDLESS = """
import asyncio, sys
import torch
from vivavoce.runtime.event_loop import iterate_on_thread

def endless():
    product = torch.ones(300, 300)
    while True:
        for _ in range(20):
            product = torch.tanh(product @ product)
        yield 1

async def main():
    async for _ in iterate_on_thread(endless, 1000):
        sys.exit(0)

asyncio.run(main())
"""


def test_a_process_that_ends_while_an_iterator_computes_ends_cleanly():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_an_iterator_waits_and_ends_within_an_item_as_its_reader_wants():
    reader, steps, ended = quick_loop.Reader(), asyncio.Queue(), asyncio.Event()
    loop, permits = asyncio.get_running_loop(), threading.Semaphore(0)

    def endless():
        try:
            yield "first"
            while True:  # an item that never ends
                permits.acquire()
                quick_loop.await_reader()
                loop.call_soon_threadsafe(steps.put_nowait, "step")
        finally:
            loop.call_soon_threadsafe(ended.set)

    items = quick_loop.iterate_on_thread(endless, 1, reader)
    async with asyncio.timeout(20):
        assert await anext(items) == "first"
        permits.release()
        assert await steps.get() == "step"
        reader.pause()
        permits.release(2)
        await asyncio.to_thread(lambda: None)
        assert steps.empty()
        reader.resume()
        assert [await steps.get(), await steps.get()] == ["step", "step"]
        await items.aclose()
        permits.release()
        await ended.wait()
    assert steps.empty()


def test_code_that_no_reader_reads_waits_for_none():
    quick_loop.await_reader()
