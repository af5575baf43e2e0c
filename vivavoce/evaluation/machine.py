"""Measurements of the machine: wall time, memory bandwidth, power draw, and how busy threads and event loop are."""

import asyncio
import contextlib
import gc
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import torch

from vivavoce.device import Device

MAX_BUFFER_BYTES = 2**30
POWER_QUERY = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--loop-ms=500")
LAG_SECONDS = 0.02
LINE_SECONDS = 10.0
SERVER_PORTS = range(12_000, 20_000)
UNNAMED_THREADS = "others"  # native threads of libraries and the driver


def free_port() -> int:
    """A port of the loopback interface that is free for TCP and UDP, and below those that connections are given."""
    while True:
        port = secrets.choice(SERVER_PORTS)
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, suppress(OSError):
            for probe in (tcp, udp):
                probe.bind(("127.0.0.1", port))
            return port


def synchronize(device: Device) -> None:
    """Wait until the device has finished all work launched on it."""
    if device.kind != "cpu":
        getattr(torch, device.kind).synchronize()


def release_memory(device: Device) -> None:
    """Free unreferenced memory, so that the next model fits."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def median_seconds(action: Callable[[], object], device: Device, repeats: int, warm_up: int = 3) -> float:
    """The median wall time of an action, with the device synchronised before and after it."""
    times = []
    for number in range(warm_up + repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def read_bandwidth(device: Device) -> float:
    """Bytes a second: the larger of a copy (bytes read and written) and a sum, on buffers larger than any cache."""
    max_bytes = MAX_BUFFER_BYTES if device.kind == "cpu" else 4 * MAX_BUFFER_BYTES
    size = min(max_bytes, device.free_memory() // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device.torch_device)
    target = torch.zeros_like(source)
    copied = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, repeats=10)
    summed = source.nbytes / median_seconds(source.sum, device, repeats=10)
    return max(copied, summed)


class PowerMeter:
    """Samples GPU power while entered with `async with`; `mean` is in watts, None without nvidia-smi."""

    def __init__(self) -> None:
        self._readings: list[float] = []
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def mean(self) -> float | None:
        return sum(self._readings) / len(self._readings) if self._readings else None

    async def __aenter__(self) -> Self:
        if shutil.which(POWER_QUERY[0]) is not None:
            self._process = await asyncio.create_subprocess_exec(
                *POWER_QUERY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
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
            with contextlib.suppress(ValueError):  # "[N/A]" where the driver has no reading
                self._readings.append(float(line))


@contextmanager
def stage(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr while the block runs, which may replace it.

    Where stderr is no terminal, lines that replace it are printed at most every ten seconds.
    """
    shown_at = time.monotonic()

    def print_at_times(line: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= LINE_SECONDS:
            shown_at = time.monotonic()
            print(f"… {line}", file=sys.stderr, flush=True)

    try:
        from rich.console import Console
    except ImportError:
        print(f"… {text}", file=sys.stderr, flush=True)
        yield print_at_times
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:
        console.print(f"… {text}")
        yield print_at_times


class HostWatch:
    """CPU use by thread and event loop lag while entered with `async with`."""

    def __init__(self) -> None:
        self.threads: dict[str, float] = {}
        """The share of a core that each thread used; set on exit."""
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._before: tuple[float, dict[str, float]] = (0.0, {})

    @property
    def lag(self) -> float:
        """Seconds by which the event loop was late, 99th percentile: with many sessions it saturates first."""
        return float(np.percentile(self._lags, 99)) if self._lags else 0.0

    async def __aenter__(self) -> "HostWatch":
        self._before = time.monotonic(), cpu_seconds()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        (started, cpu_before), cpu_now = self._before, cpu_seconds()
        wall = max(1e-9, time.monotonic() - started)
        self.threads = {name: (seconds - cpu_before.get(name, 0.0)) / wall for name, seconds in cpu_now.items()}

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lags.append(loop.time() - due)


def cpu_seconds() -> dict[str, float]:
    """CPU seconds of each thread of this process, by name; one total on systems without /proc."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii").rsplit(")", 1)[1]
            user, system = fields.split()[11:13]
            name = "loop" if thread is threading.main_thread() else thread.name
            seconds[name] = seconds.get(name, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds | {UNNAMED_THREADS: max(0.0, time.process_time() - sum(seconds.values()))}
