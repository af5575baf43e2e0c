"""Draining: a server that is told to stop opens no sessions, and lets replies and requests in progress finish."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from vivavoce.server.realtime.sessions import Sessions

LOOK_SECONDS = 0.05
CLOSE_SECONDS = 3.0  # for the close frames; a connection has 2 s for the events before it

ActiveRequests = set[object]
"""A token of each HTTP request in progress."""


class RequestTracking:
    """ASGI middleware: notes which HTTP requests are in progress."""

    def __init__(self, app: ASGIApp, active: ActiveRequests) -> None:
        self.app, self.active = app, active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; WebSockets pass through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        token = object()
        self.active.add(token)
        try:
            await self.app(scope, receive, send)
        finally:
            self.active.discard(token)


class Drain:
    """Ends the sessions of a server, each when its reply has been played, and waits for its requests."""

    def __init__(self, sessions: Sessions, requests: ActiveRequests, seconds: float) -> None:
        self._sessions, self._requests, self._seconds = sessions, requests, seconds

    async def run(self, is_hurried: Callable[[], bool]) -> None:
        """Return when all sessions have ended: in time, or because the time is over or there is a hurry."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        requests = set(self._requests)  # those that come later are not waited for
        sessions = list(self._sessions)
        self._sessions.is_stopping = True
        while self._sessions.end_idle() or requests & self._requests:
            if loop.time() >= deadline or is_hurried():
                break
            await asyncio.sleep(LOOK_SECONDS)
        await self._sessions.close()
        deadline = loop.time() + CLOSE_SECONDS
        while any(session.connections for session in sessions) and loop.time() < deadline:
            await asyncio.sleep(LOOK_SECONDS)


class DrainingServer(uvicorn.Server):
    """uvicorn that drains before it closes its sockets; a second Ctrl-C cuts that short."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def drain(self) -> None:
        """End the sessions."""
        await self._drain.run(lambda: self.force_exit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the sockets and end the application."""
        await self.drain()
        await super().shutdown(sockets)
