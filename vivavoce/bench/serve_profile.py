"""`viva bench serve --profile`: where the processes of the server spend host time, by thread and module.

py-spy samples every process of the server from outside and keeps the samples of threads that hold the interpreter's
lock. Where it is not installed, or may not trace, a thread of the server's main process samples the stacks itself.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivavoce.thread_stacks import thread_stacks

RATE = 100
STOP_SECONDS = 30.0
PACKAGE = "vivavoce"
THREAD = re.compile(r'^thread \((?:0x)?[0-9a-fA-F]+\)(?:: "?(?P<name>.*?)"?)?$')
WAITING = ("wait", "select", "poll", "acquire", "get", "sleep", "_worker", "recv", "accept")  # not host time
FRAME = re.compile(r"^(?P<function>.+) \((?P<file>[^()]*?)(?::\d+)?\)$")


@dataclass(frozen=True)
class ProfileRow:
    """Samples of one module on the threads of one name, of all processes of one name."""

    process: str
    thread: str
    module: str
    samples: int
    share: float
    """Of the samples of its process."""
    busy: float
    """Of the time that was sampled."""


class Profiler:
    """Samples processes while entered with `with`; `rows` is set on exit."""

    def __init__(self, processes: dict[int, str], folder: Path, own_stacks: Path | None = None) -> None:
        self._processes, self._folder, self._own_stacks = processes, folder, own_stacks
        self._running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
        self.rows: list[ProfileRow] = []
        self.how = f"py-spy, {RATE} samples a second, of threads that hold the interpreter's lock"

    def __enter__(self) -> "Profiler":
        self._started = time.monotonic()
        if self._own_stacks is not None:
            self._own_stacks.unlink(missing_ok=True)  # of an earlier level
            self.how = f"stacks of all threads of the main process, {RATE} samples a second, by a thread of its own"
            return self
        for pid in self._processes:
            out = self._folder / f"{pid}.stacks"
            command = ["record", "--pid", str(pid), "--gil", "--threads", "--nonblocking", "--rate", str(RATE)]
            command += ["--duration", "unlimited", "--format", "raw", "--output", str(out)]
            process = subprocess.Popen(
                [py_spy() or "py-spy", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._running[pid] = process, out
        return self

    def __exit__(self, *exc_info: object) -> None:
        seconds = time.monotonic() - self._started
        stacks: dict[str, list[str]] = {}
        for pid, (process, out) in self._running.items():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if out.is_file():
                stacks.setdefault(self._processes[pid], []).extend(out.read_text(encoding="utf8").splitlines())
        if self._own_stacks is not None and self._own_stacks.is_file():
            stacks["server"] = self._own_stacks.read_text(encoding="utf8").splitlines()
        for name, lines in stacks.items():
            count = max(1, sum(each == name for each in self._processes.values()))
            self.rows += rows(name, lines, seconds * count)

    @property
    def threads(self) -> dict[str, float]:
        """The share of the time in which the threads of each name were sampled."""
        found: dict[str, float] = {}
        for row in self.rows:
            name = f"{row.process} {row.thread}"
            found[name] = found.get(name, 0.0) + row.busy
        return found

    def as_json(self) -> dict[str, Any]:
        return {"how": self.how, "threads": self.threads, "rows": [asdict(row) for row in self.rows]}


def py_spy() -> str | None:
    """The program, beside this interpreter or on the path."""
    return shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def can_trace() -> bool:
    """Whether py-spy is installed and may read other processes here."""
    if (program := py_spy()) is None:
        return False
    command = [program, "dump", "--nonblocking", "--pid", str(os.getpid())]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def rows(process: str, stacks: Iterable[str], seconds: float) -> list[ProfileRow]:
    """Collapsed stacks ("thread;frame;frame count") by thread and module, the most samples first."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if count.isdecimal():
            counts[_place(stack.split(";"))] += int(count)
    total = sum(counts.values())
    return [
        ProfileRow(process, thread, module, count, count / total, count / RATE / max(1e-9, seconds))
        for (thread, module), count in counts.most_common()
    ]


def _place(frames: Sequence[str]) -> tuple[str, str]:
    """The thread of a stack, and its innermost frame of this package; else its innermost frame."""
    thread = "main"
    if frames and (found := THREAD.match(frames[0])):
        thread, frames = found["name"] or "unnamed", frames[1:]
    files = [(match["file"], match["function"]) for frame in frames if (match := FRAME.match(frame))]
    ours = [file for file, _ in files if f"{PACKAGE}/" in file and f"{PACKAGE}/bench/" not in file]
    if ours:
        return _short_thread(thread), module_name(ours[-1])
    return _short_thread(thread), Path(files[-1][0]).name if files else "native"


def _short_thread(name: str) -> str:
    return "main" if name in ("MainThread", "main") else re.sub(r"[-_]?\d+$", "", name)


def module_name(file: str) -> str:
    """The module of a file of this package, without the package's name."""
    return file.rpartition(f"{PACKAGE}/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def print_profile(profiler: Profiler, min_share: float = 0.01) -> None:
    """Print the modules with at least this share of the samples, by process and thread."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"where host time goes: {profiler.how}", title_justify="left", box=SIMPLE_HEAD)
    for column in ("process", "thread", "module", "share of samples", "share of time"):
        table.add_column(column, justify="right" if column.startswith("share") else "left")
    for row in profiler.rows:
        if row.share >= min_share:
            table.add_row(row.process, row.thread, row.module, f"{row.share:.1%}", f"{row.busy:.1%}")
    console = Console(stderr=True, highlight=False, width=120)
    console.print(table)
    busiest = sorted(profiler.threads.items(), key=lambda each: -each[1])
    console.print("share of time by thread: " + ", ".join(f"{name} {share:.1%}" for name, share in busiest))


# The sampler inside the server


def sample_own_stacks(file: Path) -> threading.Event:
    """Sample the stacks of all threads of this process on a thread of its own, and write them every second.

    Until the event that is returned is set.
    """
    is_over = threading.Event()

    def sample() -> None:
        stacks: Counter[str] = Counter()
        written = time.monotonic()
        own = threading.get_ident()
        while not is_over.wait(1 / RATE):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frames in thread_stacks().items():
                if ident != own and frames and frames[0].function not in WAITING:
                    calls = ";".join(f"{frame.function} ({frame.file})" for frame in reversed(frames))
                    stacks[f'thread (0): "{names.get(ident, "unnamed")}";{calls}'] += 1
            if time.monotonic() - written > 1.0:
                if not file.exists():  # a new level
                    stacks = Counter()
                file.write_text("\n".join(f"{stack} {count}" for stack, count in stacks.items()), encoding="utf8")
                written = time.monotonic()

    threading.Thread(target=sample, name="viva-profile", daemon=True).start()
    return is_over
