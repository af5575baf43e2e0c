"""A door process: uvicorn with an application that relays every connection to the engine process.

It decodes the audio of clients and encodes that of replies, and has no state that a client could miss: a client whose
door ends reconnects through another one. It imports no models and no torch.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, astuple, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn

from vivavoce.log import configure
from vivavoce.server.admission import LoopMonitor
from vivavoce.server.config import ServerOptions, read_options
from vivavoce.server.doors.calls import DoorCall
from vivavoce.server.doors.link import Item, Kind, Link, LinkChannel, message_size
from vivavoce.server.doors.sockets import bind
from vivavoce.server.realtime.audio_events import AudioEventEncoder, AudioHead, AudioPiece
from vivavoce.server.realtime.audio_formats import InputFormats, SoundReader, slices
from vivavoce.server.realtime.client_events import InputAudioBufferAppend, SessionUpdate, decode_client_event
from vivavoce.server.uvicorn_settings import uvicorn_config
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

DISCONNECT_SECONDS = 1.0  # within which a connection that cannot be sent to reports its close code
STATISTICS_SECONDS = 1.0
REALTIME_PATH = "/v1/realtime"  # of the protocol whose audio a door decodes; other WebSockets are relayed as they are
SCOPE_FIELDS = (
    *("type", "asgi", "http_version", "server", "client", "scheme", "method", "root_path"),
    *("path", "raw_path", "query_string", "headers", "subprotocols", "extensions"),
)


class DoorChannel(LinkChannel):
    """One connection of a client: its messages to the engine, and those of the engine to the client."""

    def __init__(self, link: Link, number: int, max_event_bytes: int, decodes_audio: bool) -> None:
        super().__init__(link, number)
        self._max_event_bytes, self._decodes_audio = max_event_bytes, decodes_audio
        self._to_send: deque[tuple[int, Message | tuple[int, str | AudioPiece]]] = deque()
        self._has_work = asyncio.Event()
        self._formats: InputFormats | None = None
        self._reader: SoundReader | None = None
        self._awaited_formats = 1  # first for the session that the engine attaches
        self._formats_known = asyncio.Event()
        self._encoder = AudioEventEncoder("", 0)

    # From the client

    async def relay_received(self, receive: "Receive") -> None:
        """Pass the messages of the client on until it disconnects."""
        while True:
            message = await receive()
            is_event = self._decodes_audio and message["type"] == "websocket.receive"
            if not is_event or not await self._relay_event(message):
                self.send_item(Kind.MESSAGE, message_size(message), message)
            if message["type"].endswith(".disconnect"):
                return
            await self.wait_for_room()

    async def _relay_event(self, message: "Message") -> bool:
        """Decode audio and send its samples; false for all other messages, which the engine decodes."""
        text = message.get("text")
        try:
            if text is None:
                return await self._relay_audio(None, message["bytes"], is_binary=True)
            if len(text) > self._max_event_bytes:
                return False
            event = decode_client_event(text)
            if isinstance(event, InputAudioBufferAppend):
                return await self._relay_audio(event.event_id, event.audio, is_binary=False)
        except WireError:  # the engine refuses it with the error event
            return False
        if isinstance(event, SessionUpdate):  # audio after it waits until the engine has applied it
            self._awaited_formats += 1
            self._formats_known.clear()
            message["asks_for_formats"] = True
        return False

    async def _relay_audio(self, event_id: str | None, data: bytes, is_binary: bool) -> bool:
        await self._formats_known.wait()
        formats, reader = self._formats, self._reader
        assert formats is not None
        assert reader is not None
        if formats.binary is None if is_binary else formats.binary == "opus":
            return False
        decoded: list[np.ndarray] = []
        for piece in [data] if formats.binary == "opus" else slices(data, formats.format):
            decoded.append(reader.read(piece))
            if len(piece) < len(data):
                await asyncio.sleep(0)
        samples = (decoded[0] if len(decoded) == 1 else np.concatenate([np.zeros(0, np.float32), *decoded])).tobytes()
        self.send_item(Kind.AUDIO, len(samples), event_id, len(data), samples)
        return True

    # To the client

    def formats_received(self, fields: tuple[Any, ...], is_answer: bool) -> None:
        """The formats of the client's audio from now on; the decoder keeps its state where they have not changed."""
        formats = InputFormats(*fields)
        if formats != self._formats:
            self._formats, self._reader = formats, formats.new_reader()
        self._awaited_formats -= is_answer
        if not self._awaited_formats:
            self._formats_known.set()

    def replay_received(self, tag: str, after: int) -> None:
        """The next entries are of an event log, after this event."""
        self._encoder = AudioEventEncoder(tag, after)

    def message_received(self, size: int, message: "Message") -> None:
        """Queue a message for the client."""
        self._to_send.append((size, message))
        self._has_work.set()

    def entry_received(self, size: int, sequence: int, payload: str | tuple[Any, ...]) -> None:
        """Queue an entry of the event log for the client."""
        entry = payload if isinstance(payload, str) else AudioPiece(AudioHead(*payload[0]), *payload[1:])
        self._to_send.append((size, (sequence, entry)))
        self._has_work.set()

    def ended(self) -> None:
        """The engine has finished with the connection."""
        self.end()
        self._has_work.set()

    async def relay_sent(self, send: "Send") -> None:
        """Pass the messages of the engine on until it has finished with the connection."""
        while True:
            while self._to_send:
                size, item = self._to_send.popleft()
                if isinstance(item, dict):
                    await send(item)
                else:
                    for message in self._encoder.messages(*item):
                        field = "bytes" if isinstance(message, bytes) else "text"
                        await send({"type": "websocket.send", field: message})
                self.processed(size, at_once=True)
            if self.is_over:
                return
            self._has_work.clear()
            await self._has_work.wait()


