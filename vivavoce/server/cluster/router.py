"""From an ingress to the replicas: picks a replica for a session, opens its socket, and restores sessions elsewhere."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from vivavoce.log import FailureLog
from vivavoce.server.cluster.registry import Placement, RegistryClient, ReplicaReport
from vivavoce.server.cluster.replica_events import decode_replica_event
from vivavoce.server.cluster.session_mirror import SessionMirror
from vivavoce.server.realtime.server_events import (
    Error,
    InputAudioBufferCleared,
    ServerEvent,
    SessionCreated,
    encode,
)
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.realtime.sessions import RETRY_AFTER_SECONDS
from vivavoce.server.rest.calls import ClientSecret, ClientSecretRequest
from vivavoce.server.wire import ErrorBody, ErrorDetail, WireError

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 6.0  # a replica whose machine fails is detected after 1.5 heartbeats
ANSWER_SECONDS = 10.0
TRIES = 3
RESUME_LATER = 4000  # a close code after which the replica keeps the session


@dataclass
class Upstream:
    """A socket to a replica."""

    replica: ReplicaReport
    socket: aiohttp.ClientWebSocketResponse

    async def next_event(self) -> ServerEvent | None:
        """The next event while a session is opened, None for one that is not read; ConnectionError where the replica is
        lost."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                message = await self.socket.receive()
                if message.type.name == "TEXT":
                    return decode_replica_event(message.data)
                if message.type.name != "BINARY":
                    raise ConnectionResetError(f"replica {self.replica.replica} closed")

    async def send(self, message: str | bytes) -> None:
        """Send to the replica; ConnectionError where it is lost."""
        if self.socket.closed:
            raise ConnectionResetError(f"replica {self.replica.replica} is lost")
        await (self.socket.send_str(message) if isinstance(message, str) else self.socket.send_bytes(message))


@dataclass
class SessionRequest:
    """What a client connected with; repeated at every replica the session moves to."""

    role: str
    query: Mapping[str, str]
    protocols: tuple[str, ...] = ()
    bound_session: SessionParams | None = None
    """The session that the client's browser key is bound to."""


@dataclass
class HeldPlacement:
    """A session whose socket passes, or passed, through this ingress."""

    request: SessionRequest
    mirror: SessionMirror
    replica: ReplicaReport
    is_call: bool = False
    """A sideband socket of a WebRTC call, which ends with its replica."""
    expires_at: float | None = None
    """When it is dropped, while its client is disconnected."""


