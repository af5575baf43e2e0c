"""A copy of a session outside its replica, complete enough to restore it at another.

The ingress passes it every event of both directions. Items with audio are retrieved from the replica as soon as they
are complete; a reply in progress is stored as far as it was sent, the user's audio since the last turn as received.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from vivavoce.server.cluster.mirrored_items import (
    MirroredHistory,
    MirroredReply,
    as_sent,
    audio_parts,
    bytes_per_ms,
    creatable,
    id_of,
    without_audio,
)
from vivavoce.server.cluster.replica_events import AUDIO_DELTA, decode_audio_delta, decode_replica_event, type_of
from vivavoce.server.realtime import client_events as client
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_formats import WireFormat, wire_format
from vivavoce.server.realtime.items import StatusDetails
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session_settings import output_format
from vivavoce.server.realtime.session_types import SessionObject
from vivavoce.server.wire import ErrorDetail, WireError

MAX_UPDATES = 256
TAIL_SECONDS = 20.0
OPUS_PACKET_MS = 20.0
OWN_PREFIX = "viva_mirror_"  # of the ids of events that the mirror sends
ANSWERS: dict[type[client.ClientEvent], type[ServerEvent]] = {  # events of the client, and what confirms each
    client.ConversationItemCreate: events.ConversationItemAdded,
    client.ConversationItemTruncate: events.ConversationItemTruncated,
    client.ConversationItemDelete: events.ConversationItemDeleted,
    client.InputAudioBufferCommit: events.InputAudioBufferCommitted,
    client.ResponseCreate: events.ResponseCreated,
}
Requests = tuple[str, ...]
"""Events for the replica."""


@dataclass(frozen=True)
class MirroredEvents:
    """What to send because of an event of the replica."""

    to_client: str | None
    to_replica: Requests = ()


@dataclass
class SessionMirror:
    """One session. `id` and `token` are those of the client; the replica's own may differ after a move."""

    kept_sound_seconds: float
    id: str = ""
    token: str = ""
    replica_session: str = ""
    replica_token: str = ""
    restore_event: str = ""
    """The last event of the replica that was not forwarded, because it only restored the session."""
    session: SessionObject | None = None
    updates: list[str] = field(default_factory=list)
    last_client_event: str | None = None
    is_user_speaking: bool = False
    _replies: dict[str, MirroredReply] = field(default_factory=dict)
    _tail: deque[tuple[str | bytes, float]] = field(default_factory=deque)
    _tail_ms: float = 0.0
    _received_ms: float = 0.0
    _offset_ms: int = 0
    _unanswered: list[tuple[type[ServerEvent], str]] = field(default_factory=list)
    """The client's events that the replica has not confirmed: what would confirm each, and its text."""
    _client_retrievals: Counter[str] = field(default_factory=Counter)
    _own_retrievals: Counter[str] = field(default_factory=Counter)
    """Items that the client, and the mirror, have requested from the replica."""

    def __post_init__(self) -> None:
        self._history = MirroredHistory(self.kept_sound_seconds)

    @property
    def is_quiet(self) -> bool:
        """Whether the session can move without an effect on the client."""
        is_waiting = bool(self._own_retrievals or self._unanswered)
        return not self._replies and not self.is_user_speaking and not is_waiting

    # Events of the client

    def client_sent(self, message: str | bytes) -> None:
        """Record an event, or a binary audio frame, that was sent to the replica."""
        if isinstance(message, bytes):
            self._record_audio(message, self._binary_ms(message))
            return
        try:
            event = client.decode_client_event(message)
        except WireError:  # the replica answers with the error
            return
        self.last_client_event = event.event_id or self.last_client_event
        if isinstance(event, client.InputAudioBufferAppend):
            self._record_audio(message, len(event.audio) / bytes_per_ms(self.input_format))
        elif isinstance(event, client.InputAudioBufferClear):
            self._clear_tail()
        elif isinstance(event, client.SessionUpdate):
            if len(self.updates) < MAX_UPDATES:
                self.updates.append(message)
        elif isinstance(event, client.ConversationItemRetrieve):
            self._client_retrievals[event.item_id] += 1
        elif type(event) in ANSWERS:
            self._unanswered.append((ANSWERS[type(event)], message))

    # Events of the replica

    def replica_sent(self, text: str) -> MirroredEvents:
        """Record an event of the replica; what to send to the client, and what to the replica."""
        if type_of(text) == AUDIO_DELTA:
            self._record_reply_audio(text)
            return MirroredEvents(text)
        event = decode_replica_event(text)
        if event is None:
            return MirroredEvents(self._with_client_ids(text))
        self._confirm(event)
        requests = _HANDLERS[type(event)](self, event) if type(event) in _HANDLERS else ()
        return MirroredEvents(None) if requests is None else MirroredEvents(self._translate(text, event), requests)

    def _confirm(self, event: ServerEvent) -> None:
        """Remove what the event confirms. An error may belong to any event: better none is repeated than one twice."""
        if isinstance(event, events.Error):
            self._unanswered.clear()
        if isinstance(event, events.ConversationItemAdded) and event.item.status == "in_progress":
            return  # an item of a reply
        for index, (answer, _) in enumerate(self._unanswered):
            if type(event) is answer:
                del self._unanswered[index]
                return

    def _session_created(self, event: events.SessionCreated) -> Requests:
        self.attach(event)
        self.id, self.token = self.replica_session, self.replica_token
        return ()

    def _session_updated(self, event: events.SessionUpdated) -> Requests:
        previous, self.session = self.session, event.session
        if previous is not None and _formats(previous) == _formats(event.session):
            return ()
        return tuple(request for id in self._history.drop_audio() for request in self._retrieve(id))

    def _item_added(self, event: events.ConversationItemAdded | events.ConversationItemDone) -> Requests:
        self._history.add(event.item, event.previous_item_id)
        return ()

    def _item_done(self, event: events.ConversationItemDone) -> Requests:
        self._item_added(event)
        return self._retrieve(id_of(event.item)) if audio_parts(event.item) else ()

    def _item_retrieved(self, event: events.ConversationItemRetrieved) -> Requests | None:
        """None, so that it is not forwarded, for an item that only the mirror requested."""
        id = id_of(event.item)
        if id in self._history:
            self._history.replace(event.item)
            self._history.limit_audio(self.input_format, self.output_format)
        is_own = self._own_retrievals[id] > 0
        _decrement(self._own_retrievals if is_own else self._client_retrievals, id)
        return None if is_own else ()

    def _error(self, event: events.Error) -> Requests | None:
        """None, so that it is not forwarded, where an item that the mirror requested was deleted."""
        request = event.error.event_id or ""
        if not request.startswith(OWN_PREFIX):
            return ()
        _decrement(self._own_retrievals, request.removeprefix(OWN_PREFIX))
        return None

    def _item_truncated(self, event: events.ConversationItemTruncated) -> Requests:
        return self._retrieve(event.item_id) if event.item_id in self._history else ()

    def _item_deleted(self, event: events.ConversationItemDeleted) -> Requests:
        self._history.delete(event.item_id)
        return ()

    def _transcribed(self, event: events.TranscriptionCompleted) -> Requests:
        self._history.set_transcript(event.item_id, event.transcript)
        return ()

    def _speech_started(self, event: events.InputAudioBufferSpeechStarted) -> Requests:
        self.is_user_speaking = True
        return ()

    def _committed(self, event: events.InputAudioBufferCommitted) -> Requests:
        self.is_user_speaking = False
        self._clear_tail()
        return ()

    def _response_created(self, event: events.ResponseCreated) -> Requests:
        self._replies[event.response.id] = MirroredReply(event.response)
        return ()

    def _output_item_added(self, event: events.OutputItemAdded) -> Requests:
        if (reply := self._replies.get(event.response_id)) is not None:
            reply.items[id_of(event.item)] = event.item
        return ()

    def _output_item_done(self, event: events.OutputItemDone) -> Requests:
        if (reply := self._replies.get(event.response_id)) is not None:
            reply.items.pop(id_of(event.item), None)
        return ()

    def _text_delta(self, event: events.OutputTextDelta | events.OutputAudioTranscriptDelta) -> Requests:
        if (reply := self._replies.get(event.response_id)) is not None:
            reply.text[event.item_id] = reply.text.get(event.item_id, "") + event.delta
        return ()

    def _response_done(self, event: events.ResponseDone) -> Requests:
        self._replies.pop(event.response.id, None)
        return ()

    # Restoring the session elsewhere

    def attach(self, created: events.SessionCreated) -> None:
        """Take over the ids of the replica that sent this `session.created`."""
        self.session = created.session
        self.replica_session = created.session.id or ""
        self.replica_token = (created.session.viva.resume_token if created.session.viva else UNSET) or ""

    def reset_after_move(self) -> None:
        """Forget the requests to the last replica, and offset the audio clock, which starts anew at this one."""
        self.is_user_speaking = False
        self._offset_ms = round(self._received_ms - self._tail_ms)
        self._client_retrievals.clear()
        self._own_retrievals.clear()

    def history(self) -> Iterator[str]:
        """Events that restore the settings and the history in a new session."""
        yield from self.updates
        for item in self._history:
            created = creatable(item, self.input_format, self.output_format)
            if created is not None:
                yield msgspec.json.encode(client.ConversationItemCreate(created)).decode()

    @property
    def tail(self) -> list[str | bytes]:
        """The user's audio since the last turn, and the events of the client that were not confirmed."""
        return [*(message for message, _ in self._tail), *(message for _, message in self._unanswered)]

    def resumed_event(self) -> str:
        """The first event for a client that reconnects to a session that was restored meanwhile."""
        assert self.session is not None
        event = events.SessionResumed(
            replace(self.session, id=self.id),
            lost_events=0,
            received_audio_ms=round(self._received_ms),
            last_client_event_id=self.last_client_event,
            event_id=self.restore_event,
        )
        return events.encode(event).decode()

    def fail_active_replies(self) -> list[ServerEvent]:
        """End the replies in progress: the events for the client. What was sent of them becomes history."""
        ends: list[ServerEvent] = []
        for reply in self._replies.values():
            for id, item in reply.items.items():
                whole = as_sent(reply, id, item)
                if id in self._history:
                    self._history.replace(whole)
                ends.append(events.OutputItemDone(reply.response.id, 0, without_audio(whole)))
            error = ErrorDetail(type="server_error", code="replica_lost", message="the reply was lost with its replica")
            details = StatusDetails(type="failed", error=error)
            ends.append(events.ResponseDone(replace(reply.response, status="failed", status_details=details)))
        self._replies.clear()
        return ends

    @property
    def input_format(self) -> WireFormat:
        """The format of the client's audio."""
        return WireFormat() if self.session is None else wire_format(self.session.audio.input.format)

    @property
    def output_format(self) -> WireFormat:
        """The format of the audio of replies."""
        return WireFormat() if self.session is None else output_format(self.session)

    def _retrieve(self, id: str) -> Requests:
        self._own_retrievals[id] += 1
        return (msgspec.json.encode(client.ConversationItemRetrieve(id, event_id=OWN_PREFIX + id)).decode(),)

    def _record_reply_audio(self, text: str) -> None:
        event = decode_audio_delta(text)
        reply = self._replies.get(event.response_id)
        if reply is not None:
            reply.audio.setdefault(event.item_id, []).append(text)

    def _record_audio(self, message: str | bytes, milliseconds: float) -> None:
        self._received_ms += milliseconds
        self._tail_ms += milliseconds
        self._tail.append((message, milliseconds))
        while self._tail_ms > TAIL_SECONDS * 1000 and len(self._tail) > 1:
            self._tail_ms -= self._tail.popleft()[1]

    def _clear_tail(self) -> None:
        self._tail.clear()
        self._tail_ms = 0.0

    def _binary_ms(self, message: bytes) -> float:
        viva = None if self.session is None else self.session.viva or None
        is_opus = viva is not None and viva.binary == "opus"
        return OPUS_PACKET_MS if is_opus else len(message) / bytes_per_ms(self.input_format)

    def _translate(self, text: str, event: ServerEvent) -> str:
        """The event with the ids and the audio clock of the client."""
        if self._offset_ms:
            if isinstance(event, events.InputAudioBufferSpeechStarted | events.InputAudioBufferTimeoutTriggered):
                event.audio_start_ms += self._offset_ms
            if isinstance(event, events.InputAudioBufferSpeechStopped | events.InputAudioBufferTimeoutTriggered):
                event.audio_end_ms += self._offset_ms
            if isinstance(event, _TIMED):
                text = events.encode(event).decode()
        if isinstance(event, events.SessionResumed) and str(event.last_client_event_id).startswith(OWN_PREFIX):
            event.last_client_event_id = self.last_client_event
            text = events.encode(event).decode()
        return self._with_client_ids(text)

    def _with_client_ids(self, text: str) -> str:
        return text if self.replica_session == self.id else text.replace(self.replica_session[5:], self.id[5:])


