"""WebRTC calls through a door: the session's end in the engine, and the peer's end in the door."""

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from vivavoce.dialogue.items import Samples
from vivavoce.log import log_failure
from vivavoce.server.config import ServerOptions
from vivavoce.server.doors.link import Kind, Link, LinkChannel
from vivavoce.server.doors.log_channel import LogChannel
from vivavoce.server.realtime.call_peer import OFFER_SECONDS, CallListener, CallPeer
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)


class EngineCall(LogChannel):
    """The `Caller` of a session whose peer is in a door."""

    def __init__(
        self, link: Link, number: int, listener: CallListener, rates: tuple[int, int], forget: Callable[[int], Any]
    ) -> None:
        super().__init__(link, number)
        self._listener, self._rates, self._forget = listener, rates, forget
        self._answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._negotiating = asyncio.Lock()

    async def answer(self, offer: str) -> str:
        """The SDP answer to an offer, the first one or a later one; WireError where the offer is not valid."""
        async with self._negotiating:
            return await self._answer_to(offer)

    async def _answer_to(self, offer: str) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        self.link.send((Kind.CALL, self.number, offer, *self._rates))
        try:
            async with asyncio.timeout(2 * OFFER_SECONDS):
                return await self._answer
        except TimeoutError as error:
            raise WireError("the SDP offer was not answered in time", "call_failed", status=503) from error

    def play(self, samples: Samples, is_end: bool) -> None:
        """Play a chunk of a reply's audio."""
        self.link.send((Kind.PLAY, self.number, np.asarray(samples, np.float32).tobytes(), is_end))

    def clear(self) -> None:
        """Drop the audio that was not played."""
        self.link.send((Kind.CLEAR, self.number))

    async def close(self) -> None:
        """Close the connection."""
        if not self.is_over:
            self.end()
            self._forget(self.number)
            self.link.send((Kind.END, self.number))

    def audio_received(self, size: int, event_id: str | None, wire_bytes: int, data: bytes) -> None:
        """Pass the caller's audio on."""
        self._listener.audio_received(np.frombuffer(data, np.float32))

    def message_received(self, size: int, message: MutableMapping[str, Any]) -> None:
        """Handle what the peer reports."""
        value: str = message["value"]
        match message["type"]:
            case "answer" if not self._answer.done():
                self._answer.set_result(value)
            case "refused" if not self._answer.done():
                self._answer.set_exception(WireError(value, "invalid_sdp", "sdp"))
            case "channel_opened":
                self._listener.channel_opened()
            case "channel_closed":
                self._listener.channel_closed()
            case "message":
                self._listener.message_received(value)
            case "state":
                self._listener.state_changed(value)

    def lost(self) -> None:
        """The door process has ended, and the call with it."""
        if not self._answer.done():
            self._answer.set_exception(WireError("the door of the call has ended", "call_failed", status=503))
        self._listener.state_changed("closed")


class DoorCall(LinkChannel):
    """The peer of a call, and its listener: reports what it receives to the engine."""

    def __init__(self, link: Link, number: int, options: ServerOptions, rates: tuple[int, int]) -> None:
        super().__init__(link, number)
        self._to_send: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self._peer: CallPeer | None = None
        self._options, self._rates = options, rates
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, offer: str) -> None:
        """Answer the first offer."""
        self._tasks = [asyncio.create_task(self._send())]
        self.negotiate(offer)

    def negotiate(self, offer: str) -> None:
        """Answer an offer."""
        self._tasks.append(asyncio.create_task(self._answer(offer)))

    async def close(self) -> None:
        """Close the peer connection."""
        self.end()
        for task in self._tasks:
            task.cancel()
        if self._peer is not None:
            await self._peer.close()

    async def _answer(self, offer: str) -> None:
        try:
            await asyncio.to_thread(__import__, "aiortc")  # takes a second, the first time
            self._peer = self._peer or CallPeer(self._options, self, *self._rates)
            self._report("answer", await self._peer.answer(offer))
        except WireError as error:
            self._report("refused", str(error))
        except Exception as error:
            log_failure(logger, error, "a call could not be opened")
            self._report("refused", "the call could not be opened")

    async def _send(self) -> None:
        while True:
            size, message = await self._to_send.get()
            if self._peer is not None:
                await self._peer.send(message)
            self.processed(size, at_once=True)

    def _report(self, type: str, value: str = "") -> None:
        if not self.is_over:
            self.send_item(Kind.MESSAGE, 0, {"type": type, "value": value})

    # From the engine

    def entry_received(self, size: int, sequence: int, payload: str) -> None:
        """Send an event of the session."""
        self._to_send.put_nowait((size, payload))

    def replay_received(self, tag: str, after: int) -> None:
        """A call is sent its events from the first one on, and its audio is no event."""

    def play(self, data: bytes, is_end: bool) -> None:
        """Play a chunk of a reply's audio."""
        if self._peer is not None:
            self._peer.play(np.frombuffer(data, np.float32), is_end)

    def clear(self) -> None:
        """Drop the audio that was not played."""
        if self._peer is not None:
            self._peer.clear()

    # CallListener

    def audio_received(self, samples: Samples) -> None:
        """Send the caller's audio to the engine."""
        if not self.is_over:
            self.send_item(Kind.AUDIO, 0, None, 0, np.asarray(samples, np.float32).tobytes())

    def channel_opened(self) -> None:
        """Report the data channel."""
        self._report("channel_opened")

    def channel_closed(self) -> None:
        """Report the end of the data channel."""
        self._report("channel_closed")

    def message_received(self, message: str) -> None:
        """Send an event of the caller to the engine."""
        self._report("message", message)

    def state_changed(self, state: str) -> None:
        """Report the state of the connection."""
        self._report("state", state)
