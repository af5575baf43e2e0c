"""Events to and from a server that speaks OpenAI's Realtime protocol over a WebSocket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import numpy as np

from vivavoce.errors import InputError, MissingDependencyError, VivaError

AGAIN_SECONDS = 0.2  # after which TCP sends a lost packet again


@dataclass(frozen=True)
class Line:
    """How bad it is. Sound that is lost on its way up becomes silence, as behind a telephone gateway; a message lost on
    its way down is sent again, and everything behind it waits, as on a socket."""

    loss: float = 0.0
    jitter: float = 0.0
    """Seconds a message is late on average, exponentially distributed."""
    delay: float = 0.0
    """Seconds every message takes."""


PERFECT = Line()


@dataclass
class Way:
    """One direction of a line: never faster than the message before."""

    line: Line
    seed: int = 0
    _last: float = 0.0
    _source: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._source = np.random.default_rng(self.seed)

    def loses(self) -> bool:
        """Whether the next packet is lost."""
        return bool(self._source.random() < self.line.loss)

    def arrival(self, sent: float, resent: bool = False) -> float:
        """When a message sent at this time arrives; `resent`: lost ones are sent again."""
        late = self.line.delay + (self._source.exponential(self.line.jitter) if self.line.jitter else 0.0)
        if resent and self.loses():
            late += AGAIN_SECONDS
        self._last = max(self._last, sent + late)
        return self._last


Event = dict[str, Any]
OPEN_SECONDS = 20.0


class WireClosedError(VivaError):
    """The other side is gone."""


class Wire(Protocol):
    """A connection; `receive` raises `WireClosedError` when it is over."""

    async def send(self, event: Event) -> None:
        """An event goes out."""
        ...

    async def receive(self) -> Event:
        """The next event that comes."""
        ...


def realtime_url(url: str, model: str | None = None) -> str:
    """The WebSocket address that a server's address stands for: `host:8000`, `https://host/v1` or the full one."""
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise InputError(f"{url!r} is not the address of a server; write ws://host:8000/v1/realtime")
    path = parts.path.rstrip("/")
    if not path:
        path = "/v1/realtime"
    elif path.endswith("/v1"):
        path += "/realtime"
    query = dict(parse_qsl(parts.query))
    if model is not None:
        query["model"] = model
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, urlencode(query), ""))


class SocketWire:
    """A WebSocket of the `websockets` library."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def send(self, event: Event) -> None:
        """An event goes out."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(json.dumps(event))
        except ConnectionClosed as error:
            raise WireClosedError(_goodbye(error)) from error

    async def receive(self) -> Event:
        """The next event that comes; what is no event is passed over."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                message = await self._socket.recv()
            except ConnectionClosed as error:
                raise WireClosedError(_goodbye(error)) from error
            event = json.loads(message) if isinstance(message, str) else None
            if isinstance(event, dict):
                return event


@asynccontextmanager
async def connect(url: str, key: str | None = None) -> AsyncIterator[Wire]:
    """A connection to a Realtime server; an error in one line where there is none to be had."""
    try:
        from websockets.asyncio.client import connect as open_socket
        from websockets.exceptions import InvalidStatus, WebSocketException
    except ImportError as error:
        raise MissingDependencyError("talking to a server needs websockets: pip install 'vivavoce[server]'") from error
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opening = open_socket(
        url,
        additional_headers=headers,
        max_size=None,
        max_queue=None,
        compression=None,
        open_timeout=OPEN_SECONDS,
    )
    try:
        socket = await opening
    except InvalidStatus as error:
        status = error.response.status_code
        hint = "; give --api-key" if status in (401, 403) else ""
        raise InputError(f"{url} refused the connection with HTTP {status}{hint}") from error
    except (OSError, TimeoutError, WebSocketException) as error:
        raise InputError(f"cannot connect to {url}: {error}; is the server running?") from error
    async with socket:
        yield SocketWire(socket)


class BadWire:
    """A wire behind a bad line. Start it with `async with`."""

    def __init__(self, wire: Wire, line: Line, seed: int = 0) -> None:
        self._wire = wire
        self._up, self._down = Way(line, seed), Way(line, seed + 1)
        self._leaving: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        self._coming: asyncio.Queue[tuple[float, Event | WireClosedError]] = asyncio.Queue()

    async def __aenter__(self) -> "BadWire":
        self._tasks = [asyncio.create_task(self._carry_up()), asyncio.create_task(self._carry_down())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send(self, event: Event) -> None:
        """An event goes out, and will arrive."""
        self._leaving.put_nowait((self._up.arrival(_now()), event))

    async def receive(self) -> Event:
        """The next event that comes, when it has come."""
        moment, event = await self._coming.get()
        await asyncio.sleep(max(0.0, moment - _now()))
        if isinstance(event, WireClosedError):
            raise event
        return event

    async def _carry_up(self) -> None:
        while True:
            moment, event = await self._leaving.get()
            await asyncio.sleep(max(0.0, moment - _now()))
            try:
                await self._wire.send(event)
            except WireClosedError:
                return

    async def _carry_down(self) -> None:
        while True:
            try:
                event = await self._wire.receive()
            except WireClosedError as error:
                self._coming.put_nowait((_now(), error))
                return
            self._coming.put_nowait((self._down.arrival(_now(), resent=True), event))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _goodbye(error: Any) -> str:
    close = error.rcvd
    return "the server is gone" if close is None else f"the server closed with {close.code} {close.reason}".rstrip()
