"""Answers over HTTP."""

from typing import TYPE_CHECKING, Any

from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.responses import Response


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
