"""`/v1/audio/*` filled: a text-to-speech model that speaks, a recogniser that writes down."""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from vivavoce.audio.sound import Sound
from vivavoce.dialogue.interface import Samples
from vivavoce.models.whisper_hearing import TranscriptionOptions
from vivavoce.models.whisper_hearing import TranscriptSegment as HeardSegment
from vivavoce.pipelines.recogniser_ear import LocalRecogniser
from vivavoce.pipelines.speaker_voice import TTSSynthesiser
from vivavoce.server.audio_api import RecognitionStream
from vivavoce.server.transcripts import WireSegment, WireWord

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
