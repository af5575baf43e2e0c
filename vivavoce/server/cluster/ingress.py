"""The ingress of a fleet: the same addresses as one server, each answered by the replica that should."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from vivavoce.server.app import Handler, middleware
from vivavoce.server.auth import Identity, offered_protocols
from vivavoce.server.cluster.options import AdmissionGate, FleetOptions
from vivavoce.server.cluster.proxy import SessionProxy
from vivavoce.server.cluster.registry import RemoteRegistry
from vivavoce.server.cluster.requests import Requests
from vivavoce.server.cluster.router import HeldPlacement, ReplicaRouter, SessionRequest, Upstream
from vivavoce.server.cluster.session_mirror import SessionMirror
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.websocket import BINARY_PROTOCOLS, DELIBERATE, chosen_protocol, refuse
from vivavoce.server.rest.http import error_answer
from vivavoce.server.rest.page import page_routes
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.websockets import WebSocket

logger = logging.getLogger(__name__)

Wire = dict[str, Any]
LOOK_SECONDS = 0.25  # how often the ingress looks who is to go
SPARE_SECONDS = 5.0


def ingress_app(options: FleetOptions, roll: RemoteRegistry) -> "Starlette":
    """The ASGI application of an ingress."""
    from starlette.applications import Starlette

    ingress = Ingress(options, roll)
    return Starlette(routes=ingress.routes(), lifespan=ingress.lifespan, middleware=middleware(options.server))


class Ingress:
    """Takes clients in, or refuses them at once; holds what is needed to bring a session elsewhere."""

    def __init__(self, options: FleetOptions, roll: RemoteRegistry) -> None:
        self.options, self.roll = options, roll
        self.server: ServerOptions = options.server
        self._gate = AdmissionGate(self.server, roll)
        self._doors = ReplicaRouter(roll, options.kept_sound_seconds)
        most = self.server.most_upload_bytes
        self._requests = Requests(roll, self._doors, self._gate, tuple(options.pools), most)
        self._held: dict[str, HeldPlacement] = {}
        self._bridges: set[SessionProxy] = set()

    @asynccontextmanager
    async def lifespan(self, app: "Starlette") -> AsyncIterator[None]:
        """Sockets to replicas, and an eye on those that are to go."""
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as http:
            self._doors.http = http
            looking = asyncio.create_task(self._look())
            yield
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    def routes(self) -> list[Any]:
        """Everything that has an address."""
        from starlette.routing import Route, WebSocketRoute

        asked = self._requests
        posts: dict[str, Handler] = {
            "/v1/realtime": asked.call,
            "/v1/realtime/calls": asked.call,
            "/v1/realtime/calls/{call_id}/hangup": asked.hang_up,
            "/v1/realtime/client_secrets": asked.browser_key,
            "/v1/realtime/sessions": asked.browser_key,
            "/v1/realtime/transcription_sessions": asked.browser_key,
            "/v1/audio/voices": asked.everywhere,
            "/v1/audio/{what}": asked.anywhere,
        }
        guarded = self._gate.answering
        return [
            WebSocketRoute("/v1/realtime", self.realtime),
            *(Route(path, guarded(handler), methods=["POST"]) for path, handler in posts.items()),
            Route("/v1/realtime/calls/{call_id}", guarded(asked.hang_up), methods=["DELETE"]),
            Route("/v1/audio/voices/{id}", guarded(asked.everywhere), methods=["DELETE"]),
            Route("/v1/models", guarded(asked.models)),
            Route("/v1/models/{id:path}", guarded(asked.models)),
            Route("/v1/audio/voices", guarded(asked.anywhere)),
            Route("/healthz", asked.healthy),
            Route("/readyz", asked.ready),
            Route("/metrics", guarded(asked.figures)),
            *page_routes(),
        ]

    # Sockets

    async def realtime(self, websocket: "WebSocket") -> None:
        """A socket that speaks Realtime: a new session, one that is resumed, or a look at a call."""
        try:
            caller = await self._gate.admit(websocket.headers)
        except WireError as error:
            await websocket.send_denial_response(error_answer(error))
            return
        await websocket.accept(subprotocol=chosen_protocol(offered_protocols(websocket.headers)))
        try:
            held, upstream, greeting = await self._session_for(websocket, caller)
        except WireError as error:
            await refuse(websocket, error)
        else:
            await self._carry(websocket, held, upstream, greeting)

    async def _session_for(self, websocket: "WebSocket", caller: Identity) -> tuple[HeldPlacement, Upstream, list[str]]:
        query = dict(websocket.query_params)
        protocols = tuple(
            name for name in offered_protocols(websocket.headers) if name in (*BINARY_PROTOCOLS, "realtime")
        )
        kind = (caller.session or {}).get("type") or query.get("intent")
        role = "asr" if kind == "transcription" and "asr" in self.options.pools else "speech"
        asked = SessionRequest(role, query, protocols, caller.session)
        if "resume_token" in query:
            return await self._resumed(query, asked)
        if "call_id" in query:
            return await self._beside_call(query, asked, caller)
        self._gate.check_rate(websocket.client)
        held, upstream, greeting = await self._doors.open(asked)
        self._held[held.ledger.id] = held
        return held, upstream, [greeting]

    async def _resumed(self, query: Wire, asked: SessionRequest) -> tuple[HeldPlacement, Upstream, list[str]]:
        """A client that was cut off: its session as it sits, or brought elsewhere where its replica has gone since."""
        id = query.get("session_id", "")
        held = self._held.get(id) or await self._held_elsewhere(id, asked)
        if held is None or not _is_same(held.ledger.token, query["resume_token"]):
            message = f"there is no session {id} to resume, or the token is not its own"
            raise WireError(message, "session_gone", status=404)
        held.ends_at = None
        self._held[id] = held
        try:
            return held, await self._doors.resume(held, query.get("last_event_id")), []
        except (ConnectionError, TimeoutError):
            await self._doors.lost(held.replica)
            held.ledger.cut_short()
            upstream = await self._doors.restore(held, {held.replica.replica})
            return held, upstream, [held.ledger.resumed()]

    async def _held_elsewhere(self, id: str, asked: SessionRequest) -> HeldPlacement | None:
        """A session that another ingress carried; its history stays with its replica."""
        found = await self.roll.where(id)
        if found is None:
            return None
        seat, replica = found
        ledger = SessionMirror(
            self.options.kept_sound_seconds, seat.session, seat.token, seat.sitting, seat.sitting_token
        )
        ledger.first_event = seat.first_event
        query = {name: value for name, value in asked.query.items() if name in ("model", "intent")}
        return HeldPlacement(SessionRequest(asked.role, query, asked.protocols, asked.bound), ledger, replica)

    async def _beside_call(
        self, query: Wire, asked: SessionRequest, caller: Identity
    ) -> tuple[HeldPlacement, Upstream, list[str]]:
        found = await self.roll.where(query["call_id"])
        if found is None or caller.is_browser:
            raise WireError(f"there is no call {query['call_id']}", "call_not_found", "call_id", status=404)
        upstream = await self._doors.connect(found[1], query, asked.protocols)
        return HeldPlacement(asked, SessionMirror(0.0), found[1], is_call=True), upstream, []

    async def _carry(
        self, websocket: "WebSocket", held: HeldPlacement, upstream: Upstream, greeting: list[str]
    ) -> None:
        bridge = SessionProxy(websocket, held, upstream, self._doors, self.server.resume_seconds)
        self._bridges.add(bridge)
        try:
            code = await bridge.run(greeting)
        finally:
            self._bridges.discard(bridge)
        if code in DELIBERATE:
            self._held.pop(held.ledger.id, None)
        elif not any(each.held is held for each in self._bridges):  # or another connection took over
            held.ends_at = asyncio.get_running_loop().time() + self.server.resume_seconds + SPARE_SECONDS

    async def _look(self) -> None:
        """Move sessions away from replicas that are to go; forget those whose clients did not come back."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = asyncio.get_running_loop().time()
            self._held = {id: held for id, held in self._held.items() if held.ends_at is None or held.ends_at > now}
            try:
                fleet = await self.roll.fleet()
            except Exception:  # it is being restarted
                logger.warning("the replica registry does not answer", exc_info=True)
                continue
            leaving = {each.replica for each in fleet if each.is_draining}
            for bridge in self._bridges:
                if bridge.held.replica.replica in leaving:
                    bridge.move()


def _is_same(token: str, given: str) -> bool:
    return hmac.compare_digest(token.encode(), given.encode())
