"""A recogniser as the ear of a cascade: turns as they end, and whole recordings segment by segment."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

import torch

from vivavoce.audio.buzz import buzz
from vivavoce.audio.sound import Sound
from vivavoce.device import Device, pick
from vivavoce.dialogue.gathering import DynamicBatcher
from vivavoce.dialogue.interface import Samples
from vivavoce.models.whisper_hearing import TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper_transcriber import WhisperTranscriber
from vivavoce.pipelines.threaded import on_a_thread
from vivavoce.recognition import RATE
from vivavoce.recognition.backends import Backend, BackendName, MoonshineBackend, OwnBackend
from vivavoce.recognition.many import TranscribingEngine
from vivavoce.recognition.service import RecognitionService
from vivavoce.recognition.speech_gate import SpeechGate
from vivavoce.recognition.transcriber import Transcriber

TURNS_TOGETHER = 16
RECORDINGS_TOGETHER = 4  # on a CPU
Turn = tuple[torch.Tensor, TranscriptionOptions]


class LocalRecogniser:
    """A `Transcriber`. Use as `async with`: it owns a thread.

    On a CPU one turn is heard at a time, which is soonest for each; elsewhere our Whisper hears all together.
    """

    rate = RATE

    def __init__(
        self,
        listener: Backend,
        device: Device,
        together: bool | None = None,
        transcriber: Transcriber | None = None,
    ) -> None:
        self.listener, self.device = listener, device
        self.transcriber = transcriber or Transcriber(listener, SpeechGate())
        self._turns: DynamicBatcher[Turn, list[TranscriptSegment]] = DynamicBatcher(
            "viva-recogniser", self._hear, most=1
        )
        self._together: RecognitionService | None = None
        if isinstance(listener, WhisperTranscriber) and (device.kind != "cpu" if together is None else together):
            self._together = RecognitionService(TranscribingEngine(listener, device, TURNS_TOGETHER))

    @classmethod
    def load(
        cls, name: str = "mini-asr", backend: BackendName = "auto", device: str = "auto", gate: bool = True
    ) -> "LocalRecogniser":
        """A model by bundled name, folder or hub id, behind the backend that is asked for or fits it.

        The `gate` is for recordings; turns have passed a voice activity detector already.
        """
        transcriber = Transcriber.load(name, backend, device, gate=gate, parallel=RECORDINGS_TOGETHER)
        inner = transcriber.backend
        return cls(inner.listener if isinstance(inner, OwnBackend) else inner, pick(device), transcriber=transcriber)

    async def __aenter__(self) -> Self:
        self._turns.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._turns.close()
        if self._together is not None:
            await self._together.close()

    @property
    def waiting(self) -> int:
        """Turns that nobody hears yet."""
        return self._turns.waiting

    async def warm_up(self) -> None:
        """Hear something once."""
        await self.transcribe(buzz(1.0, RATE).samples[0], RATE)

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said in a turn."""
        if not len(samples):
            return ""
        sound = Sound(samples, rate).mono().resampled(RATE).samples[0]
        wish = TranscriptionOptions(self._known(language), padding="trim", timestamps=False, temperatures=(0.0,))
        if self._together is not None:
            heard = await self._together.transcribe(sound, wish)
        else:
            heard = await self._turns.do((torch.from_numpy(sound), wish))
        return "".join(segment.text for segment in heard).strip()

    def segments(self, samples: Samples, wish: TranscriptionOptions) -> AsyncIterator[TranscriptSegment]:
        """The segments of a recording at `rate`, as they are decoded."""
        if self._together is not None:
            return self._gated(self._together, samples, wish)
        sound = torch.from_numpy(samples.copy())
        return on_a_thread(lambda: self.transcriber.segments(sound, wish))

    async def _gated(
        self, engine: RecognitionService, samples: Samples, wish: TranscriptionOptions
    ) -> AsyncIterator[TranscriptSegment]:
        chances = await asyncio.to_thread(self.transcriber.speech_chances, samples)
        async for segment in engine.segments(samples, wish):
            if self.transcriber.lets_through(segment, chances):
                yield segment

    def _known(self, language: str | None) -> str | None:
        """The language a client hints at, if the model knows it; else it is left to the model."""
        if isinstance(self.listener, MoonshineBackend):
            return None
        is_foreign = isinstance(self.listener, WhisperTranscriber) and language not in self.listener.tokens.languages
        return None if is_foreign else language

    def _hear(self, turns: Sequence[Turn]) -> list[list[TranscriptSegment]]:
        return [list(self.listener.segments(*turn)) for turn in turns]
