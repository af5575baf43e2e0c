"""Processes that a test talks to: `viva serve`, and whoever it needs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

READY_WITHIN = 90.0


@contextlib.contextmanager
def viva_serve(*arguments: str, log: Path | None = None, **environment: str) -> Iterator[str]:
    """Its address, once it is ready; it must end by itself when interrupted. `log` gets what it writes to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("viva"), "serve", "--port", str(port), "--device", "cpu", *arguments]
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as stderr:  # a pipe could fill up
        process = subprocess.Popen(
            command, env=os.environ | {"VIVA_OFFLINE": "1"} | environment, stderr=stderr, stdout=subprocess.DEVNULL
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/readyz", stderr)
            yield f"127.0.0.1:{port}"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) in (0, 130), _read(stderr)
        finally:
            process.kill()
            process.wait()


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


def _wait_until_ready(process: subprocess.Popen, url: str, stderr: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        assert process.poll() is None, _read(stderr)
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")
