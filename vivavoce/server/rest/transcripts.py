"""Transcripts in the response formats of `/v1/audio/transcriptions`; `viva transcribe` writes them too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """A segment of a transcript; its `text` keeps the leading space, so that segments can be joined."""

    text: str
    start: float
    end: float
    words: tuple[WireWord, ...] = ()
    language: str | None = None
    speaker: str | None = None


def whole_text(segments: Sequence[WireSegment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def render(segments: Sequence[WireSegment], format: str, seconds: float, with_words: bool) -> str | Wire:
    """The transcript in one of FORMATS: text, or an object to be sent as JSON."""
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
        parts = [diarized(segment, index) for index, segment in enumerate(segments)]
        return {
            "task": "transcribe",
            "duration": seconds,
            "text": whole_text(segments),
            "segments": parts,
            "usage": usage,
        }
    return {"text": whole_text(segments), "usage": usage}


def diarized(segment: WireSegment, index: int) -> Wire:
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
