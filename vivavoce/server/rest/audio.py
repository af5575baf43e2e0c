"""`/v1/audio/speech`, `transcriptions`, `translations` and `voices`: request bodies, responses and audio encoders."""

import asyncio
import io
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import av
import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from vivavoce.audio.io import Sound, TooLongError, float_to_pcm16, read, write
from vivavoce.dialogue.events import Samples
from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import (
    STOCK_VOICES,
    FileTranscriber,
    Host,
    SpeechMaker,
    TranscriptionRequest,
    VoiceRegistry,
    stand_in,
)
from vivavoce.server.realtime.audio_formats import FormatWriter, SoundWriter, WireFormat, resampler
from vivavoce.server.realtime.server_events import DurationUsage
from vivavoce.server.realtime.session_config import voice_name
from vivavoce.server.realtime.session_types import Voice
from vivavoce.server.rest.http import json_body, json_response, one_of, read_upload, unless_disconnected, within
from vivavoce.server.rest.languages import language_code, language_name, unspoken_languages
from vivavoce.server.rest.transcripts import FORMATS, WireSegment, render, whole_text
from vivavoce.server.wire import WireError

MAX_INPUT = 4096
UNSUPPORTED_FIELDS = ("include", "known_speaker_names", "known_speaker_references")
FORM_FIELDS = (
    *("model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"),
    *("chunking_strategy", "keywords", "languages", *UNSUPPORTED_FIELDS),
)
GRANULARITIES = ("word", "segment")
STREAM_FORMATS = ("audio", "sse")
CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
ENCODED = {  # FFmpeg's container and codec, and the sample rate it is given
    "mp3": ("mp3", "libmp3lame", 24_000),
    "opus": ("ogg", "libopus", 48_000),
    "aac": ("adts", "aac", 24_000),
}
UNKNOWN_SIZE = 0xFFFF_FFFF  # the size field of a WAV whose length is not known yet


class SpeechRequest(Struct, forbid_unknown_fields=True):
    """The body of `/v1/audio/speech`; the model that is there speaks, whatever `model` names."""

    input: str
    model: str | None = None
    voice: Voice | None = None
    response_format: str | None = None
    stream_format: str | None = None
    speed: float | None = None
    instructions: str | None = None


class VoiceObject(Struct):
    """A voice in responses."""

    id: str
    object: Literal["audio.voice"]
    name: str
    model: str | UnsetType = UNSET
    """The model that has it."""


class VoiceList(Struct):
    """The response of GET `/v1/audio/voices`; `voices` are the names of the voices of conversations."""

    object: Literal["list"]
    data: list[VoiceObject]
    voices: list[str]


class VoiceDeleted(Struct):
    """The response of DELETE `/v1/audio/voices/{id}`."""

    id: str
    object: Literal["audio.voice.deleted"]
    deleted: bool


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


class TranscriptionApi:
    """`/v1/audio/transcriptions` and `/v1/audio/translations`."""

    def __init__(self, transcriber: FileTranscriber, options: ServerOptions) -> None:
        self.transcriber, self.options = transcriber, options

    async def transcribe(self, request: Request, caller: Identity) -> Response:
        """The transcript of an uploaded file."""
        return await self._respond(request, translates=False)

    async def translate(self, request: Request, caller: Identity) -> Response:
        """The transcript in English, as far as the model can translate."""
        return await self._respond(request, translates=True)

    async def _respond(self, request: Request, translates: bool) -> Response:
        async with request.form(max_files=1, max_part_size=self.options.max_upload_bytes) as form:
            fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
            data = await read_upload(form, "file", self.options.max_upload_bytes)
        values = dict(fields)
        format = one_of(values.get("response_format") or "json", FORMATS, "response_format")
        options = _transcription_request(values, fields, translates)
        await self.transcriber.load()
        sound = await decoded(data, self.transcriber.rate, self.options)
        stream = self.transcriber.transcribe(sound.samples[0], options)
        if values.get("stream", "").lower() == "true":
            return StreamingResponse(
                _transcript_events(stream, sound.seconds, format == "diarized_json"), media_type="text/event-stream"
            )
        segments = await unless_disconnected(request, _all(stream))
        result = render(
            segments,
            format,
            sound.seconds,
            with_words=options.with_words,
            with_segments=options.with_segments,
            task="translate" if translates else "transcribe",
        )
        return PlainTextResponse(result) if isinstance(result, str) else json_response(result)


