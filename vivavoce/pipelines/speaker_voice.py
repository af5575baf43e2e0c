"""A text-to-speech model as the voice of a cascade."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

from vivavoce.audio.sound import downmix
from vivavoce.audio.time_stretch import FASTEST, SLOWEST
from vivavoce.dialogue.interface import Samples
from vivavoce.pipelines.threaded import on_a_thread
from vivavoce.speech import direction
from vivavoce.speech.cosyvoice_speaker import CosyVoiceTTS
from vivavoce.speech.interface import SpeakingStyle, SpeechModel
from vivavoce.speech.speaker import NanoTTS

WARM_UP = "Good evening, and welcome."


class TTSSynthesiser:
    """A `Synthesiser`: each text on a thread of its own, from the first frame on."""

    def __init__(self, speaker: SpeechModel, manner: SpeakingStyle | None = None) -> None:
        self.speaker, self.manner = speaker, manner or SpeakingStyle()
        self.rate = speaker.rate

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the model's own first if it has a name."""
        own = self.speaker.settings.own_voice if isinstance(self.speaker, NanoTTS) else None
        return [*([own] if own else []), *(name for name in self.speaker.shelf.names() if name != own)]

    def told(self, instructions: str) -> "TTSSynthesiser":
        """The same voice, speaking as it is told to; what the model cannot do is refused by name."""
        return TTSSynthesiser(self.speaker, direction.told(self.speaker, instructions, self.manner))

    def after(self, said: Sequence[str]) -> "TTSSynthesiser":
        """The same voice, speaking as somebody wished who has said all this."""
        return TTSSynthesiser(self.speaker, direction.wished(self.speaker, said, self.manner))

    async def warm_up(self) -> None:
        """Say something once, where there is a voice to say it with."""
        if isinstance(self.speaker, CosyVoiceTTS):
            await asyncio.to_thread(self.speaker.warm_up)
            if not self.voices:
                return
        async for _ in self.speak(WARM_UP, None, 1.0):
            pass

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Its sound as it is made, mono; a speed beyond what the model can is the nearest it can."""
        known = voice if voice in self.voices else None  # clients name voices of other services
        manner = replace(self.manner, speed=min(max(speed * self.manner.speed, SLOWEST), FASTEST))

        def pieces() -> Iterator[Samples]:
            for piece in self.speaker.stream(text, known, manner):
                yield downmix(piece)[0]

        return on_a_thread(pieces)
