"""Files of the package whose functions run in one `viva say`, and in one spoken turn of `viva serve`.

A child process runs the command line with a profile function in every thread, once to import and warm up, then again
to be counted. The turn is asked over the Realtime protocol, so that nothing here depends on how the server is built.
"""

import asyncio
import base64
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vivavoce"
READY_SECONDS, TURN_SECONDS, RATE = 180.0, 120.0, 24_000


class Trace:
    """Files of the package whose functions were called while it was on."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes: set[Any] = set()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: Any, event: str, argument: object) -> None:
        if self.is_on and event == "call":
            self._codes.add(frame.f_code)

    def files(self) -> list[str]:
        """Without code of modules and classes, which runs at import."""
        functions = (code for code in set(self._codes) if code.co_flags & inspect.CO_OPTIMIZED)
        return sorted({each.co_filename for each in functions if each.co_filename.startswith(str(PACKAGE))})


def traced_serve(out: Path, port: int) -> None:
    """`viva serve`; SIGUSR1 turns the trace on, SIGUSR2 writes it down."""
    trace = Trace()
    signal.signal(signal.SIGUSR1, lambda *_: setattr(trace, "is_on", True))
    signal.signal(signal.SIGUSR2, lambda *_: write_whole(out, json.dumps(trace.files())))
    run_viva("serve", "--model", "mini-speech", "--device", "cpu", "--port", str(port))


def traced_say(out: Path) -> None:
    """`viva say` twice; the second time is traced."""
    trace, sound = Trace(), str(out.with_suffix(".wav"))
    for is_on in (False, True):
        trace.is_on = is_on
        run_viva("say", "Good morning. How are you?", "--model", "mini-tts", "--device", "cpu", "--out", sound)
    trace.is_on = False
    write_whole(out, json.dumps(trace.files()))


def run_viva(*arguments: str) -> None:
    """The command line in this process."""
    from vivavoce.cli import main

    sys.argv = ["viva", *arguments]
    try:
        main()
    except SystemExit as left:
        if left.code not in (0, None):
            raise


def write_whole(out: Path, text: str) -> None:
    """Write a file that a reader never sees half of."""
    out.with_suffix(".part").write_text(text, encoding="utf8")
    out.with_suffix(".part").rename(out)


def child(*arguments: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def read_files(out: Path) -> list[str]:
    return [str(Path(each).relative_to(PACKAGE)) for each in json.loads(out.read_text(encoding="utf8"))]


def of_say(folder: Path) -> list[str]:
    """Files of one `viva say`."""
    out = folder / "say.json"
    code = child("say", str(out)).wait(READY_SECONDS)
    assert code == 0, f"viva say ended with {code}"
    return read_files(out)


def of_turn(folder: Path) -> list[str]:
    """Files of one spoken turn of an open session, from its first microphone frame to the end of the reply."""
    out = folder / "turn.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = child("serve", str(out), str(port))
    try:
        wait_until(lambda: is_ready(port), "the server is ready")
        asyncio.run(take_turn(port, lambda _: None))
        asyncio.run(take_turn(port, server.send_signal))
        wait_until(out.exists, "the trace is written")
        return read_files(out)
    finally:
        server.terminate()
        server.wait(30)


async def take_turn(port: int, send_signal: Callable[[signal.Signals], None]) -> None:
    """Ask a bundled question over the Realtime protocol, in real time, and read the reply; signal its two ends."""
    from websockets.asyncio.client import connect

    from vivavoce.audio.io import float_to_pcm16, read

    question = read(PACKAGE / "minis" / "questions" / "15-breakfast.opus", rate=RATE).mono().samples[0]
    data = float_to_pcm16(question).tobytes() + bytes(2 * RATE)
    frame = RATE // 50 * 2
    async with connect(f"ws://127.0.0.1:{port}/v1/realtime?model=mini-speech", max_size=None) as client:

        async def speak() -> None:
            for start in range(0, len(data), frame):
                audio = base64.b64encode(data[start : start + frame]).decode()
                await client.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                await asyncio.sleep(0.02)

        assert json.loads(await client.recv())["type"] == "session.created"
        send_signal(signal.SIGUSR1)
        await asyncio.sleep(0.2)  # until the signal has arrived
        speaking = asyncio.create_task(speak())
        async with asyncio.timeout(TURN_SECONDS):
            async for message in client:
                if json.loads(message)["type"] == "response.done":
                    send_signal(signal.SIGUSR2)
                    break
        await speaking


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + READY_SECONDS
    while not condition():
        assert time.monotonic() < ends, f"waited {READY_SECONDS:.0f} s until {what}"
        time.sleep(0.2)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "serve":
        traced_serve(Path(arguments[0]), int(arguments[1]))
    else:
        traced_say(Path(arguments[0]))
