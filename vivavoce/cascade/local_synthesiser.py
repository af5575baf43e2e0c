"""The synthesiser of a cascade on this machine: a text-to-speech model iterated on a thread, which can be paused."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from vivavoce.audio.io import downmix
from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.dialogue.items import Samples
from vivavoce.runtime.event_loop import Reader, iterate_on_thread
from vivavoce.tts import style as direction
from vivavoce.tts.cosyvoice import CosyVoiceTTS
from vivavoce.tts.interface import DescribedSpeech, SpeakingStyle, SpeechModel
from vivavoce.tts.kokoro import KokoroTTS
from vivavoce.tts.nano import NanoTTS

MAX_PIECES_AHEAD = 1  # synthesised and not read: a reader that waits stops the synthesis
WARM_UP = "Good evening, and welcome."


class TTSSynthesiser:
    """A `Synthesiser` by a local text-to-speech model.

    Speech models are blocking generators: each text is iterated on a thread, which waits for the device (whose work
    runs on the shared executor) or, for models that compute in the caller's thread on a CPU, does the work.
    """

    def __init__(self, speaker: SpeechModel, style: SpeakingStyle | None = None) -> None:
        self.speaker, self.style = speaker, style or SpeakingStyle()
        self.rate = speaker.rate

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the model's default first if it has a name."""
        own = self.speaker.settings.own_voice if isinstance(self.speaker, NanoTTS) else None
        return [*([own] if own else []), *(name for name in self.speaker.voices.names() if name != own)]

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it speaks; empty: not known."""
        return self.speaker.languages if isinstance(self.speaker, DescribedSpeech) else ()

    def count_tokens(self, text: str, seconds: float) -> tuple[int, int]:
        """The tokens of a text, and the frames of so much audio; a model that does not count has characters only."""
        if isinstance(self.speaker, DescribedSpeech):
            return self.speaker.count_tokens(text), math.ceil(seconds * self.speaker.frame_rate)
        return len(text), 0

    def with_instructions(self, instructions: str) -> "TTSSynthesiser":
        """A synthesiser with these style instructions; InputError names those that the model does not support."""
        return TTSSynthesiser(self.speaker, direction.with_instructions(self.speaker, instructions, self.style))

    def with_user_requests(self, messages: Sequence[str]) -> "TTSSynthesiser":
        """A synthesiser in the style that these user messages request."""
        return TTSSynthesiser(self.speaker, direction.with_user_requests(self.speaker, messages, self.style))

    async def warm_up(self, voice: str | None = None) -> None:
        """Prepare a voice, where the model has one, and speak a sentence with it."""
        known = self._known_voice(voice)
        if isinstance(self.speaker, CosyVoiceTTS):
            await asyncio.to_thread(self.speaker.warm_up)
            if not self.voices:
                return
        if isinstance(self.speaker, KokoroTTS):
            await asyncio.to_thread(self.speaker.load_languages, known)
        async for _ in self.speak(WARM_UP, known, 1.0):
            pass

    def _known_voice(self, voice: str | None) -> str | None:
        """The voice, where the model has it: clients name voices of other services."""
        return voice if voice is not None and (voice in self.voices or voice in self.speaker.voices) else None

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Stream the sound, mono; the speed is clipped to the supported range."""
        known = self._known_voice(voice)
        style = replace(self.style, speed=min(max(speed * self.style.speed, SLOWEST), FASTEST))

        def pieces() -> Iterator[Samples]:
            for piece in self.speaker.stream(text, known, style):
                yield downmix(piece)[0]

        return ThreadSpeech(pieces)


class ThreadSpeech:
    """Speech that a thread computes: a `PausableSpeech`."""

    def __init__(self, pieces: Callable[[], Iterator[Samples]]) -> None:
        self._reader = Reader()
        self._pieces: AsyncGenerator[Samples, None] = iterate_on_thread(pieces, MAX_PIECES_AHEAD, self._reader)

    def __aiter__(self) -> AsyncIterator[Samples]:
        return self

    async def __anext__(self) -> Samples:
        return await anext(self._pieces)

    def pause(self) -> None:
        """Compute nothing more until `resume`; models of frames stop within a piece."""
        self._reader.pause()

    def resume(self) -> None:
        """Go on."""
        self._reader.resume()

    async def aclose(self) -> None:
        """Stop."""
        await self._pieces.aclose()