class VoicesApi:
    """`/v1/audio/voices`: lists voices, and adds and removes them where the TTS model can clone recordings."""

    def __init__(self, host: Host, speech: SpeechMaker | None, options: ServerOptions) -> None:
        self.host, self.speech, self.options = host, speech, options

    async def list(self, request: Request, caller: Identity) -> Response:
        """The voices of the conversation model and of the TTS model."""
        named = [(card.id, name) for card in self.host.models[:1] for name in self.host.voices]
        if self.speech is not None:
            await self.speech.load()
            named += [(self.speech.model, name) for name in self.speech.voices]
        data = [VoiceObject(name, "audio.voice", name, model) for model, name in named]
        return json_response(VoiceList("list", data, [*self.host.voices]))

    async def create(self, request: Request, caller: Identity) -> Response:
        """Create a voice from a recording whose speaker has consented."""
        registry = self._registry()
        async with request.form(max_files=1, max_part_size=self.options.max_upload_bytes) as form:
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            data = await read_upload(form, "audio_sample", self.options.max_upload_bytes)
        name, consent = fields.get("name", "").strip(), fields.get("consent", "").strip()
        if not name:
            raise WireError("a voice needs a name", param="name")
        if not consent:
            raise WireError(
                "a voice is stored only with the consent of its speaker: send the consent as text or as its id",
                "consent_required",
                "consent",
            )
        sound = await decoded(data, None, self.options)
        await asyncio.to_thread(registry.add_voice, name, sound, consent, fields.get("text", ""))
        return json_response(VoiceObject(name, "audio.voice", name))

    async def delete(self, request: Request, caller: Identity) -> Response:
        """Remove a voice that was added."""
        registry, name = self._registry(), request.path_params["id"]
        await asyncio.to_thread(registry.remove_voice, name)
        return json_response(VoiceDeleted(name, "audio.voice.deleted", True))

    def _registry(self) -> VoiceRegistry:
        registry: object = self.speech
        if not isinstance(registry, VoiceRegistry):
            raise WireError("no served model can store voices; serve one with --tts", "not_found", status=404)
        return registry


async def decoded(data: bytes, rate: int | None, options: ServerOptions) -> Sound:
    """The sound of an uploaded file; WireError 413 where it is too long."""
    try:
        return await asyncio.to_thread(read, data, rate, max_seconds=options.max_audio_seconds)
    except TooLongError as error:
        raise WireError(str(error), "audio_too_long", "file", 413) from error


async def _first(sound: AsyncIterator[bytes]) -> bytes:
    return await anext(sound, b"")


async def _all(stream: AsyncIterator[WireSegment]) -> list[WireSegment]:
    return [segment async for segment in stream]


def _checked_input(text: str) -> str:
    if not text.strip() or len(text) > MAX_INPUT:
        raise WireError(f"input must have 1 to {MAX_INPUT} characters, not {len(text)}", param="input")
    return text


def _transcription_request(
    values: Mapping[str, str], fields: Sequence[tuple[str, str]], translates: bool
) -> TranscriptionRequest:
    """The request of a form; a list is sent as several fields of the same name."""
    _check_fields(values)
    lists = {
        name: tuple(value for field, value in fields if field in (name, f"{name}[]"))
        for name in ("timestamp_granularities", "keywords", "languages")
    }
    for unit in lists["timestamp_granularities"]:
        one_of(unit, GRANULARITIES, "timestamp_granularities")
    language = values.get("language") or next(iter(lists["languages"]), None)
    try:
        temperature = float(values.get("temperature") or 0)
    except ValueError as error:
        raise WireError(f"temperature must be a number, not {values['temperature']!r}", param="temperature") from error
    return TranscriptionRequest(
        language=None if language is None else language_code(language),
        prompt=values.get("prompt", ""),
        keywords=lists["keywords"],
        temperature=within(0.0, 1.0, temperature, "temperature"),
        with_words="word" in lists["timestamp_granularities"],
        with_segments=lists["timestamp_granularities"] != ("word",),
        translates=translates,
    )


def _check_fields(values: Mapping[str, str]) -> None:
    """WireError for a field that is unknown, or that no model here can honour."""
    for field, value in values.items():
        name = field.removesuffix("[]")
        if name not in FORM_FIELDS:
            raise WireError(f"Unknown parameter: '{name}'.", "unknown_parameter", name)
        if name in UNSUPPORTED_FIELDS or (name == "chunking_strategy" and value != "auto"):
            raise WireError(f"{name} is not supported by the models that are served", "unsupported_parameter", name)


