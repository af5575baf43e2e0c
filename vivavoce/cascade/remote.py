"""Ears and voices of a cascade that are elsewhere: behind OpenAI's `/audio/transcriptions` and `/audio/speech`."""

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
from vivavoce.runtime.event_loop import on_a_thread

PCM_RATE = 24_000  # of `response_format` pcm
EAR_RATE = 16_000
PIECE_BYTES = 1 << 15
TIMEOUT_SECONDS = 30.0
ANY_MODEL = "default"


class RemoteRecogniser:
    """A `Transcriber` behind an address. Use as `async with`, like an ear that is here."""

    def __init__(self, find: Resolver) -> None:
        self._find = find
        self.waiting = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def warm_up(self) -> None:
        """See that somebody is there."""
        await self._find()

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
        place = await self._find()
        try:
            return await asyncio.to_thread(_text, place, kind, form)
        except ConnectionError:  # one who has gone may be followed by another
            return await asyncio.to_thread(_text, await self._find(place), kind, form)


class RemoteSynthesiser:
    """A `Synthesiser` behind an address."""

    rate = PCM_RATE

    def __init__(self, find: Resolver) -> None:
        self._find = find
        self.voices: list[str] = []

    async def warm_up(self) -> None:
        """See that somebody is there, and learn the voices."""
        place = await self._find()
        try:
            told = await asyncio.to_thread(got, place, "/audio/voices")
        except VivaError:  # OpenAI's own has no such list
            return
        self.voices = [str(voice["id"]) for voice in told.get("data", ())]

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Its sound as it comes, at `rate`; leaving it stops it."""
        place = await self._find()
        known = voice if voice in self.voices else None
        body: dict[str, Any] = {"model": ANY_MODEL, "input": text, "voice": known or "default"}
        body |= {"speed": speed, "response_format": "pcm"}
        async for piece in on_a_thread(lambda: _spoken(place, body)):
            yield piece


def _form(samples: Samples, rate: int, language: str | None) -> tuple[str, bytes]:
    """A recording as a form, and the form's content type."""
    sound = Sound(samples, rate).mono().resampled(EAR_RATE)
    file = io.BytesIO()
    write(file, sound, "wav")
    edge = secrets.token_hex(16)
    fields = {"model": ANY_MODEL, "response_format": "json"} | ({"language": language} if language else {})
    parts = [f'--{edge}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="turn.wav"\r\n'
    begin = "".join(parts) + head + "Content-Type: audio/wav\r\n\r\n"
    return f"multipart/form-data; boundary={edge}", begin.encode() + file.getvalue() + f"\r\n--{edge}--\r\n".encode()


def _connected(place: EndpointRef) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    parts = urlsplit(place.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS), parts.path.rstrip("/"), headers


def _answer(place: EndpointRef, method: str, path: str, kind: str, body: bytes | None) -> Iterator[bytes]:
    """An answer's bytes as they come; ConnectionError where nobody is there, VivaError where it says no."""
    connection, prefix, headers = _connected(place)
    try:
        connection.request(method, prefix + path, body, headers | {"Content-Type": kind})
        with connection.getresponse() as response:  # which may hold the socket on its own
            if response.status != 200:
                detail = response.read(500).decode("utf8", "replace").strip()
                raise VivaError(f"{place.url}{path} answered {response.status}: {detail or response.reason}")
            while piece := response.read1(PIECE_BYTES):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{place.url}{path} cannot be reached ({error})") from error
    finally:
        connection.close()


def _text(place: EndpointRef, kind: str, form: bytes) -> str:
    answer = json.loads(b"".join(_answer(place, "POST", "/audio/transcriptions", kind, form)))
    return str(answer.get("text", "")).strip()


def got(place: EndpointRef, path: str) -> dict[str, Any]:
    """What stands at an address; ConnectionError where nobody is there."""
    return dict(json.loads(b"".join(_answer(place, "GET", path, "application/json", None))))


def _spoken(place: EndpointRef, body: dict[str, Any]) -> Iterator[Samples]:
    rest = b""
    for piece in _answer(place, "POST", "/audio/speech", "application/json", json.dumps(body).encode()):
        data = rest + piece
        whole = len(data) - len(data) % 2
        rest = data[whole:]
        yield pcm16_to_float(data[:whole])
