"""What serving takes of the host: how late its event loop is, and how much of a core each of its threads needs."""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np

LAG_SECONDS = 0.02
REST = "others"  # threads that Python does not know: of libraries and the device's driver


class HostWatch:
    """Watches for as long as it is entered. Use as `async with`."""

    def __init__(self) -> None:
        self.threads: dict[str, float] = {}
        """The share of a core that each thread had; known when it is left."""
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._before: tuple[float, dict[str, float]] = (0.0, {})

    @property
    def lag(self) -> float:
        """How late the event loop was, in seconds, at the 99th percentile: with many sessions it runs out first."""
        return float(np.percentile(self._lags, 99)) if self._lags else 0.0

    async def __aenter__(self) -> "HostWatch":
        self._before = time.monotonic(), processor_seconds()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        (begun, before), now = self._before, processor_seconds()
        wall = max(1e-9, time.monotonic() - begun)
        self.threads = {name: (spent - before.get(name, 0.0)) / wall for name, spent in now.items()}

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lags.append(loop.time() - due)


def processor_seconds() -> dict[str, float]:
    """What each thread of this process has had of the processor, by its name; all in one where Linux is not."""
    spent: dict[str, float] = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii").rsplit(")", 1)[1]
            user, system = fields.split()[11:13]
            name = "loop" if thread is threading.main_thread() else thread.name
            spent[name] = spent.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return spent | {REST: max(0.0, time.process_time() - sum(spent.values()))}
