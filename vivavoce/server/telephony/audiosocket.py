"""Asterisk's AudioSocket: frames over TCP of a kind, a length and a payload, 16-bit PCM in both directions."""

import asyncio
import logging
import struct
import uuid
from collections.abc import Sequence
from hmac import compare_digest

from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import PCM, WireFormat
from vivavoce.server.realtime.session_types import SampleRate
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.telephony.call import PhoneCaller, serve_call
from vivavoce.server.telephony.wire import (
    PACKET_SECONDS,
    Audio,
    CallEnded,
    CallEvent,
    Started,
    Unknown,
    WireMessage,
    digit_event,
)
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

HEADER = struct.Struct(">BH")
"""The kind of a frame, and the length of its payload."""
HANGUP, UUID, DTMF, ERROR = 0x00, 0x01, 0x03, 0xFF
AUDIO: dict[int, SampleRate] = {0x10: 8_000, 0x12: 16_000, 0x13: 24_000, 0x16: 48_000}
OTHER_AUDIO = range(0x10, 0x19)
MAX_CONNECTIONS = 1024


class AudioSocketWire:
    """The frames of one call. The caller's first audio tells the sample rate, and starts the call."""

    provider = "audiosocket"
    packet_seconds = PACKET_SECONDS
    can_clear = False

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [uuid.UUID(token).bytes for token in tokens]
        self._id: bytes | None = None
        self._kind: int | None = None

    def received(self, message: WireMessage) -> CallEvent | None:
        """The event of a frame."""
        assert isinstance(message, bytes)
        kind, payload = message[0], message[HEADER.size :]
        if self._id is None:
            self._identify(kind, payload)
            return None
        if kind in AUDIO:
            return self._audio(kind, payload)
        if kind in OTHER_AUDIO:
            raise WireError("the sample rate is not supported; use 8, 16, 24 or 48 kHz", "unsupported_codec")
        if kind == DTMF:
            return digit_event(payload.decode("latin1"))
        if kind == ERROR:
            raise WireError(f"Asterisk reports the error {payload[:8].hex() or 'unknown'}", "provider_error")
        return CallEnded() if kind == HANGUP else Unknown()

    def _identify(self, kind: int, payload: bytes) -> None:
        if kind != UUID or len(payload) != 16:
            raise WireError("the first frame is the UUID of the call", "invalid_message")
        matches = [compare_digest(payload, token) for token in self._tokens]  # every token, in constant time
        if self._tokens and not any(matches):
            raise WireError("the UUID is not a token of this server", "invalid_api_key", status=401)
        self._id = payload

    def _audio(self, kind: int, payload: bytes) -> CallEvent:
        if self._kind is None:
            self._kind = kind
            name = "" if self._tokens or self._id is None else str(uuid.UUID(bytes=self._id))
            return Started(WireFormat(PCM, AUDIO[kind]), name, name)
        if kind != self._kind:
            raise WireError("the sample rate has changed within the call", "unsupported_codec")
        return Audio(payload)

    def audio(self, data: bytes) -> WireMessage:
        """A frame of audio."""
        return _frame(self._kind or min(AUDIO), data)

    def mark(self, name: str) -> WireMessage | None:
        """There are no marks: frames are played as they arrive."""
        return None

    def clear(self) -> WireMessage | None:
        """Asterisk buffers nothing that could be cleared."""
        return None

    def hang_up(self) -> WireMessage | None:
        """A hangup frame."""
        return _frame(HANGUP)


def _frame(kind: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


class TcpLine:
    """A TCP connection of Asterisk."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> WireMessage | None:
        """The next frame; None after the last one."""
        try:
            header = await self._reader.readexactly(HEADER.size)
            return header + await self._reader.readexactly(HEADER.unpack(header)[1])
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def send(self, message: WireMessage) -> None:
        """Send a frame."""
        assert isinstance(message, bytes)
        self._writer.write(message)
        await self._writer.drain()

    async def close(self, code: int, reason: str) -> None:
        """Send an error frame unless the call has ended normally, and close the connection."""
        if code not in (1000, 1001, 1012):
            self._writer.write(_frame(ERROR) + _frame(HANGUP))
        self._writer.close()
        await self._writer.wait_closed()


class AudioSocketServer:
    """Listens for Asterisk."""

    def __init__(self, sessions: Sessions, options: ServerOptions) -> None:
        self._sessions, self._options = sessions, options
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Listen."""
        host, port = self._options.host.strip("[]"), self._options.audiosocket
        self._server = await asyncio.start_server(self._connected, host, port)
        logger.info("AudioSocket listens on port %d", self.port)

    async def close(self) -> None:
        """Stop listening, and end the calls that are left."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            address = str((writer.get_extra_info("peername") or ("unknown",))[0])
            wire = AudioSocketWire(self._options.audiosocket_tokens)
            await serve_call(TcpLine(reader, writer), wire, PhoneCaller(address), self._sessions)
        finally:
            self._tasks.discard(task)
            writer.close()
