"""Realtime over WebRTC: connects a session to a caller, whose peer may be in a door process."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from vivavoce.dialogue.items import Samples
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.call_peer import CallListener, CallPeer
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.output import OutputPiece, Pacing
from vivavoce.server.realtime.response import ResponseEncoder
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

LOST_SECONDS = 5.0
MAX_WAITING = 1024  # messages of a caller that are not handled yet


class Caller(Protocol):
    """The peer of a call as its session sees it."""

    async def answer(self, offer: str) -> str:
        """The SDP answer to an offer; WireError where the offer is not valid."""
        ...

    def play(self, samples: Samples, is_end: bool) -> None:
        """Play a chunk of a reply's audio."""
        ...

    def clear(self) -> None:
        """Drop the audio that was not played."""
        ...

    async def push(self, cursor: Cursor, stall_seconds: float) -> None:
        """Send the events of a log until cancelled; TimeoutError where the caller stops reading."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


NewCaller = Callable[[CallListener, int, int], Caller]
"""Makes the peer of a call, with the rates of the conversation's input and output."""


class LocalCaller(CallPeer):
    """A peer in this process."""

    async def push(self, cursor: Cursor, stall_seconds: float) -> None:
        """Send the events of a log until cancelled; TimeoutError where the caller stops reading."""
        while True:
            entry = await cursor.next()
            if isinstance(entry.payload, str):
                async with asyncio.timeout(stall_seconds):
                    await self.send(entry.payload)
            cursor.advance(entry)


class WebRtcCall:
    """A call: the audio and the events of a session, and what its caller sends."""

    session: RealtimeSession
    caller: Caller

    def __init__(self) -> None:
        self._state = "new"
        self._tasks: set[asyncio.Task[None]] = set()
        self._received: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)

    async def answer(self, offer: str) -> str:
        """The SDP answer to an offer; WireError where the offer is not valid."""
        answer = await self.caller.answer(offer)
        self._start(self._watch())
        return answer

    def hang_up(self) -> None:
        """Close the peer connection after the session has ended."""
        self._start(self._close())

    # Connection

    def drop(self, code: int, reason: str) -> None:
        """End the session; a call cannot be resumed."""
        self._start(self.session.close(code, reason))

    # AudioSink

    def pacing(self, options: ServerOptions) -> Pacing:
        """With a small lead: the clock of the track paces the packets."""
        return Pacing.of_calls(options)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Play a chunk."""
        self.caller.play(piece.samples, piece.is_end)

    def clear(self) -> None:
        """Drop the audio that was not played."""
        self.caller.clear()

    # CallListener

    def audio_received(self, samples: Samples) -> None:
        """Pass the caller's audio on."""
        self.session.audio.add_samples(samples)
        self.session.note_activity()

    def channel_opened(self) -> None:
        """Send the events of the session from the first one on, and handle those of the caller."""
        self._start(self._send(self.session.attach(self, 0)))
        self._start(self._handle())

    def channel_closed(self) -> None:
        """The call goes on without events."""
        self.session.detach(self)

    def message_received(self, message: str) -> None:
        """Queue an event of the caller."""
        try:
            self._received.put_nowait(message)
        except asyncio.QueueFull:
            self.session.send_error(WireError("events arrive faster than they can be handled", "rate_limit_exceeded"))

    def state_changed(self, state: str) -> None:
        """End the session of a caller that is gone."""
        self._state = state
        if state in ("failed", "closed"):
            self._start(self.session.close(1001, "the call ended"))

    async def _handle(self) -> None:
        while True:
            await self.session.receive_text(await self._received.get())

    async def _send(self, cursor: Cursor) -> None:
        try:
            await self.caller.push(cursor, self.session.options.stall_seconds)
        except TimeoutError:
            self.session.metrics.dropped.labels("stalled").inc()
            await self.session.close(1013, "the data channel was not read")

    async def _watch(self) -> None:
        """End the session of a client that does not connect, or is disconnected for too long."""
        disconnected = 0.0
        while not self.session.is_closed:
            await asyncio.sleep(0.5)
            disconnected = 0.0 if self._state == "connected" else disconnected + 0.5
            is_connecting = self._state in ("new", "connecting")
            limit = self.session.options.resume_seconds if is_connecting else LOST_SECONDS
            if disconnected > limit:
                await self.session.close(1001, "the client is disconnected")

    async def _close(self) -> None:
        self.session.detach(self)
        await self.caller.close()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def open_call(
    sessions: Sessions, opening: Opening, offer: str, address: str, new_caller: NewCaller
) -> tuple[RealtimeSession, str]:
    """A new session over a new peer connection, and the answer to its offer."""
    call = WebRtcCall()
    session = call.session = sessions.open(opening, address, "webrtc", call)
    try:
        call.caller = new_caller(call, session.conversation.input_rate, session.conversation.output_rate)
        session.on_closed.append(call.hang_up)
        session.start()
        return session, await call.answer(offer)
    except Exception:
        await session.close(1008, "no SDP")
        raise
