"""The parts of a cascade: the local recogniser and synthesiser, and the loading of a whole cascade by names."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Self

import torch

from vivavoce.asr import RATE, SpeechGate, Transcriber
from vivavoce.asr.backends import Backend, BackendName, MoonshineBackend, OwnBackend
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.service import RecognitionService
from vivavoce.audio.io import Sound, downmix
from vivavoce.audio.level import buzz
from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatModel
from vivavoce.cascade.live_turns import LiveTurns
from vivavoce.cascade.local_chat import BUNDLED, LocalChat
from vivavoce.cascade.remote import ChatEndpoint, RemoteRecogniser, RemoteSynthesiser
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.cores import usable_cores
from vivavoce.device import Device, pick
from vivavoce.dialogue.backend import (
    Address,
    RecognitionAbilities,
    ReplyTranscriber,
    Resolver,
    TurnTranscript,
    is_address,
)
from vivavoce.dialogue.events import TokenLogprob
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings
from vivavoce.implementations import choose_turn_recogniser
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.nn.process_settings import serving_pace
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.event_loop import Reader, iterate_on_thread
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.tts import style as direction
from vivavoce.tts.cosyvoice import CosyVoiceTTS
from vivavoce.tts.interface import DescribedSpeech, SpeakingStyle, SpeechModel, open_speech_model
from vivavoce.tts.kokoro import KokoroTTS
from vivavoce.tts.nano import NanoTTS

MAX_TURN_BATCH = 16
MAX_PARALLEL_RECORDINGS = 4  # on a CPU
Turn = tuple[torch.Tensor, TranscriptionOptions]
DRAFT_SECONDS = 0.8  # deadline of drafts: later than that of all other work


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
        batches: bool | None = None,
        transcriber: Transcriber | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        self.listener, self.device = listener, device
        self.transcriber = transcriber or Transcriber(listener, SpeechGate())
        executor = executor or executor_for(device.torch_device)
        self._turns: DynamicBatcher[Turn, list[TranscriptSegment]] = DynamicBatcher(
            "viva-recogniser", self._transcribe_batch, executor, max_batch=1
        )
        self._drafts: DynamicBatcher[TurnDraft, str | None] = DynamicBatcher(
            "viva-recogniser-drafts", self._write_drafts, executor, max_batch=1
        )
        self._service: RecognitionService | None = None
        if isinstance(listener, WhisperTranscriber) and (
            choose_turn_recogniser(device).cls is RecognitionService if batches is None else batches
        ):
            self._service = RecognitionService(TranscribingEngine(listener, device, MAX_TURN_BATCH, executor=executor))

    @classmethod
    def load(
        cls, name: str = "mini-asr", backend: BackendName = "auto", device: str = "auto", gate: bool = True
    ) -> "LocalRecogniser":
        """A model by bundled name, folder or hub id, with the named backend, or the one that fits it.

        The `gate` is for recordings; turns have passed a voice activity detector already.
        """
        transcriber = Transcriber.load(name, backend, device, gate=gate, parallel=MAX_PARALLEL_RECORDINGS)
        inner = transcriber.backend
        return cls(inner.transcriber if isinstance(inner, OwnBackend) else inner, pick(device), transcriber=transcriber)

    async def __aenter__(self) -> Self:
        self._turns.start()
        self._drafts.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._turns.close()
        await self._drafts.close()
        if self._service is not None:
            await self._service.close()

    @property
    def waiting(self) -> int:
        """Turns not yet started."""
        return self._turns.waiting

    async def warm_up(self) -> None:
        """Transcribe a buzz once."""
        await self.transcribe(buzz(1.0, RATE).samples[0], RATE)

    @property
    def abilities(self) -> RecognitionAbilities:
        """Which settings it follows."""
        listener = self.listener
        return RecognitionAbilities(
            prompts=not isinstance(listener, MoonshineBackend),
            logprobs=isinstance(listener, WhisperTranscriber),
            languages=listener.languages,
        )

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The text of a turn."""
        settings = RecognitionSettings(() if language is None else (language,))
        return (await self.transcribe_turn(samples, rate, settings)).text

    async def transcribe_turn(self, samples: Samples, rate: int, settings: RecognitionSettings) -> TurnTranscript:
        """The transcript of a turn. A language that the model does not know is left to the model."""
        return await self.finish(Sound(samples, rate).mono().resampled(RATE).samples[0], settings)

    async def finish(self, sound: Samples, settings: RecognitionSettings, draft: str = "") -> TurnTranscript:
        """The transcript of a turn at `rate`, whose last draft Whisper verifies instead of writing it again."""
        if not len(sound):
            return TurnTranscript("")
        options = replace(self._turn_options(settings), guess=draft)
        if self._service is not None:
            segments = await self._service.transcribe(sound, options)
        else:
            segments = await self._turns.do((torch.from_numpy(sound), options))
        return TurnTranscript(
            "".join(segment.text for segment in segments).strip(),
            tuple(
                TokenLogprob(each.text, each.data, each.logprob) for segment in segments for each in segment.logprobs
            ),
            tuple(dict.fromkeys(segment.language for segment in segments if segment.language)),
        )

    @property
    def writes_drafts(self) -> bool:
        """Whether turns that go on are drafted: not beside turns that are batched, which drafts would delay."""
        return self._service is None

    async def draft(self, samples: Samples, settings: RecognitionSettings, is_wanted: Callable[[], bool]) -> str | None:
        """The words of a turn that goes on; None where they are no longer wanted, or turns wait."""
        return await self._drafts.do(TurnDraft(samples, self._turn_options(settings), is_wanted), DRAFT_SECONDS)

    def _turn_options(self, settings: RecognitionSettings) -> TranscriptionOptions:
        return TranscriptionOptions(
            languages=tuple(each for each in settings.languages if each in self.listener.languages),
            prompt=settings.prompt or None,
            hotwords=settings.keywords,
            logprobs=settings.with_logprobs,
            padding="trim",
            timestamps=False,
            temperatures=(0.0,),
        )

    def segments(self, samples: Samples, options: TranscriptionOptions) -> AsyncIterator[TranscriptSegment]:
        """Stream the segments of a recording at `rate`.

        The transcriber is a blocking generator whose device work runs on the shared executor; the thread only waits
        for it, so that the event loop does not.
        """
        if self._service is not None or isinstance(self.transcriber.backend, OwnBackend):
            return self._gated_segments(samples, options)
        sound = torch.from_numpy(samples.copy())
        return iterate_on_thread(lambda: self.transcriber.segments(sound, options))

    async def _gated_segments(
        self, samples: Samples, options: TranscriptionOptions
    ) -> AsyncIterator[TranscriptSegment]:
        """By an engine, whose jobs can be cancelled between two steps."""
        activity = await asyncio.to_thread(self.transcriber.speech_activity, samples)
        service = self._service or RecognitionService(await asyncio.to_thread(self._recording_engine))
        async with aclosing(service.segments(samples, options)) as segments:
            async for segment in segments:
                if self.transcriber.is_speech(segment, activity):
                    yield segment

    def _recording_engine(self) -> TranscribingEngine:
        assert isinstance(self.transcriber.backend, OwnBackend)
        return self.transcriber.backend.engine  # allocated on first use

    def _write_drafts(self, drafts: Sequence["TurnDraft"]) -> list[str | None]:
        return [self._write_draft(draft) for draft in drafts]

    def _write_draft(self, draft: "TurnDraft") -> str | None:
        """The words of a draft, given up between two passes of the model where it is no longer wanted."""

        def is_wanted() -> bool:
            return draft.is_wanted() and not self._turns.waiting

        if not is_wanted():
            return None
        listener = self.listener
        if isinstance(listener, MoonshineBackend):
            text = listener.model.write(draft.samples, is_wanted)
            return text if is_wanted() else None
        sound = torch.from_numpy(draft.samples)
        if isinstance(listener, WhisperTranscriber):
            segments = listener.segments(sound, draft.options, is_wanted)
        else:
            segments = listener.segments(sound, draft.options)
        text = "".join(segment.text for segment in segments)
        return text if is_wanted() else None

    def _transcribe_batch(self, turns: Sequence[Turn]) -> list[list[TranscriptSegment]]:
        return [list(self.listener.segments(*turn)) for turn in turns]


