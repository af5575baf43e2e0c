"""The models behind `/v1/audio/*`: a TTS model, a recogniser, and a host that has only these."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vivavoce.audio.io import Sound
from vivavoce.cascade.backend import CascadeBackend, ChatPiece, WholeTurns
from vivavoce.cascade.parts import LocalRecogniser, TTSSynthesiser
from vivavoce.dialogue.events import Conversation, ConversationSettings, Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.whisper.transcriber import TranscriptionOptions, TranscriptSegment
from vivavoce.server.host import ModelCard
from vivavoce.server.rest.audio import TranscriptionRequest
from vivavoce.server.rest.transcripts import WireSegment, WireWord

Item = TypeVar("Item")


class RequestCounter:
    """How many requests are in progress, and how many were started."""

    def __init__(self) -> None:
        self.active = self.started = 0

    async def counted(self, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
        """The results of one request, which counts as active until the iterator ends or is closed."""
        self.active, self.started = self.active + 1, self.started + 1
        try:
            async for item in items:
                yield item
        finally:
            self.active -= 1


class TTSEndpoint:
    """A `SpeechMaker` and a `VoiceRegistry`."""

    def __init__(self, model: str, voice: TTSSynthesiser) -> None:
        self.model, self.voice, self.requests = model, voice, RequestCounter()
        self.rate = voice.rate

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        return self.voice.voices

    def speak(self, words: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The audio as it is generated; InputError where the model takes no such instructions."""
        return self.requests.counted(self.voice.with_instructions(instructions).speak(words, voice, speed))

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Store a voice on this machine."""
        self.voice.speaker.add_voice(name, sound, consent, text)

    def remove_voice(self, name: str) -> None:
        """Remove a stored voice."""
        self.voice.speaker.voices.remove(name)


class ASREndpoint:
    """A `FileTranscriber`."""

    def __init__(self, model: str, recogniser: LocalRecogniser) -> None:
        self.model, self.recogniser, self.requests = model, recogniser, RequestCounter()
        self.rate = recogniser.rate

    def transcribe(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        """The transcript, segment by segment."""
        return self.requests.counted(self._segments(samples, request))

    async def _segments(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        options = TranscriptionOptions(
            request.language,
            task="translate" if request.translates else "transcribe",
            prompt=request.prompt or None,
            hotwords=request.keywords,
            word_times=request.with_words,
            temperatures=(request.temperature,) if request.temperature else None,
        )
        async for segment in self.recogniser.segments(samples, options):
            yield _wire_segment(segment)


def request_gauges(*endpoints: TTSEndpoint | ASREndpoint | None) -> dict[str, float]:
    """Requests of `/v1/audio/*` in progress and started, for `/metrics`."""
    counters = [endpoint.requests for endpoint in endpoints if endpoint is not None]
    active, started = sum(each.active for each in counters), sum(each.started for each in counters)
    return {"audio_requests": float(active), "audio_requests_begun": float(started)}


def _wire_segment(segment: TranscriptSegment) -> WireSegment:
    words = tuple(WireWord(word.text.strip(), word.start, word.end) for word in segment.words)
    return WireSegment(segment.text, segment.start, segment.end, words, segment.language)


@dataclass
class AudioHost:
    """A `Host` without conversations: it transcribes, speaks, or both; transcription sessions are possible."""

    recogniser: LocalRecogniser | None = None
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    is_ready: bool = False

    @property
    def name(self) -> str:
        """The names of its models."""
        return " and ".join(card.id for card in self.models)

    @property
    def models(self) -> Sequence[ModelCard]:
        """The recogniser and the TTS model."""
        return [ModelCard(each.model) for each in (self.transcriber, self.speech) if each is not None]

    @property
    def voices(self) -> Sequence[str]:
        """None: there are no conversations."""
        return []

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What must be entered while the host is served."""
        return [] if self.recogniser is None else [self.recogniser]

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A conversation that is only transcribed."""
        if self.recogniser is None:
            raise CapacityError("this server only speaks: there are no sessions here")
        backend = CascadeBackend(WholeTurns(self.recogniser), NO_CONVERSATION, NO_CONVERSATION)
        return LiveConversation(backend, settings, replace(self.options, transcriber=self.recogniser))

    def gauges(self) -> Mapping[str, float]:
        """Queue depth and requests."""
        waiting = 0 if self.recogniser is None else self.recogniser.waiting
        return {"queue_depth": float(waiting), **request_gauges(self.speech, self.transcriber)}

    async def warm_up(self) -> None:
        """Run every model once; then the host is ready."""
        if self.recogniser is not None:
            await self.recogniser.warm_up()
        if self.speech is not None:
            await self.speech.voice.warm_up()
        self.is_ready = True


class NoConversationBackend:
    """The chat model and the synthesiser of a server that only transcribes."""

    rate = 24_000

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Raise InputError."""
        raise InputError("this server only transcribes and gives no replies; ask for a transcription session")

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Raise InputError."""
        raise InputError("this server only transcribes and has no voice")


NO_CONVERSATION = NoConversationBackend()