@dataclass
class ReplicaRouter:
    """Opens, resumes and restores sessions at replicas."""

    registry: RegistryClient
    kept_sound_seconds: float
    http: aiohttp.ClientSession = field(init=False)
    """Set once the ingress runs."""
    is_stopping: bool = False
    """Whether all replicas end, so that sessions are not restored."""
    counters: dict[str, int] = field(default_factory=lambda: {"refused": 0, "lost": 0, "moved": 0, "restored": 0})
    _failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    async def open(self, request: SessionRequest) -> tuple[HeldPlacement, Upstream, str]:
        """A new session, its socket, and its first event; WireError 503 where all replicas are full."""
        upstream, created = await self._open_at_replica(request, set())
        async with self._released_on_failure(upstream):
            held = HeldPlacement(request, SessionMirror(self.kept_sound_seconds), upstream.replica)
            text = encode(created).decode()
            held.mirror.replica_sent(text)
            await self._record(held)
        return held, upstream, text

    async def restore(self, held: HeldPlacement, avoid: set[str]) -> Upstream:
        """The mirrored session at another replica; WireError 503 where all are full."""
        upstream, created = await self._open_at_replica(held.request, avoid)
        async with self._released_on_failure(upstream):
            await self._send_history(upstream, held.mirror, created)
            held.replica = upstream.replica
            await self._record(held)
        self.counters["restored"] += 1
        return upstream

    async def _send_history(self, upstream: Upstream, mirror: SessionMirror, created: SessionCreated) -> None:
        for message in mirror.history():
            await upstream.send(message)
        await upstream.send('{"type":"input_audio_buffer.clear"}')  # the answer comes after those to the history
        event = await upstream.next_event()
        while not isinstance(event, InputAudioBufferCleared):
            event = await upstream.next_event()
        mirror.attach(created)
        mirror.reset_after_move()
        mirror.restore_event = event.event_id
        for pending in mirror.tail:
            await upstream.send(pending)

    async def resume(self, held: HeldPlacement, last_event_id: str | None) -> Upstream:
        """A socket to the session at its replica, after an event; ConnectionError where the replica is lost."""
        mirror = held.mirror
        prefix = f"event_{mirror.replica_session[5:13]}_"
        last = last_event_id if last_event_id and last_event_id.startswith(prefix) else mirror.restore_event
        query = {"session_id": mirror.replica_session, "resume_token": mirror.replica_token}
        query |= {"last_event_id": last} if last else {}
        return await self.connect(held.replica, query, held.request.protocols)

    async def connect(
        self,
        replica: ReplicaReport,
        query: Mapping[str, str],
        protocols: tuple[str, ...] = (),
        bound_session: SessionParams | None = None,
    ) -> Upstream:
        """A socket to one replica."""
        key = replica.key if bound_session is None else await self.mint_bound_key(replica, bound_session)
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

    async def mark_lost(self, replica: ReplicaReport) -> None:
        """Remove a replica that does not answer from the registry."""
        self.counters["lost"] += 1
        await self.registry.mark_lost(replica.replica)

    async def mint_bound_key(self, replica: ReplicaReport, session: SessionParams) -> str:
        """A browser key of this replica, bound to the same session as the client's key."""
        headers = {"Authorization": f"Bearer {replica.key}"}
        url = f"{replica.url}/v1/realtime/client_secrets"
        data = msgspec.json.encode(ClientSecretRequest(session))
        async with self.http.post(url, data=data, headers=headers) as response:
            body = await response.read()
        if response.status != 200:
            raise _wire_error(msgspec.json.decode(body, type=ErrorBody).error, response.status)
        return msgspec.json.decode(body, type=ClientSecret).value

    async def _open_at_replica(self, request: SessionRequest, avoid: set[str]) -> tuple[Upstream, SessionCreated]:
        """A session at the least occupied replica, and its first event; full and lost replicas are skipped."""
        refusal: WireError | None = None
        for _ in range(TRIES):
            replica = await self.registry.admit(request.role, avoid)
            if replica is None:
                break
            try:
                upstream = await self.connect(replica, request.query, request.protocols, request.bound_session)
                async with self._released_on_failure(upstream):
                    event = await upstream.next_event()
            except (ConnectionError, TimeoutError) as error:
                logger.warning("replica %s opens no session: %s", replica.replica, type(error).__name__)
                avoid = avoid | {replica.replica}
                continue
            if isinstance(event, SessionCreated):
                return upstream, event
            await upstream.socket.close()
            if isinstance(event, Error):
                refusal = _wire_error(event.error, 503 if event.error.type == "server_error" else 400)
            avoid = avoid | {replica.replica}
        self.counters["refused"] += 1
        raise refusal or capacity_error(await self.registry.replicas(), request.role)

    @asynccontextmanager
    async def _released_on_failure(self, upstream: Upstream) -> AsyncIterator[None]:
        """Close the socket where its session is not taken into use: the replica would keep it, and its place, for a
        client that resumes."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # the client has left
                self._failures.log(
                    error, "replica %s did not take a session; its socket is closed", upstream.replica.replica
                )
            await upstream.socket.close()  # at once after a receive that timed out or was cancelled
            raise

    async def _record(self, held: HeldPlacement) -> None:
        mirror = held.mirror
        await self.registry.place(
            Placement(
                session=mirror.id,
                token=mirror.token,
                replica=held.replica.replica,
                replica_session=mirror.replica_session,
                replica_token=mirror.replica_token,
                restore_event=mirror.restore_event,
            )
        )


def capacity_error(replicas: list[ReplicaReport], role: str) -> WireError:
    """Why no replica takes one more session."""
    members = [each for each in replicas if each.role == role and not each.is_draining]
    places = sum(each.capacity for each in members)
    message = f"all {places} sessions are in use" if members else f"no {role} replica is ready"
    code = "session_limit_reached" if members else "server_not_ready"
    return WireError(f"{message}; try again in {RETRY_AFTER_SECONDS} s", code, status=503, kind="server_error")


def _wire_error(error: ErrorDetail, status: int) -> WireError:
    return WireError(error.message, error.code or "refused", error.param or None, status, error.type)
