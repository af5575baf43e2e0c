"""Callers of `viva bench serve` over WebRTC: aiortc peers, whose jitter buffer is part of what is measured.

The server sends a packet of 20 ms all the time, silent ones between replies. A reply is heard from its first packet
with sound on; silent packets inside it are an underrun of the server, missing ones make the caller's player run dry.
"""

import asyncio
import time
from fractions import Fraction
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

import av
import msgspec
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from vivavoce.bench.serve_server import LOCAL
from vivavoce.bench.serve_transport import CallClosedError, CallRefusedError, Listener, ReceivedEvent

RATE = 24_000
PACKET_SECONDS = 0.02
SILENT = 2  # of 16-bit samples: what the codec makes of digital silence
HTTP_SECONDS = 20.0
REFUSED = (429, 503)
ENDED = {"failed", "closed"}


class CallerTrack(MediaStreamTrack):
    """Sends the packets of the microphone as they come."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.packets: asyncio.Queue[bytes] = asyncio.Queue()
        self._sent = 0

    async def recv(self) -> Any:
        """The next packet of the microphone."""
        pcm = np.frombuffer(await self.packets.get(), np.int16)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._sent
        self._sent += len(pcm)
        return frame


class WebRtcConnection:
    """A call with an audio track and the data channel `oai-events`."""

    def __init__(self, listener: Listener, url: str, key: str | None) -> None:
        self._listener, self._url, self._key = listener, url, key
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._microphone = CallerTrack()
        self._peer.addTrack(self._microphone)
        self._channel = self._peer.createDataChannel("oai-events")
        self._events: asyncio.Queue[tuple[float, str | bytes]] = asyncio.Queue()
        self._tracks: asyncio.Queue[MediaStreamTrack] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._channel.on("message", lambda message: self._events.put_nowait((time.monotonic(), message)))
        self._peer.on("track", self._tracks.put_nowait)
        self._peer.on("connectionstatechange", self._on_state)

    async def open(self) -> None:
        """Exchange the descriptions; CallRefusedError where the server refuses."""
        await self._peer.setLocalDescription(await self._peer.createOffer())
        answer = await asyncio.to_thread(self._post, self._peer.localDescription.sdp)
        await self._peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def receive(self) -> None:
        """Pass everything on to the listener until the call ends."""
        async with asyncio.TaskGroup() as tasks:
            events, audio = tasks.create_task(self._receive_events()), tasks.create_task(self._receive_audio())
            await self._ended.wait()
            events.cancel()
            audio.cancel()
        raise CallClosedError("the call ended")

    async def send(self, message: bytes) -> None:
        """Send a packet of the microphone."""
        self._microphone.packets.put_nowait(message)

    async def close(self) -> None:
        """Hang up."""
        await self._peer.close()

    def _on_state(self) -> None:
        if self._peer.connectionState in ENDED:
            self._ended.set()

    async def _receive_events(self) -> None:
        decode = msgspec.json.Decoder(ReceivedEvent).decode
        while True:
            now, message = await self._events.get()
            self._listener.on_event(now, decode(message))

    async def _receive_audio(self) -> None:
        track = await self._tracks.get()
        try:
            while True:
                frame: Any = await track.recv()  # an audio frame; the type of aiortc covers every kind of track
                is_silent = int(np.abs(frame.to_ndarray()).max(initial=0)) <= SILENT
                self._listener.on_packet(time.monotonic(), PACKET_SECONDS, is_silent)
        except MediaStreamError:
            self._ended.set()

    def _post(self, offer: str) -> str:
        headers = {"Content-Type": "application/sdp"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            with LOCAL.open(Request(self._url, offer.encode(), headers), timeout=HTTP_SECONDS) as response:
                return str(response.read().decode())
        except HTTPError as error:
            kind = CallRefusedError if error.code in REFUSED else CallClosedError
            raise kind(f"HTTP {error.code}") from error
        except URLError as error:
            raise CallClosedError(f"no connection: {error.reason}") from error
