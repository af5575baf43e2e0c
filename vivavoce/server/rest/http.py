"""Bodies of requests, read within limits."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vivavoce.server.realtime.client_events import decode_json
from vivavoce.server.wire_error import WireError

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
    value = decode_json(written)
    if not isinstance(value, dict):
        raise WireError("the body must be a JSON object", "invalid_type")
    return value


def text(value: Any, param: str) -> str:
    """A text, or an error that says it is none."""
    if not isinstance(value, str):
        raise WireError(f"{param} must be text, not {type(value).__name__}", "invalid_type", param)
    return value


def one_of(value: Any, known: Iterable[str], param: str) -> str:
    """A value of these, or an error that names them."""
    if value not in (names := tuple(known)):  # which also takes what cannot be hashed
        raise WireError(f"{value!r} is not one of {', '.join(names)}", param=param)
    return str(value)


def within(low: float, high: float) -> Callable[[Any, str], float]:
    """A check that a number lies between two."""

    def check(value: Any, param: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise WireError(f"{param} must be {low:g} to {high:g}, not {value!r}", param=param)
        return float(value)

    return check


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
