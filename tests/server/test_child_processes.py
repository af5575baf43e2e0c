"""Processes that are started again: how they ended is logged, and the waits grow only while they do not run well."""

import asyncio
import logging
import sys

import pytest

from vivavoce.errors import VivaError
from vivavoce.server.child_processes import Backoff, ProcessEnd, keep_running

BACKOFF = Backoff(0.01, 0.04)


async def run_python(code, was_stable=False):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    return ProcessEnd(await process.wait(), was_stable)


async def test_a_process_that_ends_is_started_again_until_the_server_stops(caplog):
    runs = iter(["exit(3)", "import os; os.kill(os.getpid(), 9)", "exit(0)"])
    done = []

    async def run():
        done.append(await run_python(next(runs)))
        return done[-1]

    with caplog.at_level(logging.ERROR):
        await keep_running("replica 7", run, lambda: len(done) == 3, BACKOFF)
    assert [end.code for end in done] == [3, -9, 0]
    assert caplog.messages == [
        "replica 7 ended with code 3; it is started again in 0.01 s",
        "replica 7 ended by SIGKILL; it is started again in 0.02 s",
    ]


async def test_waits_double_up_to_a_limit_and_begin_anew_after_a_stable_run(caplog):
    ends = iter([False, False, False, False, True, False])
    left = [6]

    async def run():
        left[0] -= 1
        return ProcessEnd(1, next(ends))

    await keep_running("door 0", run, lambda: left[0] == 0, BACKOFF)
    assert [message.split(" in ")[1] for message in caplog.messages] == [
        *("0.01 s", "0.02 s", "0.04 s", "0.04 s", "0.01 s")
    ]


def test_every_end_has_words():
    assert [str(ProcessEnd(code, False)) for code in (0, 3, -9, -40)] == [
        *("with code 0", "with code 3", "by SIGKILL", "by signal 40")
    ]


async def test_what_is_done_at_an_end_may_give_up():
    async def ended(end):
        raise VivaError(f"it ended {end}")

    with pytest.raises(VivaError, match="it ended with code 5"):
        await keep_running("replica 0", lambda: run_python("exit(5)"), lambda: False, BACKOFF, ended)
