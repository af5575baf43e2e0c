"""A copy of a session outside its replica, complete enough to restore it at another.

The ingress passes it every event of both directions. Items with audio are retrieved from the replica as soon as they
are complete; a reply in progress is stored as far as it was sent, the user's audio since the last turn as received.
"""

import base64
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vivavoce.server.realtime.audio_formats import WireFormat, wire_format
from vivavoce.server.realtime.session_types import AudioFormat

Wire = dict[str, Any]
EVENT_PREFIX = '{"type":"'  # of every event of our server
MAX_UPDATES = 256
TAIL_SECONDS = 20.0
AUDIO_DELTA = "response.output_audio.delta"
RESUMED = "viva.session.resumed"
OWN_PREFIX = "viva_mirror_"  # of the ids of events that the mirror sends
ANSWERS = {  # events of the client, and the event that confirms each
    "conversation.item.create": "conversation.item.added",
    "conversation.item.truncate": "conversation.item.truncated",
    "conversation.item.delete": "conversation.item.deleted",
    "input_audio_buffer.commit": "input_audio_buffer.committed",
    "response.create": "response.created",
}
AUDIO_TIMES = {"audio_start_ms", "audio_end_ms"}


@dataclass
class MirroredReply:
    """A reply in progress."""

    response: Wire
    items: dict[str, Wire] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    audio: dict[str, list[str]] = field(default_factory=dict)
    """The audio events of each item, as they were sent."""


