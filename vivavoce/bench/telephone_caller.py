"""Callers of `viva bench telephone`: over SIP with RTP in µ-law, and over a WebSocket, with the same questions.

A sample is spoken when the packet of 20 ms that it is in is sent. A reply is heard
when its first sound is played: a packet is played when it comes, deltas of a WebSocket one after the other.
"""

import asyncio
import base64
import json
import re
import secrets
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import websockets

from vivavoce.audio.io import Sound
from vivavoce.bench.telephone_line import EchoPath, LineSettings
from vivavoce.bench.turn_sounds import Samples, room_noise, voiced_bounds
from vivavoce.errors import VivaError
from vivavoce.server.realtime.audio_formats import MU_LAW, WireFormat, decode, encode

LINE = WireFormat(MU_LAW, 8_000)
WIDE = WireFormat()
PACKET_SECONDS = 0.02
LOUD = 0.015  # of a packet with sound
END_SECONDS = 0.7  # of silence after a reply
ANSWER_SECONDS = 25.0
NOISE_DBFS, NOISE_SECONDS = -60.0, 5.0
SIP_SECONDS = 10.0


class CallFailedError(VivaError):
    """A call was refused, or not answered."""


@dataclass
class AskedTurn:
    """One question, and what came back."""

    v2v_seconds: float | None = None
    """From the last voiced sample sent to the first sound of the reply; None: there was none."""
    reply_seconds: float = 0.0
    transcript: str = ""
    """Of a reply over a WebSocket; those of a call have a sideband."""


@dataclass
class HeardSound:
    """When sound was heard."""

    rate: int
    first_at: float | None = None
    last_at: float = 0.0

    def note(self, begin: float, samples: Samples) -> None:
        """Take samples that are played from this time on."""
        loud = np.flatnonzero(np.abs(samples) > LOUD)
        if len(loud):
            self.first_at = begin + int(loud[0]) / self.rate if self.first_at is None else self.first_at
            self.last_at = begin + int(loud[-1]) / self.rate


class OpenMicrophone:
    """Sends a packet every 20 ms, of the question or of room noise, and says when its voice has ended."""

    def __init__(self, rate: int) -> None:
        self.rate, self.size = rate, round(PACKET_SECONDS * rate)
        self._noise = Sound(room_noise(NOISE_SECONDS, NOISE_DBFS), 24_000).resampled(rate).samples[0]
        self._count = 0
        self._waiting: Samples = np.zeros(0, np.float32)
        self._voice_ends = 0
        self._said: asyncio.Future[float] | None = None
        self.lateness: list[float] = []

    def say(self, samples: Samples) -> "asyncio.Future[float]":
        """Speak from the next packet on; done with the time at which the last voiced sample was sent."""
        self._voice_ends = (
            voiced_bounds(Sound(samples, self.rate).resampled(24_000).samples[0])[1] * self.rate // 24_000
        )
        self._waiting, self._said = samples, asyncio.get_running_loop().create_future()
        return self._said

    def packet(self, now: float) -> Samples:
        """The next 20 ms."""
        begin = self._count * self.size % (len(self._noise) - self.size)
        self._count += 1
        packet = self._noise[begin : begin + self.size].copy()
        spoken, self._waiting = self._waiting[: self.size], self._waiting[self.size :]
        packet[: len(spoken)] += spoken
        if self._said is not None and not self._said.done():
            self._voice_ends -= self.size
            if self._voice_ends <= 0:
                self._said.set_result(now)
        return packet


class Sideband:
    """The events of a session: what was transcribed, and which replies were cut."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.transcripts: list[str] = []
        self.cut = 0
        self._is_played = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._socket = await websockets.connect(self._url, max_size=None)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._socket.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def send(self, **event: Any) -> None:
        """Send a client event."""
        await self._socket.send(json.dumps(event))

    def on_event(self, event: dict[str, Any]) -> None:
        """Take a server event."""
        if event["type"] == "response.output_audio_transcript.done":
            self.transcripts.append(event["transcript"])
        elif event["type"] == "output_audio_buffer.cleared":
            self.cut += 1
        elif event["type"] == "output_audio_buffer.stopped":
            self._is_played.set()

    async def until_played(self) -> None:
        """Wait until the server has played a reply to its end, which may have gaps."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._is_played.wait()

    async def _read(self) -> None:
        async for message in self._socket:
            self.on_event(json.loads(message))


