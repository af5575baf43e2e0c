"""The engine's end of door links: each connection of a client runs the ASGI application of the server."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Message, Scope

from vivavoce.log import log_failure
from vivavoce.server.admission import LoopLoad
from vivavoce.server.doors.calls import EngineCall
from vivavoce.server.doors.link import Item, Kind, Link, message_size
from vivavoce.server.doors.log_channel import LogChannel
from vivavoce.server.metrics import DoorStatistics
from vivavoce.server.realtime.audio_formats import InputFormats
from vivavoce.server.realtime.call_peer import CallListener
from vivavoce.server.realtime.handlers import DecodedAudio
from vivavoce.server.realtime.webrtc import Caller, NewCaller

logger = logging.getLogger(__name__)

TakeAudio = Callable[[DecodedAudio], float]
"""Handles audio at once; the seconds until the next message may be handled."""


class EngineChannel(LogChannel):
    """A client's connection, as an ASGI server gives it to the application.

    A WebSocket may bypass ASGI: audio that arrives while the application waits for a message is handled by
    `take_audio`, and `push` sends an event log without a task of its own.
    """

    def __init__(self, link: Link, number: int, scope: Scope, new_caller: NewCaller) -> None:
        super().__init__(link, number)
        self.scope: Scope = {**scope, "headers": list(scope["headers"]), "viva.door": self}
        self.new_caller = new_caller
        """Makes the peer of a WebRTC call in this door."""
        self.take_audio: TakeAudio | None = None
        self._received: deque[tuple[Message, int]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._delay = 0.0

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
            self.stop_pushing()
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

    def send_formats(self, formats: InputFormats, is_answer: bool) -> None:
        """Tell the door how to decode the client's audio from now on; it waits for answers to session updates."""
        self.link.send((Kind.FORMATS, self.number, formats, is_answer))


class DoorLink:
    """One door process as the engine sees it: runs the application for each of its connections."""

    def __init__(
        self, app: ASGIApp, is_ready: Callable[["DoorLink"], None], is_lost: Callable[["DoorLink"], None]
    ) -> None:
        self.door = -1
        self.statistics = DoorStatistics()
        self.missing_reports = 0
        """Times that a report was due since the last one."""
        self.channels: dict[int, EngineChannel] = {}
        self.calls: dict[int, EngineCall] = {}
        self._call_numbers = itertools.count(-1, -1)  # the door numbers the connections of its clients
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
            if (channel := self._channel(number)) is not None:
                channel.acknowledged(size)

    def _open(self, number: int, scope: Scope) -> None:
        channel = self.channels[number] = EngineChannel(self.link, number, scope, self._new_caller)
        task = asyncio.create_task(self._run(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _new_caller(self, listener: CallListener, input_rate: int, output_rate: int) -> Caller:
        number = next(self._call_numbers)
        call = self.calls[number] = EngineCall(self.link, number, listener, (input_rate, output_rate), self.calls.pop)
        return call

    def _message(self, number: int, size: int, message: Message) -> None:
        if (channel := self._channel(number)) is not None:
            channel.message_received(size, message)

    def _audio(self, number: int, *fields: Any) -> None:
        if (channel := self._channel(number)) is not None:
            channel.audio_received(*fields)

    def _channel(self, number: int) -> EngineChannel | EngineCall | None:
        return self.channels.get(number) or self.calls.get(number)

    def _ready(self, door: int) -> None:
        self.door = door
        self._is_ready(self)

    def _statistics(self, load: tuple[float, float, float], connections: int) -> None:
        self.statistics = DoorStatistics(LoopLoad(*load), connections)
        self.missing_reports = 0

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
        for call in list(self.calls.values()):
            call.lost()
        self._is_lost(self)
