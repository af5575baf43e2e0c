"""What is known of a session outside the replica that has it: enough to open it again elsewhere.

It reads along on the wire. Items with sound are asked of the replica as soon as they are whole; a reply under way is
kept as far as it was told; the user's sound since the last turn is kept as it came.
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
BEGIN = '{"type":"'  # how every event of our journal begins
MOST_UPDATES = 256
TAIL_SECONDS = 20.0
SOUND_DELTA = "response.output_audio.delta"
RESUMED = "viva.session.resumed"
OURS = "viva_ledger_"  # begins the ids of the events that we send ourselves
ANSWERS = {  # what a client sends, and what tells that it is done
    "conversation.item.create": "conversation.item.added",
    "conversation.item.truncate": "conversation.item.truncated",
    "conversation.item.delete": "conversation.item.deleted",
    "input_audio_buffer.commit": "input_audio_buffer.committed",
    "response.create": "response.created",
}
CLOCKED = {"audio_start_ms", "audio_end_ms"}


@dataclass
class ActiveReply:
    """A reply that has not ended yet."""

    response: Wire
    items: dict[str, Wire] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    sound: dict[str, list[str]] = field(default_factory=dict)
    """Events with the sound of each item, as they were told."""


@dataclass(frozen=True)
class MirroredEvents:
    """What becomes of an event of the replica."""

    forward: str | None
    ask: tuple[str, ...] = ()
    """Events that the replica is to be sent."""


@dataclass
class SessionMirror:
    """One session. `id` and `token` are those its client knows; `sitting` is what the present replica calls it."""

    kept_sound_seconds: float
    id: str = ""
    token: str = ""
    sitting: str = ""
    sitting_token: str = ""
    first_event: str = ""
    """The last event that the client was not told because it only brought the session here."""
    session: Wire = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)
    last_client_event: str | None = None
    is_user_speaking: bool = False
    _items: dict[str, Wire] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _replies: dict[str, ActiveReply] = field(default_factory=dict)
    _tail: deque[tuple[str | bytes, float]] = field(default_factory=deque)
    _tail_ms: float = 0.0
    _heard_ms: float = 0.0
    _offset_ms: int = 0
    _unanswered: list[tuple[str, str]] = field(default_factory=list)
    """Events of the client that the replica has not answered yet, and their kinds."""
    _asked: Counter[str] = field(default_factory=Counter)
    _wanted: Counter[str] = field(default_factory=Counter)
    """Items whose sound the client, and we, wait for."""

    @property
    def is_quiet(self) -> bool:
        """Whether nobody would notice that the session moves."""
        is_waiting = bool(self._wanted or self._unanswered)
        return not self._replies and not self.is_user_speaking and not is_waiting

    # What the client sends

    def said(self, message: str | bytes) -> None:
        """An event, or a binary frame of sound, goes to the replica."""
        if isinstance(message, bytes):
            self._hear(message, self._binary_ms(message))
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
            self._hear(message, len(event["audio"]) * 0.75 / _bytes_per_ms(self.input_format))
        elif kind == "input_audio_buffer.clear":
            self._forget_tail()
        elif kind == "session.update" and len(self.updates) < MOST_UPDATES:
            self.updates.append(message)
        elif kind == "conversation.item.retrieve" and isinstance(event.get("item_id"), str):
            self._asked[event["item_id"]] += 1
        elif kind in ANSWERS:
            self._unanswered.append((kind, message))

    # What the replica tells

    def told(self, text: str) -> MirroredEvents:
        """An event of the replica: what the client gets of it, and what the replica is asked."""
        kind = text[len(BEGIN) : text.find('"', len(BEGIN))] if text.startswith(BEGIN) else ""
        if kind == SOUND_DELTA:
            self._sounded(text)
            return MirroredEvents(text)
        event = json.loads(text)
        self._answered(kind, event)
        ask = _READERS[kind](self, event) if kind in _READERS else ()
        return MirroredEvents(None) if ask is None else MirroredEvents(self._renamed(text, event), ask)

    def _answered(self, kind: str, event: Wire) -> None:
        """What the client sent is done. An error may mean any of it: rather not done than done twice."""
        if kind == "error":
            self._unanswered.clear()
        is_reply = kind == "conversation.item.added" and event["item"].get("status") == "in_progress"
        for place, (asked, _) in enumerate(self._unanswered):
            if ANSWERS[asked] == kind and not is_reply:
                del self._unanswered[place]
                return

    def _session_created(self, event: Wire) -> tuple[str, ...]:
        self.seat(event)
        self.id, self.token = self.sitting, self.sitting_token
        return ()

    def _session_updated(self, event: Wire) -> tuple[str, ...]:
        before, self.session = self.session, event["session"]
        if before and _formats(before) == _formats(self.session):
            return ()
        return tuple(ask for id in self._drop_sound() for ask in self._want(id))

    def _drop_sound(self) -> list[str]:
        """Forget stored audio, which is encoded in a format no longer in force; the ids of its items."""
        dropped = []
        for id, item in self._items.items():
            had_sound = [part.pop("audio", None) for part in item.get("content", ())]
            if any(had_sound):
                dropped.append(id)
        return dropped

    def _item_added(self, event: Wire) -> tuple[str, ...]:
        item, previous = event["item"], event.get("previous_item_id")
        if item["id"] not in self._items:
            place = self._order.index(previous) + 1 if previous in self._items else 0 if previous is None else None
            self._order.insert(len(self._order) if place is None else place, item["id"])
        self._items[item["id"]] = item
        return ()

    def _item_done(self, event: Wire) -> tuple[str, ...]:
        self._item_added(event)
        has_sound = any(part["type"].endswith("_audio") for part in event["item"].get("content", ()))
        return self._want(event["item"]["id"]) if has_sound else ()

    def _item_retrieved(self, event: Wire) -> tuple[str, ...] | None:
        """None for what only we had asked for."""
        id = event["item"]["id"]
        if id in self._items:
            self._items[id] = event["item"]
            self._bound_sound()
        is_ours = self._wanted[id] > 0
        _take(self._wanted if is_ours else self._asked, id)
        return None if is_ours else ()

    def _error(self, event: Wire) -> tuple[str, ...] | None:
        """None where an item that we asked for has gone."""
        asked = event["error"].get("event_id") or ""
        if not asked.startswith(OURS):
            return ()
        _take(self._wanted, asked.removeprefix(OURS))
        return None

    def _item_truncated(self, event: Wire) -> tuple[str, ...]:
        return self._want(event["item_id"]) if event["item_id"] in self._items else ()

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
        self._forget_tail()
        return ()

    def _response_created(self, event: Wire) -> tuple[str, ...]:
        self._replies[event["response"]["id"]] = ActiveReply(event["response"])
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

    def _words_told(self, event: Wire) -> tuple[str, ...]:
        reply, item = self._replies.get(event["response_id"]), event["item_id"]
        if reply is not None:
            reply.words[item] = reply.words.get(item, "") + event["delta"]
        return ()

    def _response_done(self, event: Wire) -> tuple[str, ...]:
        self._replies.pop(event["response"]["id"], None)
        return ()

    # To open it elsewhere

    def seat(self, created: Wire) -> None:
        """It sits at a replica that greeted with this `session.created`."""
        self.session = created["session"]
        self.sitting, self.sitting_token = self.session["id"], self.session["viva"]["resume_token"]

    def moved(self) -> None:
        """It sits elsewhere from now on: what was asked of the last replica is not answered, and its clock begins."""
        self.is_user_speaking = False
        self._offset_ms = round(self._heard_ms - self._tail_ms)
        self._asked.clear()
        self._wanted.clear()

    def history(self) -> Iterator[str]:
        """Events that bring the settings and the history to a new session."""
        yield from self.updates
        for id in self._order:
            item = self._restored(self._items[id])
            if item is not None:
                yield json.dumps({"type": "conversation.item.create", "item": item})

    @property
    def tail(self) -> list[str | bytes]:
        """The user's sound since the last turn, and what the client sent that was not answered."""
        return [*(message for message, _ in self._tail), *(message for _, message in self._unanswered)]

    def resumed(self) -> str:
        """The greeting of a client that comes back to a session that was opened again meanwhile."""
        session = self.session | {"id": self.id}
        told: Wire = {"lost_events": 0, "received_audio_ms": round(self._heard_ms)}
        told["last_client_event_id"] = self.last_client_event
        return json.dumps({"type": RESUMED, "event_id": self.first_event, "session": session, **told})

    def cut_short(self) -> list[Wire]:
        """The replies under way end here: the events that tell it. What was told of them becomes history."""
        events: list[Wire] = []
        for reply in self._replies.values():
            for id, item in reply.items.items():
                whole = self._as_told(reply, id, item)
                if id in self._items:
                    self._items[id] = whole
                shown = whole | {"content": [_without_sound(part) for part in whole.get("content", [])]}
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
        """How the client's sound comes."""
        return _format(self.session, "input") if self.session else WireFormat()

    def _as_told(self, reply: ActiveReply, id: str, item: Wire) -> Wire:
        words, sound = reply.words.get(id, ""), reply.sound.get(id)
        if item.get("type") != "message":
            return item | {"status": "incomplete"}
        if sound is None:
            return item | {"status": "incomplete", "content": [{"type": "output_text", "text": words}]}
        data = b"".join(base64.b64decode(json.loads(text)["delta"]) for text in sound)
        part = {"type": "output_audio", "transcript": words or None, "audio": base64.b64encode(data).decode("ascii")}
        return item | {"status": "incomplete", "content": [part]}

    def _restored(self, item: Wire) -> Wire | None:
        """An item as a client would create it; None where neither its sound nor its words are known."""
        if item["type"] != "message":
            return {name: value for name, value in item.items() if name not in ("object", "status")}
        parts = [part for part in map(self._restored_part, item["content"]) if part is not None]
        return {"id": item["id"], "type": "message", "role": item["role"], "content": parts} if parts else None

    def _restored_part(self, part: Wire) -> Wire | None:
        is_ours = part["type"].startswith("output_")
        if part["type"].endswith("_text"):
            return part if part["text"] else None
        is_readable = not is_ours or self.input_format == _format(self.session, "output")
        if part.get("audio") and is_readable:
            return part
        words = part.get("transcript")
        return {"type": "output_text" if is_ours else "input_text", "text": words} if words else None

    def _want(self, id: str) -> tuple[str, ...]:
        self._wanted[id] += 1
        return (json.dumps({"type": "conversation.item.retrieve", "item_id": id, "event_id": OURS + id}),)

    def _sounded(self, text: str) -> None:
        event = json.loads(text)
        reply = self._replies.get(event["response_id"])
        if reply is not None:
            reply.sound.setdefault(event["item_id"], []).append(text)

    def _hear(self, message: str | bytes, milliseconds: float) -> None:
        self._heard_ms += milliseconds
        self._tail_ms += milliseconds
        self._tail.append((message, milliseconds))
        while self._tail_ms > TAIL_SECONDS * 1000 and len(self._tail) > 1:
            self._tail_ms -= self._tail.popleft()[1]

    def _forget_tail(self) -> None:
        self._tail.clear()
        self._tail_ms = 0.0

    def _binary_ms(self, message: bytes) -> float:
        is_opus = (self.session.get("viva") or {}).get("binary") == "opus"
        return 20.0 if is_opus else len(message) / _bytes_per_ms(self.input_format)

    def _bound_sound(self) -> None:
        """Sound beyond what is kept goes, the oldest first; its words stay."""
        left = self.kept_sound_seconds * 1000
        for id in reversed(self._order):
            for part in self._items[id].get("content", ()):
                format = _format(self.session, "output") if part["type"] == "output_audio" else self.input_format
                left -= len(part.get("audio") or "") * 0.75 / _bytes_per_ms(format)
                if left < 0:
                    part.pop("audio", None)

    def _renamed(self, text: str, event: Wire) -> str:
        """The event under the ids and the clock that the client knows."""
        if self._offset_ms and CLOCKED & event.keys() and event["type"].startswith("input_audio_buffer."):
            text = json.dumps(event | {name: event[name] + self._offset_ms for name in CLOCKED & event.keys()})
        if event["type"] == RESUMED and str(event["last_client_event_id"]).startswith(OURS):
            text = json.dumps(event | {"last_client_event_id": self.last_client_event})
        return text if self.sitting == self.id else text.replace(self.sitting[5:], self.id[5:])


_READERS: dict[str, Callable[[SessionMirror, Wire], tuple[str, ...] | None]] = {
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
    "response.output_audio_transcript.delta": SessionMirror._words_told,
    "response.output_text.delta": SessionMirror._words_told,
    "response.done": SessionMirror._response_done,
    "error": SessionMirror._error,
}


def _take(counter: Counter[str], id: str) -> None:
    """One less; nothing is kept of what is zero."""
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


def _without_sound(part: Wire) -> Wire:
    return {name: value for name, value in part.items() if name != "audio"}