@dataclass(frozen=True)
class TurnDraft:
    """The sound of a turn so far, and whether its words are still wanted."""

    samples: Samples
    options: TranscriptionOptions
    is_wanted: Callable[[], bool]


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


DEFAULT_CHAT_MODEL = "default"
FEW_CORES = 2


@dataclass(frozen=True)
class CascadeParts:
    """The parts of a cascade by name."""

    asr: str | Resolver = "mini-asr"
    """Bundled name, folder or hub id of a recogniser; or the resolver of a remote one."""
    chat: str = BUNDLED
    """An address such as http://localhost:11434/v1, `smollm2`, a .gguf file or a folder."""
    tts: str | Resolver = "mini-tts"
    """Bundled name, folder or hub id of a text-to-speech model; or the resolver of a remote one."""
    chat_model: str = DEFAULT_CHAT_MODEL
    """The model's name at a remote endpoint."""
    chat_key: str | None = None
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether recordings are transcribed only where speech is detected."""


class LoadedCascade(CascadeBackend):
    """A cascade that owns its parts. Use as `async with`."""

    def __init__(
        self, asr: LocalRecogniser | RemoteRecogniser, chat: ChatModel, voice: TTSSynthesiser | RemoteSynthesiser
    ) -> None:
        if isinstance(asr, LocalRecogniser) and asr.writes_drafts:
            super().__init__(LiveTurns(asr, lambda: not self.awaited), chat, voice)
        else:
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
        cores = usable_cores()
        # Its parts run concurrently, but on few cores a reply is not there in time unless each part has all of them.
        self._open_parts.enter_context(serving_pace(on_cpu, cores if cores <= FEW_CORES else None))
        await self._open_parts.enter_async_context(self.asr)
        if isinstance(self.chat, LocalChat):
            await self._open_parts.enter_async_context(self.chat)
        elif isinstance(self.chat, ChatEndpoint):
            self._open_parts.callback(self.chat.close)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open_parts.aclose()

    async def warm_up(self, settings: ConversationSettings | None = None) -> None:
        """Run each local part once, so that no reply waits for what is done only once."""
        settings = settings or ConversationSettings()
        tasks: list[Awaitable[object]] = [self.asr.warm_up()]
        voice = self.voice
        tasks.append(voice.warm_up(settings.voice) if isinstance(voice, TTSSynthesiser) else voice.warm_up())
        if isinstance(self.chat, LocalChat) and settings.instructions:
            tasks.append(self.chat.read([{"role": "system", "content": settings.instructions}]))
        if isinstance(self.chat, LocalChat) and self.chat.offers_tools:
            tasks.append(self.chat.load_compiler())
        await asyncio.gather(*tasks)


def load_cascade(parts: CascadeParts, device: str = "auto") -> LoadedCascade:
    """A cascade of these parts, the local ones on one device."""
    return LoadedCascade(open_recogniser(parts, device), open_chat(parts, device), open_synthesiser(parts, device))


def open_recogniser(parts: CascadeParts, device: str = "auto") -> LocalRecogniser | RemoteRecogniser:
    """The recogniser: at an address, or local."""
    if isinstance(parts.asr, str) and not is_address(parts.asr):
        return LocalRecogniser.load(parts.asr, parts.asr_backend, device, parts.asr_gate)
    return RemoteRecogniser(Address(parts.asr) if isinstance(parts.asr, str) else parts.asr)


def open_synthesiser(parts: CascadeParts, device: str = "auto") -> TTSSynthesiser | RemoteSynthesiser:
    """The synthesiser: at an address, or local."""
    if isinstance(parts.tts, str) and not is_address(parts.tts):
        return TTSSynthesiser(open_speech_model(parts.tts, device))
    return RemoteSynthesiser(Address(parts.tts) if isinstance(parts.tts, str) else parts.tts)


def open_chat(parts: CascadeParts, device: str = "auto") -> ChatModel:
    """The chat model: at an address, or local."""
    if is_address(parts.chat):
        return ChatEndpoint(parts.chat, parts.chat_model, parts.chat_key)
    return LocalChat.load(parts.chat, device)