@dataclass(frozen=True)
class MirroredEvents:
    """What to do about an event of the replica."""

    to_client: str | None
    to_replica: tuple[str, ...] = ()


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
    session: Wire = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    last_client_event: str | None = None
    is_user_speaking: bool = False
    _items: dict[str, Wire] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _replies: dict[str, MirroredReply] = field(default_factory=dict)
    _tail: deque[tuple[str | bytes, float]] = field(default_factory=deque)
    _tail_ms: float = 0.0
    _received_ms: float = 0.0
    _offset_ms: int = 0
    _unanswered: list[tuple[str, str]] = field(default_factory=list)
    """Kind and text of the client's events that the replica has not confirmed."""
    _client_retrievals: Counter[str] = field(default_factory=Counter)
    _own_retrievals: Counter[str] = field(default_factory=Counter)
    """Items that the client, and the mirror, have requested from the replica."""

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
            event = json.loads(message)
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        kind = event.get("type")
        self.last_client_event = event.get("event_id") or self.last_client_event
        if kind == "input_audio_buffer.append" and isinstance(event.get("audio"), str):
            self._record_audio(message, len(event["audio"]) * 0.75 / _bytes_per_ms(self.input_format))
        elif kind == "input_audio_buffer.clear":
            self._clear_tail()
        elif kind == "session.update" and len(self.updates) < MAX_UPDATES:
            self.updates.append(message)
        elif kind == "conversation.item.retrieve" and isinstance(event.get("item_id"), str):
            self._client_retrievals[event["item_id"]] += 1
        elif kind in ANSWERS:
            self._unanswered.append((kind, message))

    # Events of the replica

    def replica_sent(self, text: str) -> MirroredEvents:
        """Record an event of the replica; what to send to the client, and what to the replica."""
        kind = text[len(EVENT_PREFIX) : text.find('"', len(EVENT_PREFIX))] if text.startswith(EVENT_PREFIX) else ""
        if kind == AUDIO_DELTA:
            self._record_reply_audio(text)
            return MirroredEvents(text)
        event = json.loads(text)
        self._confirm(kind, event)
        requests = _HANDLERS[kind](self, event) if kind in _HANDLERS else ()
        return MirroredEvents(None) if requests is None else MirroredEvents(self._translate(text, event), requests)

    def _confirm(self, kind: str, event: Wire) -> None:
        """Remove what the event confirms. An error may belong to any event: better none is repeated than one twice."""
        if kind == "error":
            self._unanswered.clear()
        is_reply = kind == "conversation.item.added" and event["item"].get("status") == "in_progress"
        for index, (sent, _) in enumerate(self._unanswered):
            if ANSWERS[sent] == kind and not is_reply:
                del self._unanswered[index]
                return

    def _session_created(self, event: Wire) -> tuple[str, ...]:
        self.attach(event)
        self.id, self.token = self.replica_session, self.replica_token
        return ()

    def _session_updated(self, event: Wire) -> tuple[str, ...]:
        before, self.session = self.session, event["session"]
        if before and _formats(before) == _formats(self.session):
            return ()
        return tuple(request for id in self._drop_audio() for request in self._retrieve(id))

    def _drop_audio(self) -> list[str]:
        """Drop stored audio, which is in a format no longer configured; the ids of its items."""
        dropped = []
        for id, item in self._items.items():
            audio = [part.pop("audio", None) for part in item.get("content", ())]
            if any(audio):
                dropped.append(id)
        return dropped

    def _item_added(self, event: Wire) -> tuple[str, ...]:
        item, previous = event["item"], event.get("previous_item_id")
        if item["id"] not in self._items:
            index = 0 if previous is None else len(self._order)
            if previous in self._items:
                index = self._order.index(previous) + 1
            self._order.insert(index, item["id"])
        self._items[item["id"]] = item
        return ()

    def _item_done(self, event: Wire) -> tuple[str, ...]:
        self._item_added(event)
        has_audio = any(part["type"].endswith("_audio") for part in event["item"].get("content", ()))
        return self._retrieve(event["item"]["id"]) if has_audio else ()

    def _item_retrieved(self, event: Wire) -> tuple[str, ...] | None:
        """None, so that it is not forwarded, for an item that only the mirror requested."""
        id = event["item"]["id"]
        if id in self._items:
            self._items[id] = event["item"]
            self._limit_audio()
        is_own = self._own_retrievals[id] > 0
        _decrement(self._own_retrievals if is_own else self._client_retrievals, id)
        return None if is_own else ()

    def _error(self, event: Wire) -> tuple[str, ...] | None:
        """None, so that it is not forwarded, where an item that the mirror requested was deleted."""
        request = event["error"].get("event_id") or ""
        if not request.startswith(OWN_PREFIX):
            return ()
        _decrement(self._own_retrievals, request.removeprefix(OWN_PREFIX))
        return None

    def _item_truncated(self, event: Wire) -> tuple[str, ...]:
        return self._retrieve(event["item_id"]) if event["item_id"] in self._items else ()

    def _item_deleted(self, event: Wire) -> tuple[str, ...]:
        if self._items.pop(event["item_id"], None) is not None:
            self._order.remove(event["item_id"])
        return ()

    def _transcribed(self, event: Wire) -> tuple[str, ...]:
        for part in self._items.get(event["item_id"], {}).get("content", ()):
            if part["type"] == "input_audio":
                part["transcript"] = event["transcript"]
        return ()

    def _speech_started(self, event: Wire) -> tuple[str, ...]:
        self.is_user_speaking = True
        return ()

    def _committed(self, event: Wire) -> tuple[str, ...]:
        self.is_user_speaking = False
        self._clear_tail()
        return ()

    def _response_created(self, event: Wire) -> tuple[str, ...]:
        self._replies[event["response"]["id"]] = MirroredReply(event["response"])
        return ()

    def _output_item_added(self, event: Wire) -> tuple[str, ...]:
        reply = self._replies.get(event["response_id"])
        if reply is not None:
            reply.items[event["item"]["id"]] = event["item"]
        return ()

    def _output_item_done(self, event: Wire) -> tuple[str, ...]:
        reply = self._replies.get(event["response_id"])
        if reply is not None:
            reply.items.pop(event["item"]["id"], None)
        return ()

    def _text_delta(self, event: Wire) -> tuple[str, ...]:
        reply, item = self._replies.get(event["response_id"]), event["item_id"]
        if reply is not None:
            reply.text[item] = reply.text.get(item, "") + event["delta"]
        return ()

    def _response_done(self, event: Wire) -> tuple[str, ...]:
        self._replies.pop(event["response"]["id"], None)
        return ()

    # Restoring the session elsewhere

    def attach(self, created: Wire) -> None:
        """Take over the ids of the replica that sent this `session.created`."""
        self.session = created["session"]
        self.replica_session, self.replica_token = self.session["id"], self.session["viva"]["resume_token"]

    def reset_after_move(self) -> None:
        """Forget the requests to the last replica, and offset the audio clock, which starts anew at this one."""
        self.is_user_speaking = False
        self._offset_ms = round(self._received_ms - self._tail_ms)
        self._client_retrievals.clear()
        self._own_retrievals.clear()

    def history(self) -> Iterator[str]:
        """Events that restore the settings and the history in a new session."""
        yield from self.updates
        for id in self._order:
            item = self._creatable(self._items[id])
            if item is not None:
                yield json.dumps({"type": "conversation.item.create", "item": item})

    @property
    def tail(self) -> list[str | bytes]:
        """The user's audio since the last turn, and the events of the client that were not confirmed."""
        return [*(message for message, _ in self._tail), *(message for _, message in self._unanswered)]

    def resumed_event(self) -> str:
        """The first event for a client that reconnects to a session that was restored meanwhile."""
        event: Wire = {"type": RESUMED, "event_id": self.restore_event, "session": self.session | {"id": self.id}}
        event |= {"lost_events": 0, "received_audio_ms": round(self._received_ms)}
        return json.dumps(event | {"last_client_event_id": self.last_client_event})

    def fail_active_replies(self) -> list[Wire]:
        """End the replies in progress: the events for the client. What was sent of them becomes history."""
        events: list[Wire] = []
        for reply in self._replies.values():
            for id, item in reply.items.items():
                whole = self._as_sent(reply, id, item)
                if id in self._items:
                    self._items[id] = whole
                shown = whole | {"content": [_without_audio(part) for part in whole.get("content", [])]}
                events.append({"type": "response.output_item.done", "response_id": reply.response["id"]})
                events[-1] |= {"output_index": 0, "item": shown}
            error = {"type": "server_error", "code": "replica_lost", "message": "the reply was lost with its replica"}
            details = {"type": "failed", "error": error}
            response = reply.response | {"status": "failed", "status_details": details}
            events.append({"type": "response.done", "response": response})
        self._replies.clear()
        return events

    @property
    def input_format(self) -> WireFormat:
        """The format of the client's audio."""
        return _format(self.session, "input") if self.session else WireFormat()

    def _as_sent(self, reply: MirroredReply, id: str, item: Wire) -> Wire:
        text, audio = reply.text.get(id, ""), reply.audio.get(id)
        if item.get("type") != "message":
            return item | {"status": "incomplete"}
        if audio is None:
            return item | {"status": "incomplete", "content": [{"type": "output_text", "text": text}]}
        data = b"".join(base64.b64decode(json.loads(event)["delta"]) for event in audio)
        part = {"type": "output_audio", "transcript": text or None, "audio": base64.b64encode(data).decode("ascii")}
        return item | {"status": "incomplete", "content": [part]}

    def _creatable(self, item: Wire) -> Wire | None:
        """An item as a client would create it; None where neither its audio nor its text is known."""
        if item["type"] != "message":
            return {name: value for name, value in item.items() if name not in ("object", "status")}
        parts = [part for part in map(self._creatable_part, item["content"]) if part is not None]
        return {"id": item["id"], "type": "message", "role": item["role"], "content": parts} if parts else None

    def _creatable_part(self, part: Wire) -> Wire | None:
        is_output = part["type"].startswith("output_")
        if part["type"].endswith("_text"):
            return part if part["text"] else None
        is_readable = not is_output or self.input_format == _format(self.session, "output")
        if part.get("audio") and is_readable:
            return part
        text = part.get("transcript")
        return {"type": "output_text" if is_output else "input_text", "text": text} if text else None

    def _retrieve(self, id: str) -> tuple[str, ...]:
        self._own_retrievals[id] += 1
        return (json.dumps({"type": "conversation.item.retrieve", "item_id": id, "event_id": OWN_PREFIX + id}),)

    def _record_reply_audio(self, text: str) -> None:
        event = json.loads(text)
        reply = self._replies.get(event["response_id"])
        if reply is not None:
            reply.audio.setdefault(event["item_id"], []).append(text)

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
        is_opus = (self.session.get("viva") or {}).get("binary") == "opus"
        return 20.0 if is_opus else len(message) / _bytes_per_ms(self.input_format)

    def _limit_audio(self) -> None:
        """Drop audio beyond `kept_sound_seconds`, the oldest first; its text stays."""
        left = self.kept_sound_seconds * 1000
        for id in reversed(self._order):
            for part in self._items[id].get("content", ()):
                format = _format(self.session, "output") if part["type"] == "output_audio" else self.input_format
                left -= len(part.get("audio") or "") * 0.75 / _bytes_per_ms(format)
                if left < 0:
                    part.pop("audio", None)

    def _translate(self, text: str, event: Wire) -> str:
        """The event with the ids and the audio clock of the client."""
        if self._offset_ms and AUDIO_TIMES & event.keys() and event["type"].startswith("input_audio_buffer."):
            text = json.dumps(event | {name: event[name] + self._offset_ms for name in AUDIO_TIMES & event.keys()})
        if event["type"] == RESUMED and str(event["last_client_event_id"]).startswith(OWN_PREFIX):
            text = json.dumps(event | {"last_client_event_id": self.last_client_event})
        return text if self.replica_session == self.id else text.replace(self.replica_session[5:], self.id[5:])


