"""`/v1/audio/speech`, `transcriptions` and `translations`, for whoever can speak and whoever can listen."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vivavoce.audio.io import read
from vivavoce.dialogue.events import Samples
from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import STOCK_VOICES
from vivavoce.server.realtime.server_events import DurationUsage
from vivavoce.server.rest.audio_stream import CONTENT_TYPES, encoded
from vivavoce.server.rest.http import json_answer, json_body, one_of, text, uploaded, within
from vivavoce.server.rest.stream_events import (
    SpeechAudioDelta,
    SpeechAudioDone,
    SpeechUsage,
    TranscriptTextDelta,
    TranscriptTextDone,
    TranscriptTextSegment,
    sse,
)
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


Wire = dict[str, Any]
FORMATS = ("json", "text", "srt", "verbose_json", "vtt", "diarized_json")


@dataclass(frozen=True)
class WireWord:
    """A word and its time in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class WireSegment:
    """A stretch of speech; `text` as it stands in the whole, with its spaces."""

    text: str
    start: float
    end: float
    words: tuple[WireWord, ...] = ()
    language: str | None = None
    speaker: str | None = None


def whole_text(segments: Sequence[WireSegment]) -> str:
    """All that was said."""
    return "".join(segment.text for segment in segments).strip()


def rendered(segments: Sequence[WireSegment], format: str, seconds: float, with_words: bool) -> str | Wire:
    """The transcript in one of FORMATS: text, or what becomes JSON."""
    usage = {"type": "duration", "seconds": round(seconds)}
    if format == "text":
        return whole_text(segments) + "\n"
    if format == "srt":
        return _subtitles(segments, ",", numbered=True)
    if format == "vtt":
        return "WEBVTT\n\n" + _subtitles(segments, ".", numbered=False)
    if format == "verbose_json":
        return _verbose(segments, seconds, with_words) | {"usage": usage}
    if format == "diarized_json":
        parts = [_diarized(segment, index) for index, segment in enumerate(segments)]
        return {
            "task": "transcribe",
            "duration": seconds,
            "text": whole_text(segments),
            "segments": parts,
            "usage": usage,
        }
    return {"text": whole_text(segments), "usage": usage}


def _diarized(segment: WireSegment, index: int) -> Wire:
    """A segment with its speaker."""
    times = {"start": segment.start, "end": segment.end}
    kind = {"type": "transcript.text.segment", "id": f"seg_{index}"}
    return kind | times | {"speaker": segment.speaker or "A", "text": segment.text.strip()}


def _verbose(segments: Sequence[WireSegment], seconds: float, with_words: bool) -> Wire:
    language = next((segment.language for segment in segments if segment.language), "")
    result: Wire = {"task": "transcribe", "language": language, "duration": seconds, "text": whole_text(segments)}
    if with_words:
        words = [word for segment in segments for word in segment.words]
        result["words"] = [{"word": word.text, "start": word.start, "end": word.end} for word in words]
    unknown = {"tokens": [], "temperature": 0.0, "avg_logprob": 0.0, "compression_ratio": 1.0, "no_speech_prob": 0.0}
    result["segments"] = [
        {"id": index, "seek": 0, "start": segment.start, "end": segment.end, "text": segment.text} | unknown
        for index, segment in enumerate(segments)
    ]
    return result


def _subtitles(segments: Sequence[WireSegment], point: str, numbered: bool) -> str:
    blocks = []
    for index, segment in enumerate(segments, 1):
        number = f"{index}\n" if numbered else ""
        blocks.append(
            f"{number}{_time(segment.start, point)} --> {_time(segment.end, point)}\n{segment.text.strip()}\n"
        )
    return "\n".join(blocks)


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


LONGEST_INPUT = 4096
GRANULARITIES = ("word", "segment")
STREAM_FORMATS = ("audio", "sse")


