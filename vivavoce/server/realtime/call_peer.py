"""A WebRTC peer: its audio tracks and its data channel `oai-events`. Runs beside the session, or in a door process."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Sequence
from fractions import Fraction
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from vivavoce.audio.io import float_to_pcm16
from vivavoce.audio.resample import LiveResampler
from vivavoce.dialogue.items import Samples
from vivavoce.errors import MissingDependencyError
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import resampler, to_mono
from vivavoce.server.realtime.items import InputAudio, MessageItem, OutputAudio
from vivavoce.server.realtime.server_events import ConversationItemRetrieved, encode
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from aiortc import MediaStreamTrack, RTCDataChannel, RTCPeerConnection

logger = logging.getLogger(__name__)

MAX_MESSAGE = 200_000  # which every browser accepts on a data channel
MAX_BUFFERED = 1 << 20
OFFER_SECONDS = 10.0
CALL_RATE = 48_000
PACKET = CALL_RATE // 50
FADE = CALL_RATE // 200  # 5 ms at the edges of a gap


class CallOutput:
    """The audio of responses as packets of 20 ms, with silence between responses."""

    def __init__(self, rate: int) -> None:
        self._queue: Samples = np.zeros(0, np.float32)
        self._is_playing = False
        self._is_ending = False
        self._resampler = resampler(rate, CALL_RATE)
        self._state = self._resampler.initial_state()

    def play(self, samples: Samples, is_end: bool) -> None:
        """Queue a chunk, which may be the last one of an item."""
        output, self._state = self._resampler.step(self._state, samples[None])
        pieces = [self._queue, output[0]]
        if is_end:
            pieces.append(self._resampler.flush(self._state)[0])
            self._state = self._resampler.initial_state()
        self._queue = np.concatenate(pieces)
        self._is_ending = is_end

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


class CallListener(Protocol):
    """Takes what a peer receives."""

    def audio_received(self, samples: Samples) -> None:
        """Samples of the caller, at the rate of the conversation."""
        ...

    def channel_opened(self) -> None:
        """The caller has opened its data channel."""
        ...

    def channel_closed(self) -> None:
        """The data channel is closed."""
        ...

    def message_received(self, message: str) -> None:
        """A message of the data channel."""
        ...

    def state_changed(self, state: str) -> None:
        """The connection state as WebRTC names it: new, connecting, connected, disconnected, failed or closed."""
        ...


class CallPeer:
    """The connection to one caller."""

    def __init__(self, options: ServerOptions, listener: CallListener, input_rate: int, output_rate: int) -> None:
        self._listener, self._input_rate, self._host = listener, input_rate, options.host
        self._output = CallOutput(output_rate)
        self._channel: RTCDataChannel | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection = _new_connection(options.ice_servers)
        self._connection.addTrack(new_track(self._output))
        self._connection.on("track", self._on_track)
        self._connection.on("datachannel", self._on_channel)
        self._connection.on("connectionstatechange", self._on_state)

    async def answer(self, offer: str) -> str:
        """The SDP answer to an offer, the first one or a later one; WireError where the offer is not valid."""
        from aiortc import RTCSessionDescription

        if "m=audio" not in offer:
            raise WireError("the SDP offer has no audio track (a line m=audio …)", "invalid_sdp", "sdp")
        previous: RTCSessionDescription | None = self._connection.remoteDescription
        if previous is not None and ice_credentials(previous.sdp) != ice_credentials(offer):
            raise WireError("ICE cannot be restarted on a call; open a new one", "invalid_sdp", "sdp")
        try:
            async with asyncio.timeout(OFFER_SECONDS):
                await self._connection.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
                if previous is None:
                    use_addresses(self._connection, await asyncio.to_thread(candidate_addresses, self._host))
                await self._connection.setLocalDescription(await self._connection.createAnswer())
        except Exception as error:
            logger.info("an SDP offer could not be answered: %s", type(error).__name__)
            raise WireError(f"the SDP offer cannot be answered: {error}", "invalid_sdp", "sdp") from error
        return str(self._connection.localDescription.sdp)

    def play(self, samples: Samples, is_end: bool) -> None:
        """Play a chunk of a reply's audio."""
        self._output.play(samples, is_end)

    def clear(self) -> None:
        """Drop the audio that was not played."""
        self._output.clear()

    async def send(self, message: str) -> None:
        """Send a message on the data channel, once it accepts more."""
        channel = self._channel
        if channel is None:
            return
        while channel.readyState == "open" and channel.bufferedAmount > MAX_BUFFERED:
            await asyncio.sleep(0.02)
        if channel.readyState == "open":
            channel.send(without_large_audio(message))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()
        for task in list(self._tasks):
            task.cancel()

    def _on_track(self, track: "MediaStreamTrack") -> None:
        if track.kind == "audio":
            self._start(self._receive_audio(track))

    def _on_channel(self, channel: "RTCDataChannel") -> None:
        if channel.label != "oai-events":
            return
        self._channel = channel
        channel.on("message", self._on_message)
        channel.on("close", self._listener.channel_closed)
        self._listener.channel_opened()

    def _on_message(self, message: str | bytes) -> None:
        self._listener.message_received(message if isinstance(message, str) else message.decode("utf8", "replace"))

    def _on_state(self) -> None:
        self._listener.state_changed(str(self._connection.connectionState))

    async def _receive_audio(self, track: "MediaStreamTrack") -> None:
        from aiortc.mediastreams import MediaStreamError

        filters: LiveResampler | None = None
        with contextlib.suppress(MediaStreamError):
            while True:
                frame: Any = await track.recv()  # an audio frame; the type of aiortc covers every kind of track
                if filters is None or filters.from_rate != frame.sample_rate:
                    filters = resampler(frame.sample_rate, self._input_rate)
                    state = filters.initial_state()
                output, state = filters.step(state, to_mono(frame)[None])
                self._listener.audio_received(output[0])

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


