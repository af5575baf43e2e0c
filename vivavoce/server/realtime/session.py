"""One session: passes the client's events to the conversation, and the events of the conversation to the event log."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from vivavoce.dialogue.conversation import Conversation
from vivavoce.errors import CapacityError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Host, abilities_of
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.metrics import Metrics, TurnClock
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.client_events import AnyClientEvent, InputAudioBufferAppend, decode_client_event
from vivavoce.server.realtime.encoder import EventEncoder
from vivavoce.server.realtime.event_log import Cursor, EventLog
from vivavoce.server.realtime.handlers import AudioInputStream, ClientEventHandlers, DecodedAudio
from vivavoce.server.realtime.hang_up import HangUp
from vivavoce.server.realtime.hosted_tools import HostedTools
from vivavoce.server.realtime.output import Lead
from vivavoce.server.realtime.prompts import prompt_folder
from vivavoce.server.realtime.response import AudioSink, WebSocketOutput
from vivavoce.server.realtime.session_config import Configuration, mcp_tools, without_secrets
from vivavoce.server.realtime.session_types import (
    Binary,
    SessionObject,
    SessionParams,
    SessionType,
    VivaSession,
    value_or,
)
from vivavoce.server.recording import SessionRecording
from vivavoce.server.tools.selection import selected_tools
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

AWAITED_SECONDS = 5.0  # after the end of a turn, for which its reply is expected


class Connection(Protocol):
    """A transport that reads the event log."""

    def drop(self, code: int, reason: str) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True)
class Opening:
    """What a client requested when it connected."""

    model: str
    kind: SessionType = "realtime"
    session: SessionParams | None = None
    """The session parameters of a browser key or a call."""
    binary: Binary | None = None
    opened_with: bytes | None = None
    """The hash of the browser key."""
    id: str | None = None
    """The id of the session, where it was given to a client before."""
    silence_seconds: float | None = None
    """Of a telephone call, after which the model speaks; None: as the session says."""


class RealtimeSession:
    """A conversation behind the protocol. It survives its connections for a limited time."""

    def __init__(
        self,
        host: Host,
        opening: Opening,
        options: ServerOptions,
        metrics: Metrics,
        track: AudioSink | None = None,
    ) -> None:
        self.id = opening.id or f"sess_{secrets.token_hex(12)}"
        self.resume_token = secrets.token_urlsafe(24)
        self.options, self.metrics = options, metrics
        self.opened_with = opening.opened_with
        allowed_mcp, prompts = AllowedServers.read(options.allow_mcp), prompt_folder(options)
        self.configuration = Configuration(
            host,
            opening.model,
            opening.kind,
            opening.session,
            prompts,
            allowed_mcp,
            None if opening.silence_seconds is None else round(1000 * opening.silence_seconds),
        )
        if opening.binary is not None:
            viva = VivaSession(binary=opening.binary)
            self.configuration.session = replace(self.configuration.session, viva=viva)
        self.conversation: Conversation = host.open(self.configuration.settings(), opening.model)
        self.log = EventLog(self.id[5:13], options.resume_seconds)
        self.clock = TurnClock(metrics)
        self.audio = AudioInputStream(self.conversation, self.configuration, self.clock, options.max_pending_bytes)
        self.is_call = track is not None
        self.encoder = self._new_encoder(track)
        self.connections: dict[Connection, Cursor] = {}
        self.last_client_event: str | None = None
        self.is_closed = self._is_on_hold = False
        self.close_reason: tuple[int, str] = (1000, "")
        self.on_closed: list[Callable[[], None]] = []
        self.on_updated: list[Callable[[], None]] = []
        self.on_sent: list[Callable[[events.ServerEvent], None]] = []
        self._hang_up = HangUp(lambda: self.close(1000, "the conversation was ended"))
        self.encoder.on_played = self._hang_up.note_played
        built_in = selected_tools(options.tools, options.embedding) if abilities_of(host).tools else ()
        self.hosted = HostedTools(
            self.conversation, allowed_mcp, self.send, self._apply_tools, built_in, self, self.encoder.reply_with
        )
        self.configuration.hosted, self.encoder.on_hosted_call = self.hosted, self.hosted.make_call
        self.on_sent += [self._hang_up.note_sent, self.hosted.note_sent]
        self._handlers = ClientEventHandlers(
            self.conversation, self.configuration, self.encoder, self.audio, self.clock, self._send_updated, self.hosted
        )
        self._opened = time.time()
        self._active_at = self._now()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send the first events and run the encoder."""
        self.send(events.SessionCreated(self.session_object(with_token=True)))
        self.send(events.ConversationCreated(events.ConversationObject(self.encoder.conversation_id)))
        self._task = asyncio.create_task(self._run())
        if self.options.tools:
            self._apply_tools()
        self.hosted.update(mcp_tools(self.configuration.session))
        if self.options.record is not None:
            self._record(Path(self.options.record))

    def _record(self, folder: Path) -> None:
        """Record from now on; the file is complete when the session has ended."""
        rates = self.conversation.input_rate, self.conversation.output_rate
        recording = SessionRecording(folder, self.id, rates, self._now)
        self.encoder.recording, self.audio.on_samples = recording, recording.heard
        writing = asyncio.create_task(recording.run())

        def finish() -> None:
            writing.cancel()
            recording.finish(self.conversation.items)

        self.on_closed.append(finish)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the session and its connections."""
        if self.is_closed:
            return
        self._finish(code, reason)
        await self.hosted.close()
        await self.conversation.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def hang_up(self, reply: str | None = None) -> None:
        """End the session when this reply, or the next one, was heard; for the tool of this name."""
        self._hang_up.request(reply)

    async def _run(self) -> None:
        try:
            await self.encoder.run()
        except Exception as error:
            log_failure(logger, error, "session %s failed", self.id)
            message = f"the session failed: {type(error).__name__}"
            self.send_error(WireError(message, "session_failed", kind="server_error"))
            await self.conversation.close()
            await self.hosted.close()
        finally:
            self._finish(1011, "the session ended")

    def _finish(self, code: int, reason: str) -> None:
        if self.is_closed:
            return
        self.is_closed, self.close_reason = True, (code, reason)
        for connection in list(self.connections):
            connection.drop(code, reason)
        if not self.connections:
            self.log.clear()
        for callback in self.on_closed:
            callback()

    # Connections

    def attach(self, connection: Connection, after: int) -> Cursor:
        """Let a connection read the log after an event."""
        self.connections[connection] = self.log.open_cursor(after)
        self._active_at = self._now()
        if not self._is_on_hold:
            self.encoder.resume()
        return self.connections[connection]

    def detach(self, connection: Connection) -> None:
        """Remove a closed connection; the session waits for the next one."""
        cursor = self.connections.pop(connection, None)
        if cursor is None:
            return
        self.log.close_cursor(cursor)
        self._active_at = self._now()
        if self.connections:
            return
        if self.is_closed:
            self.log.clear()
        elif not self.is_call:
            self.encoder.pause()

    def hold(self) -> None:
        """Let replies wait although clients are connected: the other side of a call does not listen."""
        self._is_on_hold = True
        self.encoder.pause()

    def unhold(self) -> None:
        """Continue after `hold`."""
        self._is_on_hold = False
        self.encoder.resume()

    def note_activity(self) -> None:
        """Restart the idle timer."""
        self._active_at = self._now()

    @property
    def idle_seconds(self) -> float:
        """Seconds without activity."""
        is_speaking = self.encoder.is_speaking and bool(self.connections)
        return 0.0 if is_speaking else self._now() - self._active_at

    @property
    def is_busy(self) -> bool:
        """Whether a reply is awaited, generated or played."""
        return self.encoder.is_speaking or 0 < self.clock.waiting_seconds < AWAITED_SECONDS

    @property
    def is_unanswered(self) -> bool:
        """Whether no reply has had audio so far."""
        return self.clock.last_ttfa is None

    @property
    def age_seconds(self) -> float:
        """Seconds since the session was opened."""
        return time.time() - self._opened

    # Sending

    def send(self, event: events.ServerEvent) -> None:
        """Append an event to the log; connections with too many unread bytes are dropped."""
        if self.is_closed:
            return
        self.log.append(event)
        for follow in self.on_sent:
            follow(event)
        if self.options.log_content:
            logger.info("%s → %s", self.id, events.encode(event).decode())
        for connection, cursor in list(self.connections.items()):
            if cursor.pending_bytes > self.options.max_pending_bytes:
                self.metrics.dropped.labels("unread").inc()
                connection.drop(1013, "too many events are unread; read faster, or reconnect")
        if not self.connections and self.log.stored_bytes > 2 * self.options.max_pending_bytes:
            self._finish(1013, "the events are not read")

    def send_error(self, error: WireError, event_id: str | None = None) -> None:
        self.metrics.errors.labels(error.code or "none").inc()
        self.send(events.error_event(error, event_id))

    def session_object(self, with_token: bool = False) -> SessionObject:
        """The complete session object."""
        session = replace(without_secrets(self.configuration.session), id=self.id)
        if self.options.session_seconds is not None:
            session = replace(session, expires_at=int(self._opened + self.options.session_seconds))
        if with_token:
            viva = replace(value_or(session.viva, VivaSession()), resume_token=self.resume_token)
            session = replace(session, viva=viva)
        return session

    def _apply_tools(self) -> None:
        """Give the conversation the built-in tools, and those that MCP servers have listed."""
        settings = self.configuration.settings()
        self.conversation.update(lambda _: settings)

    def _send_updated(self) -> None:
        if isinstance(self.encoder.output, WebSocketOutput):
            self.encoder.output.binary = self.configuration.binary
        self.send(events.SessionUpdated(self.session_object()))
        self.hosted.update(mcp_tools(self.configuration.session))
        for callback in self.on_updated:
            callback()

    # Receiving

    async def receive_text(self, message: str) -> None:
        """Handle one client event as JSON; every failure becomes an error event."""
        event_id: str | None = None

        async def handle() -> None:
            nonlocal event_id
            event = self._decoded(message)
            event_id = event.event_id
            await self._handlers.handle(event)
            self.last_client_event = event_id or self.last_client_event

        await self._received(handle(), lambda: event_id)

    async def receive_audio(self, data: bytes) -> None:
        """Handle a binary message: audio in the negotiated format."""
        await self._received(self.audio.append_binary(data), lambda: None)

    async def receive_decoded(self, audio: DecodedAudio) -> None:
        """Handle audio that a door process has decoded."""
        if not audio.is_long:
            self.take_audio(audio)
            return

        async def handle() -> None:
            await self.audio.append_long(audio)
            self.last_client_event = audio.event_id or self.last_client_event

        await self._received(handle(), lambda: audio.event_id)

    def take_audio(self, audio: DecodedAudio) -> None:
        """Handle a short piece of decoded audio at once."""
        self.note_activity()
        try:
            self.audio.append_decoded(audio)
            self.last_client_event = audio.event_id or self.last_client_event
        except Exception as error:
            self._refuse(error, audio.event_id)

    async def _received(self, handling: Awaitable[None], event_id: Callable[[], str | None]) -> None:
        self.note_activity()
        try:
            await handling
        except Exception as error:
            self._refuse(error, event_id())

    def _refuse(self, error: Exception, event_id: str | None) -> None:
        """Answer a client event that failed with an error event."""
        if isinstance(error, WireError):
            logger.debug("session %s: a client event was refused: %s", self.id, error.code)
            self.send_error(error, event_id)
        elif isinstance(error, VivaError):
            log_failure(logger, error, "session %s: a client event was refused", self.id)
            is_full = isinstance(error, CapacityError)
            refusal = WireError(str(error), "capacity", kind="server_error") if is_full else WireError(str(error))
            self.send_error(refusal, event_id)
        elif isinstance(error, RecursionError):
            self.send_error(WireError("the event is nested too deeply", "invalid_json"), event_id)
        else:
            log_failure(logger, error, "session %s: a client event failed", self.id)
            message = f"the event could not be handled: {type(error).__name__}"
            self.send_error(WireError(message, "internal_error", kind="server_error"), event_id)

    def _decoded(self, message: str) -> AnyClientEvent:
        if len(message) > self.options.max_event_bytes:
            limit = self.options.max_event_bytes >> 20
            raise WireError(f"an event of {len(message)} bytes; the limit is {limit} MiB", "event_too_large")
        event = decode_client_event(message)
        if self.options.log_content and not isinstance(event, InputAudioBufferAppend):
            logger.info("%s ← %s", self.id, message)
        return event

    def _new_encoder(self, track: AudioSink | None) -> EventEncoder:
        output = track or WebSocketOutput(self.log, self.conversation.output_rate, self.configuration.binary)
        pacing = output.pacing(self.options)
        return EventEncoder(
            self.conversation,
            self.send,
            output,
            self.metrics,
            self.clock,
            f"conv_{self.id[5:]}",
            self.configuration.session,
            Lead(pacing.min_lead_ms / 1000, pacing.max_lead_ms / 1000, self.clock.arrivals),
            pacing.piece_ms / 1000,
            plays_audio=track is not None,
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
