"""Transcripts in the response formats of `/v1/audio/transcriptions`; `viva transcribe` writes them too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

FORMATS = ("json", "text", "srt", "verbose_json", "vtt", "diarized_json")


@dataclass(frozen=True)
class WireWord:
    """A word and its time in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class WireSegment:
    """A segment of a transcript; its `text` keeps the leading space, so that segments can be joined."""

    text: str
    start: float
    end: float
    words: tuple[WireWord, ...] = ()
    language: str | None = None
    speaker: str | None = None


class TranscriptionUsage(TypedDict):
    """What a transcription is billed by."""

    type: Literal["duration"]
    seconds: int


class PlainTranscript(TypedDict):
    """`json`."""

    text: str
    usage: TranscriptionUsage


class VerboseWord(TypedDict):
    """A word of `verbose_json`."""

    word: str
    start: float
    end: float


class VerboseSegment(TypedDict):
    """A segment of `verbose_json`; the statistics after the text are placeholders."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscript(TypedDict):
    """`verbose_json`."""

    task: str
    language: str
    duration: float
    text: str
    words: NotRequired[list[VerboseWord]]
    segments: list[VerboseSegment]
    usage: TranscriptionUsage


class DiarizedSegment(TypedDict):
    """A segment of `diarized_json`."""

    type: Literal["transcript.text.segment"]
    id: str
    start: float
    end: float
    speaker: str
    text: str


class DiarizedTranscript(TypedDict):
    """`diarized_json`."""

    task: str
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: TranscriptionUsage


JsonTranscript = PlainTranscript | VerboseTranscript | DiarizedTranscript


def whole_text(segments: Sequence[WireSegment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def render(segments: Sequence[WireSegment], format: str, seconds: float, with_words: bool) -> str | JsonTranscript:
    """The transcript in one of FORMATS: text, or an object to be sent as JSON."""
    text, usage = whole_text(segments), TranscriptionUsage(type="duration", seconds=round(seconds))
    if format == "text":
        return text + "\n"
    if format == "srt":
        return _subtitles(segments, ",", numbered=True)
    if format == "vtt":
        return "WEBVTT\n\n" + _subtitles(segments, ".", numbered=False)
    if format == "verbose_json":
        return _verbose(segments, seconds, with_words, usage)
    if format == "diarized_json":
        parts = [_diarized(segment, index) for index, segment in enumerate(segments)]
        return DiarizedTranscript(task="transcribe", duration=seconds, text=text, segments=parts, usage=usage)
    return PlainTranscript(text=text, usage=usage)


def _diarized(segment: WireSegment, index: int) -> DiarizedSegment:
    return DiarizedSegment(
        type="transcript.text.segment",
        id=f"seg_{index}",
        start=segment.start,
        end=segment.end,
        speaker=segment.speaker or "A",
        text=segment.text.strip(),
    )


def _verbose(
    segments: Sequence[WireSegment], seconds: float, with_words: bool, usage: TranscriptionUsage
) -> VerboseTranscript:
    timed = [
        VerboseSegment(
            id=index,
            seek=0,
            start=segment.start,
            end=segment.end,
            text=segment.text,
            tokens=[],
            temperature=0.0,
            avg_logprob=0.0,
            compression_ratio=1.0,
            no_speech_prob=0.0,
        )
        for index, segment in enumerate(segments)
    ]
    language = next((segment.language for segment in segments if segment.language), "")
    text = whole_text(segments)
    if not with_words:
        return VerboseTranscript(
            task="transcribe", language=language, duration=seconds, text=text, segments=timed, usage=usage
        )
    words = [
        VerboseWord(word=word.text, start=word.start, end=word.end) for segment in segments for word in segment.words
    ]
    return VerboseTranscript(
        task="transcribe", language=language, duration=seconds, text=text, words=words, segments=timed, usage=usage
    )


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