def ice_credentials(sdp: str) -> set[str]:
    """The lines of a description that change when ICE is restarted."""
    return {line.strip() for line in sdp.splitlines() if line.startswith(("a=ice-ufrag:", "a=ice-pwd:"))}


def candidate_addresses(host: str) -> list[str]:
    """The addresses at which a call can reach a server that is bound to this host: loopback is one of them."""
    import ifaddr  # of aioice

    found = socket.getaddrinfo(host.strip("[]") or None, 0, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    bound = list(dict.fromkeys(str(address[0]) for *_, address in found))
    if not any(ip_address(each).is_unspecified for each in bound):
        return bound
    with_v6 = any(":" in each for each in bound)
    every = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    v6 = [ip[0] for ip in every if isinstance(ip, tuple) and ip[2] == 0]  # a scope id cannot stand in a candidate
    return [ip for ip in every if isinstance(ip, str)] + (v6 if with_v6 else [])


def use_addresses(connection: "RTCPeerConnection", addresses: Sequence[str]) -> None:
    """Let a peer connection gather its candidates at these addresses: aioice uses all, except those of loopback."""
    transports = {each.receiver.transport for each in connection.getTransceivers()}
    if connection.sctp is not None:
        transports.add(connection.sctp.transport)
    for ice in {each.transport.iceGatherer._connection for each in transports}:
        gather = ice.get_component_candidates

        async def gather_bound(*, gather: Any = gather, **options: Any) -> Any:
            return await gather(**options | {"addresses": list(addresses)})

        setattr(ice, gather.__name__, gather_bound)


def _new_connection(ice_servers: Sequence[str]) -> "RTCPeerConnection":
    """A peer connection; without configured ICE servers no STUN server is used."""
    try:
        from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection
    except ImportError as error:
        raise MissingDependencyError("calls need aiortc: pip install 'vivavoce[server]'") from error
    return RTCPeerConnection(RTCConfiguration(iceServers=[RTCIceServer(urls=url) for url in ice_servers]))
