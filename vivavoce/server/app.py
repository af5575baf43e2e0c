"""The server: what is at which address."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from vivavoce.errors import MissingDependencyError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.auth import Identity, Keys, check_place, key_of
from vivavoce.server.config import ServerOptions, is_loopback
from vivavoce.server.host import Host, ModelCard
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.realtime.websocket import serve_socket
from vivavoce.server.rest.audio import FileTranscriber, SpeechApi, SpeechMaker, TranscriptionApi
from vivavoce.server.rest.calls import CallsApi
from vivavoce.server.rest.http import UnstalledBodies, error_answer, json_answer
from vivavoce.server.rest.page import page_routes
from vivavoce.server.rest.voices import VoicesApi
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

logger = logging.getLogger(__name__)

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

Answer = Callable[["Request"], Awaitable["Response"]]
Handler = Callable[["Request", Identity], Awaitable["Response"]]


def build_app(
    host: Host,
    options: ServerOptions | None = None,
    speech: SpeechMaker | None = None,
    transcriber: FileTranscriber | None = None,
) -> "Starlette":
    """The ASGI application of a host; raises InputError for options that must not be served."""
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
    except ImportError as error:
        raise MissingDependencyError("serving needs Starlette: pip install 'vivavoce[server]'") from error
    options = options or ServerOptions()
    options.check()
    server = RealtimeServer(host, options, speech, transcriber)
    app = Starlette(
        routes=server.routes(),
        lifespan=server.lifespan,
        middleware=middleware(options),
        exception_handlers={HTTPException: refusal},
    )
    app.state.server = server
    return app


def refusal(request: "Request", error: Exception) -> "Response":
    """What Starlette refuses by itself, such as an address that is none, as the protocol says it."""
    status, detail = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    return error_answer(WireError(f"{request.method} {request.url.path}: {detail}", code, status=status))


def middleware(options: ServerOptions) -> list[Any]:
    """What says which pages may read our answers, and what refuses bodies that never come."""
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware

    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.allowed_origins),
        allow_origin_regex=LOOPBACK_ORIGIN if is_loopback(options.host) else None,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Location", "X-Request-Id"],
    )
    return [cors, Middleware(UnstalledBodies, seconds=options.stall_seconds)]


def serve(
    host: Host,
    options: ServerOptions | None = None,
    speech: SpeechMaker | None = None,
    transcriber: FileTranscriber | None = None,
) -> None:
    """Serve until interrupted."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependencyError("serving needs uvicorn: pip install 'vivavoce[server]'") from error
    options = options or ServerOptions()
    uvicorn.Server(uvicorn_config(build_app(host, options, speech, transcriber), options)).run()


def uvicorn_config(app: "Starlette", options: ServerOptions) -> Any:
    """How uvicorn runs the application. A message a little over the limit still gets its error event."""
    import uvicorn

    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        ws_max_size=options.most_event_bytes + (1 << 20),
        ws_per_message_deflate=False,
        ws_ping_interval=20,
        ws_ping_timeout=20,
        timeout_graceful_shutdown=5,
        access_log=False,
        server_header=False,
        log_config=None,  # its loggers have no handlers of their own: their records go where ours go
        log_level="warning",  # its lines of connections would hold their queries
    )


