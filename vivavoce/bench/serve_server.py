"""The server process of `viva bench serve`: the code of `viva serve` around a model whose replies have a fixed length.

`python -m vivavoce.bench.serve_server` reads a `ServerPlan` in JSON from stdin and serves until it is terminated.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import msgspec

from vivavoce.bench.serve_profile import sample_own_stacks
from vivavoce.errors import VivaError

READY_SECONDS = 600.0
STOP_SECONDS = 20.0
TAIL_BYTES = 3000
OPENS_PER_MINUTE = 1e6
TURN_SILENCE_MS = 240  # as `viva serve --silence-ms 240`; with its default every first sound is 260 ms later
LOCAL = build_opener(ProxyHandler({}))  # no proxy between processes of one machine


class ServerPlan(msgspec.Struct, frozen=True):
    """What is served, and for how many."""

    shape: str
    device: str
    dtype: str
    port: int
    sessions: int
    """That the engine has memory for."""
    max_sessions: int
    turns: int
    question_seconds: float
    reply_seconds: float
    left_chunks: int
    about: str
    """The file to which device, dtype and torch's version are written."""
    doors: int | None = None
    stacks: str | None = None
    """The file to which the server samples its own stacks; None: it does not sample."""


class ServerFailedError(VivaError):
    """The server of the benchmark did not start, or died."""


class PortPlan(Protocol):
    """A plan of a server process, which is sent to it as JSON."""

    @property
    def port(self) -> int: ...


class ServerProcess:
    """Starts the server and ends it; use as `with`."""

    MODULE = "vivavoce.bench.serve_server"

    def __init__(self, plan: PortPlan) -> None:
        self.plan = plan
        descriptor, name = tempfile.mkstemp(prefix="viva-bench-serve-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its HTTP address."""
        return f"http://127.0.0.1:{self.plan.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self.MODULE]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self.plan) + b"\n")
        self._process.stdin.close()
        return self

    def wait_until_ready(self) -> None:
        """Wait until the model is warm; ServerFailedError where the process ends before."""
        ends = time.monotonic() + READY_SECONDS
        while time.monotonic() < ends:
            self.check()
            try:
                with LOCAL.open(f"{self.url}/readyz", timeout=5.0) as response:
                    if response.status == 200:
                        return
            except (URLError, OSError):
                pass
            time.sleep(0.2)
        raise ServerFailedError(f"the server was not ready after {READY_SECONDS:.0f} s; {self.log_tail()}")

    def check(self) -> None:
        """Raise ServerFailedError where the process has ended."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise ServerFailedError(f"the server ended with status {code}; {self.log_tail()}")

    def log_tail(self) -> str:
        """The end of what it printed."""
        text = self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return f"the end of {self.log}:\n{text}" if text else "it printed nothing"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.log.stat().st_size:
            print(f"what the server logged is in {self.log}", file=sys.stderr)
        else:
            self.log.unlink()


def serve_plan(plan: ServerPlan) -> None:
    """Build the model and serve it, as `viva serve` does."""
    import torch

    from vivavoce.bench.serve import BATCHES, ENDLESS
    from vivavoce.bench.serve_parts import ServeLoad, build
    from vivavoce.device import pick
    from vivavoce.dialogue.reply import SpeakingOptions
    from vivavoce.dialogue.session import DialogueOptions
    from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
    from vivavoce.engine.sequence import Admission
    from vivavoce.log import configure
    from vivavoce.runtime import event_loop
    from vivavoce.s2s.options import MossSpeechOptions
    from vivavoce.server.config import ServerOptions
    from vivavoce.server.hosting import SpeechHost, serve
    from vivavoce.server.hosting.config import ConversationOptions

    configure("warning", "text")
    if plan.stacks is not None:
        sample_own_stacks(Path(plan.stacks))
    target = pick(plan.device)
    load = ServeLoad(plan.sessions, plan.question_seconds, plan.reply_seconds, plan.turns)
    options = MossSpeechOptions(seed=1, left_chunks=plan.left_chunks, admission=Admission())  # as of `viva serve`
    if target.kind == "cuda":
        batches = [batch for batch in BATCHES if batch < 2 * plan.sessions]
        options = replace(options, voices_together=batches[-1], warm_batches=tuple(batches))
    pipeline = build(plan.shape, target, plan.dtype, load, options)
    dtype = str(pipeline.core.runner.cache.keys.dtype).removeprefix("torch.")
    Path(plan.about).write_bytes(
        msgspec.json.encode({"device": target.name, "dtype": dtype, "torch": str(torch.__version__)})
    )
    front_end = ConversationOptions().front_end(models_use_cores=target.kind == "cpu")
    dialogue = DialogueOptions(speaking=SpeakingOptions(guards=ENDLESS), front_end=front_end)
    settings = ConversationSettings(turn=TurnSettings(silence_duration_ms=TURN_SILENCE_MS))
    host = SpeechHost(f"bench-{plan.shape}", pipeline, dialogue, settings)
    event_loop.run(serve(host, server_options(plan, ServerOptions)))


def server_options(plan: ServerPlan, kind: Any) -> Any:
    """The options of the server; `doors` where this version has them."""
    values: dict[str, Any] = {
        "port": plan.port,
        "max_sessions": plan.max_sessions,
        "opens_per_minute": OPENS_PER_MINUTE,
        "log_level": "warning",
    }
    if plan.doors is not None:
        if "doors" not in {each.name for each in fields(kind)}:
            raise ServerFailedError("this version has no --doors")
        values["doors"] = plan.doors
    return kind(**values)


if __name__ == "__main__":
    serve_plan(msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerPlan))
