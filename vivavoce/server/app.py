"""The ASGI application of a server: its routes, middleware and lifespan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from vivavoce.errors import InputError
from vivavoce.server.admission import AdmissionController, LoopMonitor
from vivavoce.server.auth import Identity, Keys, check_origin, request_key
from vivavoce.server.config import ServerOptions, is_loopback
from vivavoce.server.drain import ActiveRequests, Drain, RequestTracking
from vivavoce.server.host import Announcer, FileTranscriber, Host, ModelCard, SpeechMaker, abilities_of
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.realtime.websocket import serve_socket
from vivavoce.server.rest.about import AboutApi
from vivavoce.server.rest.calls import CallsApi
from vivavoce.server.rest.http import (
    MAX_BODY,
    BodyLimits,
    Endpoint,
    Handler,
    StatusBody,
    authenticated,
    error_response,
    http_exception_response,
    json_response,
    model_object,
    models_response,
    page_routes,
    readiness_response,
)
from vivavoce.server.rest.request_ids import RequestIds
from vivavoce.server.rest.sip_calls import SipCallsApi
from vivavoce.server.rest.speech import SpeechApi
from vivavoce.server.rest.transcriptions import TranscriptionApi
from vivavoce.server.rest.voices import VoicesApi
from vivavoce.server.stalls import StallWatch
from vivavoce.server.telephony.audiosocket import AudioSocketServer
from vivavoce.server.telephony.media_streams import PATH, MediaStreams
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent

STALL_SECONDS = 0.1  # of the event loop; longer ones are logged
WEBHOOK_SECONDS = 5.0  # for the last ones when the server ends
LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def build_app(
    host: Host,
    options: ServerOptions | None = None,
    speech: SpeechMaker | None = None,
    transcriber: FileTranscriber | None = None,
) -> Starlette:
    """The ASGI application of a host; raises InputError for options that must not be served."""
    options = options or ServerOptions()
    options.check()
    if options.greeting is not None and not isinstance(host, Announcer):
        raise InputError("this server cannot speak a greeting; use --greeting-instructions")
    if options.tools and not abilities_of(host).tools:
        raise InputError("--tool needs a model that calls tools: --chat, or --tool-model for a speech-to-speech model")
    server = RealtimeServer(host, options, speech, transcriber)
    app = Starlette(
        routes=server.routes(),
        lifespan=server.lifespan,
        middleware=[Middleware(RequestTracking, active=server.requests), *middleware(options)],
        exception_handlers={HTTPException: http_exception_response},
    )
    app.state.server = server
    return app


def middleware(options: ServerOptions) -> list[Middleware]:
    """Request ids, CORS, and the limits of request bodies."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.allowed_origins),
        allow_origin_regex=LOOPBACK_ORIGIN if is_loopback(options.host) else None,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Location", "X-Request-Id"],
    )
    max_bytes = options.max_upload_bytes + MAX_BODY  # the file of a form, and its other fields
    return [Middleware(RequestIds), cors, Middleware(BodyLimits, seconds=options.stall_seconds, max_bytes=max_bytes)]


def serve(
    host: Host,
    options: ServerOptions | None = None,
    speech: SpeechMaker | None = None,
    transcriber: FileTranscriber | None = None,
) -> None:
    """Serve until interrupted."""
    from vivavoce.server.doors.supervisor import new_server

    options = options or ServerOptions()
    new_server(build_app(host, options, speech, transcriber), options).run()


