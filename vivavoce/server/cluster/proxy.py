"""One client's socket and the replica that has its session; when the replica goes, the session goes on at another."""

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivavoce.server.cluster.router import RESUME_LATER, HeldPlacement, ReplicaRouter, Upstream
from vivavoce.server.cluster.session_mirror import MirroredEvents
from vivavoce.server.realtime.websocket import DELIBERATE, close_code, refuse
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

logger = logging.getLogger(__name__)

Wire = dict[str, Any]
LOST = {1006, 1012}  # the replica broke, or stops: not how a session ends by itself
TRY_AGAIN_SECONDS = 0.25


@dataclass(frozen=True)
class End:
    """How a socket to a replica ended."""

    code: int
    reason: str = ""


class SessionProxy:
    """Carries events both ways until the client, or its session, is gone."""

    def __init__(
        self, websocket: "WebSocket", held: HeldPlacement, upstream: Upstream, doors: ReplicaRouter, patience: float
    ) -> None:
        self._websocket, self.held, self._doors, self._patience = websocket, held, doors, patience
        self._upstream = upstream
        self._is_seated = asyncio.Event()
        self._is_seated.set()
        self._move = asyncio.Event()
        self._is_handling = False
        self._made_events = 0

    def move(self) -> None:
        """The replica is to go: leave it at the next quiet moment."""
        if self.held.ledger.is_quiet and not self._is_handling and not self.held.is_call:
            self._move.set()

    async def run(self, greeting: list[str]) -> int:
        """Carry; the code with which the client, or we, closed."""
        for event in greeting:
            await self._to_client(event)
        from_client = asyncio.create_task(self._from_client())
        try:
            while True:
                end = await self._carry(from_client)
                if from_client.done():
                    return await self._client_gone(from_client.result())
                if end is not None and (end.code not in LOST or self.held.is_call):
                    await self._close(end.code, end.reason)
                    return end.code
                await (self._leave() if end is None else self._go_on_elsewhere())
        except WireError as error:
            await refuse(self._websocket, error)
            return 1013
        finally:
            from_client.cancel()
            await asyncio.gather(from_client, return_exceptions=True)
            await self._upstream.socket.close(code=RESUME_LATER)

    async def _carry(self, from_client: "asyncio.Task[int]") -> End | None:
        """Until one side ends, or the session is to be moved (None)."""
        from_replica = asyncio.create_task(self._from_replica())
        moving = asyncio.create_task(self._move.wait())
        try:
            await asyncio.wait({from_client, from_replica, moving}, return_when=asyncio.FIRST_COMPLETED)
            if from_replica.done():
                return from_replica.result()
            return None
        finally:
            for task in (from_replica, moving):
                task.cancel()
            await asyncio.gather(from_replica, moving, return_exceptions=True)

    async def _from_client(self) -> int:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return close_code(message)
            await self._send(message["text"] if message.get("text") is not None else message["bytes"])

    async def _send(self, message: str | bytes) -> None:
        """To the replica that has the session; what the last one could not take goes to the next."""
        while True:
            await self._is_seated.wait()
            try:
                await self._upstream.send(message)
            except ConnectionError:
                self._is_seated.clear()
            else:
                self.held.ledger.said(message)
                return

    async def _from_replica(self) -> End:
        upstream = self._upstream
        while True:
            message = await upstream.socket.receive()
            self._is_handling = True
            try:
                if message.type.name == "TEXT":
                    await self._told(upstream, message.data)
                elif message.type.name == "BINARY":
                    await self._to_client(message.data)
                else:
                    return End(upstream.socket.close_code or 1006, str(message.extra or ""))
            finally:
                self._is_handling = False

    async def _told(self, upstream: Upstream, text: str) -> None:
        told = MirroredEvents(text) if self.held.is_call else self.held.ledger.told(text)
        if told.forward is not None:
            await self._to_client(told.forward)
        with contextlib.suppress(ConnectionError):  # the next receive says that it is gone
            for event in told.ask:
                await upstream.send(event)

    async def _leave(self) -> None:
        """Nothing is under way: nobody notices."""
        self._move.clear()
        last = self._upstream
        if not self.held.ledger.is_quiet:
            return
        self._is_seated.clear()
        try:
            self._upstream = await self._doors.restore(self.held, {last.replica.replica})
        except (WireError, ConnectionError, TimeoutError):  # there is no room elsewhere: it stays as long as it may
            logger.info("session %s stays at %s", self.held.ledger.id, last.replica.replica)
        else:
            self._doors.figures["moved"] += 1
            await last.socket.close()
        self._is_seated.set()

    async def _go_on_elsewhere(self) -> None:
        """The replica is lost: the client is told, what was under way ends, and the session is opened again."""
        self._is_seated.clear()
        gone = self._upstream.replica
        logger.warning("session %s: replica %s is lost", self.held.ledger.id, gone.replica)
        await self._doors.lost(gone)
        message = "the replica that held this session is lost; the session goes on at another, the reply under way ends"
        error = WireError(message, "replica_lost", kind="server_error").as_error()
        await self._tell({"type": "error", "error": error})
        for event in self.held.ledger.cut_short():
            await self._tell(event)
        self._upstream = await self.restored(gone.replica)
        self._is_seated.set()

    async def restored(self, gone: str) -> Upstream:
        """The session at another replica, as soon as there is room for it."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while True:
            try:
                return await self._doors.restore(self.held, {gone})
            except (WireError, ConnectionError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise WireError(
                        f"the session is lost: {error}", "session_lost", None, 503, "server_error"
                    ) from error
                await asyncio.sleep(TRY_AGAIN_SECONDS)

    async def _tell(self, event: Wire) -> None:
        self._made_events += 1
        numbered = {"type": event["type"], "event_id": f"event_ingress_{self._made_events}"} | event
        await self._to_client(json.dumps(numbered, ensure_ascii=False))

    async def _to_client(self, message: str | bytes) -> None:
        """To the client; where it is gone, the one who reads from it learns how."""
        from starlette.websockets import WebSocketDisconnect

        with contextlib.suppress(OSError, RuntimeError, WebSocketDisconnect):
            if isinstance(message, str):
                await self._websocket.send_text(message)
            else:
                await self._websocket.send_bytes(message)

    async def _client_gone(self, code: int) -> int:
        with contextlib.suppress(ConnectionError):
            await self._upstream.socket.close(code=1000 if code in DELIBERATE else RESUME_LATER)
        return code

    async def _close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason[:120])
        except Exception:  # the client may be gone too
            logger.debug("session %s: the socket could not be closed", self.held.ledger.id, exc_info=True)
