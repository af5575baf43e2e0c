"""Modules of this package in processes of their own, which read their options from their input."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import vivavoce

logger = logging.getLogger(__name__)

SIGNAL_NAMES = {each.value: each.name for each in signal.Signals}  # real-time signals have none


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a process is started again; twice as long after each run that was not stable."""

    first_seconds: float
    max_seconds: float


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, and whether it had run well until then."""

    code: int
    was_stable: bool

    def __str__(self) -> str:
        """As in "ended by SIGKILL"."""
        if self.code >= 0:
            return f"with code {self.code}"
        return f"by {SIGNAL_NAMES.get(-self.code, f'signal {-self.code}')}"


async def keep_running(
    name: str,
    run: Callable[[], Awaitable[ProcessEnd]],
    is_stopping: Callable[[], bool],
    backoff: Backoff,
    ended: Callable[[ProcessEnd], Awaitable[None]] | None = None,
) -> None:
    """Run a process until `is_stopping`, again when it ends. `ended` is called first then, and may raise."""
    seconds = backoff.first_seconds
    while True:
        end = await run()
        if is_stopping():
            return
        if ended is not None:
            await ended(end)
        seconds = backoff.first_seconds if end.was_stable else seconds
        logger.error("%s ended %s; it is started again in %g s", name, end, seconds)
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, backoff.max_seconds)


async def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    is_apart: bool = False,
) -> asyncio.subprocess.Process:
    """Start a module with this package, wherever it was loaded from. `is_apart`: Ctrl-C does not reach it."""
    package = str(Path(vivavoce.__file__).parents[1])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | environment | {"PYTHONPATH": search},
        pass_fds=inherited,
        start_new_session=is_apart,
    )
