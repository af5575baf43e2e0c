"""The recogniser of a cascade on this machine: turns, drafts of turns that go on, and recordings."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

import torch

from vivavoce.asr import RATE, SpeechGate, Transcriber
from vivavoce.asr.backends import Backend, BackendName, MoonshineBackend, OwnBackend
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.service import RecognitionService
from vivavoce.audio.io import Sound
from vivavoce.audio.level import buzz
from vivavoce.device import Device, pick
from vivavoce.dialogue.backend import RecognitionAbilities, TurnTranscript
from vivavoce.dialogue.events import TokenLogprob
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import RecognitionSettings
from vivavoce.implementations import choose_turn_recogniser
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.event_loop import iterate_on_thread
from vivavoce.runtime.executor import DeadlineExecutor, executor_for

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