class SpeechMaker(Protocol):
    """Text to sound."""

    @property
    def model(self) -> str:
        """Its name, as `/v1/models` tells it."""
        ...

    @property
    def rate(self) -> int:
        """Samples a second of what it says."""
        ...

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        ...

    def speak(self, words: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The sound, piece by piece as it is made; closing the iterator stops the making."""
        ...


@dataclass(frozen=True)
class RecognitionStream:
    """How a recording is to be written down."""

    language: str | None = None
    """None: the one that is heard."""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    with_words: bool = False
    """Whether words have times of their own."""
    translates: bool = False
    """Into English."""


class FileTranscriber(Protocol):
    """Sound to text."""

    @property
    def model(self) -> str:
        """Its name, as `/v1/models` tells it."""
        ...

    @property
    def rate(self) -> int:
        """Samples a second that it wants."""
        ...

    def transcribe(self, samples: Samples, listening: RecognitionStream) -> AsyncIterator[WireSegment]:
        """What is said, segment by segment; times in seconds."""
        ...


class SpeechApi:
    """`/v1/audio/speech`."""

    def __init__(self, maker: SpeechMaker) -> None:
        self.maker = maker

    async def speak(self, request: "Request", caller: Identity) -> "Response":
        """A sound file, or events with its pieces, while it is being made."""
        from starlette.responses import StreamingResponse

        body = await json_body(request)
        words = _words(body)
        format = one_of(body.get("response_format") or "mp3", CONTENT_TYPES, "response_format")
        stream_format = one_of(body.get("stream_format") or "audio", STREAM_FORMATS, "stream_format")
        speed = 1.0 if body.get("speed") is None else within(0.25, 4.0)(body["speed"], "speed")
        instructions = text(body.get("instructions") or "", "instructions")
        pieces = self.maker.speak(words, self._voice(body.get("voice")), speed, instructions)
        sound = encoded(pieces, self.maker.rate, format)
        first = await anext(sound, b"")  # what goes wrong at once is still an error, not half a file
        if stream_format == "sse":
            return StreamingResponse(_speech_events(first, sound, len(words)), media_type="text/event-stream")
        return StreamingResponse(_with_first(first, sound), media_type=CONTENT_TYPES[format])

    def _voice(self, voice: Any) -> str | None:
        name = voice.get("id") if isinstance(voice, dict) else voice
        if name in self.maker.voices:
            return str(name)
        if name in (None, "default", *STOCK_VOICES):
            return None
        known = ", ".join(self.maker.voices) or "only the default one"
        raise WireError(f"there is no voice {name!r}; there is {known}", param="voice")


class TranscriptionApi:
    """`/v1/audio/transcriptions` and `/v1/audio/translations`."""

    def __init__(self, transcriber: FileTranscriber, options: ServerOptions) -> None:
        self.transcriber, self.options = transcriber, options

    async def transcribe(self, request: "Request", caller: Identity) -> "Response":
        """What is said in an uploaded file."""
        return await self._write_down(request, translates=False)

    async def translate(self, request: "Request", caller: Identity) -> "Response":
        """The same in English, as far as the model can."""
        return await self._write_down(request, translates=True)

    async def _write_down(self, request: "Request", translates: bool) -> "Response":
        from starlette.responses import PlainTextResponse, StreamingResponse

        async with request.form(max_files=1, max_part_size=self.options.most_upload_bytes) as form:
            fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
            data = await uploaded(form, "file", self.options.most_upload_bytes)
        asked = dict(fields)
        format = one_of(asked.get("response_format") or "json", FORMATS, "response_format")
        listening = _listening(asked, fields, translates)
        sound = await asyncio.to_thread(read, data, self.transcriber.rate)
        found = self.transcriber.transcribe(sound.samples[0], listening)
        if asked.get("stream", "").lower() == "true":
            return StreamingResponse(
                _transcript_events(found, sound.seconds, format == "diarized_json"), media_type="text/event-stream"
            )
        segments = [segment async for segment in found]
        result = rendered(segments, format, sound.seconds, listening.with_words)
        return PlainTextResponse(result) if isinstance(result, str) else json_answer(result)


def _listening(asked: Mapping[str, str], fields: Sequence[tuple[str, str]], translates: bool) -> RecognitionStream:
    """What the fields of a form ask for; lists come as fields of the same name."""
    listed = {
        name: tuple(value for field, value in fields if field in (name, f"{name}[]"))
        for name in ("timestamp_granularities", "keywords", "languages")
    }
    for unit in listed["timestamp_granularities"]:
        one_of(unit, GRANULARITIES, "timestamp_granularities")
    try:
        temperature = float(asked.get("temperature") or 0)
    except ValueError as error:
        raise WireError(f"temperature is {asked['temperature']!r}, no number", param="temperature") from error
    return RecognitionStream(
        language=asked.get("language") or next(iter(listed["languages"]), None),
        prompt=asked.get("prompt", ""),
        keywords=listed["keywords"],
        temperature=within(0.0, 1.0)(temperature, "temperature"),
        with_words="word" in listed["timestamp_granularities"],
        translates=translates,
    )


def _words(body: Mapping[str, Any]) -> str:
    words = text(body.get("input"), "input")
    if not words.strip() or len(words) > LONGEST_INPUT:
        raise WireError(f"input must have 1 to {LONGEST_INPUT} characters, not {len(words)}", param="input")
    return words


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in rest:
        yield data


async def _speech_events(first: bytes, rest: AsyncIterator[bytes], characters: int) -> AsyncIterator[bytes]:
    async for data in _with_first(first, rest):
        yield sse(SpeechAudioDelta(data))
    yield sse(SpeechAudioDone(SpeechUsage(characters, 0, characters)))


async def _transcript_events(
    found: AsyncIterator[WireSegment], seconds: float, by_speaker: bool
) -> AsyncIterator[bytes]:
    segments: list[WireSegment] = []
    async for segment in found:
        if by_speaker:
            place = f"seg_{len(segments)}", segment.start, segment.end
            yield sse(TranscriptTextSegment(*place, segment.speaker or "A", segment.text.strip()))
        delta = segment.text if segments else segment.text.lstrip()
        segments.append(segment)
        yield sse(TranscriptTextDelta(delta))
    yield sse(TranscriptTextDone(whole_text(segments), DurationUsage(round(seconds))))
