"""HTTP of the server: authenticated handlers, error responses, bodies within limits, `/v1/models`, the page's files."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.server.auth import Identity
from vivavoce.server.host import ModelCard
from vivavoce.server.realtime.client_events import decode_object
from vivavoce.server.rest.request_ids import REQUEST_ID
from vivavoce.server.wire import ErrorBody, WireError

logger = logging.getLogger(__name__)

Body = TypeVar("Body")
Result = TypeVar("Result")
Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Request, Identity], Awaitable[Response]]
MAX_BODY = 1 << 20

MEDIA_TYPES = {  # the table of the operating system may differ
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # cached, but validated: an old page never talks to a newer server
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# Handlers


def authenticated(
    handler: Handler, admit: Callable[[Request], Awaitable[Identity]], takes_browser_keys: bool = False
) -> Endpoint:
    """A route's endpoint: `admit` identifies the caller, exceptions become error bodies of the protocol."""

    async def endpoint(request: Request) -> Response:
        try:
            caller = await admit(request)
            if not takes_browser_keys:
                caller.check_may_do_more()
            return await handler(request, caller)
        except WireError as error:
            logger.debug("%s was refused: %s", _route(request), error.code)
            return error_response(error)
        except VivaError as error:
            log_failure(logger, error, "%s was refused", _route(request))
            return error_response(WireError(str(error)))
        except HTTPException as error:
            return http_exception_response(request, error)
        except ClientDisconnect:  # the response will not be read
            return error_response(WireError("the client has disconnected", "incomplete_body"))
        except Exception as error:
            log_failure(logger, error, "%s failed", _route(request))
            message = f"the request could not be handled: {type(error).__name__}"
            return error_response(WireError(message, "internal_error", status=500, kind="server_error"))

    return endpoint


def _route(request: Request) -> str:
    """The route and the id of a request; its path is text of the client and is not logged."""
    route, id = getattr(request.scope.get("route"), "path", "?"), request.scope.get(REQUEST_ID)
    return f"{request.method} {route}" + (f" ({id})" if id else "")


def http_exception_response(request: Request, error: Exception) -> Response:
    """The error response for an exception of Starlette, such as an unknown path."""
    status, detail = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    return error_response(WireError(f"{request.method} {request.url.path}: {detail}", code, status=status))


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body, of a struct or of plain values."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: WireError) -> Response:
    """The protocol's error body."""
    headers = {"Retry-After": "5"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    if error.status == 408:  # otherwise the rest of the body would be read as the next request
        headers = {"Connection": "close"}
    return json_response(ErrorBody(error.detail()), error.status, headers)


class StatusBody(Struct):
    """`/healthz` and `/readyz`."""

    status: str


def readiness_response(is_ready: bool) -> Response:
    """`/readyz`: 503 until clients can connect."""
    return json_response(StatusBody("ready" if is_ready else "not ready"), 200 if is_ready else 503)


class ModelExtension(Struct):
    """Our extension of a model object."""

    kind: str


class ModelObject(Struct):
    """A model of `/v1/models`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    viva: ModelExtension


class ModelList(Struct):
    """`/v1/models`."""

    object: Literal["list"]
    data: list[ModelObject]


def model_object(card: ModelCard, kind: str) -> ModelObject:
    """The model object of a card; `kind` is realtime, speech or transcription."""
    return ModelObject(card.id, "model", card.created, card.owned_by, ModelExtension(kind))


def models_response(models: Iterable[ModelObject], id: str | None) -> Response:
    """`/v1/models`, or the model of this id; a model with several uses is listed once."""
    known = {model.id: model for model in models}
    if id is None:
        return json_response(ModelList("list", list(known.values())))
    if id not in known:
        raise WireError(f"there is no model {id!r} here", "model_not_found", "model", 404)
    return json_response(known[id])


# Bodies


class BodyLimits:
    """ASGI middleware: refuses a body that is too large, or of which nothing arrives for some seconds.

    Both are checked when the handler reads the body, which it does after authentication: by the announced length before
    any of it is read, and by the bytes that have come.
    """

    def __init__(self, app: ASGIApp, seconds: float, max_bytes: int) -> None:
        self.app, self.seconds, self.max_bytes = app, seconds, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; WebSockets pass through."""
        is_complete, size = scope["type"] != "http", 0

        async def receive_within_limits() -> Message:
            nonlocal is_complete, size
            if is_complete:
                return await receive()
            self._check(_content_length(scope))
            try:
                message = await asyncio.wait_for(receive(), self.seconds)
            except TimeoutError as error:
                problem = f"no data of the request body arrived for {self.seconds:g} s"
                raise WireError(problem, "request_timeout", status=408) from error
            is_complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            self._check(size)
            return message

        await self.app(scope, receive_within_limits, send)

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            problem = f"the body is larger than {self.max_bytes} bytes"
            raise WireError(problem, "body_too_large", status=413)


def _content_length(scope: Scope) -> int:
    """The announced length of a body; 0 where there is none. The HTTP parser has checked that it is a number."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is cancelled when the client disconnects. The body must have been read."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def json_body(request: Request, kind: type[Body], param: str = "") -> Body:
    """The JSON object of a request's body; an empty body is an empty object."""
    return decode_body(await read_body(request), kind, param)


def decode_body(data: bytes, kind: type[Body], param: str = "") -> Body:
    """The JSON object in these bytes; without any it is an empty object."""
    return decode_object(data.decode("utf8", "replace") if data.strip() else "{}", kind, param)


async def read_body(request: Request, max_bytes: int = MAX_BODY) -> bytes:
    """The bytes of a body; WireError 413 beyond the limit."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise WireError(f"the body is larger than {max_bytes} bytes", "body_too_large", status=413)
        chunks.append(chunk)
    return b"".join(chunks)


def one_of(value: str, known: Iterable[str], param: str) -> str:
    """The value; WireError where it is not one of the known ones."""
    if value not in (names := tuple(known)):
        raise WireError(f"{value!r} is not one of {', '.join(names)}", param=param)
    return value


def within(low: float, high: float, value: float, param: str) -> float:
    """The value; WireError where it is not between the limits."""
    if not low <= value <= high:
        raise WireError(f"{param} must be {low:g} to {high:g}, not {value!r}", param=param)
    return value


async def read_upload(form: FormData, name: str, max_bytes: int) -> bytes:
    """The bytes of a form's file; WireError where it is missing or too large."""
    upload = form.get(name)
    if upload is None or isinstance(upload, str):
        raise WireError(f"the file {name} is missing", "missing_file", name)
    data = bytes(await upload.read(max_bytes + 1))
    if len(data) > max_bytes:
        raise WireError(f"the file is larger than {max_bytes >> 20} MiB", "file_too_large", name, 413)
    return data


# The page


@dataclass(frozen=True)
class PageFile:
    """One file of the page."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """A hash of the content."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def respond(self, request: Request) -> Response:
        """The file, or 304 where the browser's copy is current."""
        headers = PAGE_HEADERS | {"ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def page_files() -> dict[str, PageFile]:
    """The files of the page by name; all come from the package."""
    found: dict[str, PageFile] = {}
    for file in files("vivavoce.server").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            found[file.name] = PageFile(file.read_bytes(), media_type)
    return found


def page_routes() -> list[Route]:
    """Routes of the page, which need no key."""
    paths = {"/" if name == "index.html" else f"/{name}": file for name, file in page_files().items()}
    return [Route(path, file.respond) for path, file in paths.items()]
