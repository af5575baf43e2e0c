"""`/v1/audio/transcriptions` and `translations`: request forms and responses."""

from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import FileTranscriber, TranscriptionRequest
from vivavoce.server.realtime.server_events import DurationUsage
from vivavoce.server.rest.audio_files import decoded
from vivavoce.server.rest.http import json_response, one_of, read_upload, unless_disconnected, within
from vivavoce.server.rest.languages import language_code
from vivavoce.server.rest.server_sent import StreamEvent, sse
from vivavoce.server.rest.transcripts import FORMATS, LogprobObject, WireSegment, render, whole_text
from vivavoce.server.wire import WireError

UNSUPPORTED_FIELDS = ("known_speaker_names", "known_speaker_references")
FORM_FIELDS = (
    *("model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"),
    *("chunking_strategy", "keywords", "languages", "include", *UNSUPPORTED_FIELDS),
)
GRANULARITIES = ("word", "segment")
INCLUDES = ("logprobs",)


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
        if options.with_logprobs and format != "json":
            raise WireError("include takes logprobs with response_format json only", param="include")
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


async def _all(stream: AsyncIterator[WireSegment]) -> list[WireSegment]:
    return [segment async for segment in stream]


def _transcription_request(
    values: Mapping[str, str], fields: Sequence[tuple[str, str]], translates: bool
) -> TranscriptionRequest:
    """The request of a form; a list is sent as several fields of the same name."""
    _check_fields(values)
    lists = {
        name: tuple(value for field, value in fields if field in (name, f"{name}[]"))
        for name in ("timestamp_granularities", "keywords", "languages", "include")
    }
    for unit in lists["timestamp_granularities"]:
        one_of(unit, GRANULARITIES, "timestamp_granularities")
    for field in lists["include"]:
        one_of(field, INCLUDES, "include")
    if (language := values.get("language")) and lists["languages"]:
        raise WireError("name a language or several, not both", param="languages")
    try:
        temperature = float(values.get("temperature") or 0)
    except ValueError as error:
        raise WireError(f"temperature must be a number, not {values['temperature']!r}", param="temperature") from error
    return TranscriptionRequest(
        languages=tuple(map(language_code, (language,) if language else lists["languages"])),
        prompt=values.get("prompt", ""),
        keywords=lists["keywords"],
        temperature=within(0.0, 1.0, temperature, "temperature"),
        with_words="word" in lists["timestamp_granularities"],
        with_segments=lists["timestamp_granularities"] != ("word",),
        translates=translates,
        with_logprobs=bool(lists["include"]),
    )


def _check_fields(values: Mapping[str, str]) -> None:
    """WireError for a field that is unknown, or that no model here can honour."""
    for field, value in values.items():
        name = field.removesuffix("[]")
        if name not in FORM_FIELDS:
            raise WireError(f"Unknown parameter: '{name}'.", "unknown_parameter", name)
        if name in UNSUPPORTED_FIELDS or (name == "chunking_strategy" and value != "auto"):
            raise WireError(f"{name} is not supported by the models that are served", "unsupported_parameter", name)


class TranscriptTextDelta(StreamEvent, tag="transcript.text.delta"):
    delta: str
    logprobs: list[LogprobObject] | UnsetType = UNSET


class TranscriptTextSegment(StreamEvent, tag="transcript.text.segment"):
    id: str
    start: float
    end: float
    speaker: str
    text: str


class TranscriptTextDone(StreamEvent, tag="transcript.text.done"):
    text: str
    usage: DurationUsage
    logprobs: list[LogprobObject] | UnsetType = UNSET


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
        yield sse(TranscriptTextDelta(delta, list(segment.logprobs) or UNSET))
    logprobs = [each for segment in segments for each in segment.logprobs]
    yield sse(TranscriptTextDone(whole_text(segments), DurationUsage(round(seconds)), logprobs or UNSET))
