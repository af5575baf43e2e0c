"""Realtime over WebRTC: audio on tracks, events on the data channel `oai-events`."""

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from vivavoce.errors import MissingDependencyError
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import mono, resampler
from vivavoce.server.realtime.audio_sinks import CallOutput, new_track
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.item_types import InputAudio, MessageItem, OutputAudio
from vivavoce.server.realtime.server_events import ConversationItemRetrieved, encode
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.wire_error import WireError

logger = logging.getLogger(__name__)

MAX_MESSAGE = 200_000  # what every browser takes on a data channel
MAX_BUFFERED = 1 << 20
LOST_SECONDS = 5.0
OFFER_SECONDS = 10.0


class WebRtcCall:
    """A peer connection that speaks for a session."""

    def __init__(self, peer: Any, session: RealtimeSession, output: CallOutput) -> None:
        self.peer, self.session = peer, session
        self._options = session.options
        self._tasks: set[asyncio.Task[None]] = set()
        self._received: asyncio.Queue[str | bytes] = asyncio.Queue(maxsize=1024)
        output.start(session.conversation.output_rate)
        peer.addTrack(new_track(output))
        peer.on("track", self._on_track)
        peer.on("datachannel", self._on_channel)
        peer.on("connectionstatechange", self._on_state)

    async def answer(self, offer: str) -> str:
        """The SDP that answers an offer; WireError where it is none."""
        from aiortc import RTCSessionDescription

        if "m=audio" not in offer:
            raise WireError("the SDP offer has no audio track (a line m=audio …)", "invalid_sdp", "sdp")
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                await self.peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
                await self.peer.setLocalDescription(await self.peer.createAnswer())
        except Exception as error:
            logger.info("an SDP offer could not be answered: %s", type(error).__name__)
            raise WireError(f"the SDP offer cannot be answered: {error}", "invalid_sdp", "sdp") from error
        self._start(self._watch())
        return str(self.peer.localDescription.sdp)

    def drop(self, code: int, reason: str) -> None:
        """The event log is no longer read; the session ends with the call."""
        self._start(self.session.close(code, reason))

    def hang_up(self) -> None:
        """The session is over."""
        self._start(self._close())

    def _on_track(self, track: Any) -> None:
        if track.kind == "audio":
            self._start(self._listen(track))

    def _on_channel(self, channel: Any) -> None:
        if channel.label != "oai-events":
            return
        cursor = self.session.attach(self, 0)
        channel.on("message", self._on_message)
        channel.on("close", lambda: self.session.detach(self))
        self._start(self._send(channel, cursor))
        self._start(self._handle())

    def _on_message(self, message: str | bytes) -> None:
        try:
            self._received.put_nowait(message)
        except asyncio.QueueFull:
            self.session.send_error(WireError("events come faster than they can be handled", "rate_limit_exceeded"))

    def _on_state(self) -> None:
        if self.peer.connectionState in ("failed", "closed"):
            self._start(self.session.close(1001, "the call ended"))

    async def _handle(self) -> None:
        while True:
            message = await self._received.get()
            if isinstance(message, bytes):
                message = message.decode("utf8", "replace")
            await self.session.receive_text(message)

    async def _listen(self, track: Any) -> None:
        from aiortc.mediastreams import MediaStreamError

        filters: Any = None
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                if filters is None or filters.from_rate != frame.sample_rate:
                    filters = resampler(frame.sample_rate, self.session.conversation.input_rate)
                    state = filters.initial_state()
                output, state = filters.step(state, mono(frame)[None])
                self.session.audio.hear(output[0])
                self.session.stay_awake()

    async def _send(self, channel: Any, cursor: Cursor) -> None:
        while channel.readyState == "open":
            entry = await cursor.next()
            if not await self._has_room(channel):
                self.session.metrics.dropped.labels("stalled").inc()
                await self.session.close(1013, "the data channel was not read")
                return
            if isinstance(entry.payload, str):
                channel.send(without_large_audio(entry.payload))
            cursor.advance(entry)

    async def _has_room(self, channel: Any) -> bool:
        """Wait until the channel takes more; false if it does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.stall_seconds):
                while channel.bufferedAmount > MAX_BUFFERED:
                    await asyncio.sleep(0.02)
                return True
        return False

    async def _watch(self) -> None:
        """A caller that never comes, or is gone for a while, is hung up on."""
        missing = 0.0
        while not self.session.is_closed:
            await asyncio.sleep(0.5)
            missing = 0.0 if self.peer.connectionState == "connected" else missing + 0.5
            is_coming = self.peer.connectionState in ("new", "connecting")
            limit = self._options.resume_seconds if is_coming else LOST_SECONDS
            if missing > limit:
                await self.session.close(1001, "the caller is gone")

    async def _close(self) -> None:
        self.session.detach(self)
        await self.peer.close()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def without_large_audio(payload: str) -> str:
    """The event, without its audio where it is too large for a data channel."""
    if len(payload) <= MAX_MESSAGE:
        return payload
    try:
        event = msgspec.json.decode(payload, type=ConversationItemRetrieved)
    except msgspec.ValidationError:
        return payload
    if isinstance(event.item, MessageItem):
        for part in event.item.content:
            if isinstance(part, InputAudio | OutputAudio):
                part.audio = msgspec.UNSET
    return encode(event).decode()


async def open_call(sessions: Sessions, opening: Opening, offer: str, address: str) -> tuple[RealtimeSession, str]:
    """A new session over a new peer connection, and the answer to its offer."""
    output = CallOutput()
    peer = new_peer(sessions.options)
    session = sessions.open(opening, address, "webrtc", output)
    call = WebRtcCall(peer, session, output)
    session.on_closed.append(call.hang_up)
    session.start()
    try:
        return session, await call.answer(offer)
    except WireError:
        await session.close(1008, "no SDP")
        raise


def new_peer(options: ServerOptions) -> Any:
    """A peer connection; no STUN server is asked unless one was named."""
    try:
        from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection
    except ImportError as error:
        raise MissingDependencyError("calls need aiortc: pip install 'vivavoce[server]'") from error
    return RTCPeerConnection(RTCConfiguration(iceServers=[RTCIceServer(urls=url) for url in options.ice_servers]))
