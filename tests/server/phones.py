"""Callers that speak the documented shapes of telephony providers, each over a real socket.

A caller hears at once what it is sent, and answers a mark only where the test lets it.
"""

import asyncio
import base64
import contextlib
import json
import struct
import uuid

import numpy as np
import websockets

from tests.server.harness import DEADLINE, connected, eventually
from vivavoce.server.realtime.audio_formats import A_LAW, MU_LAW, PCM, WireFormat, decode, encode

TOKEN = uuid.UUID("0f6f1d1c-6a34-4f9c-8a4c-2d1fd3a9b2c1")


def payload(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Phone:
    """A call; subclasses have the messages of a provider."""

    provider = ""
    format = WireFormat(MU_LAW, 8_000)
    has_marks = True

    def __init__(self, server, key: str | None = None, start: bool = True) -> None:
        self.server, self.key, self._starts = server, key, start
        self.heard: list[bytes] = []
        self.marks: list[tuple[str, float]] = []
        """Their names, and the seconds of audio before them."""
        self.clears = 0
        self.answers_marks = True
        self.changed = asyncio.Condition()

    async def __aenter__(self):
        await self.connect()
        self._reading = asyncio.create_task(self._read())
        if self._starts:
            before = {session.id for session in self.server.sessions}
            for message in self.opening():
                await self.send(message)
            opened = lambda: [each for each in self.server.sessions if each.id not in before]  # noqa: E731
            await eventually(opened, "the session is open")
            (self.session,) = opened()
        return self

    async def __aexit__(self, *error) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self.disconnect()

    async def connect(self) -> None:
        path = f"/v1/media-streams/{self.provider}" + (f"/{self.key}" if self.key else "")
        self.socket = await websockets.connect(self.server.ws + path, max_queue=None)

    async def disconnect(self) -> None:
        await self.socket.close()

    async def send(self, message) -> None:
        await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def messages(self):
        async for message in self.socket:
            yield message

    async def _read(self) -> None:
        async for message in self.messages():
            kind, value = self.parse(message)
            if kind == "audio":
                self.heard.append(value)
            elif kind == "mark":
                self.marks.append((value, self.format.seconds(sum(map(len, self.heard)))))
                if self.answers_marks:
                    await self.send(self.played(value))
            elif kind == "clear":
                self.clears += 1
            async with self.changed:
                self.changed.notify_all()

    @property
    def sound(self) -> np.ndarray:
        return decode(b"".join(self.heard), self.format)

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(condition)

    async def closed(self) -> tuple[int, str]:
        """Wait until the server closes; its code and reason."""
        await asyncio.wait_for(self.socket.wait_closed(), DEADLINE)
        return self.socket.close_code, self.socket.close_reason

    async def speak(self, samples: np.ndarray, is_paced: bool = False) -> None:
        """Say samples of 8 kHz, or of the rate of the line."""
        data = encode(samples, self.format)
        step = self.format.rate // 50 * self.format.bytes_per_sample
        for begin in range(0, len(data) - step + 1, step):
            await self.send(self.media(data[begin : begin + step]))
            if is_paced:
                await asyncio.sleep(0.02)

    async def press(self, digit: str) -> None:
        await self.send(self.dtmf(digit))

    @contextlib.asynccontextmanager
    async def sideband(self):
        """A client of the Realtime protocol beside the call; it has the events from the first one on."""
        query = f"?call_id={self.session.id.replace('sess_', 'rtc_', 1)}"
        async with connected(self.server, query, self.key) as client:
            await client.until("session.created")
            yield client


class TwilioPhone(Phone):
    provider = "twilio"
    stream = "MZ18ad3ab5a668481ce02b83e7395059f0"

    def opening(self):
        media = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
        start = {"accountSid": "AC1", "streamSid": self.stream, "callSid": "CA1", "tracks": ["inbound"]}
        start |= {"mediaFormat": media, "customParameters": {"name": "Ada"}}
        yield {"event": "connected", "protocol": "Call", "version": "1.0.0"}
        yield {"event": "start", "sequenceNumber": "1", "start": start, "streamSid": self.stream}

    def media(self, data):
        part = {"track": "inbound", "chunk": "1", "timestamp": "5", "payload": payload(data)}
        return {"event": "media", "sequenceNumber": "3", "media": part, "streamSid": self.stream}

    def dtmf(self, digit):
        return {"event": "dtmf", "streamSid": self.stream, "dtmf": {"track": "inbound_track", "digit": digit}}

    def played(self, name):
        return {"event": "mark", "sequenceNumber": "4", "streamSid": self.stream, "mark": {"name": name}}

    def stop(self):
        return {"event": "stop", "streamSid": self.stream, "stop": {"accountSid": "AC1", "callSid": "CA1"}}

    def parse(self, message):
        content = json.loads(message)
        assert content.pop("streamSid") == self.stream
        return parsed(content)


def parsed(content: dict):
    """A message as Twilio, Telnyx and Exotel take it, without its stream."""
    match content:
        case {"event": "media", "media": {"payload": data}} if len(content) == 2:
            return "audio", base64.b64decode(data)
        case {"event": "mark", "mark": {"name": name}} if len(content) == 2:
            return "mark", name
        case {"event": "clear"} if len(content) == 1:
            return "clear", None
    raise AssertionError(content)


class TelnyxPhone(Phone):
    provider = "telnyx"
    format = WireFormat(A_LAW, 8_000)
    stream = "32DE0DEA-53CB-4B21-89A4-9E1819C043BC"

    def opening(self):
        media = {"encoding": "PCMA", "sample_rate": 8000, "channels": 1}
        yield {"event": "connected", "version": "1.0.0"}
        start = {"user_id": "u", "call_control_id": "v2:T0", "media_format": media}
        yield {"event": "start", "sequence_number": "1", "start": start, "stream_id": self.stream}

    def media(self, data):
        part = {"track": "inbound", "chunk": "2", "timestamp": "5", "payload": payload(data)}
        return {"event": "media", "sequence_number": "4", "media": part, "stream_id": self.stream}

    def dtmf(self, digit):
        return {"event": "dtmf", "stream_id": self.stream, "sequence_number": "5", "dtmf": {"digit": digit}}

    def played(self, name):
        return {"event": "mark", "stream_id": self.stream, "sequence_number": "6", "mark": {"name": name}}

    def stop(self):
        return {"event": "stop", "sequence_number": "5", "stop": {"call_control_id": "v2:T0"}, "stream_id": self.stream}

    def parse(self, message):
        return parsed(json.loads(message))


class ExotelPhone(Phone):
    provider = "exotel"
    format = WireFormat(PCM, 8_000)
    stream = "MZ5a1"

    def opening(self):
        media = {"encoding": "audio/x-raw", "sample_rate": "8000", "bit_rate": "16"}
        start = {"stream_sid": self.stream, "call_sid": "CA2", "from": "+91", "to": "+92", "media_format": media}
        yield {"event": "connected"}
        yield {"event": "start", "sequence_number": "1", "stream_sid": self.stream, "start": start}

    def media(self, data):
        part = {"chunk": "2", "timestamp": "200", "payload": payload(data)}
        return {"event": "media", "sequence_number": "3", "stream_sid": self.stream, "media": part}

    def dtmf(self, digit):
        return {"event": "dtmf", "stream_sid": self.stream, "dtmf": {"digit": digit, "duration": "100"}}

    def played(self, name):
        return {"event": "mark", "stream_sid": self.stream, "mark": {"name": name}}

    def stop(self):
        return {"event": "stop", "stream_sid": self.stream, "stop": {"reason": "callended"}}

    def parse(self, message):
        content = json.loads(message)
        assert content.pop("stream_sid") == self.stream
        kind, value = parsed(content)
        assert kind != "audio" or (len(value) >= 1600 and len(value) % 320 == 0), "whole frames, and enough of them"
        return kind, value


class PlivoPhone(Phone):
    provider = "plivo"
    format = WireFormat(PCM, 16_000)
    stream = "20170ada-f610-433b-8758-c02a2aab3662"

    def opening(self):
        media = {"encoding": "audio/x-l16", "sampleRate": 16000}
        start = {"callId": "c", "streamId": self.stream, "accountId": "MA", "tracks": ["inbound"], "mediaFormat": media}
        yield {"sequenceNumber": 0, "event": "start", "start": start, "extra_headers": "{}"}

    def media(self, data):
        part = {"track": "inbound", "timestamp": "1", "chunk": 1, "payload": payload(data)}
        return {"sequenceNumber": 1, "streamId": self.stream, "event": "media", "media": part}

    def dtmf(self, digit):
        part = {"track": "inbound", "digit": digit, "timestamp": "1"}
        return {"event": "dtmf", "streamId": self.stream, "dtmf": part}

    def played(self, name):
        return {"event": "playedStream", "streamId": self.stream, "name": name}

    def stop(self):
        return None

    def parse(self, message):
        match json.loads(message):
            case {"event": "playAudio", "media": {"contentType": "audio/x-l16", "sampleRate": 16000, "payload": data}}:
                return "audio", base64.b64decode(data)
            case {"event": "checkpoint", "streamId": self.stream, "name": name}:
                return "mark", name
            case {"event": "clearAudio", "streamId": self.stream}:
                return "clear", None
        raise AssertionError(message)


class VonagePhone(Phone):
    provider = "vonage"
    format = WireFormat(PCM, 16_000)

    def opening(self):
        yield {"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "caller": "447700900000"}

    def media(self, data):
        return data

    def dtmf(self, digit):
        return {"event": "websocket:dtmf", "digit": digit, "duration": 260}

    def played(self, name):
        return {"event": "websocket:notify", "payload": {"mark": name}}

    def stop(self):
        return None

    def parse(self, message):
        if isinstance(message, bytes):
            assert len(message) == 640, "a message has 20 ms"
            return "audio", message
        match json.loads(message):
            case {"action": "notify", "payload": {"mark": name}}:
                return "mark", name
            case {"action": "clear"}:
                return "clear", None
        raise AssertionError(message)


class AsteriskPhone(Phone):
    """chan_websocket with JSON control messages."""

    provider = "asterisk"

    def opening(self):
        start = {"event": "MEDIA_START", "connection_id": "e226", "channel": "WebSocket/viva", "channel_id": "pbx1-1.9"}
        yield start | {"format": "ulaw", "optimal_frame_size": 160, "ptime": 20, "channel_variables": {"A": "b"}}

    def media(self, data):
        return data

    def dtmf(self, digit):
        return {"event": "DTMF_END", "channel_id": "pbx1-1.9", "digit": digit}

    def played(self, name):
        return {"event": "MEDIA_MARK_PROCESSED", "channel_id": "pbx1-1.9", "correlation_id": name}

    def stop(self):
        return None

    def parse(self, message):
        if isinstance(message, bytes):
            assert len(message) % 160 == 0
            return "audio", message
        match json.loads(message):
            case {"command": "MARK_MEDIA", "correlation_id": name}:
                return "mark", name
            case {"command": "FLUSH_MEDIA"}:
                return "clear", None
            case {"command": "HANGUP"}:
                return "hangup", None
        raise AssertionError(message)


class PlainAsteriskPhone(AsteriskPhone):
    """chan_websocket of older versions."""

    has_marks = False

    def opening(self):
        yield "MEDIA_START connection_id:e226 channel:WebSocket/viva format:ulaw optimal_frame_size:160"

    def dtmf(self, digit):
        return f"DTMF_END digit:{digit}"

    def parse(self, message):
        if isinstance(message, bytes):
            return "audio", message
        return {"FLUSH_MEDIA": "clear", "HANGUP": "hangup"}[message], None


class AudioSocketPhone(Phone):
    """Asterisk's `AudioSocket()`, over TCP."""

    provider = "audiosocket"
    format = WireFormat(PCM, 8_000)
    has_marks = False
    token = TOKEN

    async def connect(self) -> None:
        port = self.server.app.state.server.audiosocket.port
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)

    async def disconnect(self) -> None:
        self.writer.close()

    def opening(self):
        yield b"\x01\x00\x10" + self.token.bytes
        yield self.media(b"\x00" * 320)

    async def send(self, message) -> None:
        self.writer.write(message)
        await self.writer.drain()

    async def messages(self):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await self.reader.readexactly(3)
                yield header + await self.reader.readexactly(struct.unpack(">BH", header)[1])

    def media(self, data):
        return struct.pack(">BH", 0x10, len(data)) + data

    def dtmf(self, digit):
        return b"\x03\x00\x01" + digit.encode()

    def stop(self):
        return b"\x00\x00\x00"

    def parse(self, message):
        if message == b"\x00\x00\x00":
            return "hangup", None
        if message[0] == 0xFF:
            return "error", None
        assert message[0] == 0x10 and len(message) == 323
        return "audio", message[3:]

    async def closed(self) -> tuple[int, str]:
        await asyncio.wait_for(self._reading, DEADLINE)
        return 0, ""


PHONES = [
    *(TwilioPhone, TelnyxPhone, ExotelPhone, PlivoPhone, VonagePhone),
    *(AsteriskPhone, PlainAsteriskPhone, AudioSocketPhone),
]
