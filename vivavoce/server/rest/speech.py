"""`/v1/audio/speech`: an audio file of a text, or events with its chunks."""

from collections.abc import AsyncIterator, Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vivavoce.dialogue.items import Samples
from vivavoce.server.auth import Identity
from vivavoce.server.host import STOCK_VOICES, SpeechMaker, stand_in
from vivavoce.server.realtime.session_settings import voice_name
from vivavoce.server.realtime.session_types import Voice
from vivavoce.server.rest.audio_files import CONTENT_TYPES, encode
from vivavoce.server.rest.http import json_body, one_of, unless_disconnected, within
from vivavoce.server.rest.languages import language_name, unspoken_languages
from vivavoce.server.rest.server_sent import StreamEvent, sse
from vivavoce.server.wire import WireError

MAX_INPUT = 4096
STREAM_FORMATS = ("audio", "sse")


class SpeechRequest(Struct, forbid_unknown_fields=True):
    """The body of `/v1/audio/speech`; the model that is there speaks, whatever `model` names."""

    input: str
    model: str | None = None
    voice: Voice | None = None
    response_format: str | None = None
    stream_format: str | None = None
    speed: float | None = None
    instructions: str | None = None


class SpeechApi:
    """`/v1/audio/speech`."""

    def __init__(self, maker: SpeechMaker) -> None:
        self.maker = maker

    async def speak(self, request: Request, caller: Identity) -> Response:
        """An audio file, or events with its chunks, streamed while the audio is generated."""
        body = await json_body(request, SpeechRequest)
        text = _checked_input(body.input)
        format = one_of(body.response_format or "mp3", CONTENT_TYPES, "response_format")
        stream_format = one_of(body.stream_format or "audio", STREAM_FORMATS, "stream_format")
        speed = 1.0 if body.speed is None else within(0.25, 4.0, body.speed, "speed")
        await self.maker.load()
        if languages := unspoken_languages(text, self.maker.languages):
            known = ", ".join(map(language_name, self.maker.languages))
            problem = f"the input seems to be {language_name(languages[0])}; {self.maker.model} speaks {known}"
            raise WireError(problem, "unsupported_language", "input")
        chunks = self.maker.speak(text, self._voice(body.voice), speed, body.instructions or "")
        spoken = SpokenSeconds(chunks, self.maker.rate)
        sound = encode(spoken.counted(), self.maker.rate, format)
        # A failure before the first chunk is still an error response.
        first = await unless_disconnected(request, _first(sound))
        if stream_format == "sse":
            events = _speech_events(first, sound, lambda: self.maker.count_tokens(text, spoken.seconds))
            return StreamingResponse(events, media_type="text/event-stream")
        return StreamingResponse(_with_first(first, sound), media_type=CONTENT_TYPES[format])

    def _voice(self, voice: Voice | None) -> str | None:
        name = None if voice is None else voice_name(voice)
        if name in self.maker.voices:
            return name
        if name is None or name == "default":
            return None
        if name in STOCK_VOICES:
            return stand_in(name, self.maker.voices)
        known = ", ".join(self.maker.voices) or "only the default one"
        raise WireError(f"there is no voice {name!r}; known voices: {known}", param="voice")


def _checked_input(text: str) -> str:
    if not text.strip() or len(text) > MAX_INPUT:
        raise WireError(f"input must have 1 to {MAX_INPUT} characters, not {len(text)}", param="input")
    return text


async def _first(sound: AsyncIterator[bytes]) -> bytes:
    return await anext(sound, b"")


class SpeechUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechAudioDelta(StreamEvent, tag="speech.audio.delta"):
    audio: bytes


class SpeechAudioDone(StreamEvent, tag="speech.audio.done"):
    usage: SpeechUsage


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in rest:
        yield data


async def _speech_events(
    first: bytes, rest: AsyncIterator[bytes], tokens: Callable[[], tuple[int, int]]
) -> AsyncIterator[bytes]:
    async for data in _with_first(first, rest):
        yield sse(SpeechAudioDelta(data))
    read, spoken = tokens()
    yield sse(SpeechAudioDone(SpeechUsage(read, spoken, read + spoken)))


class SpokenSeconds:
    """Counts the audio of a request while it is generated."""

    def __init__(self, chunks: AsyncIterator[Samples], rate: int) -> None:
        self._chunks, self._rate = chunks, rate
        self.seconds = 0.0

    async def counted(self) -> AsyncIterator[Samples]:
        """The chunks."""
        async for samples in self._chunks:
            self.seconds += len(samples) / self._rate
            yield samples
