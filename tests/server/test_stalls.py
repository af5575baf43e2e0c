"""Stalls of an event loop are logged with the stack that caused them."""

import asyncio
import logging
import time

from vivavoce.server.stalls import BEAT_SECONDS, StallWatch


def hold_the_loop() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


async def logged(caplog, count: int) -> list[str]:
    """The messages once there are so many; fails by the test's time limit."""
    while len(caplog.messages) < count:
        await asyncio.sleep(BEAT_SECONDS)
    return caplog.messages


async def test_a_stall_is_logged_with_the_function_that_held_the_loop(caplog):
    caplog.set_level(logging.WARNING, "vivavoce.server.stalls")
    with StallWatch(seconds=0.1, repeat_seconds=0.0).watching():
        hold_the_loop()
        (message,) = await logged(caplog, 1)
    assert message.startswith("the event loop did not run for ")
    assert "it was in hold_the_loop (server/test_stalls.py:" in message


async def test_stalls_in_quick_succession_are_counted(caplog):
    caplog.set_level(logging.WARNING, "vivavoce.server.stalls")
    watch = StallWatch(seconds=0.1, repeat_seconds=0.5)
    with watch.watching():
        hold_the_loop()
        await logged(caplog, 1)
        hold_the_loop()
        while not watch._omitted:
            await asyncio.sleep(BEAT_SECONDS)
        while len(caplog.messages) < 2:
            hold_the_loop()
            await asyncio.sleep(3 * BEAT_SECONDS)
    assert "more stalls since the last record)" in caplog.messages[-1]


async def test_a_loop_that_runs_logs_nothing(caplog):
    caplog.set_level(logging.WARNING, "vivavoce.server.stalls")
    with StallWatch(seconds=5.0).watching():
        await asyncio.sleep(10 * BEAT_SECONDS)
    assert not caplog.messages
