"""One session: what its client sends, done to the conversation; what the conversation tells, written to the journal."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vivavoce.dialogue.events import Conversation
from vivavoce.errors import CapacityError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.client_events import ClientEvents
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Host
from vivavoce.server.metrics import Metrics, TurnClock
from vivavoce.server.realtime.audio_input import SoundInput
from vivavoce.server.realtime.audio_sinks import SocketAudioSink
from vivavoce.server.realtime.event_log import Cursor, EventLog
from vivavoce.server.realtime.jitter import Lead
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.telling import AudioSink, EventEncoder
from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_json import parsed
from vivavoce.server.wire_legacy import modern_event

logger = logging.getLogger(__name__)

Wire = dict[str, Any]
OBJECTS = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}
LONGEST_EVENT_ID = 512


class Connection(Protocol):
    """Somebody who reads the journal."""

    def drop(self, code: int, reason: str) -> None:
        """Close it, from our side."""
        ...


@dataclass(frozen=True)
class Opening:
    """What a client asked for before its first event."""

    model: str
    kind: str = "realtime"
    session: Wire | None = None
    """What a browser key or a call brings along."""
    binary: str | None = None


class RealtimeSession:
    """The wire's side of a conversation. It outlives its connections, for a while."""

    def __init__(
        self,
        host: Host,
        opening: Opening,
        options: ServerOptions,
        metrics: Metrics,
        track: AudioSink | None = None,
    ) -> None:
        self.id = f"sess_{secrets.token_hex(12)}"
        self.resume_token = secrets.token_urlsafe(24)
        self.options, self.metrics = options, metrics
        self.configuration = Configuration(host, opening.model, opening.kind, opening.session)
        if opening.binary is not None:
            self.configuration.wire["viva"] = {"binary": opening.binary}
        self.conversation: Conversation = host.open(self.configuration.settings(), opening.model)
        self.journal = EventLog(self.id[5:13], options.resume_seconds)
        self.clock = TurnClock(metrics)
        self.sound = SoundInput(self.conversation, self.configuration, self.clock, options.most_pending_bytes)
        self.is_call = track is not None
        self.teller = self._new_teller(track)
        self.connections: dict[Connection, Cursor] = {}
        self.last_client_event: str | None = None
        self.is_closed = False
        self.on_closed: list[Callable[[], None]] = []
        self._events = ClientEvents(
            self.conversation, self.configuration, self.teller, self.sound, self.clock, self._tell_updated
        )
        self._opened = time.time()
        self._last_active = self._now()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Greet, and listen."""
        self.tell({"type": "session.created", "session": self.session_object(with_token=True)})
        conversation = {"id": self.teller.conversation_id, "object": "realtime.conversation"}
        self.tell({"type": "conversation.created", "conversation": conversation})
        self._task = asyncio.create_task(self._run())

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the session and whoever is connected to it."""
        if self.is_closed:
            return
        self._finish(code, reason)
        await self.conversation.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self.teller.run()
        except Exception as error:
            log_failure(logger, error, "session %s failed", self.id)
            message = f"the session failed: {type(error).__name__}"
            self.tell_error(WireError(message, "session_failed", kind="server_error"))
            await self.conversation.close()
        finally:
            self._finish(1011, "the session ended")

    def _finish(self, code: int, reason: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for connection in list(self.connections):
            connection.drop(code, reason)
        for told in self.on_closed:
            told()

    # Who reads

    def attach(self, connection: Connection, after: int) -> Cursor:
        """A connection reads on from an event."""
        self.connections[connection] = self.journal.open_cursor(after)
        self._last_active = self._now()
        self.teller.resume()
        return self.connections[connection]

    def detach(self, connection: Connection) -> None:
        """A connection is gone; the session waits for another."""
        cursor = self.connections.pop(connection, None)
        if cursor is None:
            return
        self.journal.close_cursor(cursor)
        self._last_active = self._now()
        if not self.connections and not self.is_call:
            self.teller.pause()

    def stay_awake(self) -> None:
        """Somebody is there."""
        self._last_active = self._now()

    @property
    def idle_seconds(self) -> float:
        """How long nobody said anything."""
        is_speaking = self.teller.is_speaking and bool(self.connections)
        return 0.0 if is_speaking else self._now() - self._last_active

    @property
    def age_seconds(self) -> float:
        """How long the session has been open."""
        return time.time() - self._opened

    # What is told

    def tell(self, event: Wire) -> None:
        """Write an event into the journal; whoever leaves too much of it unread is dropped."""
        if self.is_closed:
            return
        numbered = self.journal.append(event)
        if self.options.log_content:
            logger.info("%s → %s", self.id, json.dumps(numbered, ensure_ascii=False))
        for connection, cursor in list(self.connections.items()):
            if cursor.pending_bytes > self.options.most_pending_bytes:
                self.metrics.dropped.labels("unread").inc()
                connection.drop(1013, "too much is waiting to be read; read faster, or come back")
        if not self.connections and self.journal.kept_bytes > 2 * self.options.most_pending_bytes:
            self._finish(1013, "nobody reads")

    def tell_error(self, error: WireError, event_id: str | None = None) -> None:
        """An error event."""
        self.metrics.errors.labels(error.code).inc()
        self.tell({"type": "error", "error": error.as_error(event_id)})

    def session_object(self, with_token: bool = False) -> Wire:
        """The session as it is, every field of it."""
        named: Wire = {"object": OBJECTS[self.configuration.wire["type"]], "id": self.id}
        wire = named | self.configuration.wire
        if self.options.session_seconds is not None:
            wire["expires_at"] = int(self._opened + self.options.session_seconds)
        if with_token:
            wire["viva"] = wire.get("viva", {}) | {"resume_token": self.resume_token}
        return wire

    def _tell_updated(self) -> None:
        if isinstance(self.teller.speaker, SocketAudioSink):
            self.teller.speaker.binary = self.configuration.binary
        self.tell({"type": "session.updated", "session": self.session_object()})

    # What is received

    async def receive_text(self, message: str) -> None:
        """One client event as JSON; whatever is wrong with it becomes an error event."""
        event_id: str | None = None

        async def handle() -> None:
            nonlocal event_id
            event = self._parsed(message)
            event_id = event.get("event_id")
            await self._events.handle(event)
            self.last_client_event = event_id or self.last_client_event

        await self._received(handle(), lambda: event_id)

    async def receive_sound(self, data: bytes) -> None:
        """A binary message: sound in the negotiated form."""
        await self._received(self.sound.hear_binary(data), lambda: None)

    async def _received(self, handling: Awaitable[None], event_id: Callable[[], str | None]) -> None:
        self.stay_awake()
        try:
            await handling
        except WireError as error:
            logger.debug("session %s: a client event was refused: %s", self.id, error.code)
            self.tell_error(error, event_id())
        except CapacityError as error:
            log_failure(logger, error, "session %s: a client event was refused", self.id)
            self.tell_error(WireError(str(error), "capacity", kind="server_error"), event_id())
        except VivaError as error:
            log_failure(logger, error, "session %s: a client event was refused", self.id)
            self.tell_error(WireError(str(error)), event_id())
        except RecursionError:
            self.tell_error(WireError("the event is nested too deeply", "invalid_json"), event_id())
        except Exception as error:
            log_failure(logger, error, "session %s: a client event failed", self.id)
            message = f"the event could not be handled: {type(error).__name__}"
            self.tell_error(WireError(message, "internal_error", kind="server_error"), event_id())

    def _parsed(self, message: str) -> Wire:
        if len(message) > self.options.most_event_bytes:
            limit = self.options.most_event_bytes >> 20
            raise WireError(f"an event of {len(message)} bytes; at most {limit} MiB are taken", "event_too_large")
        event = parsed(message)
        if not isinstance(event, dict):
            raise WireError(f"an event is a JSON object, not {type(event).__name__}", "invalid_event")
        event_id = event.get("event_id")
        if event_id is not None and (not isinstance(event_id, str) or len(event_id) > LONGEST_EVENT_ID):
            raise WireError(f"event_id must be a text of at most {LONGEST_EVENT_ID} characters", param="event_id")
        if self.options.log_content:
            shown = {name: value for name, value in event.items() if name != "audio"}
            logger.info("%s ← %s", self.id, json.dumps(shown, ensure_ascii=False))
        return modern_event(event)

    def _new_teller(self, track: AudioSink | None) -> EventEncoder:
        options = self.options
        least, most, piece_ms = (
            (options.least_lead_ms, options.lead_ms, options.piece_ms)
            if track is None
            else (options.call_lead_ms, options.call_lead_ms, options.call_piece_ms)
        )
        return EventEncoder(
            self.conversation,
            self.tell,
            track or SocketAudioSink(self.journal, self.conversation.output_rate, self.configuration.binary),
            self.metrics,
            self.clock,
            f"conv_{self.id[5:]}",
            self.configuration.wire,
            Lead(min(least, most) / 1000, most / 1000, self.clock.arrivals),
            piece_ms / 1000,
            plays_itself=track is not None,
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