class RealtimeServer:
    """A host, its sessions and its keys, behind addresses."""

    def __init__(
        self,
        host: Host,
        options: ServerOptions,
        speech: SpeechMaker | None = None,
        transcriber: FileTranscriber | None = None,
    ) -> None:
        self.host, self.options = host, options
        self.speech, self.transcriber = speech, transcriber
        self.metrics = Metrics(host)
        self.keys = Keys(options)
        self.sessions = Sessions(host, options, self.metrics)

    @asynccontextmanager
    async def lifespan(self, app: "Starlette") -> AsyncIterator[None]:
        """Watch over the sessions while the server runs."""
        lasting = (self.sessions.sweep(), self.sessions.upkeep.run(), self.metrics.watch_loop())
        tasks = [asyncio.create_task(each) for each in lasting]
        with self.metrics.counting_exceptions():
            yield
            await self.sessions.close()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def routes(self) -> list[Any]:
        """Everything that has an address."""
        from starlette.routing import Route, WebSocketRoute

        calls = CallsApi(self.sessions, self.keys)
        voices = VoicesApi(self.host, self.speech, self.options)
        posts: dict[str, Handler] = {
            "/v1/realtime": calls.create,  # as the beta protocol had it
            "/v1/realtime/calls": calls.create,
            "/v1/realtime/calls/{call_id}/hangup": calls.hang_up,
            "/v1/realtime/client_secrets": calls.client_secret,
            "/v1/realtime/sessions": calls.legacy_session,
            "/v1/realtime/transcription_sessions": calls.legacy_session,
            "/v1/audio/voices": voices.create,
        }
        if self.speech is not None:
            posts["/v1/audio/speech"] = SpeechApi(self.speech).speak
        if self.transcriber is not None:
            listens = TranscriptionApi(self.transcriber, self.options)
            posts |= {"/v1/audio/transcriptions": listens.transcribe, "/v1/audio/translations": listens.translate}
        return [
            WebSocketRoute("/v1/realtime", self.realtime),
            *(Route(path, self.answering(handler), methods=["POST"]) for path, handler in posts.items()),
            Route("/v1/realtime/calls/{call_id}", self.answering(calls.hang_up), methods=["DELETE"]),
            Route("/v1/models", self.answering(self.models)),
            Route("/v1/models/{id:path}", self.answering(self.model)),
            Route("/v1/audio/voices", self.answering(voices.list)),
            Route("/v1/audio/voices/{id}", self.answering(voices.delete), methods=["DELETE"]),
            Route("/healthz", self.healthy),
            Route("/readyz", self.ready),
            Route("/metrics", self.answering(self.figures)),
            *page_routes(),
        ]

    async def realtime(self, websocket: "WebSocket") -> None:
        """A socket that speaks Realtime."""
        try:
            check_place(websocket.headers, self.options)
            caller = self.keys.admit(key_of(websocket.headers))
        except WireError as error:
            await websocket.send_denial_response(error_answer(error))
            return
        await serve_socket(websocket, caller, self.sessions)

    def answering(self, answer: Handler) -> Answer:
        """The answer, for those who may have it; errors as the protocol says them."""
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        async def guarded(request: "Request") -> "Response":
            try:
                check_place(request.headers, self.options)
                return await answer(request, self.keys.admit(key_of(request.headers)))
            except WireError as error:
                logger.debug("%s was refused: %s", _route(request), error.code)
                return error_answer(error)
            except VivaError as error:
                log_failure(logger, error, "%s was refused", _route(request))
                return error_answer(WireError(str(error)))
            except HTTPException as error:
                return refusal(request, error)
            except ClientDisconnect:  # in the middle of its body; nobody reads the answer
                return error_answer(WireError("the body ended too soon", "incomplete_body"))
            except Exception as error:
                log_failure(logger, error, "%s failed", _route(request))
                message = f"the request could not be handled: {type(error).__name__}"
                return error_answer(WireError(message, "internal_error", status=500, kind="server_error"))

        return guarded

    async def models(self, request: "Request", caller: Identity) -> "Response":
        """The models there are."""
        return json_answer({"object": "list", "data": self._cards()})

    async def model(self, request: "Request", caller: Identity) -> "Response":
        """One model."""
        id = request.path_params["id"]
        found = [card for card in self._cards() if card["id"] == id]
        if not found:
            raise WireError(f"there is no model {id!r} here", "model_not_found", "model", 404)
        return json_answer(found[0])

    async def healthy(self, request: "Request") -> "Response":
        """Whether the process is alive."""
        return json_answer({"status": "ok"})

    async def ready(self, request: "Request") -> "Response":
        """Whether clients can come."""
        is_ready = self.host.is_ready and not self.sessions.is_stopping
        return json_answer({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def figures(self, request: "Request", caller: Identity) -> "Response":
        """Figures for Prometheus."""
        from starlette.responses import Response

        page, content_type = self.metrics.page()
        return Response(page, media_type=content_type)

    def _cards(self) -> list[dict[str, Any]]:
        """The models as they are told; what each is for is an addition of ours."""
        others = {"speech": self.speech, "transcription": self.transcriber}
        cards = [
            *(_wire_card(card, "realtime") for card in self.host.models),
            *(_wire_card(ModelCard(maker.model), kind) for kind, maker in others.items() if maker is not None),
        ]
        return list(
            {card["id"]: card for card in cards}.values()
        )  # a server without conversations has the others alone


def _route(request: "Request") -> str:
    """Which handler it is; the path itself is the client's text."""
    return f"{request.method} {getattr(request.scope.get('route'), 'path', '?')}"


def _wire_card(card: ModelCard, kind: str) -> dict[str, Any]:
    known = {"id": card.id, "object": "model", "created": card.created, "owned_by": card.owned_by}
    return known | {"viva": {"kind": kind}}
