"""The ingress of a fleet: the routes of one server, and sockets that are proxied to the replicas of their sessions."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from vivavoce.log import log_failure
from vivavoce.server.app import middleware
from vivavoce.server.auth import Identity, offered_protocols
from vivavoce.server.cluster.options import FleetOptions
from vivavoce.server.cluster.registry import RegistryClient
from vivavoce.server.cluster.requests import AdmissionGate, RequestForwarder
from vivavoce.server.cluster.router import RESUME_LATER, HeldPlacement, ReplicaRouter, SessionRequest, Upstream
from vivavoce.server.cluster.session_mirror import MirroredEvents, SessionMirror
from vivavoce.server.config import ServerOptions
from vivavoce.server.metrics import ExceptionCounter
from vivavoce.server.realtime.server_events import ServerEvent, encode, error_event
from vivavoce.server.realtime.websocket import BINARY_PROTOCOLS, DELIBERATE, chosen_protocol, close_code, refuse
from vivavoce.server.rest.http import Handler, error_response, page_routes
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # how often the ingress looks for draining replicas
SPARE_SECONDS = 5.0
RETRY_SECONDS = 0.25
LOST = {1006, 1012}  # close codes of a replica that failed or stops, not of a session that ended


def ingress_app(options: FleetOptions, registry: RegistryClient) -> Starlette:
    """The ASGI application of an ingress."""
    ingress = Ingress(options, registry)
    app = Starlette(routes=ingress.routes(), lifespan=ingress.lifespan, middleware=middleware(options.server))
    app.state.ingress = ingress
    return app


class Ingress:
    """Admits or refuses clients without queueing them; mirrors their sessions to restore them at other replicas."""

    def __init__(self, options: FleetOptions, registry: RegistryClient) -> None:
        self.options, self.registry = options, registry
        self.server: ServerOptions = options.server
        self.exceptions = ExceptionCounter()
        self._gate = AdmissionGate(self.server, registry)
        self._router = ReplicaRouter(registry, options.kept_sound_seconds)
        self._requests = RequestForwarder(
            registry, self._router, self._gate, tuple(options.pools), self.server.max_upload_bytes, self.exceptions
        )
        self._held: dict[str, HeldPlacement] = {}
        self._proxies: set[SessionProxy] = set()

    def stop(self) -> None:
        """All replicas end: sessions are not moved any more, they end with their replicas."""
        self._router.is_stopping = True

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Hold the HTTP client of the replicas, and watch for replicas that drain."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as http:
            self._router.http = http
            watching = asyncio.create_task(self._watch())
            with self.exceptions.counting():
                yield
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def routes(self) -> list[BaseRoute]:
        """The routes of one server, and of the page."""
        requests, endpoint = self._requests, self._gate.endpoint
        posts: dict[str, Handler] = {
            "/v1/realtime/calls/{call_id}": requests.forward_to_call,
            "/v1/realtime/calls/{call_id}/hangup": requests.forward_to_call,
            "/v1/realtime/client_secrets": requests.create_browser_key,
            "/v1/realtime/sessions": requests.create_browser_key,
            "/v1/realtime/transcription_sessions": requests.create_browser_key,
            "/v1/audio/voices": requests.forward_to_all,
            "/v1/audio/{what}": requests.forward_to_one,
        }
        return [
            WebSocketRoute("/v1/realtime", self.realtime),
            *(
                Route(path, endpoint(requests.create_call, takes_browser_keys=True), methods=["POST"])
                for path in ("/v1/realtime", "/v1/realtime/calls")
            ),
            *(Route(path, endpoint(handler), methods=["POST"]) for path, handler in posts.items()),
            Route("/about", endpoint(requests.forward_to_one, takes_browser_keys=True)),
            Route("/v1/realtime/calls/{call_id}", endpoint(requests.forward_to_call), methods=["DELETE"]),
            Route("/v1/audio/voices/{id}", endpoint(requests.forward_to_all), methods=["DELETE"]),
            Route("/v1/models", endpoint(requests.models)),
            Route("/v1/models/{id:path}", endpoint(requests.models)),
            Route("/v1/audio/voices", endpoint(requests.forward_to_one)),
            Route("/healthz", requests.healthy),
            Route("/readyz", requests.ready),
            Route("/metrics", endpoint(requests.metrics)),
            *page_routes(),
        ]

    async def realtime(self, websocket: WebSocket) -> None:
        """A WebSocket of the Realtime protocol: a new session, a resumed one, or a sideband of a call."""
        try:
            caller = await self._gate.admit(websocket.headers)
        except WireError as error:
            await websocket.send_denial_response(error_response(error))
            return
        await websocket.accept(subprotocol=chosen_protocol(offered_protocols(websocket.headers)))
        try:
            held, upstream, greeting = await self._session_for(websocket, caller)
        except WireError as error:
            await refuse(websocket, error)
        else:
            await self._proxy(websocket, held, upstream, greeting)

    async def _session_for(self, websocket: WebSocket, caller: Identity) -> tuple[HeldPlacement, Upstream, list[str]]:
        query = dict(websocket.query_params)
        protocols = tuple(
            name for name in offered_protocols(websocket.headers) if name in (*BINARY_PROTOCOLS, "realtime")
        )
        kind = (caller.session and caller.session.type) or query.get("intent")
        role = "asr" if kind == "transcription" and "asr" in self.options.pools else "speech"
        request = SessionRequest(role, query, protocols, caller.session)
        if "resume_token" in query:
            return await self._resume(query, request)
        if "call_id" in query:
            return await self._join_call(query, request, caller)
        self._gate.check_rate(websocket.client)
        held, upstream, greeting = await self._router.open(request)
        self._held[held.mirror.id] = held
        return held, upstream, [greeting]

    async def _resume(
        self, query: Mapping[str, str], request: SessionRequest
    ) -> tuple[HeldPlacement, Upstream, list[str]]:
        """The session of a client that reconnects: at its replica, or restored elsewhere where that is lost."""
        id = query.get("session_id", "")
        held = self._held.get(id) or await self._hold_from_registry(id, request)
        if held is None or not hmac.compare_digest(held.mirror.token.encode(), query["resume_token"].encode()):
            message = f"there is no session {id} to resume, or the token is wrong"
            raise WireError(message, "session_gone", status=404)
        held.expires_at = None
        self._held[id] = held
        try:
            return held, await self._router.resume(held, query.get("last_event_id")), []
        except (ConnectionError, TimeoutError):
            await self._router.mark_lost(held.replica)
            held.mirror.fail_active_replies()
            upstream = await self._router.restore(held, {held.replica.replica})
            return held, upstream, [held.mirror.resumed_event()]

    async def _hold_from_registry(self, id: str, request: SessionRequest) -> HeldPlacement | None:
        """A session that another ingress proxied; its history is at its replica only."""
        found = await self.registry.locate(id)
        if found is None:
            return None
        placement, replica = found
        mirror = SessionMirror(
            self.options.kept_sound_seconds,
            id=placement.session,
            token=placement.token,
            replica_session=placement.replica_session,
            replica_token=placement.replica_token,
            restore_event=placement.restore_event,
        )
        query = {name: value for name, value in request.query.items() if name in ("model", "intent")}
        original = SessionRequest(request.role, query, request.protocols, request.bound_session)
        return HeldPlacement(original, mirror, replica)

    async def _join_call(
        self, query: Mapping[str, str], request: SessionRequest, caller: Identity
    ) -> tuple[HeldPlacement, Upstream, list[str]]:
        found = await self.registry.locate(query["call_id"])
        if found is None or caller.is_browser:
            raise WireError(f"there is no call {query['call_id']}", "call_not_found", "call_id", status=404)
        upstream = await self._router.connect(found[1], query, request.protocols)
        return HeldPlacement(request, SessionMirror(0.0), found[1], is_call=True), upstream, []

    async def _proxy(self, websocket: WebSocket, held: HeldPlacement, upstream: Upstream, greeting: list[str]) -> None:
        proxy = SessionProxy(websocket, held, upstream, self._router, self.server.resume_seconds)
        self._proxies.add(proxy)
        try:
            code = await proxy.run(greeting)
        finally:
            self._proxies.discard(proxy)
        if code in DELIBERATE:
            self._held.pop(held.mirror.id, None)
        elif not any(each.held is held for each in self._proxies):  # the client may have reconnected already
            held.expires_at = asyncio.get_running_loop().time() + self.server.resume_seconds + SPARE_SECONDS

    async def _watch(self) -> None:
        """Move sessions away from draining replicas; drop those whose clients did not reconnect in time."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = asyncio.get_running_loop().time()
            self._held = {
                id: held for id, held in self._held.items() if held.expires_at is None or held.expires_at > now
            }
            try:
                replicas = await self.registry.replicas()
            except Exception:  # the registry is being restarted
                logger.warning("the replica registry does not answer", exc_info=True)
                continue
            draining = {each.replica for each in replicas if each.is_draining}
            for proxy in self._proxies:
                if proxy.held.replica.replica in draining:
                    proxy.request_move()


