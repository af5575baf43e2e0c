"""What the server uses while `viva bench serve` measures it: `/metrics`, and CPU and memory of its processes."""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.request import Request

from vivavoce.bench.serve_server import LOCAL

logger = logging.getLogger(__name__)

MEMORY_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
LAG = "event_loop_lag_seconds"
STAGE = "viva_stage_"
COUNTERS = ("viva_underruns_total", "viva_deadlines_missed_total", "viva_sessions_refused_total")
SAMPLE_SECONDS = 2.0
SCRAPE_SECONDS = 20.0

Labels = tuple[tuple[str, str], ...]
MetricsPage = dict[tuple[str, Labels], float]
"""Samples of `/metrics`, by name and labels."""


@dataclass(frozen=True)
class ProcessUse:
    """One process of the server over a level."""

    pid: int
    name: str
    cpu: float
    """Cores that were busy with it."""
    main_thread_cpu: float
    """Of that, the thread of its event loop."""
    rss_bytes: int
    threads: int


@dataclass(frozen=True)
class ServerUse:
    """What the server reports and uses over a level."""

    processes: list[ProcessUse] = field(default_factory=list)
    loop_lag_p99_ms: dict[str, float | None] = field(default_factory=dict)
    """The lag's 99th percentile by process: of a histogram the upper edge of its bucket (None: above all), of a gauge
    over the last seconds the largest value."""
    counters: dict[str, float] = field(default_factory=dict)
    stages_ms: dict[str, float] = field(default_factory=dict)
    """Median milliseconds of the stages before a first sound: the largest value of each."""
    gpu_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class ServerWatch:
    """Measures while entered with `async with`; the result is `use`. Without a process id only `/metrics` is read."""

    def __init__(self, url: str, key: str | None = None, pid: int | None = None) -> None:
        self._url, self._key, self._pid = url, key, pid
        self.use = ServerUse()
        self._rss: dict[int, int] = {}
        self._lags: dict[str, float] = {}
        self._stages: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._metrics = await asyncio.to_thread(self._scrape)
        self._started, self._cpu = time.monotonic(), self._cpu_seconds()
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        wall = max(1e-9, time.monotonic() - self._started)
        processes = [
            ProcessUse(
                pid,
                process_name(pid, pid == self._pid),
                (total - self._cpu.get(pid, (0.0, 0.0))[0]) / wall,
                (main - self._cpu.get(pid, (0.0, 0.0))[1]) / wall,
                self._rss.get(pid, 0),
                _thread_count(pid),
            )
            for pid, (total, main) in self._cpu_seconds().items()
        ]
        after = await asyncio.to_thread(self._scrape)
        counters = {name: metric_total(after, name) - metric_total(self._metrics, name) for name in COUNTERS}
        gpu = await asyncio.to_thread(gpu_bytes) if self._pid is not None else None
        lags = lag_percentiles(self._metrics, after) | {name: lag * 1e3 for name, lag in self._lags.items()}
        stages = {name: seconds * 1e3 for name, seconds in self._stages.items()}
        self.use = ServerUse(processes, lags, counters, stages, gpu)

    def _scrape(self) -> MetricsPage:
        try:
            return read_metrics(self._url, self._key)
        except OSError:  # an overloaded server may not answer in time
            logger.warning("the server's /metrics could not be read", exc_info=True)
            return {}

    def _cpu_seconds(self) -> dict[int, tuple[float, float]]:
        """CPU seconds of all threads and of the main thread, by process."""
        found = {}
        for pid in [] if self._pid is None else process_tree(self._pid):
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
                found[pid] = (_cpu(Path(f"/proc/{pid}/stat")), _cpu(Path(f"/proc/{pid}/task/{pid}/stat")))
        return found

    async def _sample(self) -> None:
        """Note the largest memory of each process, and the largest lag and stage time reported as gauges."""
        while True:
            for pid in [] if self._pid is None else process_tree(self._pid):
                self._rss[pid] = max(self._rss.get(pid, 0), _rss_bytes(pid))
            page = await asyncio.to_thread(self._scrape)
            for largest, gauges in ((self._lags, lag_gauges(page)), (self._stages, stage_gauges(page))):
                for name, value in gauges.items():
                    largest[name] = max(largest.get(name, 0.0), value)
            await asyncio.sleep(SAMPLE_SECONDS)


def read_metrics(url: str, key: str | None = None) -> MetricsPage:
    """The metrics of a server; OSError where it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with LOCAL.open(Request(f"{url}/metrics", headers=headers), timeout=SCRAPE_SECONDS) as response:
        return samples(response.read().decode())


def samples(page: str) -> MetricsPage:
    """The samples of a page in Prometheus' text format, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def lag_percentiles(before: MetricsPage, after: MetricsPage) -> dict[str, float | None]:
    """Milliseconds under which 99 % of the lags between two pages were, by process."""
    return bucket_percentiles(before, after, LAG, 0.99)


def bucket_percentiles(before: MetricsPage, after: MetricsPage, metric: str, share: float) -> dict[str, float | None]:
    """Milliseconds under which this share of the values of a histogram of seconds was between two pages, by process.

    An edge of a bucket; None above all.
    """
    by_process: dict[str, dict[float, float]] = {}
    for (name, labels), count in after.items():
        if not name.endswith(f"{metric}_bucket"):
            continue
        edge = float(dict(labels)["le"])
        process = " ".join(value for label, value in labels if label != "le") or "server"
        by_process.setdefault(process, {})[edge] = count - before.get((name, labels), 0.0)
    found: dict[str, float | None] = {}
    for process, edges in by_process.items():
        if total := edges.pop(math.inf, 0.0):
            found[process] = next((edge * 1e3 for edge in sorted(edges) if edges[edge] >= share * total), None)
    return found


def lag_gauges(page: MetricsPage) -> dict[str, float]:
    """Seconds of lag that processes report as a gauge, by their labels: "door 1"."""
    return {
        " ".join(part for label in labels for part in label): value
        for (name, labels), value in page.items()
        if name.endswith(LAG) and labels
    }


def stage_gauges(page: MetricsPage) -> dict[str, float]:
    """Seconds of the stages before a first sound, by name."""
    return {
        name.removeprefix(STAGE).removesuffix("_seconds"): value
        for (name, _), value in page.items()
        if name.startswith(STAGE)
    }


def metric_total(page: MetricsPage, name: str, **wanted: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(
        value for (each, labels), value in page.items() if each == name and wanted.items() <= dict(labels).items()
    )


def process_tree(pid: int) -> list[int]:
    """A process and its descendants; empty where there is no /proc or the process has ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
            parent = int(stat.read_text(encoding="utf8").rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid] if Path(f"/proc/{pid}").exists() else []
    for each in found:
        found += children.get(each, [])
    return found


def process_name(pid: int, is_engine: bool) -> str:
    """A short name by its command line."""
    if is_engine:
        return "server"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    return next((word.rpartition(".")[2] for word in words if word.startswith("vivavoce.")), Path(words[0]).name)


def _cpu(stat: Path) -> float:
    user, system = stat.read_text(encoding="utf8").rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _thread_count(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def gpu_bytes() -> int | None:
    """Memory in use on the first GPU; None without nvidia-smi."""
    if shutil.which(MEMORY_QUERY[0]) is None:
        return None
    done = subprocess.run(MEMORY_QUERY, capture_output=True, text=True, check=False)
    first = done.stdout.strip().partition("\n")[0]
    return int(first) << 20 if first.isdecimal() else None