_HANDLERS: dict[str, Callable[[SessionMirror, Wire], tuple[str, ...] | None]] = {
    "session.created": SessionMirror._session_created,
    "session.updated": SessionMirror._session_updated,
    "conversation.item.added": SessionMirror._item_added,
    "conversation.item.done": SessionMirror._item_done,
    "conversation.item.retrieved": SessionMirror._item_retrieved,
    "conversation.item.truncated": SessionMirror._item_truncated,
    "conversation.item.deleted": SessionMirror._item_deleted,
    "conversation.item.input_audio_transcription.completed": SessionMirror._transcribed,
    "input_audio_buffer.speech_started": SessionMirror._speech_started,
    "input_audio_buffer.committed": SessionMirror._committed,
    "response.created": SessionMirror._response_created,
    "response.output_item.added": SessionMirror._output_item_added,
    "response.output_item.done": SessionMirror._output_item_done,
    "response.output_audio_transcript.delta": SessionMirror._text_delta,
    "response.output_text.delta": SessionMirror._text_delta,
    "response.done": SessionMirror._response_done,
    "error": SessionMirror._error,
}


def _decrement(counter: Counter[str], id: str) -> None:
    """Subtract one, and remove the key at zero."""
    counter[id] -= 1
    if counter[id] <= 0:
        del counter[id]


def _formats(session: Wire) -> tuple[WireFormat, WireFormat]:
    return _format(session, "input"), _format(session, "output")


def _format(session: Wire, side: str) -> WireFormat:
    audio = session["audio"].get(side)
    return WireFormat() if audio is None else wire_format(msgspec.convert(audio["format"], AudioFormat))


def _bytes_per_ms(format: WireFormat) -> float:
    return format.rate * format.bytes_per_sample / 1000


def _without_audio(part: Wire) -> Wire:
    return {name: value for name, value in part.items() if name != "audio"}
