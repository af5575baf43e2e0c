"""The quickest event loop there is runs what any other runs."""

import asyncio
import sys

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
