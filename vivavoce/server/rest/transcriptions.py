"""`/v1/audio/transcriptions` and `translations`: request forms and responses."""

from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from vivavoce.dialogue.items import Samples
from vivavoce.errors import VivaError
from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import FileTranscriber, SpeakerReference, TranscriptionRequest
from vivavoce.server.realtime.server_events import DurationUsage
from vivavoce.server.rest.audio_files import decoded
from vivavoce.server.rest.http import json_response, one_of, read_upload, unless_disconnected, within
from vivavoce.server.rest.languages import language_code
from vivavoce.server.rest.server_sent import StreamEvent, sse
from vivavoce.server.rest.transcripts import FORMATS, LogprobObject, WireSegment, render, whole_text
from vivavoce.server.wire import WireError

FORM_FIELDS = (
    *("model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"),
    *("chunking_strategy", "keywords", "languages", "include", "known_speaker_names", "known_speaker_references"),
)
BY_SPEAKER = "diarized_json"
MAX_KNOWN_SPEAKERS = 4
REFERENCE_SECONDS = (2.0, 10.0)
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
        if format == BY_SPEAKER:
            known = await self._known_speakers(fields)
            options = replace(options, by_speaker=not translates, known_speakers=known)
        elif any(name.startswith("known_speaker") for name in values):
            raise WireError(
                f"known_speaker_names and _references need response_format {BY_SPEAKER}", param="known_speaker_names"
            )
        await self.transcriber.load()
        sound = await decoded(data, self.transcriber.rate, self.options)
        stream = self.transcriber.transcribe(sound.samples[0], options)
        if values.get("stream", "").lower() == "true":
            return StreamingResponse(
                _transcript_events(stream, sound.seconds, format == BY_SPEAKER), media_type="text/event-stream"
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

    async def _known_speakers(self, fields: Sequence[tuple[str, str]]) -> tuple[SpeakerReference, ...]:
        """The speakers of a form: names, and as many data URLs with samples of their voices."""
        names, references = (_listed(fields, f"known_speaker_{part}") for part in ("names", "references"))
        if len(names) != len(references) or len(names) > MAX_KNOWN_SPEAKERS or len(set(names)) < len(names):
            raise WireError(
                f"known_speaker_names takes up to {MAX_KNOWN_SPEAKERS} different names, and known_speaker_references "
                "as many samples",
                param="known_speaker_names",
            )
        return tuple(
            [
                SpeakerReference(name, await self._reference(name, url))
                for name, url in zip(names, references, strict=True)
            ]
        )

    async def _reference(self, name: str, url: str) -> Samples:
        head, comma, data = url.partition(",")
        try:
            if not (head.startswith("data:") and head.endswith(";base64") and comma):
                raise ValueError(head[:20])
            sound = await decoded(b64decode(data, validate=True), self.transcriber.rate, self.options)
        except (ValueError, VivaError) as error:
            raise WireError(
                f"the reference of {name!r} must be an audio file as a data URL in base64",
                param="known_speaker_references",
            ) from error
        lowest, highest = REFERENCE_SECONDS
        if not lowest <= sound.seconds <= highest:
            raise WireError(
                f"the reference of {name!r} has {sound.seconds:.1f} s; give {lowest:.0f} to {highest:.0f}",
                param="known_speaker_references",
            )
        return sound.samples[0]


async def _all(stream: AsyncIterator[WireSegment]) -> list[WireSegment]:
    return [segment async for segment in stream]


def _transcription_request(
    values: Mapping[str, str], fields: Sequence[tuple[str, str]], translates: bool
) -> TranscriptionRequest:
    """The request of a form; a list is sent as several fields of the same name."""
    _check_fields(values)
    lists = {name: _listed(fields, name) for name in ("timestamp_granularities", "keywords", "languages", "include")}
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


def _listed(fields: Sequence[tuple[str, str]], name: str) -> tuple[str, ...]:
    """The values of a list, which is sent as several fields of its name."""
    return tuple(value for field, value in fields if field in (name, f"{name}[]"))


def _check_fields(values: Mapping[str, str]) -> None:
    """WireError for a field that is unknown, or that no model here can honour."""
    for field, value in values.items():
        name = field.removesuffix("[]")
        if name not in FORM_FIELDS:
            raise WireError(f"Unknown parameter: '{name}'.", "unknown_parameter", name)
        if name == "chunking_strategy" and value != "auto":
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
