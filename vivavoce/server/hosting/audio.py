"""`/v1/audio/*` filled: a text-to-speech model that speaks, a recogniser that writes down."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vivavoce.audio.io import Sound
from vivavoce.cascade.backend import CascadeBackend, WholeTurns
from vivavoce.cascade.chat_endpoint import ChatPiece
from vivavoce.cascade.parts import LocalRecogniser, TTSSynthesiser
from vivavoce.dialogue.events import Conversation, ConversationSettings, Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.whisper.windows import TranscriptionOptions
from vivavoce.models.whisper.windows import TranscriptSegment as HeardSegment
from vivavoce.server.host import ModelCard
from vivavoce.server.rest.audio import RecognitionStream, WireSegment, WireWord

Piece = TypeVar("Piece")


class Busy:
    """How many requests are under way, and how many there have been."""

    def __init__(self) -> None:
        self.now = self.begun = 0

    async def with_each(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        """The pieces of one request, counted until they end or nobody wants more."""
        self.now, self.begun = self.now + 1, self.begun + 1
        try:
            async for piece in pieces:
                yield piece
        finally:
            self.now -= 1


class TTSEndpoint:
    """A `SpeechMaker` and a `VoiceKeeper`."""

    def __init__(self, model: str, voice: TTSSynthesiser) -> None:
        self.model, self.voice, self.busy = model, voice, Busy()
        self.rate = voice.rate

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        return self.voice.voices

    def speak(self, words: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The sound as it is made; a model that cannot speak as it is told to says so."""
        return self.busy.with_each(self.voice.told(instructions).speak(words, voice, speed))

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Keep a voice on this machine."""
        self.voice.speaker.add_voice(name, sound, consent, text)

    def remove_voice(self, name: str) -> None:
        """Forget a voice that was added."""
        self.voice.speaker.shelf.remove(name)


class ASREndpoint:
    """A `Transcriber`."""

    def __init__(self, model: str, ear: LocalRecogniser) -> None:
        self.model, self.ear, self.busy = model, ear, Busy()
        self.rate = ear.rate

    def transcribe(self, samples: Samples, listening: RecognitionStream) -> AsyncIterator[WireSegment]:
        """What is said, segment by segment."""
        return self.busy.with_each(self._segments(samples, listening))

    async def _segments(self, samples: Samples, listening: RecognitionStream) -> AsyncIterator[WireSegment]:
        temperature = listening.temperature
        wish = TranscriptionOptions(
            listening.language,
            task="translate" if listening.translates else "transcribe",
            prompt=listening.prompt or None,
            hotwords=listening.keywords,
            word_times=listening.with_words,
            temperatures=None if not temperature else (temperature,),
        )
        async for segment in self.ear.segments(samples, wish):
            yield _on_the_wire(segment)


def requests(*makers: TTSEndpoint | ASREndpoint | None) -> dict[str, float]:
    """Requests of `/v1/audio/*` that are under way, and those that have been."""
    busy = [maker.busy for maker in makers if maker is not None]
    now, begun = sum(each.now for each in busy), sum(each.begun for each in busy)
    return {"audio_requests": float(now), "audio_requests_begun": float(begun)}


def _on_the_wire(segment: HeardSegment) -> WireSegment:
    words = tuple(WireWord(word.text.strip(), word.start, word.end) for word in segment.words)
    return WireSegment(segment.text, segment.start, segment.end, words, segment.language)


@dataclass
class AudioHost:
    """A `Host` without conversations: it writes down, it speaks, or both; sessions may be transcribed."""

    ear: LocalRecogniser | None = None
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    is_ready: bool = False

    @property
    def name(self) -> str:
        """Its models."""
        return " and ".join(card.id for card in self.models)

    @property
    def models(self) -> Sequence[ModelCard]:
        """Who listens, and who speaks."""
        return [ModelCard(each.model) for each in (self.transcriber, self.speech) if each is not None]

    @property
    def voices(self) -> Sequence[str]:
        """None: nobody converses."""
        return []

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What runs while it is served."""
        return [] if self.ear is None else [self.ear]

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A conversation in which nobody answers: the user's words are all there is of it."""
        if self.ear is None:
            raise CapacityError("this server speaks and hears nobody: there are no sessions here")
        listening = CascadeBackend(WholeTurns(self.ear), NOBODY, NOBODY)
        return LiveConversation(listening, settings, replace(self.options, transcriber=self.ear))

    def gauges(self) -> Mapping[str, float]:
        """What waits, and what is being done."""
        waiting = 0 if self.ear is None else self.ear.waiting
        return {"queue_depth": float(waiting), **requests(self.speech, self.transcriber)}

    async def warm_up(self) -> None:
        """Let everything work once; then clients may come."""
        if self.ear is not None:
            await self.ear.warm_up()
        if self.speech is not None:
            await self.speech.voice.warm_up()
        self.is_ready = True


class NoConversationBackend:
    """The chat model and the voice of a server that only listens."""

    rate = 24_000

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Says so."""
        raise InputError("this server writes down what it hears and answers nobody; ask for a transcription session")

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Says so."""
        raise InputError("this server writes down what it hears and has no voice")


NOBODY = NoConversationBackend()
