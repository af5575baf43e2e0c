"""The engine's end of door links: each connection of a client runs the ASGI application of the server."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Scope

from vivavoce.log import log_failure
from vivavoce.server.admission import LoopLoad
from vivavoce.server.doors.link import Channel, Item, Kind, Link, message_size
from vivavoce.server.metrics import DoorStatistics
from vivavoce.server.realtime.audio_formats import InputFormats
from vivavoce.server.realtime.event_log import Cursor, Entry
from vivavoce.server.realtime.handlers import DecodedAudio

logger = logging.getLogger(__name__)

STALL_CHECKS = 8  # within the time after which a client that does not read is dropped
TakeAudio = Callable[[DecodedAudio], float]
"""Handles audio at once; the seconds until the next message may be handled."""


class EngineChannel(Channel):
    """A client's connection, as an ASGI server gives it to the application.

    A WebSocket may bypass ASGI: audio that arrives while the application waits for a message is handled by
    `take_audio`, and `push` sends an event log without a task of its own.
    """

    def __init__(self, link: Link, number: int, scope: Scope) -> None:
        super().__init__(link, number)
        self.scope: Scope = {**scope, "headers": list(scope["headers"])}
        if scope["type"] == "websocket":
            self.scope["viva.door"] = self
        self.take_audio: TakeAudio | None = None
        self._received: deque[tuple[Message, int]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._delay = 0.0
        self._cursor: Cursor | None = None
        self._next_position = 0
        self._in_flight: deque[tuple[int, Entry]] = deque()  # `sent_bytes` at its end, and the entry
        self._progress_at = 0.0

    # ASGI

    async def receive(self) -> Message:
        """The next message of the client."""
        while True:
            if self._delay:
                delay, self._delay = self._delay, 0.0
                await asyncio.sleep(delay)
            if self._received:
                message, size = self._received.popleft()
                self.processed(size)
                return message
            if self.is_over:
                return self._disconnect_message
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    async def send(self, message: Message) -> None:
        """Send a message, and wait while the client does not read."""
        if self.is_over and self.scope["type"] == "websocket":
            raise OSError("the client is disconnected")
        if message["type"] in ("websocket.close", "websocket.http.response.start"):
            self._stop_pushing()
        self.send_item(Kind.MESSAGE, message_size(message), message)
        await self.wait_for_room()

    @property
    def _disconnect_message(self) -> Message:
        """Of a lost connection, which has no close code."""
        if self.scope["type"] == "http":
            return {"type": "http.disconnect"}
        return {"type": "websocket.disconnect", "code": 1006}

    # From the door

    def message_received(self, size: int, message: Message) -> None:
        """Queue a message for the application."""
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            self.end()
        self._received.append((message, size))
        self._wake()

    def audio_received(self, size: int, event_id: str | None, wire_bytes: int, data: bytes) -> None:
        """Handle audio at once where the application waits for a message, in its turn otherwise."""
        audio = DecodedAudio(event_id, wire_bytes, np.frombuffer(data, np.float32))
        is_waiting = self._waiting is not None and not self._waiting.done() and not self._received
        if self.take_audio is None or not is_waiting or audio.is_long:
            self._received.append(({"type": "websocket.receive", "audio": audio}, size))
            self._wake()
            return
        self.processed(size)
        self._delay = self.take_audio(audio)
        if self._delay:
            self._wake()

    def lost(self) -> None:
        """The door process has ended."""
        self.end()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # The event log

    def send_formats(self, formats: InputFormats) -> None:
        """Tell the door how to decode the client's audio from now on."""
        self.link.send((Kind.FORMATS, self.number, formats))

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
            self._stop_pushing()

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
            self.send_item(Kind.ENTRY, entry.size, entry.sequence, entry.payload)
            self._in_flight.append((self.sent_bytes, entry))

    def _stop_pushing(self) -> None:
        if self._cursor is not None:
            self._cursor.on_append = None
            self._cursor = None
            self._in_flight.clear()


class DoorLink:
    """One door process as the engine sees it: runs the application for each of its connections."""

    def __init__(
        self, app: ASGIApp, is_ready: Callable[["DoorLink"], None], is_lost: Callable[["DoorLink"], None]
    ) -> None:
        self.door = -1
        self.statistics = DoorStatistics()
        self.channels: dict[int, EngineChannel] = {}
        self.link = Link(self._received, self._lost)
        self._app, self._is_ready, self._is_lost = app, is_ready, is_lost
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: dict[int, Callable[..., None]] = {
            Kind.ACKNOWLEDGED: self._acknowledged,
            Kind.OPEN: self._open,
            Kind.MESSAGE: self._message,
            Kind.AUDIO: self._audio,
            Kind.READY: self._ready,
            Kind.STATISTICS: self._statistics,
        }

    def drain(self) -> None:
        """Let the door close its connections and exit."""
        self.link.send((Kind.DRAIN,))

    async def finished(self) -> None:
        """Wait until the application has ended for every connection."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _received(self, item: Item) -> None:
        self._handlers[item[0]](*item[1:])

    def _acknowledged(self, sizes: dict[int, int]) -> None:
        for number, size in sizes.items():
            if (channel := self.channels.get(number)) is not None:
                channel.acknowledged(size)

    def _open(self, number: int, scope: Scope) -> None:
        channel = self.channels[number] = EngineChannel(self.link, number, scope)
        task = asyncio.create_task(self._run(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _message(self, number: int, size: int, message: Message) -> None:
        if (channel := self.channels.get(number)) is not None:
            channel.message_received(size, message)

    def _audio(self, number: int, *fields: Any) -> None:
        if (channel := self.channels.get(number)) is not None:
            channel.audio_received(*fields)

    def _ready(self, door: int) -> None:
        self.door = door
        self._is_ready(self)

    def _statistics(self, load: tuple[float, float, float], connections: int) -> None:
        self.statistics = DoorStatistics(LoopLoad(*load), connections)

    async def _run(self, channel: EngineChannel) -> None:
        try:
            await self._app(channel.scope, channel.receive, channel.send)
        except Exception as error:
            log_failure(logger, error, "a request failed")
        finally:
            del self.channels[channel.number]
            channel.end()
            self.link.send((Kind.END, channel.number))

    def _lost(self) -> None:
        for channel in self.channels.values():
            channel.lost()
        self._is_lost(self)
