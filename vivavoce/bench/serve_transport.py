"""The connections of the callers of `viva bench serve`."""

import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from vivavoce.errors import VivaError

BYTES_A_SECOND = 48_000  # 16-bit PCM at 24 kHz
OPUS_FRAME_SECONDS = 0.02
AUDIO_DELTA = "response.output_audio.delta"
WRITE_LIMIT = 1 << 24  # a microphone does not wait for the server
CLOSE_SECONDS = 2.0
REFUSALS = {1008, 1013}


class CallRefusedError(VivaError):
    """The server refused the session."""


class CallClosedError(VivaError):
    """The server closed the connection."""


class ResponseObject(msgspec.Struct):
    """A response, as far as it is read here."""

    id: str
    status: str | None = None


class ErrorObject(msgspec.Struct):
    """An error, as far as it is read here."""

    message: str = ""
    code: str | None = None


class ReceivedEvent(msgspec.Struct):
    """An event of the server, as far as it is read here."""

    type: str
    delta: str | None = None
    response_id: str | None = None
    response: ResponseObject | None = None
    error: ErrorObject | None = None


class Listener(Protocol):
    """Takes what a connection receives, with the time of arrival."""

    def on_audio(self, now: float, seconds: float, reply: str | None) -> None: ...

    def on_packet(self, now: float, seconds: float, is_silent: bool) -> None: ...

    def on_event(self, now: float, event: ReceivedEvent) -> None: ...


class CallerConnection(Protocol):
    """A connection to the server."""

    async def open(self) -> None:
        """Connect; CallRefusedError where the server refuses."""
        ...

    async def receive(self) -> None:
        """Pass everything on to the listener until the connection is closed."""
        ...

    async def send(self, message: bytes) -> None:
        """Send a message of the microphone."""
        ...

    async def close(self) -> None:
        """Leave."""
        ...


class WebSocketConnection:
    """Events with base64 audio, or `viva.opus` binary frames."""

    def __init__(self, listener: Listener, url: str, key: str | None, is_binary: bool) -> None:
        self._listener, self._url, self._key, self._is_binary = listener, url, key, is_binary
        self._socket: Any = None

    async def open(self) -> None:
        """Connect; CallRefusedError where the server refuses."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.typing import Subprotocol

        try:
            self._socket = await connect(
                self._url,
                additional_headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
                subprotocols=[Subprotocol("viva.opus")] if self._is_binary else None,
                compression=None,
                proxy=None,
                ping_interval=None,
                open_timeout=None,
                close_timeout=CLOSE_SECONDS,
                max_size=None,
                max_queue=None,
                write_limit=WRITE_LIMIT,
            )
        except InvalidStatus as error:
            raise CallRefusedError(f"HTTP {error.response.status_code}") from error
        except WebSocketException as error:
            raise CallClosedError(f"no connection: {error}") from error

    async def receive(self) -> None:
        """Pass everything on to the listener until the connection is closed."""
        from websockets.exceptions import ConnectionClosed

        decode = msgspec.json.Decoder(ReceivedEvent).decode
        on_audio, on_event, receive = self._listener.on_audio, self._listener.on_event, self._socket.recv
        while True:
            try:
                message = await receive(decode=False)
            except ConnectionClosed as error:
                close = error.rcvd
                if close is not None and close.code in REFUSALS:
                    raise CallRefusedError(f"{close.code} {close.reason}") from error
                raise CallClosedError(f"the connection was closed: {close or error}") from error
            now = time.monotonic()
            if self._is_binary and not message.startswith(b"{"):
                on_audio(now, OPUS_FRAME_SECONDS, None)
                continue
            event = decode(message)
            if event.type == AUDIO_DELTA and event.delta is not None:
                on_audio(now, base64_bytes(event.delta) / BYTES_A_SECOND, event.response_id)
            else:
                on_event(now, event)

    async def send(self, message: bytes) -> None:
        """Send a message of the microphone."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(message, text=not self._is_binary)
        except ConnectionClosed as error:
            raise CallClosedError(f"the connection was closed: {error.rcvd or error}") from error

    async def close(self) -> None:
        """Leave."""
        if self._socket is not None:
            await self._socket.close()


def base64_bytes(text: str) -> int:
    """The number of bytes that a base64 text encodes."""
    return len(text) // 4 * 3 - text.count("=", -2)


def connector(transport: str, url: str, key: str | None) -> Callable[[Listener], CallerConnection]:
    """Makes the connection of a caller; the URL is that of WebSockets."""
    if transport == "webrtc":
        from vivavoce.bench.serve_webrtc import WebRtcConnection

        parts = urlsplit(url)
        scheme = "https" if parts.scheme == "wss" else "http"
        calls = urlunsplit((scheme, parts.netloc, f"{parts.path}/calls", parts.query, ""))
        return lambda listener: WebRtcConnection(listener, calls, key)
    return lambda listener: WebSocketConnection(listener, url, key, transport == "binary")
