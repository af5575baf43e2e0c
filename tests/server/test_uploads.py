"""Uploads beyond the limits, sounds that grow when they are decoded, and clients that do not wait for their result."""

import asyncio
import contextlib
import io
import json
import struct
import zlib
from dataclasses import dataclass, field

import av
import httpx
import numpy as np
import pytest
import soundfile

from tests.memory import is_too_long, peak_bytes, seconds_of
from tests.server.harness import RunningServer, eventually
from tests.server.scripted import ScriptedHost, tone
from tests.server.test_lost_clients import request_of
from vivavoce.audio.io import read
from vivavoce.errors import InputError
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.rest.transcripts import WireSegment

RATE = 16_000
KEY = "a-key-of-this-server"
MEBIBYTE = 1 << 20


@dataclass
class SteppingModels:
    """Transcribes and speaks a step at a time, without an end."""

    model: str = "stepping"
    rate: int = RATE
    voices: tuple[str, ...] = ("ada",)
    languages: tuple[str, ...] = ()
    started: int = 0
    stopped: int = 0
    steps: int = 0
    may_step: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self) -> None:
        """It is there."""

    async def transcribe(self, samples, request):
        async for _ in self._run():
            yield WireSegment(" word", 0.0, 1.0, (), "en", None)

    async def speak(self, text, voice, speed, instructions):
        async for _ in self._run():
            yield tone(300, 0.1, RATE)

    async def _run(self):
        self.started += 1
        try:
            while True:
                await self.may_step.wait()
                await asyncio.sleep(0.001)
                self.steps += 1
                yield
        finally:
            self.stopped += 1


class UploadServer(RunningServer):
    def __init__(self, **options) -> None:
        super().__init__(ScriptedHost(), ServerOptions(max_upload_bytes=MEBIBYTE, **options))
        self.models = SteppingModels()
        self.use(build_app(self.host, self.options, self.models, self.models))


@pytest.fixture
async def uploads():
    async with UploadServer(api_keys=(KEY,)) as server:
        yield server


def form(file: bytes, **fields: str) -> bytes:
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return ("".join(parts) + head).encode() + file + b"\r\n--x--\r\n"


def head(length: str, key: str = KEY, path: str = "/v1/audio/transcriptions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: multipart/form-data; boundary=x", length, "", ""]
    return "\r\n".join(lines).encode()


async def status_and_sent(server: RunningServer, head: bytes, pieces: int, piece: bytes) -> tuple[bytes, int]:
    """The status line, and how many pieces of the body were sent before it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = asyncio.create_task(reader.readline())
    sent = 0
    try:
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while sent < pieces and not answer.done():
                writer.write(piece)
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.005)
        return await asyncio.wait_for(answer, 20), sent
    finally:
        answer.cancel()
        writer.transport.abort()


async def test_an_upload_that_announces_too_much_is_refused_before_it_is_sent(uploads):
    status, sent = await status_and_sent(uploads, head("Content-Length: 629145600"), 0, b"")
    assert status.startswith(b"HTTP/1.1 413") and sent == 0


async def test_an_upload_that_announces_nothing_is_refused_when_it_is_too_large(uploads):
    body = form(b"\x00" * (100 * MEBIBYTE))
    piece = body[: 64 << 10]
    chunk = b"%x\r\n" % len(piece) + piece + b"\r\n"
    status, sent = await status_and_sent(uploads, head("Transfer-Encoding: chunked"), 1600, chunk)
    assert status.startswith(b"HTTP/1.1 413")
    assert sent * len(piece) < 40 * MEBIBYTE  # the rest is what the buffers of both sockets hold


async def test_nothing_of_an_upload_without_a_key_is_read(uploads):
    status, _ = await status_and_sent(uploads, head("Content-Length: 629145600", key="another-key"), 0, b"")
    assert status.startswith(b"HTTP/1.1 401")


async def test_a_refused_body_is_not_taken_for_ever(uploads):
    reader, writer = await asyncio.open_connection("127.0.0.1", uploads.port)
    writer.write(head("Content-Length: 629145600"))
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 413")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 200 * MEBIBYTE:
            writer.write(b"\x00" * MEBIBYTE)
            await asyncio.wait_for(writer.drain(), 20)
            sent += MEBIBYTE
            await asyncio.sleep(0)
    assert sent < 100 * MEBIBYTE
    writer.transport.abort()


async def test_an_upload_at_the_limit_is_taken(uploads):
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        answer = await http.post(
            f"{uploads.http}/v1/audio/transcriptions", files={"file": ("a.wav", b"\x00" * MEBIBYTE)}
        )
        assert answer.status_code == 400  # it is no sound
        answer = await http.post(
            f"{uploads.http}/v1/audio/transcriptions", files={"file": ("a.wav", b"\x00" * (MEBIBYTE + 1))}
        )
        assert answer.status_code == 413


# Sounds that grow when they are decoded


def silence(seconds: float, container: str, encoding: str) -> bytes:
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", RATE, 1, encoding, format=container) as written:
        for _ in range(round(seconds / 10)):
            written.write(np.zeros(10 * RATE, np.float32))
    return file.getvalue()


def matroska(seconds: float) -> bytes:
    """Silence as Opus in a container that only PyAV reads."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono")
        for _ in range(round(seconds)):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.int16), format="s16", layout="mono")
            frame.sample_rate = 48_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


