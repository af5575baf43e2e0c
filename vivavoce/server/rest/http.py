"""Bodies of requests, read within limits."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_json import parsed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from starlette.responses import Response


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


async def uploaded(form: Mapping[str, Any], name: str, most_bytes: int) -> bytes:
    """The bytes of a form's file; WireError where there is none, or too much of it."""
    upload = form.get(name)
    if upload is None or isinstance(upload, str):
        raise WireError(f"there is no {name}", "missing_file", name)
    data = bytes(await upload.read(most_bytes + 1))
    if len(data) > most_bytes:
        raise WireError(f"a file of more than {most_bytes >> 20} MiB", "file_too_large", name, 413)
    return data


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> "Response":
    """A JSON body."""
    from starlette.responses import JSONResponse

    return JSONResponse(body, status, headers)


def error_answer(error: WireError) -> "Response":
    """The protocol's error body."""
    headers = {"Retry-After": "5"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    if error.status == 408:  # what may still come of the body is nobody's
        headers = {"Connection": "close"}
    return json_answer({"error": error.as_error()}, error.status, headers)
