"""Processes that a test talks to: `viva serve`, and whoever it needs."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

READY_WITHIN = 90.0


@contextlib.contextmanager
def viva_serve(*arguments: str, log: Path | None = None, **environment: str) -> Iterator[str]:
    """Its address, once it says that it is ready; it must end by itself when interrupted. `log` gets its stderr."""
    command = [Path(sys.executable).with_name("viva"), "serve", "--port", "0", "--device", "cpu", *arguments]
    if "--filler-seconds" not in arguments:
        command += ["--filler-seconds", "0"]  # a busy machine is slow
    settings = os.environ | {"VIVA_OFFLINE": "1", "COLUMNS": "200"} | environment
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as stderr:  # a pipe could fill up
        process = subprocess.Popen(command, env=settings, stderr=stderr, stdout=subprocess.PIPE, text=True)
        try:
            yield _announced_address(process, stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) in (0, 130), _read(stderr)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextlib.contextmanager
def chat_server() -> Iterator[str]:
    """The address of a chat endpoint whose key is chat-secret."""
    program = Path(__file__).with_name("chat_server.py")
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _announced_address(process: subprocess.Popen, stderr: IO[bytes]) -> str:
    """The address in the first line that a server prints, where it is ready from that moment on."""
    is_there, _, _ = select.select([process.stdout], [], [], READY_WITHIN)
    assert is_there, f"the server did not become ready: {_read(stderr)}"
    found = re.search(r"http://(127\.0\.0\.1:\d+)", process.stdout.readline())
    assert found, _read(stderr)
    with urllib.request.urlopen(f"{found[0]}/readyz", timeout=5) as answer:
        assert answer.status == 200
    return found[1]
