"""The link between the engine process and a door process: msgpack over a Unix socket, one write a tick and direction.

Each side collects what it has to send and writes it as one array of items. The connections of clients are channels of
the link. The bytes of a channel that the other side has not processed are limited, so that a client that does not read,
or sends too much, stops only itself.
"""

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from enum import IntEnum
from typing import Any, TypeAlias, cast

import msgpack

from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.004
ACK_SECONDS = 0.02  # acknowledgements alone wait longer
FLUSH_BYTES = 1 << 20  # collected items of this size are written at once
MAX_MESSAGE_BYTES = 256 << 20
WINDOW_BYTES = 256 << 10
"""Bytes of a channel that may be unprocessed; one more message may exceed it."""
ACK_BYTES = WINDOW_BYTES // 4

Item: TypeAlias = tuple[Any, ...]
"""A kind, and its fields; for most kinds the first field is the number of a channel."""


class Kind(IntEnum):
    """What an item is; the fields after it."""

    ACKNOWLEDGED = 0
    """Bytes processed, by channel."""
    OPEN = 1
    """Door: channel, ASGI scope."""
    MESSAGE = 2
    """Channel, size, ASGI message."""
    END = 3
    """Engine: channel. The application has returned, or failed."""
    AUDIO = 4
    """Door: channel, size, event id, bytes on the wire, float32 samples."""
    FORMATS = 5
    """Engine: channel, `InputFormats`, whether the door waits for it (for a new session, and after each update)."""
    ENTRY = 6
    """Engine: channel, size, last event number, text or `AudioPiece` of an event log."""
    REPLAY = 7
    """Engine: channel, tag of the event ids, number of the last event that the client has."""
    READY = 8
    """Door: its number. It listens."""
    STATISTICS = 9
    """Door: the `LoopLoad` of its event loop, connections."""
    DRAIN = 10
    """Engine: stop listening, close the connections and exit."""
    CALL = 11
    """Engine: channel, SDP offer, rates of the audio to and from the engine. Opens a WebRTC call, or negotiates it
    again."""
    PLAY = 12
    """Engine: channel of a call, float32 samples, whether they end an item."""
    CLEAR = 13
    """Engine: channel of a call. Drop the audio that was not played."""


class Link(asyncio.Protocol):
    """One end of a link."""

    def __init__(self, received: Callable[[Item], None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._packer = msgpack.Packer()
        self._unpacker = msgpack.Unpacker(use_list=False, strict_map_key=False, max_buffer_size=MAX_MESSAGE_BYTES)
        self._items: list[Item] = []
        self._size = 0
        self._acknowledged: dict[int, int] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_at = float("inf")
        self._flushed_at = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the other process is gone, or the link is not connected yet."""
        return self._transport is None

    def send(self, item: Item, size: int = 0) -> None:
        """Send an item with the next tick: at once on an idle link."""
        self._items.append(item)
        self._size += size
        if self._size > FLUSH_BYTES:
            self._flush()
        else:
            self._schedule(self._flushed_at + TICK_SECONDS)

    def acknowledge(self, channel: int, size: int) -> None:
        """Tell the other side that these bytes of a channel are processed."""
        self._acknowledged[channel] = self._acknowledged.get(channel, 0) + size
        self._schedule(self._loop.time() + ACK_SECONDS)

    def close(self) -> None:
        """Send what is pending and close."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for items in self._unpacker:
            for item in items:
                try:
                    self._received(item)
                except Exception as error:  # of one connection; the others of the link go on
                    log_failure(logger, error, "an item of a door link could not be handled")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def _schedule(self, at: float) -> None:
        if at >= self._flush_at:
            return
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_at = at
        self._flush_timer = self._loop.call_at(at, self._flush)  # at once where the time is over

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._flush_at, self._flushed_at = float("inf"), self._loop.time()
        items, self._items, self._size = self._items, [], 0
        if self._acknowledged:
            items.append((Kind.ACKNOWLEDGED, self._acknowledged))
            self._acknowledged = {}
        if items and self._transport is not None:
            self._transport.write(self._packer.pack(items))


class LinkChannel:
    """One end of a client's connection on a link."""

    def __init__(self, link: Link, number: int) -> None:
        self.link, self.number = link, number
        self.sent_bytes = 0
        self.acknowledged_bytes = 0
        self.is_over = False
        """Nothing can be sent any more."""
        self._processed = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def has_room(self) -> bool:
        """Whether the other side has processed enough to be sent more."""
        return self.sent_bytes - self.acknowledged_bytes < WINDOW_BYTES

    def send_item(self, kind: Kind, size: int, *fields: Any) -> None:
        """Send an item of which the other side acknowledges `size` bytes."""
        self.sent_bytes += size
        self.link.send((kind, self.number, size, *fields), size)

    async def wait_for_room(self) -> None:
        """Return when more can be sent, or when nothing can be sent any more."""
        while not self.has_room and not self.is_over:
            self._room.clear()
            await self._room.wait()

    def acknowledged(self, size: int) -> None:
        """The other side has processed bytes."""
        self.acknowledged_bytes += size
        if self.has_room:
            self._room.set()

    def processed(self, size: int, at_once: bool = False) -> None:
        """Bytes of the other side were processed here."""
        self._processed += size
        if self._processed and (at_once or self._processed >= ACK_BYTES):
            self.link.acknowledge(self.number, self._processed)
            self._processed = 0

    def end(self) -> None:
        """Nothing can be sent any more."""
        self.is_over = True
        self._room.set()


def message_size(message: MutableMapping[str, Any]) -> int:
    """The bytes of an ASGI message that are acknowledged."""
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")
