"""The parts of a cascade: the local recogniser and synthesiser, and the loading of a whole cascade by names."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Self

import torch

from vivavoce.asr import RATE
from vivavoce.asr.backends import Backend, BackendName, MoonshineBackend, OwnBackend
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.service import RecognitionService
from vivavoce.asr.transcriber import SpeechGate, Transcriber
from vivavoce.audio.io import Sound, downmix
from vivavoce.audio.level import buzz
from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.cascade.backend import CascadeBackend, ChatModel, WholeTurns
from vivavoce.cascade.local_chat import BUNDLED, LocalChat
from vivavoce.cascade.remote import ChatEndpoint, RemoteRecogniser, RemoteSynthesiser
from vivavoce.device import Device, pick
from vivavoce.dialogue.backend import Address, ReplyTranscriber, Resolver, is_address
from vivavoce.dialogue.events import ConversationSettings, Samples
from vivavoce.implementations import choose_turn_recogniser
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import TranscriptionOptions, TranscriptSegment
from vivavoce.nn.process_settings import serving_pace
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.event_loop import iterate_on_thread
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.tts import style as direction
from vivavoce.tts.cosyvoice import CosyVoiceTTS
from vivavoce.tts.interface import SpeakingStyle, SpeechModel, open_speech_model
from vivavoce.tts.nano import NanoTTS

MAX_TURN_BATCH = 16
MAX_PARALLEL_RECORDINGS = 4  # on a CPU
Turn = tuple[torch.Tensor, TranscriptionOptions]


class LocalRecogniser:
    """A `ReplyTranscriber`. Use as `async with`.

    On a CPU turns are transcribed one at a time, which is fastest for each; elsewhere our Whisper batches them. Turns
    are tasks of `executor`, or of the executor that all models of the device share.
    """

    rate = RATE

    def __init__(
        self,
        listener: Backend,
        device: Device,
        together: bool | None = None,
        transcriber: Transcriber | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.listener, self.device = listener, device
        self.transcriber = transcriber or Transcriber(listener, SpeechGate())
        executor = executor or executor_for(device.torch_device)
        self._turns: DynamicBatcher[Turn, list[TranscriptSegment]] = DynamicBatcher(
            "viva-recogniser", self._transcribe_batch, executor, max_batch=1
        )
        self._together: RecognitionService | None = None
        if isinstance(listener, WhisperTranscriber) and (
            choose_turn_recogniser(device).cls is RecognitionService if together is None else together
        ):
            self._together = RecognitionService(TranscribingEngine(listener, device, MAX_TURN_BATCH, executor=executor))

    @classmethod
    def load(
        cls, name: str = "mini-asr", backend: BackendName = "auto", device: str = "auto", gate: bool = True
    ) -> "LocalRecogniser":
        """A model by bundled name, folder or hub id, behind the backend that is asked for or fits it.

        The `gate` is for recordings; turns have passed a voice activity detector already.
        """
        transcriber = Transcriber.load(name, backend, device, gate=gate, parallel=MAX_PARALLEL_RECORDINGS)
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
        """Turns that wait."""
        return self._turns.waiting

    async def warm_up(self) -> None:
        """Hear something once."""
        await self.transcribe(buzz(1.0, RATE).samples[0], RATE)

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said in a turn."""
        if not len(samples):
            return ""
        sound = Sound(samples, rate).mono().resampled(RATE).samples[0]
        options = TranscriptionOptions(self._known(language), padding="trim", timestamps=False, temperatures=(0.0,))
        if self._together is not None:
            found = await self._together.transcribe(sound, options)
        else:
            found = await self._turns.do((torch.from_numpy(sound), options))
        return "".join(segment.text for segment in found).strip()

    def segments(self, samples: Samples, options: TranscriptionOptions) -> AsyncIterator[TranscriptSegment]:
        """The segments of a recording at `rate`, as they are decoded."""
        if self._together is not None:
            return self._gated(self._together, samples, options)
        sound = torch.from_numpy(samples.copy())
        return iterate_on_thread(lambda: self.transcriber.segments(sound, options))

    async def _gated(
        self, engine: RecognitionService, samples: Samples, options: TranscriptionOptions
    ) -> AsyncIterator[TranscriptSegment]:
        probabilities = await asyncio.to_thread(self.transcriber.speech_probabilities, samples)
        async for segment in engine.segments(samples, options):
            if self.transcriber.passes_gate(segment, probabilities):
                yield segment

    def _known(self, language: str | None) -> str | None:
        """The language a client hints at, if the model knows it; else it is left to the model."""
        if isinstance(self.listener, MoonshineBackend):
            return None
        is_foreign = isinstance(self.listener, WhisperTranscriber) and language not in self.listener.tokens.languages
        return None if is_foreign else language

    def _transcribe_batch(self, turns: Sequence[Turn]) -> list[list[TranscriptSegment]]:
        return [list(self.listener.segments(*turn)) for turn in turns]


WARM_UP = "Good evening, and welcome."


