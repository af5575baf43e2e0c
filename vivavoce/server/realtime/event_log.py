"""The events a session has sent, numbered: a connection reads on from where it stands, a resumed one misses nothing."""

import asyncio
from collections import deque
from dataclasses import dataclass

from vivavoce.server.realtime.server_events import ServerEvent, encode

KEPT_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """One event as it goes over the wire: JSON text, or the bytes of an audio frame."""

    sequence: int
    payload: str | bytes
    at: float
    end: int
    """Bytes logged up to and with this one."""
    is_sound: bool


class Cursor:
    """How far one connection has read."""

    def __init__(self, log: "EventLog", sequence: int) -> None:
        self.log, self.sequence = log, sequence
        self.offset = log.offset_of(sequence)

    @property
    def pending_bytes(self) -> int:
        """What is logged and not yet read."""
        return self.log.end - self.offset

    async def next(self) -> Entry:
        """The next entry, when there is one; call `advance` once it is sent."""
        while (entry := self.log.after(self.sequence)) is None:
            await self.log.grown()
        return entry

    def advance(self, entry: Entry) -> None:
        """The entry was sent."""
        self.sequence, self.offset = entry.sequence, entry.end


class EventLog:
    """Events in order; those that every connection has read are kept for `keep_seconds`, within `KEPT_BYTES`."""

    def __init__(self, tag: str, keep_seconds: float) -> None:
        self.tag, self.keep_seconds = tag, keep_seconds
        self.end = 0
        self.last = 0
        self.cursors: set[Cursor] = set()
        self._entries: deque[Entry] = deque()
        self._growth = asyncio.Event()

    def append(self, event: ServerEvent, is_sound: bool = False) -> None:
        """Give an event its id, encode and keep it."""
        event.event_id = self.event_id(self.last + 1)
        self._append(encode(event).decode(), is_sound)

    def append_frame(self, header: bytes, audio: bytes) -> None:
        """A frame of audio: header, its number, the audio."""
        self._append(header + (self.last + 1).to_bytes(4, "little") + audio, is_sound=True)

    def open_cursor(self, after: int) -> Cursor:
        """A new reader, of everything after an entry."""
        cursor = Cursor(self, after)
        self.cursors.add(cursor)
        return cursor

    def close_cursor(self, cursor: Cursor) -> None:
        """This reader is gone; what it had not read is kept."""
        self.cursors.discard(cursor)

    def event_id(self, sequence: int) -> str:
        """The id of the event with a number."""
        return f"event_{self.tag}_{sequence}"

    def sequence_of(self, event_id: str) -> int | None:
        """The number in an event id; None if it is not one of ours."""
        prefix, _, number = event_id.rpartition("_")
        is_ours = prefix == f"event_{self.tag}" and number.isdecimal() and len(number) < 18
        return int(number) if is_ours and int(number) <= self.last else None

    @property
    def kept_bytes(self) -> int:
        """How much is here."""
        return self.end - self.offset_of(0)

    @property
    def first(self) -> int:
        """The oldest number still here."""
        return self._entries[0].sequence if self._entries else self.last + 1

    def after(self, sequence: int) -> Entry | None:
        """The entry that follows a number, or the oldest that is left."""
        index = max(sequence + 1 - self.first, 0)
        return self._entries[index] if index < len(self._entries) else None

    def offset_of(self, sequence: int) -> int:
        """Bytes logged before the entry that follows a number."""
        entry = self.after(sequence)
        return self.end if entry is None else entry.end - len(entry.payload)

    async def grown(self) -> None:
        """Return when something was appended."""
        await self._growth.wait()

    def _append(self, payload: str | bytes, is_sound: bool) -> None:
        self.last += 1
        self.end += len(payload)
        now = asyncio.get_running_loop().time()
        self._entries.append(Entry(self.last, payload, now, self.end, is_sound))
        self._trim(now)
        self._growth.set()
        self._growth = asyncio.Event()

    def _trim(self, now: float) -> None:
        """Drop what is old or too much, but never what a present reader has still to read or no reader has read yet."""
        read = min((cursor.sequence for cursor in self.cursors), default=0)
        while self._entries and (oldest := self._entries[0]).sequence <= read:
            if now - oldest.at < self.keep_seconds and self.end - oldest.end < KEPT_BYTES:
                break
            self._entries.popleft()
