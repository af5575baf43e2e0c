"""Events of streamed speech and transcripts (`text/event-stream`)."""

import msgspec
from msgspec import Struct

from vivavoce.server.realtime.server_events import DurationUsage


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
