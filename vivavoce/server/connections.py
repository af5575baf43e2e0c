"""Limits of connections before a request is known: the size of its head, the time it may take, and how many wait.

All of this is checked before the key: an anonymous client could otherwise hold memory, file descriptors and the event
loop. When too many connections wait, the oldest are closed: the head of a usual client is complete within
milliseconds, so it is not among them.
"""

import asyncio
import logging
from collections import OrderedDict
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from vivavoce.server.config import ServerOptions

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 16 << 10
MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 << 10
MAX_DISCARDED_BYTES = 16 << 20  # of a body whose request was answered: a client reads the answer only after its body
REFUSALS = {408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large"}


class HeadTooLargeError(Exception):
    """The head of a request is beyond the limits."""


class PendingConnections:
    """Connections without a complete request head, oldest first: of each address, and of all."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections, self._max_per_address = max_connections, max_per_address
        self._all: OrderedDict[BoundedHttpProtocol, str] = OrderedDict()
        self._by_address: dict[str, OrderedDict[BoundedHttpProtocol, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: "BoundedHttpProtocol", address: str) -> None:
        """Add a connection; the oldest one beyond a limit is closed."""
        self._all[connection] = address
        of_address = self._by_address.setdefault(address, OrderedDict())
        of_address[connection] = None
        if len(of_address) > self._max_per_address:
            next(iter(of_address)).give_up()
        elif len(self._all) > self._max_connections:
            next(iter(self._all)).give_up()

    def remove(self, connection: "BoundedHttpProtocol") -> None:
        """Remove a connection, if it is there."""
        address = self._all.pop(connection, None)
        if address is not None:
            of_address = self._by_address[address]
            del of_address[connection]
            if not of_address:
                del self._by_address[address]


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol of HTTP/1.1 and of the WebSocket handshake, with limits on request heads.

    The parser buffers an unfinished header, and the trailers of a body alike: bytes that lead to no callback are
    counted, whatever they are.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        pending: PendingConnections,
        head_seconds: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._pending, self._head_seconds = pending, head_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._buffered_bytes = self._discarded_bytes = 0
        self._callbacks = 0
        self._is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the first request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes."""
        if self.transport.is_closing():
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        callbacks = self._callbacks
        super().data_received(data)
        self._buffered_bytes = self._buffered_bytes + len(data) if self._callbacks == callbacks else 0
        if self._buffered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = self._discarded_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request's URL."""
        self._callbacks += 1
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._raise_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._callbacks += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._raise_too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the application has its own limits for the rest."""
        self._callbacks += 1
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body; after the response it is discarded, up to a limit."""
        self._callbacks += 1
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that could not be parsed."""
        if self._is_too_large:
            self._refuse(431)
        else:
            self._end_head()
            super().send_400_response(msg)

    def give_up(self) -> None:
        """Close the connection: its request did not come in time, or others need its place."""
        self._refuse(408)

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._head_seconds, self.give_up)
        self._pending.add(self, self.client[0] if self.client else "unknown")

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pending.remove(self)

    def _raise_too_large(self) -> None:
        self._is_too_large = True
        raise HeadTooLargeError  # the parser reports it as an invalid request

    def _refuse(self, status: int) -> None:
        self._end_head()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            logger.debug("a connection was refused with %d before its request was complete", status)
            self.transport.write(
                b"HTTP/1.1 " + REFUSALS[status] + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()


class QuietWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol of WebSockets; it takes a refused handshake for one that was forgotten, and logs an error."""

    async def send(self, message: Any) -> None:
        """Send a message of the application."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True


def bounded_protocol(options: ServerOptions) -> Any:
    """The protocol class of a server with these options, for uvicorn's `http`; its connections are counted together."""
    pending = PendingConnections(options.max_pending_connections, options.max_pending_per_address)
    return partial(BoundedHttpProtocol, pending=pending, head_seconds=options.head_seconds)