_TIMED = (
    events.InputAudioBufferSpeechStarted,
    events.InputAudioBufferSpeechStopped,
    events.InputAudioBufferTimeoutTriggered,
)
_HANDLERS: dict[type[ServerEvent], Callable[[SessionMirror, Any], Requests | None]] = {
    events.SessionCreated: SessionMirror._session_created,
    events.SessionUpdated: SessionMirror._session_updated,
    events.ConversationItemAdded: SessionMirror._item_added,
    events.ConversationItemDone: SessionMirror._item_done,
    events.ConversationItemRetrieved: SessionMirror._item_retrieved,
    events.ConversationItemTruncated: SessionMirror._item_truncated,
    events.ConversationItemDeleted: SessionMirror._item_deleted,
    events.TranscriptionCompleted: SessionMirror._transcribed,
    events.InputAudioBufferSpeechStarted: SessionMirror._speech_started,
    events.InputAudioBufferCommitted: SessionMirror._committed,
    events.ResponseCreated: SessionMirror._response_created,
    events.OutputItemAdded: SessionMirror._output_item_added,
    events.OutputItemDone: SessionMirror._output_item_done,
    events.OutputAudioTranscriptDelta: SessionMirror._text_delta,
    events.OutputTextDelta: SessionMirror._text_delta,
    events.ResponseDone: SessionMirror._response_done,
    events.Error: SessionMirror._error,
}


def _decrement(counter: Counter[str], id: str) -> None:
    """Subtract one, and remove the key at zero."""
    counter[id] -= 1
    if counter[id] <= 0:
        del counter[id]


def _formats(session: SessionObject) -> tuple[WireFormat, WireFormat]:
    return wire_format(session.audio.input.format), output_format(session)
