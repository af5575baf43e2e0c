"""Ids of requests: `x-request-id` in every HTTP response and WebSocket handshake, and in the log of what failed."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
REQUEST_ID = "viva.request_id"  # in the scope of a request
STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class RequestIds:
    """ASGI middleware: gives each request an id, unless the server behind a proxy has given one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or a socket."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        id = scope[REQUEST_ID] = f"req_{secrets.token_hex(16)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] in STARTS:
                message.setdefault("headers", [])
                MutableHeaders(scope=message).setdefault(HEADER, id)
            await send(message)

        await self.app(scope, receive, send_with_id)
