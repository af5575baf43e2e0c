"""Realtime over WebRTC: audio on tracks, events on the data channel `oai-events`."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vivavoce.audio.io import float_to_pcm16
from vivavoce.audio.resample import LiveResampler
from vivavoce.dialogue.events import Samples
from vivavoce.errors import MissingDependencyError
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import resampler, to_mono
from vivavoce.server.realtime.event_log import Cursor
from vivavoce.server.realtime.items import InputAudio, MessageItem, OutputAudio
from vivavoce.server.realtime.output import OutputPiece
from vivavoce.server.realtime.response import ResponseEncoder
from vivavoce.server.realtime.server_events import ConversationItemRetrieved, encode
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from aiortc import MediaStreamTrack, RTCDataChannel, RTCPeerConnection

logger = logging.getLogger(__name__)

MAX_MESSAGE = 200_000  # which every browser accepts on a data channel
MAX_BUFFERED = 1 << 20
LOST_SECONDS = 5.0
OFFER_SECONDS = 10.0
CALL_RATE = 48_000
PACKET = CALL_RATE // 50
FADE = CALL_RATE // 200  # 5 ms at the edges of a gap


class CallOutput:
    """The audio of responses as packets of 20 ms, with silence between responses."""

    def __init__(self) -> None:
        self._queue: Samples = np.zeros(0, np.float32)
        self._is_playing = False
        self._is_ending = False
        self._resampler = resampler(CALL_RATE, CALL_RATE)
        self._state = self._resampler.initial_state()

    def start(self, rate: int) -> None:
        """Set the sample rate of the chunks."""
        self._resampler = resampler(rate, CALL_RATE)
        self._state = self._resampler.initial_state()

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Queue a chunk."""
        output, self._state = self._resampler.step(self._state, piece.samples[None])
        pieces = [self._queue, output[0]]
        if piece.is_end:
            pieces.append(self._resampler.flush(self._state)[0])
            self._state = self._resampler.initial_state()
        self._queue = np.concatenate(pieces)
        self._is_ending = piece.is_end

    def clear(self) -> None:
        """Drop the queue except for a short fade-out."""
        self._queue = self._queue[:FADE]
        self._is_ending = True
        self._state = self._resampler.initial_state()

    def packet(self) -> Samples:
        """The next 20 ms. An incomplete packet waits for more audio, except at the end."""
        if len(self._queue) < PACKET and not (self._is_ending and len(self._queue)):
            self._is_playing = False
            return np.zeros(PACKET, np.float32)
        samples, self._queue = self._queue[:PACKET].copy(), self._queue[PACKET:]
        ramp = np.linspace(0, 1, min(FADE, len(samples)), dtype=np.float32)
        if not self._is_playing:
            samples[: len(ramp)] *= ramp
        if self._is_ending and not len(self._queue):
            samples[len(samples) - len(ramp) :] *= ramp[::-1]
        self._is_playing = True
        return np.pad(samples, (0, PACKET - len(samples)))


def new_track(output: CallOutput) -> "MediaStreamTrack":
    """An aiortc track that sends this output."""
    import av
    from aiortc.mediastreams import MediaStreamTrack

    class CallTrack(MediaStreamTrack):
        kind = "audio"

        def __init__(self) -> None:
            super().__init__()
            self._started_at: float | None = None
            self._sent = 0

        async def recv(self) -> Any:
            """The next packet at its time; after a stall, missed packets are skipped, not sent in a burst."""
            loop = asyncio.get_running_loop()
            self._started_at = loop.time() if self._started_at is None else self._started_at
            wait = self._started_at + self._sent * PACKET / CALL_RATE - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                self._sent += int(-wait * CALL_RATE / PACKET)
            frame = av.AudioFrame.from_ndarray(float_to_pcm16(output.packet())[None], format="s16", layout="mono")
            frame.sample_rate, frame.time_base, frame.pts = CALL_RATE, Fraction(1, CALL_RATE), self._sent * PACKET
            self._sent += 1
            return frame

    return CallTrack()


class WebRtcCall:
    """Connects a peer connection to a session."""

    def __init__(self, peer: "RTCPeerConnection", session: RealtimeSession, output: CallOutput) -> None:
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
        """The SDP answer to an offer; WireError where the offer is not valid."""
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
        """End the session; a call cannot be resumed."""
        self._start(self.session.close(code, reason))

    def hang_up(self) -> None:
        """Close the peer connection after the session has ended."""
        self._start(self._close())

    def _on_track(self, track: "MediaStreamTrack") -> None:
        if track.kind == "audio":
            self._start(self._receive_audio(track))

    def _on_channel(self, channel: "RTCDataChannel") -> None:
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
            self.session.send_error(WireError("events arrive faster than they can be handled", "rate_limit_exceeded"))

    def _on_state(self) -> None:
        if self.peer.connectionState in ("failed", "closed"):
            self._start(self.session.close(1001, "the call ended"))

    async def _handle(self) -> None:
        while True:
            message = await self._received.get()
            if isinstance(message, bytes):
                message = message.decode("utf8", "replace")
            await self.session.receive_text(message)

    async def _receive_audio(self, track: "MediaStreamTrack") -> None:
        from aiortc.mediastreams import MediaStreamError

        filters: LiveResampler | None = None
        with contextlib.suppress(MediaStreamError):
            while True:
                frame: Any = await track.recv()  # an audio frame; the type of aiortc covers every kind of track
                if filters is None or filters.from_rate != frame.sample_rate:
                    filters = resampler(frame.sample_rate, self.session.conversation.input_rate)
                    state = filters.initial_state()
                output, state = filters.step(state, to_mono(frame)[None])
                await self.session.audio.add_samples(output[0])
                self.session.note_activity()

    async def _send(self, channel: "RTCDataChannel", cursor: Cursor) -> None:
        while channel.readyState == "open":
            entry = await cursor.next()
            if not await self._has_room(channel):
                self.session.metrics.dropped.labels("stalled").inc()
                await self.session.close(1013, "the data channel was not read")
                return
            if isinstance(entry.payload, str):
                channel.send(without_large_audio(entry.payload))
            cursor.advance(entry)

    async def _has_room(self, channel: "RTCDataChannel") -> bool:
        """Wait until the channel accepts more data; false after a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.stall_seconds):
                while channel.bufferedAmount > MAX_BUFFERED:
                    await asyncio.sleep(0.02)
                return True
        return False

    async def _watch(self) -> None:
        """End the session of a client that does not connect, or is disconnected for too long."""
        disconnected = 0.0
        while not self.session.is_closed:
            await asyncio.sleep(0.5)
            disconnected = 0.0 if self.peer.connectionState == "connected" else disconnected + 0.5
            is_connecting = self.peer.connectionState in ("new", "connecting")
            limit = self._options.resume_seconds if is_connecting else LOST_SECONDS
            if disconnected > limit:
                await self.session.close(1001, "the client is disconnected")

    async def _close(self) -> None:
        self.session.detach(self)
        await self.peer.close()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def without_large_audio(payload: str) -> str:
    """The event; its audio is removed where it is too large for a data channel."""
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


def new_peer(options: ServerOptions) -> "RTCPeerConnection":
    """A peer connection; without configured ICE servers no STUN server is used."""
    try:
        from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection
    except ImportError as error:
        raise MissingDependencyError("calls need aiortc: pip install 'vivavoce[server]'") from error
    return RTCPeerConnection(RTCConfiguration(iceServers=[RTCIceServer(urls=url) for url in options.ice_servers]))
