"""The numbered log of a session's events. Connections read it by cursors, so that a resumed one misses none."""

import asyncio
from collections import deque
from dataclasses import dataclass

from vivavoce.server.realtime.server_events import ServerEvent, encode

MAX_REPLAY_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """One encoded event: JSON text, or the bytes of an audio frame."""

    sequence: int
    payload: str | bytes
    at: float
    end: int
    """Bytes logged up to the end of this entry."""
    is_sound: bool


class Cursor:
    """How far one connection has read."""

    def __init__(self, log: "EventLog", sequence: int) -> None:
        self.log, self.sequence = log, sequence
        self.offset = log.offset_of(sequence)

    @property
    def pending_bytes(self) -> int:
        """Bytes logged and not yet read."""
        return self.log.end - self.offset

    async def next(self) -> Entry:
        """Wait for the next entry; call `advance` once it is sent."""
        while (entry := self.log.entry_after(self.sequence)) is None:
            await self.log.wait_for_append()
        return entry

    def advance(self, entry: Entry) -> None:
        """Move past an entry that was sent."""
        self.sequence, self.offset = entry.sequence, entry.end


class EventLog:
    """Events in order; those that every connection has read stay for `replay_seconds`, up to `MAX_REPLAY_BYTES`."""

    def __init__(self, tag: str, replay_seconds: float) -> None:
        self.tag, self.replay_seconds = tag, replay_seconds
        self.end = 0
        self.last = 0
        self.cursors: set[Cursor] = set()
        self._entries: deque[Entry] = deque()
        self._appended = asyncio.Event()

    def append(self, event: ServerEvent, is_sound: bool = False) -> None:
        """Number, encode and store an event."""
        event.event_id = self.event_id(self.last + 1)
        self._append(encode(event).decode(), is_sound)

    def append_frame(self, header: bytes, audio: bytes) -> None:
        """Store an audio frame: header, event number, audio."""
        self._append(header + (self.last + 1).to_bytes(4, "little") + audio, is_sound=True)

    def open_cursor(self, sequence: int) -> Cursor:
        """A new cursor after the entry with this number."""
        cursor = Cursor(self, sequence)
        self.cursors.add(cursor)
        return cursor

    def close_cursor(self, cursor: Cursor) -> None:
        """Remove the cursor of a closed connection; what it had not read stays."""
        self.cursors.discard(cursor)

    def event_id(self, sequence: int) -> str:
        """The event id of a number."""
        return f"event_{self.tag}_{sequence}"

    def sequence_of(self, event_id: str) -> int | None:
        """The number in an event id; None for an id of another session."""
        prefix, _, number = event_id.rpartition("_")
        is_ours = prefix == f"event_{self.tag}" and number.isdecimal() and len(number) < 18
        return int(number) if is_ours and int(number) <= self.last else None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored entries."""
        return self.end - self.offset_of(0)

    @property
    def first(self) -> int:
        """The number of the oldest stored entry."""
        return self._entries[0].sequence if self._entries else self.last + 1

    def entry_after(self, sequence: int) -> Entry | None:
        """The entry after a number, or the oldest stored one; None at the end of the log."""
        index = max(sequence + 1 - self.first, 0)
        return self._entries[index] if index < len(self._entries) else None

    def offset_of(self, sequence: int) -> int:
        """Bytes logged before the entry after a number."""
        entry = self.entry_after(sequence)
        return self.end if entry is None else entry.end - len(entry.payload)

    async def wait_for_append(self) -> None:
        """Return when the next entry is appended."""
        await self._appended.wait()

    def _append(self, payload: str | bytes, is_sound: bool) -> None:
        self.last += 1
        self.end += len(payload)
        now = asyncio.get_running_loop().time()
        self._entries.append(Entry(self.last, payload, now, self.end, is_sound))
        self._trim(now)
        self._appended.set()
        self._appended = asyncio.Event()

    def _trim(self, now: float) -> None:
        """Drop entries by age and size, except those that an open cursor, or no cursor yet, has read."""
        read = min((cursor.sequence for cursor in self.cursors), default=0)
        while self._entries and (oldest := self._entries[0]).sequence <= read:
            if now - oldest.at < self.replay_seconds and self.end - oldest.end < MAX_REPLAY_BYTES:
                break
            self._entries.popleft()