class RealtimeServer:
    """The sessions, the keys and the routes of one host."""

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
        self.loop_monitor = LoopMonitor(self.metrics.lag.observe)
        self.admission = AdmissionController(self.loop_monitor, options)
        self.sessions = Sessions(host, options, self.metrics, self.admission)
        self.audiosocket: AudioSocketServer | None = None
        if options.audiosocket is not None:
            self.audiosocket = AudioSocketServer(self.sessions, options)
        self.sip = self._new_user_agent() if options.sip.listen else None
        self.requests: ActiveRequests = set()
        self.drain = Drain(self.sessions, self.requests, options.drain_seconds)

    def _new_user_agent(self) -> "UserAgent":
        from vivavoce.server.sip.agent import UserAgent

        return UserAgent(self.sessions, self.options)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Run the background tasks of the sessions and the metrics while the server runs."""
        webhooks = self.sessions.webhooks
        background = [self.sessions.sweep(), self.sessions.cleanup.run(), self.loop_monitor.run()]
        tasks = [asyncio.create_task(each) for each in (*background, *([webhooks.run()] if webhooks else []))]
        with self.metrics.exceptions.counting(), StallWatch(STALL_SECONDS).watching():
            if self.audiosocket is not None:
                await self.audiosocket.start()
            if self.sip is not None:
                await self.sip.start()
            yield
            await self.sessions.close()
            if self.audiosocket is not None:
                await self.audiosocket.close()
            if self.sip is not None:
                await self.sip.close()
            if webhooks is not None:
                await webhooks.finish(WEBHOOK_SECONDS)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def routes(self) -> list[BaseRoute]:
        """The routes of all APIs and of the page."""
        calls = CallsApi(self.sessions, self.keys)
        sip_calls = SipCallsApi(self.sip, self.sessions.calls)
        voices = VoicesApi(self.host, self.speech, self.options)
        openings: dict[str, Handler] = {
            "/v1/realtime": calls.create,  # the path of the beta protocol
            "/v1/realtime/calls": calls.create,
            "/v1/realtime/calls/{call_id}": calls.renegotiate,
            "/v1/realtime/calls/{call_id}/hangup": calls.hang_up,
        }
        posts: dict[str, Handler] = {
            "/v1/realtime/client_secrets": calls.client_secret,
            "/v1/realtime/sessions": calls.legacy_session,
            "/v1/realtime/transcription_sessions": calls.legacy_session,
            "/v1/realtime/calls/{call_id}/accept": sip_calls.accept,
            "/v1/realtime/calls/{call_id}/reject": sip_calls.reject,
            "/v1/realtime/calls/{call_id}/refer": sip_calls.refer,
            "/v1/realtime/calls/{call_id}/dtmf": sip_calls.press_keys,
            "/v1/audio/voices": voices.create,
        }
        if self.speech is not None:
            posts["/v1/audio/speech"] = SpeechApi(self.speech).speak
        if self.transcriber is not None:
            transcriptions = TranscriptionApi(self.transcriber, self.options)
            posts["/v1/audio/transcriptions"] = transcriptions.transcribe
            posts["/v1/audio/translations"] = transcriptions.translate
        return [
            WebSocketRoute("/v1/realtime", self.realtime),
            Route("/v1/realtime/calls/dial", self._endpoint(sip_calls.dial), methods=["POST"]),
            Route("/v1/realtime/calls", self._endpoint(sip_calls.list), methods=["GET"]),
            Route("/v1/realtime/calls/{call_id}", self._endpoint(sip_calls.find), methods=["GET"]),
            *(Route(path, self._endpoint(handler, True), methods=["POST"]) for path, handler in openings.items()),
            Route("/v1/realtime/calls/{call_id}", self._endpoint(calls.hang_up, True), methods=["DELETE"]),
            Route("/about", self._endpoint(AboutApi(self.host, self.options).read, True)),
            *(Route(path, self._endpoint(handler), methods=["POST"]) for path, handler in posts.items()),
            Route("/v1/models", self._endpoint(self.models)),
            Route("/v1/models/{id:path}", self._endpoint(self.models)),
            Route("/v1/audio/voices", self._endpoint(voices.list)),
            Route("/v1/audio/voices/{id}", self._endpoint(voices.delete), methods=["DELETE"]),
            Route("/healthz", self.healthy),
            Route("/readyz", self.ready),
            Route("/metrics", self._endpoint(self.metrics_page)),
            *self._telephony_routes(),
            *page_routes(),
        ]

    def _telephony_routes(self) -> list[BaseRoute]:
        if not self.options.media_streams:
            return []
        streams = MediaStreams(self.sessions, self.keys)
        return [WebSocketRoute(path, streams.serve) for path in (PATH, PATH + "/{key}")]

    async def realtime(self, websocket: WebSocket) -> None:
        """A WebSocket of the Realtime protocol."""
        try:
            check_origin(websocket.headers, self.options)
            caller = self.keys.admit(request_key(websocket.headers))
        except WireError as error:
            await websocket.send_denial_response(error_response(error))
            return
        await serve_socket(websocket, caller, self.sessions)

    async def models(self, request: Request, caller: Identity) -> Response:
        """`/v1/models` and `/v1/models/{id}`."""
        others = {"speech": self.speech, "transcription": self.transcriber}
        models = [
            *(model_object(card, "realtime") for card in self.host.models),
            *(model_object(ModelCard(model.model), kind) for kind, model in others.items() if model is not None),
        ]
        return models_response(models, request.path_params.get("id"))

    async def healthy(self, request: Request) -> Response:
        """Whether the process is alive."""
        return json_response(StatusBody("ok"))

    async def ready(self, request: Request) -> Response:
        """Whether clients can connect."""
        is_ready = self.host.is_ready and not self.sessions.is_stopping
        return readiness_response(is_ready)

    async def metrics_page(self, request: Request, caller: Identity) -> Response:
        """`/metrics`, for Prometheus."""
        page, content_type = self.metrics.page()
        return Response(page, media_type=content_type)

    def _endpoint(self, handler: Handler, takes_browser_keys: bool = False) -> Endpoint:
        return authenticated(handler, self._admit, takes_browser_keys)

    async def _admit(self, request: Request) -> Identity:
        check_origin(request.headers, self.options)
        return self.keys.admit(request_key(request.headers))