class Relay:
    """The ASGI application of a door."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.channels: dict[int, DoorChannel | DoorCall] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._handlers: dict[int, Callable[..., None]] = {
            Kind.ACKNOWLEDGED: self._acknowledged,
            Kind.MESSAGE: self._for_channel("message_received"),
            Kind.ENTRY: self._for_channel("entry_received"),
            Kind.FORMATS: self._for_channel("formats_received"),
            Kind.REPLAY: self._for_channel("replay_received"),
            Kind.PLAY: self._for_channel("play"),
            Kind.CLEAR: self._for_channel("clear"),
            Kind.CALL: self._open_call,
            Kind.END: self._end,
            Kind.DRAIN: self._drain,
        }
        self.server: DoorServer
        self.link: Link

    def received(self, item: Item) -> None:
        """Handle an item of the engine."""
        self._handlers[item[0]](*item[1:])

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Relay a connection until the engine has finished with it."""
        decodes_audio = scope["path"] == REALTIME_PATH
        channel = DoorChannel(self.link, next(self._numbers), self.options.max_event_bytes, decodes_audio)
        self.channels[channel.number] = channel
        self.link.send((Kind.OPEN, channel.number, {name: scope[name] for name in SCOPE_FIELDS if name in scope}))
        receiving = asyncio.create_task(channel.relay_received(receive))
        try:
            await channel.relay_sent(send)
        except (OSError, RuntimeError):
            logger.debug("a connection was closed while a message was sent", exc_info=True)
            await asyncio.wait([receiving], timeout=DISCONNECT_SECONDS)  # it passes the close code on
        finally:
            del self.channels[channel.number]
            if not receiving.done() and not channel.is_over:
                disconnect = {"type": f"{scope['type']}.disconnect", "code": 1006}
                channel.send_item(Kind.MESSAGE, 0, disconnect)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def _drain(self) -> None:
        self.server.should_exit = True

    async def close_calls(self) -> None:
        """Hang up."""
        await asyncio.gather(*(call.close() for call in self.channels.values() if isinstance(call, DoorCall)))

    def _acknowledged(self, sizes: dict[int, int]) -> None:
        for number, size in sizes.items():
            if (channel := self.channels.get(number)) is not None:
                channel.acknowledged(size)

    def _open_call(self, number: int, offer: str, input_rate: int, output_rate: int) -> None:
        call = self.channels.get(number)
        if isinstance(call, DoorCall):
            call.negotiate(offer)
            return
        call = self.channels[number] = DoorCall(self.link, number, self.options, (input_rate, output_rate))
        call.start(offer)

    def _end(self, number: int) -> None:
        channel = self.channels.get(number)
        if isinstance(channel, DoorChannel):
            channel.ended()
        elif channel is not None:
            del self.channels[number]
            task = asyncio.create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _for_channel(self, method: str) -> Callable[..., None]:
        """A handler of items that are for one channel; those of a channel that has ended are dropped."""

        def handle(number: int, *fields: Any) -> None:
            if (channel := self.channels.get(number)) is not None:
                getattr(channel, method)(*fields)

        return handle


class DoorServer(uvicorn.Server):
    """uvicorn that obeys the engine process instead of signals, and ends with it."""

    def __init__(self, relay: Relay, number: int, link_path: str) -> None:
        super().__init__(uvicorn_config(relay, replace(relay.options, api_keys=())))
        self.config.lifespan = "off"
        self._relay, self._number, self._link_path = relay, number, link_path
        self._monitor = LoopMonitor()
        relay.server = self

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ignore the signals of a terminal or a service manager: the engine drains its doors."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engine, then listen."""
        link = self._relay.link = Link(self._relay.received, self._lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, self._link_path)
        await super().startup(sockets)
        link.send((Kind.READY, self._number))
        self._loading = asyncio.create_task(asyncio.to_thread(load_opus))
        self._background = [asyncio.create_task(each) for each in (self._monitor.run(), self._report())]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, then the link."""
        await self._relay.close_calls()
        await super().shutdown(sockets)
        for task in self._background:
            task.cancel()
        self._relay.link.close()

    def _lost(self) -> None:
        """The engine process has ended."""
        self.should_exit = self.force_exit = True

    async def _report(self) -> None:
        """Send statistics once a second."""
        while True:
            await asyncio.sleep(STATISTICS_SECONDS)
            self._relay.link.send((Kind.STATISTICS, astuple(self._monitor.load), len(self._relay.channels)))


def load_opus() -> None:
    """Import PyAV, which would stall the event loop when the first client uses Opus."""
    with contextlib.suppress(ImportError):
        import av  # noqa: F401


SECRETS: dict[str, Any] = {"api_keys": [], "audiosocket_tokens": [], "webhook_secret": None}


def door_options(options: ServerOptions, port: int) -> bytes:
    """What `main` reads; the keys stay in the engine process."""
    return json.dumps(asdict(options) | SECRETS | {"port": port}).encode()


def main() -> None:
    """Run a door: its number, the path of its link and inherited sockets are arguments, its options are on stdin."""
    number, link_path, *inherited = sys.argv[1:]
    options = read_options(ServerOptions, json.load(sys.stdin.buffer), "options of a door")
    configure(options.log_level, options.log_format)
    gc.freeze()  # collections need not look at what was imported
    sockets = [socket.socket(fileno=int(each)) for each in inherited] or bind(options)
    DoorServer(Relay(options), int(number), link_path).run(sockets)
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main()