BOMBS = {
    "flac": lambda: silence(3000, "FLAC", "PCM_16"),
    "ogg": lambda: silence(600, "OGG", "VORBIS"),
    "mp3": lambda: silence(600, "MP3", "MPEG_LAYER_III"),
    "opus": lambda: matroska(200),
}


@pytest.mark.parametrize("format", BOMBS)
def test_a_decoder_stops_at_the_limit(format):
    refused, peak = peak_bytes(is_too_long, BOMBS[format](), RATE, 60.0)
    assert refused and peak < 40 * MEBIBYTE


async def test_a_recording_that_is_too_long_is_refused(uploads):
    server = UploadServer(max_audio_seconds=60.0)
    async with server, httpx.AsyncClient() as http:
        for path in ("transcriptions", "translations"):
            answer = await http.post(
                f"{server.http}/v1/audio/{path}", files={"file": ("a.flac", silence(100, "FLAC", "PCM_16"))}
            )
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "audio_too_long"
    assert server.models.started == 0


def test_a_block_of_many_channels_is_small():
    file = io.BytesIO()
    soundfile.write(file, np.zeros((2000, 500), np.int16), RATE, format="WAV")
    seconds, peak = peak_bytes(seconds_of, file.getvalue())
    assert seconds == pytest.approx(2000 / RATE) and peak < 20 * MEBIBYTE


def test_a_wav_of_tiny_chunks_is_not_walked_through():
    chunks = struct.pack("<4sI", b"junk", 0) * 500_000
    with pytest.raises(InputError):
        read(struct.pack("<4sI4s", b"RIFF", len(chunks) + 4, b"WAVE") + chunks)


def test_a_wav_that_announces_more_than_it_holds_is_refused():
    data = bytearray(silence(10, "WAV", "PCM_16"))
    data[40:44] = struct.pack("<I", 0x7000_0000)
    with pytest.raises(InputError, match="cut short"):
        read(bytes(data), RATE, max_seconds=60.0)


def test_a_compressed_file_is_no_sound():
    with pytest.raises(InputError):
        read(zlib.compress(b"\x00" * MEBIBYTE))


# Clients that do not wait


SOUND = silence(10, "WAV", "PCM_16")
SPOKEN = {"model": "x", "input": "hello", "voice": "ada"}
ABANDONED = {
    "transcription": ("transcriptions", form(SOUND), False),
    "translation": ("translations", form(SOUND), False),
    "streamed transcription": ("transcriptions", form(SOUND, stream="true"), True),
    "speech": ("speech", json.dumps(SPOKEN | {"response_format": "wav"}).encode(), True),
    "speech in a file of one piece": ("speech", json.dumps(SPOKEN | {"response_format": "flac"}).encode(), False),
    "speech in events": ("speech", json.dumps(SPOKEN | {"stream_format": "sse"}).encode(), True),
}


@pytest.mark.parametrize("work", ABANDONED, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("is_working", [False, True], ids=["before-its-first-step", "between-steps"])
async def test_work_for_a_client_that_has_left_stops(work, is_working):
    path, body, is_streamed = ABANDONED[work]
    server = UploadServer()
    async with server:
        kind = "application/json" if path == "speech" else "multipart/form-data; boundary=x"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_of(f"/v1/audio/{path}", kind, body))
        await eventually(lambda: server.models.started == 1, "it is at work")
        if is_working:
            server.models.may_step.set()
            await eventually(lambda: server.models.steps > 3, "it has made some steps")
            if is_streamed:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        await eventually(lambda: server.models.stopped == 1, "the work ends")
