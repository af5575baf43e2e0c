"""A server on a real port, and a plain client that waits for events with a deadline."""

import asyncio
import base64
import contextlib
import json
import socket
from dataclasses import replace

import numpy as np
import uvicorn.server
import websockets
from uvicorn import Server
from websockets.exceptions import ConnectionClosed

from tests.server.scripted import ScriptedHost
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.doors.supervisor import Doors, EngineServer, new_server
from vivavoce.server.realtime.audio_formats import WireFormat, encode
from vivavoce.server.uvicorn_settings import uvicorn_config

DEADLINE = 20.0  # far beyond what anything here takes, also on a busy machine
LOOK_SECONDS = 0.005


class QuickLooks:
    """asyncio as uvicorn sees it here: between two looks whether it may end, it sleeps 5 ms instead of 100."""

    def __getattr__(self, name: str):
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, LOOK_SECONDS))


uvicorn.server.asyncio = QuickLooks()


class RunningServer:
    """A server in this event loop; with `doors`, behind that number of processes."""

    def __init__(self, host: ScriptedHost, options: ServerOptions) -> None:
        """Limits of two options are those given only where they are not the default.

        Many replies here hang (`drain_seconds`), and clients and server share cores and often a loop (`max_lag_ms`).
        """
        drain_seconds = 0.0 if options.drain_seconds == ServerOptions.drain_seconds else options.drain_seconds
        max_lag_ms = 60_000.0 if options.max_lag_ms == ServerOptions.max_lag_ms else options.max_lag_ms
        self.host = host
        self.options = replace(
            options, port=0, doors=options.doors or 0, drain_seconds=drain_seconds, max_lag_ms=max_lag_ms
        )
        self.port = 0
        self.use(build_app(host, self.options))

    def use(self, app) -> None:
        """Serve this application."""
        self.app = app
        has_sessions = hasattr(app.state, "server")
        self._server = new_server(app, self.options) if has_sessions else Server(uvicorn_config(app, self.options))

    @property
    def sessions(self):
        return self.app.state.server.sessions

    @property
    def doors(self) -> Doors:
        """The processes in front of it, if it was started with any."""
        return self._server.doors

    @property
    def http(self) -> str:
        return self.options.address(self.port)

    @property
    def ws(self) -> str:
        return self.http.replace("http", "ws", 1)

    async def __aenter__(self) -> "RunningServer":
        self._task = asyncio.create_task(self._server._serve())  # without its signal handlers
        while not self._server.started:
            assert not self._task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        is_behind_doors = isinstance(self._server, EngineServer)
        self.port = self._server.doors.port if is_behind_doors else self._server.servers[0].sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error) -> None:
        self._server.should_exit = True
        await asyncio.wait_for(self._task, DEADLINE)


class Client:
    """Speaks the wire, and remembers everything it was told."""

    def __init__(self, socket) -> None:
        self.socket = socket
        self.events: list[dict] = []
        self.frames: list[bytes] = []

    async def send(self, type: str, **fields) -> None:
        await self.socket.send(json.dumps({"type": type, **fields}))

    async def next(self) -> dict:
        while True:
            message = await asyncio.wait_for(self.socket.recv(), DEADLINE)
            if isinstance(message, bytes):
                self.frames.append(message)
                continue
            self.events.append(json.loads(message))
            return self.events[-1]

    async def until(self, *types: str) -> dict:
        """The next event of one of these types."""
        while True:
            event = await self.next()
            if event["type"] in types:
                return event
            if event["type"] == "error":
                raise AssertionError(f"waiting for {types}, got {event}")

    async def error(self) -> dict:
        """The next error."""
        while (event := await self.next())["type"] != "error":
            pass
        return event["error"]

    async def closed(self) -> int:
        """Read on until the server closes; the code it closes with."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        return self.socket.close_code

    async def say(self, text: str, **response) -> dict:
        """A whole text turn; the response that ended it."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", **({"response": response} if response else {}))
        return (await self.until("response.done"))["response"]

    async def speak(self, samples: np.ndarray, format: WireFormat | None = None, piece_ms: int = 100) -> None:
        """Sound as a microphone gives it, though not in its time."""
        format = format or WireFormat()
        data = encode(samples, format)
        step = piece_ms * format.rate // 1000 * format.bytes_per_sample
        for begin in range(0, len(data), step):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data[begin : begin + step]).decode())

    def of_type(self, *types: str) -> list[dict]:
        return [event for event in self.events if event["type"] in types]

    def sound(self, format: WireFormat | None = None) -> bytes:
        """The bytes of all sound that came."""
        return b"".join(base64.b64decode(event["delta"]) for event in self.of_type("response.output_audio.delta"))


def drop_connections(server: RunningServer) -> None:
    """Close every connection as a restarted server does."""
    for session in server.sessions:
        for connection in tuple(session.connections):
            connection.drop(1012, "restart")


@contextlib.asynccontextmanager
async def connected(server: RunningServer, query: str = "?model=any", key: str | None = None, **options):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"max_size": None, "max_queue": None} | options  # a full queue would keep the close from being read
    async with websockets.connect(f"{server.ws}/v1/realtime{query}", additional_headers=headers, **options) as socket:
        yield Client(socket)


async def eventually(condition, what: str) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