class SocketCaller(Sideband):
    """A caller over `/v1/realtime`, with 16-bit PCM."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._heard, self._audio_until, self._is_done = HeardSound(WIDE.rate), 0.0, asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._microphone = OpenMicrophone(WIDE.rate)
        self._speaking = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await stop(self._speaking)
        await super().__aexit__(*error)

    def on_event(self, event: dict[str, Any]) -> None:
        """Take a server event."""
        super().on_event(event)
        if event["type"] == "response.output_audio.delta":
            samples = decode(base64.b64decode(event["delta"]), WIDE)
            begin = max(self._audio_until, time.monotonic())  # deltas come faster than they are played
            self._heard.note(begin, samples)
            self._audio_until = begin + len(samples) / WIDE.rate
        elif event["type"] == "response.done" and event["response"]["status"] == "completed":
            self._is_done.set()  # one that a pause in the question has begun is cancelled

    async def ask(self, question: Samples, rate: int) -> AskedTurn:
        """Ask, and listen to the end of the reply."""
        self._heard, self._audio_until, before = HeardSound(WIDE.rate), 0.0, len(self.transcripts)
        self._is_done.clear()
        said = await self._microphone.say(Sound(question, rate).resampled(WIDE.rate).samples[0])
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._is_done.wait()
        except TimeoutError:
            return AskedTurn()
        await asyncio.sleep(max(0.0, self._audio_until - time.monotonic()) + END_SECONDS)
        first = self._heard.first_at
        return AskedTurn(
            v2v_seconds=None if first is None else first - said,
            reply_seconds=0.0 if first is None else self._heard.last_at - first,
            transcript=" ".join(self.transcripts[before:]),
        )

    async def _speak(self) -> None:
        async for now in ticks(self._microphone):
            data = base64.b64encode(encode(self._microphone.packet(now), WIDE)).decode()
            await self.send(type="input_audio_buffer.append", audio=data)


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Datagrams(asyncio.DatagramProtocol):
    """A UDP socket."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, address: tuple[str | Any, int]) -> None:
        self._received(data)


