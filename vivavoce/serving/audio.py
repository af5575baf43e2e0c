"""`/v1/audio/*` filled: a text-to-speech model that speaks, a recogniser that writes down."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from vivavoce.audio.sound import Sound
from vivavoce.dialogue.interface import Samples
from vivavoce.models.whisper_transcriber import Segment as HeardSegment
from vivavoce.models.whisper_transcriber import Wish
from vivavoce.pipelines.recogniser_ear import RecogniserEar
from vivavoce.pipelines.speaker_voice import SpeakerVoice
from vivavoce.server.audio_api import Listening
from vivavoce.server.transcripts import Segment, Word


class TextSpeaker:
    """A `SpeechMaker` and a `VoiceKeeper`."""

    def __init__(self, model: str, voice: SpeakerVoice) -> None:
        self.model, self.voice = model, voice
        self.rate = voice.rate

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        return self.voice.voices

    def speak(self, words: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The sound as it is made; how it should be said is beyond the model."""
        return self.voice.speak(words, voice, speed)

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Keep a voice on this machine."""
        self.voice.speaker.add_voice(name, sound, consent, text)

    def remove_voice(self, name: str) -> None:
        """Forget a voice that was added."""
        self.voice.speaker.shelf.remove(name)


class FileListener:
    """A `Transcriber`."""

    def __init__(self, model: str, ear: RecogniserEar) -> None:
        self.model, self.ear = model, ear
        self.rate = ear.rate

    async def transcribe(self, samples: Samples, listening: Listening) -> AsyncIterator[Segment]:
        """What is said, segment by segment."""
        temperature, listener = listening.temperature, self.ear.listener
        wish = Wish(
            listening.language or await asyncio.to_thread(listener.own_language, torch.from_numpy(samples.copy())),
            task="translate" if listening.translates else "transcribe",
            prompt=listening.prompt or None,
            hotwords=listening.keywords,
            word_times=listening.with_words,
            temperatures=None if not temperature else (temperature,),
        )
        async for segment in self.ear.segments(samples, wish):
            yield _on_the_wire(segment, wish.language)


def _on_the_wire(segment: HeardSegment, language: str | None) -> Segment:
    words = tuple(Word(word.text.strip(), word.start, word.end) for word in segment.words)
    return Segment(segment.text, segment.start, segment.end, words, language)
