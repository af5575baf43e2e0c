"""From an ingress to the replicas: a place for a session, a socket to it, and a session opened again elsewhere."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vivavoce.server.cluster.registry import Placement, RemoteRegistry, ReplicaReport
from vivavoce.server.cluster.session_mirror import SessionMirror
from vivavoce.server.realtime.sessions import RETRY_AFTER_SECONDS
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

logger = logging.getLogger(__name__)

Wire = dict[str, Any]
HEARTBEAT_SECONDS = 6.0  # a replica whose machine is gone is missed after one and a half
ANSWER_SECONDS = 10.0
TRIES = 3
RESUME_LATER = 4000  # not one of the codes by which a client says that it will not come back


@dataclass
class Upstream:
    """A socket to a replica."""

    replica: ReplicaReport
    socket: "ClientWebSocketResponse"

    async def next(self) -> Wire:
        """The next event, while the session is being opened; ConnectionError where the replica is gone."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                message = await self.socket.receive()
                if message.type.name == "TEXT":
                    event: Wire = json.loads(message.data)
                    return event
                if message.type.name != "BINARY":
                    raise ConnectionResetError(f"replica {self.replica.replica} closed")

    async def send(self, message: str | bytes) -> None:
        """To the replica; ConnectionError where it is gone."""
        if self.socket.closed:
            raise ConnectionResetError(f"replica {self.replica.replica} is gone")
        await (self.socket.send_str(message) if isinstance(message, str) else self.socket.send_bytes(message))


@dataclass
class SessionRequest:
    """What a client connected with; it is asked again wherever the session moves."""

    role: str
    query: Mapping[str, str]
    protocols: tuple[str, ...] = ()
    bound: Wire | None = None
    """The session its browser key is bound to."""


@dataclass
class HeldPlacement:
    """A session whose socket passes, or passed, through this ingress."""

    asked: SessionRequest
    ledger: SessionMirror
    replica: ReplicaReport
    is_call: bool = False
    """A look at a WebRTC call, whose sound goes elsewhere: it ends with its replica."""
    ends_at: float | None = None
    """When it is forgotten, while its client is away."""