@dataclass
class SipCaller:
    """A caller over SIP and RTP that shares no code with the server's: it receives what any telephone would."""

    sip_port: int
    line: LineSettings = field(default_factory=LineSettings)
    seed: int = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.user, self._call_id, self._tag = f"bench{secrets.token_hex(4)}", secrets.token_hex(8), secrets.token_hex(4)
        self._to_tag, self._responses = "", asyncio.Queue[str]()
        self._chance = np.random.default_rng(self.seed)
        self._heard, self._echo = HeardSound(LINE.rate), EchoPath(self.line, LINE.rate)
        self.is_hung_up = False
        async with AsyncExitStack() as stack:
            self._sip, _ = await loop.create_datagram_endpoint(
                lambda: Datagrams(self._received_sip), ("127.0.0.1", 0), ("127.0.0.1", self.sip_port)
            )
            stack.callback(self._sip.close)
            self._rtp, _ = await loop.create_datagram_endpoint(lambda: Datagrams(self._received_rtp), ("127.0.0.1", 0))
            stack.callback(self._rtp.close)
            self._microphone = OpenMicrophone(LINE.rate)
            self._media_port = await self._invite()
            stack.push_async_callback(self._hang_up)
            stack.push_async_callback(stop, asyncio.create_task(self._speak()))
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.aclose()

    async def _hang_up(self) -> None:
        if not self.is_hung_up:
            await self._exchange("BYE", 2)

    @property
    def lateness(self) -> list[float]:
        """Seconds by which packets were sent late."""
        return self._microphone.lateness

    async def ask(self, question: Samples, rate: int) -> AskedTurn:
        """Ask, and listen to the end of the reply."""
        self._heard = HeardSound(LINE.rate)
        said = await self._microphone.say(Sound(question, rate).resampled(LINE.rate).samples[0])
        self._heard = heard = HeardSound(LINE.rate)
        deadline = said + ANSWER_SECONDS
        while time.monotonic() < deadline and not self.is_hung_up:
            await asyncio.sleep(PACKET_SECONDS)
            if heard.first_at is not None and time.monotonic() - heard.last_at > END_SECONDS:
                return AskedTurn(heard.first_at - said, heard.last_at - heard.first_at)
        return AskedTurn()

    # SIP

    async def _invite(self) -> int:
        port = self._rtp.get_extra_info("sockname")[1]
        sdp = (
            "v=0\r\no=- 1 1 IN IP4 127.0.0.1\r\ns=-\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
            f"m=audio {port} RTP/AVP 0\r\na=sendrecv\r\n"
        )
        answer = await self._exchange("INVITE", 1, sdp)
        found = re.search(r"m=audio (\d+)", answer)
        if not answer.startswith("SIP/2.0 200") or found is None:
            raise CallFailedError(f"the server has answered a call with {answer.partition(chr(13))[0]}")
        self._to_tag = re.search(r"\nTo:[^\r]*(;tag=[^\r;]+)", answer)[1]  # type: ignore[index]
        self._send("ACK", 1)
        return int(found[1])

    async def _exchange(self, method: str, number: int, body: str = "") -> str:
        """Send a request, again each half second, until it has a final response."""
        branch = secrets.token_hex(6)
        ends = time.monotonic() + SIP_SECONDS
        while time.monotonic() < ends:
            self._send(method, number, body, branch)
            try:
                async with asyncio.timeout(0.5):
                    while (response := await self._responses.get())[8] == "1" or f"{number} {method}" not in response:
                        pass
                    return response
            except TimeoutError:
                continue
        raise CallFailedError(f"the server has not answered {method}")

    def _send(self, method: str, number: int, body: str = "", branch: str = "") -> None:
        own, port = self._sip.get_extra_info("sockname")[1], self.sip_port
        lines = [
            f"{method} sip:viva@127.0.0.1:{port} SIP/2.0",
            f"Via: SIP/2.0/UDP 127.0.0.1:{own};branch=z9hG4bK{branch or secrets.token_hex(6)};rport",
            f"From: <sip:{self.user}@127.0.0.1:{own}>;tag={self._tag}",
            f"To: <sip:viva@127.0.0.1:{port}>{self._to_tag}",
            f"Call-ID: {self._call_id}",
            f"CSeq: {number} {method}",
            f"Contact: <sip:{self.user}@127.0.0.1:{own}>",
            "Max-Forwards: 70",
            *(["Content-Type: application/sdp"] if body else []),
            f"Content-Length: {len(body)}",
        ]
        self._sip.sendto("\r\n".join((*lines, "", body)).encode())

    def _received_sip(self, data: bytes) -> None:
        text = data.decode("utf8", "replace")
        if text.startswith("SIP/2.0"):
            self._responses.put_nowait(text)
        elif text.startswith("BYE "):
            self.is_hung_up = True
            head = [line for line in text.split("\r\n") if re.match("(Via|From|To|Call-ID|CSeq):", line)]
            self._sip.sendto("\r\n".join(("SIP/2.0 200 OK", *head, "Content-Length: 0", "", "")).encode())

    # RTP

    def _received_rtp(self, data: bytes) -> None:
        if len(data) > 12 and data[1] & 0x7F == 0:
            samples = decode(data[12:], LINE)
            self._heard.note(time.monotonic(), samples)
            self._echo.receive(int.from_bytes(data[4:8], "big"), samples)

    async def _speak(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        async for now in ticks(self._microphone):
            number += 1
            samples = self._microphone.packet(now) + self._echo.next(self._microphone.size)
            if self._chance.random() < self.line.loss:
                continue
            header = struct.pack(">BBHII", 0x80, 0, number & 0xFFFF, number * len(samples) & 0xFFFFFFFF, 7)
            packet = header + encode(samples, LINE)
            if self.line.jitter_seconds:
                loop.call_later(self._chance.random() * self.line.jitter_seconds, self._send_rtp, packet)
            else:
                self._send_rtp(packet)

    def _send_rtp(self, packet: bytes) -> None:
        if not self._rtp.is_closing():
            self._rtp.sendto(packet, ("127.0.0.1", self._media_port))


async def ticks(microphone: OpenMicrophone) -> AsyncIterator[float]:
    """The time of every packet; those that are late are noted."""
    begin, number = time.monotonic(), 0
    while True:
        number += 1
        due = begin + number * PACKET_SECONDS
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        microphone.lateness.append(time.monotonic() - due)
        yield time.monotonic()
