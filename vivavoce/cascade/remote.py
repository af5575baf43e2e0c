"""Remote recogniser and synthesiser of a cascade: behind OpenAI's `/audio/transcriptions` and `/audio/speech`."""

import asyncio
import http.client
import io
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self
from urllib.parse import urlsplit

from vivavoce.audio.io import Sound, pcm16_to_float, write
from vivavoce.dialogue.backend import EndpointRef, Resolver
from vivavoce.dialogue.events import Samples
from vivavoce.errors import VivaError
from vivavoce.runtime.event_loop import iterate_on_thread

PCM_RATE = 24_000  # of `response_format` pcm
ASR_RATE = 16_000
PIECE_BYTES = 1 << 15
TIMEOUT_SECONDS = 30.0
ANY_MODEL = "default"


class RemoteRecogniser:
    """A `Transcriber` behind an address. Use as `async with`, like a local one."""

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self.waiting = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def warm_up(self) -> None:
        """Check that there is an endpoint."""
        await self._resolve()

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said in a turn."""
        if not len(samples):
            return ""
        self.waiting += 1
        try:
            kind, form = await asyncio.to_thread(_form, samples, rate, language)
            return await self._asked(kind, form)
        finally:
            self.waiting -= 1

    async def _asked(self, kind: str, form: bytes) -> str:
        endpoint = await self._resolve()
        try:
            return await asyncio.to_thread(_text, endpoint, kind, form)
        except ConnectionError:  # another endpoint may have taken its place
            return await asyncio.to_thread(_text, await self._resolve(endpoint), kind, form)


class RemoteSynthesiser:
    """A `Synthesiser` behind an address."""

    rate = PCM_RATE

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self.voices: list[str] = []

    async def warm_up(self) -> None:
        """Check that there is an endpoint, and read its voices."""
        endpoint = await self._resolve()
        try:
            answer = await asyncio.to_thread(got, endpoint, "/audio/voices")
        except VivaError:  # OpenAI's own has no such list
            return
        self.voices = [str(voice["id"]) for voice in answer.get("data", ())]

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Its sound as it comes, at `rate`; leaving it stops it."""
        endpoint = await self._resolve()
        known = voice if voice in self.voices else None
        body: dict[str, Any] = {"model": ANY_MODEL, "input": text, "voice": known or "default"}
        body |= {"speed": speed, "response_format": "pcm"}
        async for piece in iterate_on_thread(lambda: _spoken(endpoint, body)):
            yield piece


def _form(samples: Samples, rate: int, language: str | None) -> tuple[str, bytes]:
    """A recording as a form, and the form's content type."""
    sound = Sound(samples, rate).mono().resampled(ASR_RATE)
    file = io.BytesIO()
    write(file, sound, "wav")
    edge = secrets.token_hex(16)
    fields = {"model": ANY_MODEL, "response_format": "json"} | ({"language": language} if language else {})
    parts = [f'--{edge}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="turn.wav"\r\n'
    begin = "".join(parts) + head + "Content-Type: audio/wav\r\n\r\n"
    return f"multipart/form-data; boundary={edge}", begin.encode() + file.getvalue() + f"\r\n--{edge}--\r\n".encode()


def _connected(endpoint: EndpointRef) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    parts = urlsplit(endpoint.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS), parts.path.rstrip("/"), headers


def _answer(endpoint: EndpointRef, method: str, path: str, kind: str, body: bytes | None) -> Iterator[bytes]:
    """An answer's bytes as they come; ConnectionError where it cannot be reached, VivaError where it refuses."""
    connection, prefix, headers = _connected(endpoint)
    try:
        connection.request(method, prefix + path, body, headers | {"Content-Type": kind})
        with connection.getresponse() as response:  # which may hold the socket on its own
            if response.status != 200:
                detail = response.read(500).decode("utf8", "replace").strip()
                raise VivaError(f"{endpoint.url}{path} answered {response.status}: {detail or response.reason}")
            while piece := response.read1(PIECE_BYTES):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{endpoint.url}{path} cannot be reached ({error})") from error
    finally:
        connection.close()


def _text(endpoint: EndpointRef, kind: str, form: bytes) -> str:
    answer = json.loads(b"".join(_answer(endpoint, "POST", "/audio/transcriptions", kind, form)))
    return str(answer.get("text", "")).strip()


def got(endpoint: EndpointRef, path: str) -> dict[str, Any]:
    """JSON from an address; ConnectionError where it cannot be reached."""
    return dict(json.loads(b"".join(_answer(endpoint, "GET", path, "application/json", None))))


def _spoken(endpoint: EndpointRef, body: dict[str, Any]) -> Iterator[Samples]:
    rest = b""
    for piece in _answer(endpoint, "POST", "/audio/speech", "application/json", json.dumps(body).encode()):
        data = rest + piece
        whole = len(data) - len(data) % 2
        rest = data[whole:]
        yield pcm16_to_float(data[:whole])