@dataclass(frozen=True)
class End:
    """How a socket to a replica ended."""

    code: int
    reason: str = ""


class SessionProxy:
    """Relays events between a client and the replica of its session; the session may move to another replica."""

    def __init__(
        self, websocket: WebSocket, held: HeldPlacement, upstream: Upstream, router: ReplicaRouter, max_wait: float
    ) -> None:
        self._websocket, self.held, self._router, self._max_wait = websocket, held, router, max_wait
        self._upstream = upstream
        self._is_connected = asyncio.Event()
        self._is_connected.set()
        self._move_requested = asyncio.Event()
        self._is_handling = False
        self._own_events = 0

    def request_move(self) -> None:
        """Leave the replica, if the session is idle now."""
        if self.held.mirror.is_quiet and not self._is_handling and not self.held.is_call:
            self._move_requested.set()

    async def run(self, greeting: list[str]) -> int:
        """Relay until the client or the session ends; the close code."""
        for event in greeting:
            await self._send_to_client(event)
        from_client = asyncio.create_task(self._relay_from_client())
        try:
            while True:
                end = await self._relay(from_client)
                if from_client.done():
                    return await self._close_upstream(from_client.result())
                is_final = self.held.is_call or self._router.is_stopping
                if end is not None and (end.code not in LOST or is_final):
                    await self._close_client(end.code, end.reason)
                    return end.code
                await (self._move() if end is None else self._recover())
        except WireError as error:
            await refuse(self._websocket, error)
            return 1013
        finally:
            from_client.cancel()
            await asyncio.gather(from_client, return_exceptions=True)
            await self._upstream.socket.close(code=RESUME_LATER)

    async def _relay(self, from_client: "asyncio.Task[int]") -> End | None:
        """Relay until one side ends, or until the session is to be moved (None)."""
        from_replica = asyncio.create_task(self._relay_from_replica())
        moving = asyncio.create_task(self._move_requested.wait())
        try:
            await asyncio.wait({from_client, from_replica, moving}, return_when=asyncio.FIRST_COMPLETED)
            return from_replica.result() if from_replica.done() else None
        finally:
            for task in (from_replica, moving):
                task.cancel()
            await asyncio.gather(from_replica, moving, return_exceptions=True)

    async def _relay_from_client(self) -> int:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return close_code(message)
            await self._send_to_replica(message["text"] if message.get("text") is not None else message["bytes"])

    async def _send_to_replica(self, message: str | bytes) -> None:
        """Send to the replica; what the last one could not take is sent to the next."""
        while True:
            await self._is_connected.wait()
            try:
                await self._upstream.send(message)
            except ConnectionError:
                self._is_connected.clear()
            else:
                self.held.mirror.client_sent(message)
                return

    async def _relay_from_replica(self) -> End:
        upstream = self._upstream
        while True:
            message = await upstream.socket.receive()
            self._is_handling = True
            try:
                if message.type.name == "TEXT":
                    await self._forward(upstream, message.data)
                elif message.type.name == "BINARY":
                    await self._send_to_client(message.data)
                else:
                    return End(upstream.socket.close_code or 1006, str(message.extra or ""))
            finally:
                self._is_handling = False

    async def _forward(self, upstream: Upstream, text: str) -> None:
        events = MirroredEvents(text) if self.held.is_call else self.held.mirror.replica_sent(text)
        if events.to_client is not None:
            await self._send_to_client(events.to_client)
        with contextlib.suppress(ConnectionError):  # the next receive returns the end
            for event in events.to_replica:
                await upstream.send(event)

    async def _move(self) -> None:
        """Move an idle session; the client does not notice."""
        self._move_requested.clear()
        last = self._upstream
        if not self.held.mirror.is_quiet:
            return
        self._is_connected.clear()
        try:
            self._upstream = await self._router.restore(self.held, {last.replica.replica})
        except (WireError, ConnectionError, TimeoutError):  # the others are full: it stays until the replica ends
            logger.info("session %s stays at %s", self.held.mirror.id, last.replica.replica)
        else:
            self._router.counters["moved"] += 1
            await last.socket.close()
        self._is_connected.set()

    async def _recover(self) -> None:
        """The replica is lost: notify the client, end the replies in progress, and restore the session."""
        self._is_connected.clear()
        lost = self._upstream.replica
        logger.warning("session %s: replica %s is lost", self.held.mirror.id, lost.replica)
        await self._router.mark_lost(lost)
        message = "the replica of this session is lost; the session continues at another, the reply in progress ends"
        await self._send_event(error_event(WireError(message, "replica_lost", kind="server_error")))
        for event in self.held.mirror.fail_active_replies():
            await self._send_event(event)
        self._upstream = await self._restore(lost.replica)
        self._is_connected.set()

    async def _restore(self, lost: str) -> Upstream:
        """The session at another replica, as soon as one has capacity."""
        deadline = asyncio.get_running_loop().time() + self._max_wait
        while True:
            try:
                return await self._router.restore(self.held, {lost})
            except (WireError, ConnectionError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    log_failure(logger, error, "session %s is lost", self.held.mirror.id)
                    message = f"the session is lost: {str(error) or 'no replica answers'}"
                    raise WireError(message, "session_lost", None, 503, "server_error") from error
                await asyncio.sleep(RETRY_SECONDS)

    async def _send_event(self, event: ServerEvent) -> None:
        self._own_events += 1
        event.event_id = f"event_ingress_{self._own_events}"
        await self._send_to_client(encode(event).decode())

    async def _send_to_client(self, message: str | bytes) -> None:
        """Send to the client; where it has disconnected, the task that reads from it returns the close code."""
        with contextlib.suppress(OSError, RuntimeError, WebSocketDisconnect):
            if isinstance(message, str):
                await self._websocket.send_text(message)
            else:
                await self._websocket.send_bytes(message)

    async def _close_upstream(self, code: int) -> int:
        with contextlib.suppress(ConnectionError):
            await self._upstream.socket.close(code=1000 if code in DELIBERATE else RESUME_LATER)
        return code

    async def _close_client(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason[:120])
        except Exception:  # the client may have disconnected too
            logger.debug("session %s: the socket could not be closed", self.held.mirror.id, exc_info=True)