class TTSSynthesiser:
    """A `Synthesiser`: each text on a thread of its own, from the first frame on."""

    def __init__(self, speaker: SpeechModel, style: SpeakingStyle | None = None) -> None:
        self.speaker, self.style = speaker, style or SpeakingStyle()
        self.rate = speaker.rate

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the model's own first if it has a name."""
        own = self.speaker.settings.own_voice if isinstance(self.speaker, NanoTTS) else None
        return [*([own] if own else []), *(name for name in self.speaker.shelf.names() if name != own)]

    def with_instructions(self, instructions: str) -> "TTSSynthesiser":
        """A synthesiser with these style instructions; what the model cannot do is refused by name."""
        return TTSSynthesiser(self.speaker, direction.with_instructions(self.speaker, instructions, self.style))

    def after(self, said: Sequence[str]) -> "TTSSynthesiser":
        """A synthesiser in the style that these user messages ask for."""
        return TTSSynthesiser(self.speaker, direction.with_user_requests(self.speaker, said, self.style))

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
        style = replace(self.style, speed=min(max(speed * self.style.speed, SLOWEST), FASTEST))

        def pieces() -> Iterator[Samples]:
            for piece in self.speaker.stream(text, known, style):
                yield downmix(piece)[0]

        return iterate_on_thread(pieces)


DEFAULT_CHAT_MODEL = "default"


@dataclass(frozen=True)
class CascadeParts:
    """The parts of a cascade by name."""

    asr: str | Resolver = "mini-asr"
    """Bundled name, folder or hub id of a recogniser; or where one is."""
    chat: str = BUNDLED
    """An address such as http://localhost:11434/v1, `smollm2`, a .gguf file or a folder."""
    tts: str | Resolver = "mini-tts"
    """Bundled name, folder or hub id of a text-to-speech model; or where one is."""
    chat_model: str = DEFAULT_CHAT_MODEL
    """The model's name at the address."""
    chat_key: str | None = None
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether recordings are written down only where speech is detected."""


class LoadedCascade(CascadeBackend):
    """A cascade that owns its parts. Use as `async with`."""

    def __init__(
        self, asr: LocalRecogniser | RemoteRecogniser, chat: ChatModel, voice: TTSSynthesiser | RemoteSynthesiser
    ) -> None:
        super().__init__(WholeTurns(asr), chat, voice)
        self.asr, self.voice = asr, voice
        self._open_parts = AsyncExitStack()

    @property
    def words(self) -> ReplyTranscriber:
        """The transcriber for speech over a reply."""
        return self.asr

    @property
    def waiting(self) -> int:
        """Turns queued for the recogniser."""
        return self.asr.waiting

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the default first."""
        return self.voice.voices

    async def __aenter__(self) -> Self:
        on_cpu = isinstance(self.asr, LocalRecogniser) and self.asr.device.kind == "cpu"
        self._open_parts.enter_context(serving_pace(on_cpu))  # its parts work at the same time
        await self._open_parts.enter_async_context(self.asr)
        if isinstance(self.chat, LocalChat):
            await self._open_parts.enter_async_context(self.chat)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open_parts.aclose()

    async def warm_up(self, settings: ConversationSettings | None = None) -> None:
        """Run each local part once; a local chat model reads the instructions."""
        tasks = [self.asr.warm_up(), self.voice.warm_up()]
        if isinstance(self.chat, LocalChat) and settings is not None and settings.instructions:
            tasks.append(self.chat.read([{"role": "system", "content": settings.instructions}]))
        await asyncio.gather(*tasks)


def load_cascade(parts: CascadeParts, device: str = "auto") -> LoadedCascade:
    """A cascade of these parts, all that are local on one device."""
    return LoadedCascade(open_recogniser(parts, device), open_chat(parts, device), open_synthesiser(parts, device))


def open_recogniser(parts: CascadeParts, device: str = "auto") -> LocalRecogniser | RemoteRecogniser:
    """The recogniser: at an address, or local."""
    if isinstance(parts.asr, str) and not is_address(parts.asr):
        return LocalRecogniser.load(parts.asr, parts.asr_backend, device, parts.asr_gate)
    return RemoteRecogniser(Address(parts.asr) if isinstance(parts.asr, str) else parts.asr)


def open_synthesiser(parts: CascadeParts, device: str = "auto") -> TTSSynthesiser | RemoteSynthesiser:
    """The speaking part: at an address, or here."""
    if isinstance(parts.tts, str) and not is_address(parts.tts):
        return TTSSynthesiser(open_speech_model(parts.tts, device))
    return RemoteSynthesiser(Address(parts.tts) if isinstance(parts.tts, str) else parts.tts)


def open_chat(parts: CascadeParts, device: str = "auto") -> ChatModel:
    """The thinking part: at an address, or here."""
    if is_address(parts.chat):
        return ChatEndpoint(parts.chat, parts.chat_model, parts.chat_key)
    return LocalChat.load(parts.chat, device)
