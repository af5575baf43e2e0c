"""The numbered log of a session's events. Connections read it by cursors, so that a resumed one misses none."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from vivavoce.server.realtime.audio_events import AudioPiece
from vivavoce.server.realtime.server_events import ServerEvent, encode

MAX_REPLAY_BYTES = 8 << 20
HEAD_BYTES = 128  # counted for the fields of an audio piece
PREROLL_SECONDS = 0.4  # of earlier audio that a new encoder reads, to continue where the previous one ended


class Entry(Struct, frozen=True, gc=False):
    """One event: JSON text, or a piece of audio that the connection encodes to events or frames."""

    position: int
    """Number of entries logged before this one."""
    sequence: int
    """Its event number; the last one of an audio piece that is encoded to several messages."""
    payload: str | AudioPiece
    at: float
    end: int
    """Bytes logged up to the end of this entry."""
    size: int


class Cursor:
    """How far one connection has read."""

    def __init__(self, log: "EventLog", after: int) -> None:
        self.log, self.after = log, after
        """The number of the last event that the client has; entries up to it only prepare the audio encoder."""
        self.position = log.start_of_replay(after)
        self.offset = log.offset_of(self.position)
        self.on_append: Callable[[], None] | None = None
        """Called for each new entry, by a connection that does not wait in `next`."""

    @property
    def pending_bytes(self) -> int:
        """Bytes logged and not yet read."""
        return self.log.end - self.offset

    async def next(self) -> Entry:
        """Wait for the next entry; call `advance` once it is sent."""
        while (entry := self.log.entry_at(self.position)) is None:
            await self.log.wait_for_append()
        return entry

    def advance(self, entry: Entry) -> None:
        """Move past an entry that was sent."""
        self.position, self.offset = entry.position + 1, entry.end


class EventLog:
    """Events in order; those that every connection has read stay for `replay_seconds`, up to `MAX_REPLAY_BYTES`."""

    def __init__(self, tag: str, replay_seconds: float) -> None:
        self.tag, self.replay_seconds = tag, replay_seconds
        self.end = 0
        self.last = 0
        self.cursors: set[Cursor] = set()
        self._entries: deque[Entry] = deque()
        self._count = 0
        self._appended: asyncio.Event | None = None

    def append(self, event: ServerEvent) -> None:
        """Number, encode and store an event."""
        event.event_id = self.event_id(self.last + 1)
        payload = encode(event).decode()
        self._append(payload, len(payload), 1)

    def append_audio(self, piece: AudioPiece) -> None:
        """Number and store a piece of audio."""
        self._append(piece, HEAD_BYTES + len(piece.samples), piece.numbers)

    def clear(self) -> None:
        """Drop all entries, at the end of the session: they are most of its memory."""
        self._entries.clear()

    def open_cursor(self, sequence: int) -> Cursor:
        """A new cursor after the event with this number."""
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
        """The number of the oldest stored event."""
        if not self._entries:
            return self.last + 1
        oldest = self._entries[0]
        return oldest.sequence + 1 - (oldest.payload.numbers if isinstance(oldest.payload, AudioPiece) else 1)

    def entry_at(self, position: int) -> Entry | None:
        """The entry at a position, or the oldest stored one; None at the end of the log."""
        index = max(position - self._count + len(self._entries), 0)
        return self._entries[index] if index < len(self._entries) else None

    def offset_of(self, position: int) -> int:
        """Bytes logged before the entry at a position."""
        entry = self.entry_at(position)
        return self.end if entry is None else entry.end - entry.size

    def start_of_replay(self, after: int) -> int:
        """The position from which a client that has the events up to `after` is served.

        Audio is encoded as a stream. In the middle of an item, a new encoder first reads earlier pieces of it, so that
        it continues sample for sample.
        """
        entries = self._entries
        index = bisect_right(entries, after, key=lambda entry: entry.sequence)
        following = (entries[each].payload for each in range(index, len(entries)))
        piece = next((payload for payload in following if isinstance(payload, AudioPiece)), None)
        start = index
        for earlier in range(index - 1, -1, -1) if piece is None or piece.start else ():
            payload = entries[earlier].payload
            if not isinstance(payload, AudioPiece):
                continue
            if piece is None and payload.is_end:
                break  # no item is in progress
            piece = piece or payload
            if payload.head.item_id == piece.head.item_id:
                start = earlier
                if payload.starts_packet and payload.start <= piece.start - PREROLL_SECONDS * payload.head.rate:
                    break
        return self._count - len(entries) + start

    async def wait_for_append(self) -> None:
        """Return when the next entry is appended."""
        self._appended = self._appended or asyncio.Event()
        await self._appended.wait()

    def _append(self, payload: str | AudioPiece, size: int, numbers: int) -> None:
        self.last += numbers
        self.end += size
        now = asyncio.get_running_loop().time()
        self._entries.append(Entry(self._count, self.last, payload, now, self.end, size))
        self._count += 1
        self._trim(now)
        if self._appended is not None:
            self._appended.set()
            self._appended = None
        for cursor in self.cursors:
            if cursor.on_append is not None:
                cursor.on_append()

    def _trim(self, now: float) -> None:
        """Drop entries by age and size, except those that an open cursor, or no cursor yet, has read."""
        if not self._is_old(now):
            return
        read = min((cursor.position for cursor in self.cursors), default=0)
        while self._entries and self._entries[0].position < read and self._is_old(now):
            self._entries.popleft()

    def _is_old(self, now: float) -> bool:
        """Whether the oldest entry need not be kept for a resume."""
        oldest = self._entries[0]
        return now - oldest.at >= self.replay_seconds or self.end - oldest.end >= MAX_REPLAY_BYTES