@dataclass
class ReplicaRouter:
    """Opens sessions at replicas."""

    roll: RemoteRegistry
    kept_sound_seconds: float
    http: "ClientSession" = field(init=False)
    """Set once the ingress runs."""
    figures: dict[str, int] = field(default_factory=lambda: {"refused": 0, "lost": 0, "moved": 0, "restored": 0})

    async def open(self, asked: SessionRequest) -> tuple[HeldPlacement, Upstream, str]:
        """A new session, its socket, and its greeting as told; WireError 503 where there is no room."""
        upstream, greeting = await self._admitted(asked, set())
        held = HeldPlacement(asked, SessionMirror(self.kept_sound_seconds), upstream.replica)
        text = json.dumps(greeting, separators=(",", ":"), ensure_ascii=False)
        held.ledger.told(text)
        await self._seat(held)
        return held, upstream, text

    async def restore(self, held: HeldPlacement, avoid: set[str]) -> Upstream:
        """The session of a ledger at another replica; WireError 503 where there is no room."""
        upstream, greeting = await self._admitted(held.asked, avoid)
        ledger = held.ledger
        for message in ledger.history():
            await upstream.send(message)
        await upstream.send('{"type":"input_audio_buffer.clear"}')  # answered when all before it is done
        event = await upstream.next()
        while event["type"] != "input_audio_buffer.cleared":
            event = await upstream.next()
        ledger.seat(greeting)
        ledger.moved()
        ledger.first_event = event["event_id"]
        for tail in ledger.tail:
            await upstream.send(tail)
        held.replica = upstream.replica
        await self._seat(held)
        self.figures["restored"] += 1
        return upstream

    async def resume(self, held: HeldPlacement, last_event_id: str | None) -> Upstream:
        """A socket to the session as it sits, reading on after an event; ConnectionError where its replica is gone."""
        ledger = held.ledger
        tag = f"event_{ledger.sitting[5:13]}_"
        known = last_event_id if last_event_id and last_event_id.startswith(tag) else ledger.first_event
        query = {"session_id": ledger.sitting, "resume_token": ledger.sitting_token}
        query |= {"last_event_id": known} if known else {}
        return await self.connect(held.replica, query, held.asked.protocols)

    async def connect(
        self,
        replica: ReplicaReport,
        query: Mapping[str, str],
        protocols: tuple[str, ...] = (),
        bound: Wire | None = None,
    ) -> Upstream:
        """A socket to one replica."""
        import aiohttp

        key = replica.key if bound is None else await self.bound_key(replica, bound)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                socket = await self.http.ws_connect(
                    f"{replica.url}/v1/realtime",
                    params=dict(query),
                    headers={"Authorization": f"Bearer {key}"},
                    protocols=protocols,
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=0,
                )
        except aiohttp.ClientError as error:
            raise ConnectionResetError(f"replica {replica.replica} does not answer: {type(error).__name__}") from error
        return Upstream(replica, socket)

    async def lost(self, replica: ReplicaReport) -> None:
        """A replica was found dead."""
        self.figures["lost"] += 1
        await self.roll.lost(replica.replica)

    async def _admitted(self, asked: SessionRequest, avoid: set[str]) -> tuple[Upstream, Wire]:
        """A session at the least full replica, and its greeting; one that is full after all, or gone, is passed by."""
        refusal: WireError | None = None
        for _ in range(TRIES):
            replica = await self.roll.admit(asked.role, avoid)
            if replica is None:
                break
            try:
                upstream = await self.connect(replica, asked.query, asked.protocols, asked.bound)
                greeting = await upstream.next()
            except (ConnectionError, TimeoutError) as error:
                logger.warning("replica %s takes no session: %s", replica.replica, type(error).__name__)
                avoid = avoid | {replica.replica}
                continue
            if greeting["type"] == "session.created":
                return upstream, greeting
            await upstream.socket.close()
            refusal = _as_error(greeting)
            avoid = avoid | {replica.replica}
        self.figures["refused"] += 1
        raise refusal or no_room(await self.roll.fleet(), asked.role)

    async def _seat(self, held: HeldPlacement) -> None:
        ledger = held.ledger
        sitting = (ledger.sitting, ledger.sitting_token, ledger.first_event)
        await self.roll.seat(Placement(ledger.id, ledger.token, held.replica.replica, *sitting))

    async def bound_key(self, replica: ReplicaReport, session: Wire) -> str:
        """A browser key of this replica, bound to the session that the client's key was bound to."""
        headers = {"Authorization": f"Bearer {replica.key}"}
        url = f"{replica.url}/v1/realtime/client_secrets"
        async with self.http.post(url, json={"session": session}, headers=headers) as answer:
            made = await answer.json()
        if answer.status != 200:
            raise WireError(made["error"]["message"], made["error"]["code"], made["error"].get("param"), answer.status)
        return str(made["value"])


def no_room(fleet: list[ReplicaReport], role: str) -> WireError:
    """Why nobody takes one more session."""
    members = [each for each in fleet if each.role == role and not each.is_draining]
    places = sum(each.capacity for each in members)
    message = f"all {places} places are taken" if members else f"no {role} replica is ready"
    code = "session_limit_reached" if members else "server_not_ready"
    return WireError(f"{message}; try again in {RETRY_AFTER_SECONDS} s", code, status=503, kind="server_error")


def _as_error(greeting: Wire) -> WireError:
    told = greeting.get("error") or {}
    is_full = told.get("type") == "server_error"
    message, code = told.get("message", "the session was refused"), told.get("code", "refused")
    return WireError(message, code, told.get("param"), 503 if is_full else 400, told.get("type", "server_error"))
