"""What a GPU draws while something runs, by its driver's own tool; where that is not there, nothing is said."""

import asyncio
import contextlib
import shutil
from typing import Self

QUERY = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--loop-ms=500")


class PowerMeter:
    """Use as `async with`; `mean` is in watts, None where nothing could be read."""

    def __init__(self) -> None:
        self._readings: list[float] = []
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def mean(self) -> float | None:
        """Over all readings."""
        return sum(self._readings) / len(self._readings) if self._readings else None

    async def __aenter__(self) -> Self:
        if shutil.which(QUERY[0]) is not None:
            self._process = await asyncio.create_subprocess_exec(
                *QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            self._task = asyncio.create_task(self._read(self._process))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process is not None and self._task is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
            await self._task

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # the driver says "[N/A]" where it does not know
                self._readings.append(float(line))
