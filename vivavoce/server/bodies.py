"""Bodies of requests, read within limits."""

import asyncio
from typing import TYPE_CHECKING, Any

from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_json import parsed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Wire = dict[str, Any]
LARGEST_BODY = 1 << 20


class UnstalledBodies:
    """ASGI middleware: a body of which nothing more comes for so long is refused, and its connection closed."""

    def __init__(self, app: "ASGIApp", seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """A request; sockets are none of its business."""
        is_whole = scope["type"] != "http"

        async def received() -> "Message":
            nonlocal is_whole
            if is_whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.seconds)
            except TimeoutError as error:
                told = f"nothing more of the body came for {self.seconds:g} s"
                raise WireError(told, "request_timeout", status=408) from error
            is_whole = not message.get("more_body", False)
            return message

        await self.app(scope, received, send)


async def json_body(request: "Request") -> Wire:
    """The object in a body; an empty body is an empty object."""
    data = await body(request)
    return json_object(data.decode("utf8", "replace")) if data.strip() else {}


async def body(request: "Request", most: int = LARGEST_BODY) -> bytes:
    """The bytes of a body, if they are not too many."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise WireError(f"a body of more than {most} bytes", "body_too_large", status=413)
        pieces.append(piece)
    return b"".join(pieces)


def json_object(written: str) -> Wire:
    """The JSON object that a text is."""
    value = parsed(written)
    if not isinstance(value, dict):
        raise WireError("the body must be a JSON object", "invalid_type")
    return value