# Server-sent events


class StreamEvent(Struct, tag_field="type"):
    pass


class SpeechUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechAudioDelta(StreamEvent, tag="speech.audio.delta"):
    audio: bytes


class SpeechAudioDone(StreamEvent, tag="speech.audio.done"):
    usage: SpeechUsage


class TranscriptTextDelta(StreamEvent, tag="transcript.text.delta"):
    delta: str


class TranscriptTextSegment(StreamEvent, tag="transcript.text.segment"):
    id: str
    start: float
    end: float
    speaker: str
    text: str


class TranscriptTextDone(StreamEvent, tag="transcript.text.done"):
    text: str
    usage: DurationUsage


def sse(event: StreamEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


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


async def _transcript_events(
    stream: AsyncIterator[WireSegment], seconds: float, by_speaker: bool
) -> AsyncIterator[bytes]:
    segments: list[WireSegment] = []
    async for segment in stream:
        if by_speaker:
            id, speaker = f"seg_{len(segments)}", segment.speaker or "A"
            yield sse(TranscriptTextSegment(id, segment.start, segment.end, speaker, segment.text.strip()))
        delta = segment.text if segments else segment.text.lstrip()
        segments.append(segment)
        yield sse(TranscriptTextDelta(delta))
    yield sse(TranscriptTextDone(whole_text(segments), DurationUsage(round(seconds))))


# Audio files


async def encode(chunks: AsyncIterator[Samples], rate: int, format: str) -> AsyncIterator[bytes]:
    """The bytes of an audio file, while its samples are still being generated."""
    writer = _writer(rate, format)
    if format == "wav":
        yield wav_header(WireFormat().rate)
    async for samples in chunks:
        for data in writer.write(samples):
            yield data
    for data in writer.flush():
        yield data


def _writer(rate: int, format: str) -> SoundWriter:
    if format == "flac":
        return FlacWriter(rate, WireFormat().rate)
    return FFmpegWriter(rate, format) if format in ENCODED else FormatWriter(rate, WireFormat())


def wav_header(rate: int) -> bytes:
    """The header of a mono 16-bit WAV of unknown length."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", UNKNOWN_SIZE, b"WAVE") + form + struct.pack("<4sI", b"data", UNKNOWN_SIZE)


class FlacWriter:
    """Encodes a FLAC file at its end: libsndfile reads only files whose header holds the length."""

    def __init__(self, rate: int, file_rate: int) -> None:
        self._rate, self._file_rate = rate, file_rate
        self._chunks: list[Samples] = []

    def write(self, samples: Samples) -> list[bytes]:
        """An empty list: the file is encoded at the end."""
        self._chunks.append(samples)
        return []

    def flush(self) -> list[bytes]:
        """The whole file."""
        file = io.BytesIO()
        write(file, Sound(np.concatenate(self._chunks), self._rate).resampled(self._file_rate), "flac")
        return [file.getvalue()]


class _MuxerOutput:
    """A file object that collects what the muxer writes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        taken, self._pieces = [piece for piece in self._pieces if piece], []
        return taken


class FFmpegWriter:
    """One audio file through FFmpeg's encoder and muxer."""

    def __init__(self, rate: int, format: str) -> None:
        container, codec, self._rate = ENCODED[format]
        self._output = _MuxerOutput()
        self._file: Any = av.open(self._output, "w", format=container)
        self._stream: Any = self._file.add_stream(codec, rate=self._rate, layout="mono")
        self._resampler = resampler(rate, self._rate)
        self._state = self._resampler.initial_state()
        self._encoded_samples = 0

    def write(self, samples: Samples) -> list[bytes]:
        """The bytes that these samples complete."""
        output, self._state = self._resampler.step(self._state, samples[None])
        self._encode(output[0])
        return self._output.take()

    def flush(self) -> list[bytes]:
        """The end of the file."""
        self._encode(self._resampler.flush(self._state)[0])
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._output.take()

    def _encode(self, samples: Samples) -> None:
        if not len(samples):
            return
        pcm = np.ascontiguousarray(float_to_pcm16(samples)[None])
        frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), self._encoded_samples
        self._encoded_samples += len(samples)
        self._file.mux(self._stream.encode(frame))
