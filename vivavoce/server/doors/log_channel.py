"""A channel of the engine that sends an event log as it grows, without a task switch for each entry."""

import asyncio
from collections import deque

from msgspec.structs import astuple

from vivavoce.server.doors.link import Kind, Link, LinkChannel
from vivavoce.server.realtime.event_log import Cursor, Entry

STALL_CHECKS = 8  # within the time after which a client that does not read is dropped


class LogChannel(LinkChannel):
    """Sends the entries of a log to a door when they are appended, as far as the client reads."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(link, number)
        self._cursor: Cursor | None = None
        self._next_position = 0
        self._in_flight: deque[tuple[int, Entry]] = deque()  # `sent_bytes` at its end, and the entry
        self._progress_at = 0.0

    async def push(self, cursor: Cursor, stall_seconds: float) -> None:
        """Send the entries of a log as they are appended; TimeoutError where the client stops reading."""
        loop = asyncio.get_running_loop()
        self.link.send((Kind.REPLAY, self.number, cursor.log.tag, cursor.after))
        self._cursor, self._next_position, self._progress_at = cursor, cursor.position, loop.time()
        cursor.on_append = self._push_entries
        try:
            self._push_entries()
            while not self._in_flight or loop.time() - self._progress_at < stall_seconds:
                await asyncio.sleep(stall_seconds / STALL_CHECKS)
            raise TimeoutError
        finally:
            self.stop_pushing()

    def acknowledged(self, size: int) -> None:
        super().acknowledged(size)
        if self._cursor is None:
            return
        while self._in_flight and self._in_flight[0][0] <= self.acknowledged_bytes:
            self._cursor.advance(self._in_flight.popleft()[1])
        self._progress_at = asyncio.get_running_loop().time()
        self._push_entries()

    def _push_entries(self) -> None:
        """Send what was appended, as far as the client reads."""
        cursor = self._cursor
        if cursor is None:
            return
        if not self._in_flight:
            self._progress_at = asyncio.get_running_loop().time()
        while self.has_room and (entry := cursor.log.entry_at(self._next_position)) is not None:
            self._next_position = entry.position + 1
            payload = entry.payload if isinstance(entry.payload, str) else astuple(entry.payload)
            self.send_item(Kind.ENTRY, entry.size, entry.sequence, payload)
            self._in_flight.append((self.sent_bytes, entry))

    def stop_pushing(self) -> None:
        if self._cursor is not None:
            self._cursor.on_append = None
            self._cursor = None
            self._in_flight.clear()
