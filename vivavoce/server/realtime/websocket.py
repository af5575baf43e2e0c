"""Realtime over a WebSocket: one task receives and one sends, independently of each other."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vivavoce.log import log_failure
from vivavoce.server.auth import Identity, offered_protocols
from vivavoce.server.config import Bucket
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_events import AudioEventEncoder
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.handlers import DecodedAudio
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.session_types import Binary, SessionParams, SessionType
from vivavoce.server.realtime.sessions import Sessions, served_model
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from starlette.types import Message
    from starlette.websockets import WebSocket

    from vivavoce.server.doors.engine import EngineChannel

logger = logging.getLogger(__name__)

BINARY_PROTOCOLS: dict[str, Binary] = {"viva.raw": "raw", "viva.opus": "opus"}
CLOSE_SECONDS = 2.0
BEHIND_SECONDS = 0.02  # for which audio from a door waits while that before it is being processed
BURST_SECONDS = 360.0  # of audio accepted without a delay: more than the largest event can hold
DELIBERATE = {1000, 1001, 1005}  # close codes of a client that will not resume the session
REPLACED = 4001


async def serve_socket(websocket: "WebSocket", caller: Identity, sessions: Sessions) -> None:
    """Serve one connection: a new session, a resumed session, or a sideband of a call."""
    await websocket.accept(subprotocol=chosen_protocol(offered_protocols(websocket.headers)))
    try:
        session, after, greeting = _session_for(websocket, caller, sessions)
    except WireError as error:
        await refuse(websocket, error)
        return
    connection = SocketConnection(websocket, session)
    code = await connection.run(after, greeting)
    if not session.connections and code in DELIBERATE and not session.is_call:
        await session.close()


class SocketConnection:
    """Connects a socket to a session: sends the event log, and passes received events on."""

    def __init__(self, websocket: "WebSocket", session: RealtimeSession) -> None:
        self._websocket, self._session, self._options = websocket, session, session.options
        self._door: EngineChannel | None = websocket.scope.get("viva.door")
        self._limits = InputLimits(session)
        self._dropped: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def drop(self, code: int, reason: str) -> None:
        """Close the socket after the pending events."""
        if not self._dropped.done():
            self._dropped.set_result((code, reason))

    async def run(self, after: int, greeting: list[events.ServerEvent]) -> int:
        """Receive and send until one side closes; the close code."""
        cursor = self._session.attach(self, after)
        sender = asyncio.create_task(self._send(cursor, greeting))
        receiver = asyncio.create_task(self._receive())
        try:
            ends: set[asyncio.Future[Any]] = {sender, receiver, self._dropped}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._dropped.done():
                return await self._close(sender, cursor, *self._dropped.result())
            if receiver.done():
                return receiver.result()
            if (error := sender.exception()) is not None:
                log_failure(logger, error, "session %s: sending failed", self._session.id)
            return await self._close(sender, cursor, 1011, "an event could not be sent")
        finally:
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)
            self._session.detach(self)
            if self._door is not None:
                self._door.take_audio = None
                with contextlib.suppress(ValueError):  # it was closed before it received anything
                    self._session.on_updated.remove(self._send_formats)

    async def _send(self, cursor: Cursor, greeting: list[events.ServerEvent]) -> None:
        from starlette.websockets import WebSocketDisconnect

        for event in greeting:
            await self._websocket.send_text(events.encode(event).decode())
        if self._door is not None:
            await self._push(self._door, cursor)
        encoder = AudioEventEncoder(cursor.log.tag, cursor.after)
        while True:
            entry = await cursor.next()
            try:
                async with asyncio.timeout(self._options.stall_seconds):
                    for message in encoder.messages(entry.sequence, entry.payload):
                        if isinstance(message, bytes):
                            await self._websocket.send_bytes(message)
                        else:
                            await self._websocket.send_text(message)
            except TimeoutError:
                self._drop_stalled()
                await asyncio.Event().wait()
            except (
                OSError,
                RuntimeError,
                WebSocketDisconnect,
            ):  # disconnected: the receiver has the close code
                await asyncio.Event().wait()
            cursor.advance(entry)

    async def _push(self, door: "EngineChannel", cursor: Cursor) -> None:
        """Send the log through a door process, which encodes the audio."""
        try:
            await door.push(cursor, self._options.stall_seconds)
        except TimeoutError:
            self._drop_stalled()
        await asyncio.Event().wait()

    def _drop_stalled(self) -> None:
        self._session.metrics.dropped.labels("stalled").inc()
        self.drop(1013, f"nothing was read for {self._options.stall_seconds:g} s; reconnect")

    async def _receive(self) -> int:
        if self._door is not None:
            self._send_formats(is_answer=True)
            self._session.on_updated.append(self._send_formats)
            self._door.take_audio = self._take_audio
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return close_code(message)
            if message.get("text") is not None:
                await self._session.receive_text(message["text"])
            elif message.get("audio") is not None:
                await self._session.receive_decoded(message["audio"])
            else:
                await self._session.receive_audio(message["bytes"])
            if message.get("asks_for_formats"):
                self._send_formats(is_answer=True)
            wait = self._limits.wait_seconds()
            if wait > 0:  # messages above the rate limit wait in the socket
                await asyncio.sleep(wait)

    def _send_formats(self, is_answer: bool = False) -> None:
        """Tell the door how to decode the client's audio; another connection of the session may have changed it."""
        if self._door is not None:
            self._door.send_formats(self._session.audio.formats, is_answer)

    def _take_audio(self, audio: DecodedAudio) -> float:
        self._session.take_audio(audio)
        wait = self._limits.wait_seconds()
        return max(wait, BEHIND_SECONDS) if self._session.audio.is_behind else wait

    async def _close(self, sender: asyncio.Task[None], cursor: Cursor, code: int, reason: str) -> int:
        """Close after the logged events have been sent, or after a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while cursor.pending_bytes and not sender.done():
                    await asyncio.sleep(0.01)
        sender.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._websocket.close(code, reason)
        except Exception:  # the client may have disconnected
            logger.debug("session %s: the socket could not be closed", self._session.id, exc_info=True)
        return code


class InputLimits:
    """The rates of events and audio that a client may send."""

    def __init__(self, session: RealtimeSession) -> None:
        options = session.options
        self._clock = session.clock
        self._events = Bucket(options.events_per_second, 4 * options.events_per_second)
        self._audio = Bucket(options.sound_per_second, BURST_SECONDS)
        self._received_ms = session.clock.received_ms

    def wait_seconds(self) -> float:
        """Count one more event; the seconds until the next one may be handled."""
        now, received_ms = asyncio.get_running_loop().time(), self._clock.received_ms
        seconds, self._received_ms = (received_ms - self._received_ms) / 1000, received_ms
        return max(self._events.take(1, now), self._audio.take(seconds, now))


def _session_for(
    websocket: "WebSocket", caller: Identity, sessions: Sessions
) -> tuple[RealtimeSession, int, list[events.ServerEvent]]:
    """The session of a connection, the number of the last event it has, and the events it is sent first."""
    query = websocket.query_params
    if "resume_token" in query:
        return _resumed(query.get("session_id", ""), query["resume_token"], query.get("last_event_id"), sessions)
    if "call_id" in query:
        session = sessions.find(query["call_id"])
        if session is None or caller.is_browser:
            raise WireError(f"there is no call {query['call_id']}", "call_not_found", "call_id", status=404)
        event_id = session.log.event_id(session.log.last)
        return session, session.log.last, [events.SessionCreated(session.session_object(), event_id=event_id)]
    kind: SessionType = "transcription" if query.get("intent") == "transcription" else "realtime"
    bound = caller.session or SessionParams()
    opening = Opening(
        model=served_model(sessions, query.get("model") or bound.model or None),
        kind=bound.type or kind,
        session=bound,
        binary=next(
            (BINARY_PROTOCOLS[name] for name in offered_protocols(websocket.headers) if name in BINARY_PROTOCOLS), None
        ),
    )
    address = websocket.client.host if websocket.client else "unknown"
    session = sessions.open(opening, address, "websocket")
    session.start()
    return session, 0, []


def _resumed(
    id: str, token: str, last_event_id: str | None, sessions: Sessions
) -> tuple[RealtimeSession, int, list[events.ServerEvent]]:
    session = sessions.resume(id, token)
    for connection in list(session.connections):
        connection.drop(REPLACED, "the session was resumed elsewhere")
        session.detach(connection)
    last = 0 if last_event_id is None else session.log.sequence_of(last_event_id)
    if last is None:
        raise WireError(f"{last_event_id} is not an event of this session", "unknown_event", "last_event_id")
    greeting = events.SessionResumed(
        session.session_object(),
        lost_events=max(session.log.first - 1 - last, 0),
        received_audio_ms=round(session.clock.received_ms),
        last_client_event_id=session.last_client_event,
        event_id=session.log.event_id(last),
    )
    return session, last, [greeting]


def close_code(message: "Message") -> int:
    """The close code of a client; 1006 for a lost connection, which gives no reason."""
    return int(message["code"]) if "reason" in message else 1006


def chosen_protocol(offered: list[str]) -> str | None:
    """The first supported subprotocol; browsers require one of those they offered."""
    return next((name for name in offered if name in (*BINARY_PROTOCOLS, "realtime")), None)


async def refuse(websocket: "WebSocket", error: WireError) -> None:
    """Send an error event and close with a code that says whether the client may retry."""
    event = events.error_event(error)
    event.event_id = "event_refused"
    code = 1013 if error.status in (429, 503) else 1008
    try:
        await websocket.send_text(events.encode(event).decode())
        await websocket.close(code, str(error)[:120])
    except Exception:  # the client may have disconnected
        logger.debug("a refused socket could not be closed", exc_info=True)
