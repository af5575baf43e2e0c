"""Transcripts in the response formats of `/v1/audio/transcriptions`; `viva transcribe` writes them too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict

from vivavoce.server.rest.languages import language_name

Task = Literal["transcribe", "translate"]
SEEK_FRAMES_PER_SECOND = 100
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
    measures: "SegmentMeasures | None" = None
    """None: the recogniser has none, and the response leaves them out."""
    logprobs: "tuple[LogprobObject, ...]" = ()
    """Of its tokens, where they were asked for."""

    def shifted(self, seconds: float, speaker: str) -> "WireSegment":
        """The segment of a recording in which it begins so much later, with its speaker."""
        words = tuple(WireWord(word.text, word.start + seconds, word.end + seconds) for word in self.words)
        return replace(self, start=self.start + seconds, end=self.end + seconds, words=words, speaker=speaker)


@dataclass(frozen=True)
class SegmentMeasures:
    """How sure a recogniser is of a segment, as Whisper measures it."""

    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


def wire_segment(segment: Any) -> WireSegment:
    """A `TranscriptSegment` of a recogniser; one without tokens has no measures either."""
    words = tuple(WireWord(word.text.strip(), word.start, word.end) for word in segment.words)
    measures = SegmentMeasures(
        segment.tokens, segment.temperature, segment.average_logprob, segment.compression, segment.no_speech
    )
    known = measures if segment.tokens else None
    logprobs = tuple(
        LogprobObject(token=each.text, bytes=list(each.data), logprob=each.logprob) for each in segment.logprobs
    )
    return WireSegment(
        segment.text, segment.start, segment.end, words, segment.language, measures=known, logprobs=logprobs
    )


class LogprobObject(TypedDict):
    """A token of a transcript, its bytes and the logarithm of its probability."""

    token: str
    bytes: list[int]
    logprob: float


class LanguageObject(TypedDict):
    """A language that was detected."""

    code: str


class TranscriptionUsage(TypedDict):
    """What a transcription is billed by."""

    type: Literal["duration"]
    seconds: int


class PlainTranscript(TypedDict):
    """`json`."""

    text: str
    usage: TranscriptionUsage
    logprobs: NotRequired[list[LogprobObject]]
    languages: NotRequired[list[LanguageObject]]


class VerboseWord(TypedDict):
    """A word of `verbose_json`."""

    word: str
    start: float
    end: float


class VerboseSegment(TypedDict):
    """A segment of `verbose_json`; the last six where they are known."""

    id: int
    start: float
    end: float
    text: str
    seek: NotRequired[int]
    tokens: NotRequired[list[int]]
    temperature: NotRequired[float]
    avg_logprob: NotRequired[float]
    compression_ratio: NotRequired[float]
    no_speech_prob: NotRequired[float]


class VerboseTranscript(TypedDict):
    """`verbose_json`."""

    task: Task
    language: str
    duration: float
    text: str
    words: NotRequired[list[VerboseWord]]
    segments: NotRequired[list[VerboseSegment]]
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

    task: Task
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: TranscriptionUsage


JsonTranscript = PlainTranscript | VerboseTranscript | DiarizedTranscript


def whole_text(segments: Sequence[WireSegment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def render(
    segments: Sequence[WireSegment],
    format: str,
    seconds: float,
    with_words: bool,
    with_segments: bool = True,
    task: Task = "transcribe",
) -> str | JsonTranscript:
    """The transcript in one of FORMATS: text, or an object to be sent as JSON."""
    text, usage = whole_text(segments), TranscriptionUsage(type="duration", seconds=round(seconds))
    if format == "text":
        return text + "\n"
    if format == "srt":
        return _subtitles(segments, ",", numbered=True)
    if format == "vtt":
        return "WEBVTT\n\n" + _subtitles(segments, ".", numbered=False)
    if format == "verbose_json":
        verbose = VerboseTranscript(
            task=task, language=_language(segments, task), duration=seconds, text=text, usage=usage
        )
        if with_words:
            verbose["words"] = [_word(word) for segment in segments for word in segment.words]
        if with_segments:
            verbose["segments"] = [_verbose(segment, index) for index, segment in enumerate(segments)]
        return verbose
    if format == "diarized_json":
        parts = [_diarized(segment, index) for index, segment in enumerate(segments)]
        return DiarizedTranscript(task=task, duration=seconds, text=text, segments=parts, usage=usage)
    transcript = PlainTranscript(text=text, usage=usage)
    if logprobs := [each for segment in segments for each in segment.logprobs]:
        transcript["logprobs"] = logprobs
    if languages := dict.fromkeys(segment.language for segment in segments if segment.language):
        transcript["languages"] = [LanguageObject(code=code) for code in languages]
    return transcript


def _diarized(segment: WireSegment, index: int) -> DiarizedSegment:
    return DiarizedSegment(
        type="transcript.text.segment",
        id=f"seg_{index}",
        start=segment.start,
        end=segment.end,
        speaker=segment.speaker or "A",
        text=segment.text.strip(),
    )


def _language(segments: Sequence[WireSegment], task: Task) -> str:
    """The name of the language of the text."""
    spoken = next((segment.language for segment in segments if segment.language), "")
    return language_name("en" if task == "translate" else spoken)


def _word(word: WireWord) -> VerboseWord:
    return VerboseWord(word=word.text, start=word.start, end=word.end)


def _verbose(segment: WireSegment, index: int) -> VerboseSegment:
    result = VerboseSegment(id=index, start=segment.start, end=segment.end, text=segment.text)
    if segment.measures is not None:
        result["seek"] = round(segment.start * SEEK_FRAMES_PER_SECOND)
        result["tokens"] = list(segment.measures.tokens)
        result["temperature"] = segment.measures.temperature
        result["avg_logprob"] = segment.measures.avg_logprob
        result["compression_ratio"] = segment.measures.compression_ratio
        result["no_speech_prob"] = segment.measures.no_speech_prob
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
