"""The models behind `/v1/audio/*`: a TTS model and a recogniser, given or loaded when they are first needed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Generic, Self, TypeVar

from vivavoce.asr import RATE
from vivavoce.audio.diarization import KnownSpeaker, SpeakerLabels, SpeakerTurn, diarize, with_margin
from vivavoce.audio.io import Sound
from vivavoce.audio.vad import VoiceActivity, voice_activity
from vivavoce.audio.voiced import voiced_samples
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.dialogue.items import Samples
from vivavoce.errors import InputError
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.server.host import SpeakerReference, TranscriptionRequest
from vivavoce.server.hosting.embeddings import SPEAKER_MODEL, installed_speaker_encoder
from vivavoce.server.rest.transcripts import WireSegment, wire_segment
from vivavoce.tts.style import Directable

logger = logging.getLogger(__name__)

MIN_REFERENCE_SPEECH = 0.5  # seconds

Item = TypeVar("Item")
Part = TypeVar("Part")


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


class OnDemand(Generic[Part]):
    """A part that is given, or made on a thread when it is first needed."""

    def __init__(self, part: Part | None, make: Callable[[], Part] | None = None) -> None:
        self.loaded, self._make = part, make
        self._lock = asyncio.Lock()

    @property
    def value(self) -> Part:
        """The part, once it is loaded."""
        assert self.loaded is not None
        return self.loaded

    async def load(self) -> bool:
        """Return when the part is there; whether it was made by this call."""
        async with self._lock:
            if self.loaded is not None or self._make is None:
                return False
            self.loaded = await asyncio.to_thread(self._make)
            return True


class TTSEndpoint:
    """A `SpeechMaker` and a `VoiceRegistry`. Its model is given, or loaded when it is first needed."""

    def __init__(
        self, model: str, voice: TTSSynthesiser | None, make: Callable[[], TTSSynthesiser] | None = None
    ) -> None:
        self.model, self.requests = model, RequestCounter()
        self._part = OnDemand(voice, make)

    async def load(self) -> None:
        """Return when the model is loaded."""
        await self._part.load()

    async def warm_up(self) -> None:
        """Speak a sentence, unless the model is not loaded yet."""
        if self._part.loaded is not None:
            await self._part.loaded.warm_up()

    @property
    def voice(self) -> TTSSynthesiser:
        """The loaded model."""
        return self._part.value

    @property
    def rate(self) -> int:
        """Sample rate of its audio."""
        return self.voice.rate

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        return self.voice.voices

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it speaks."""
        return self.voice.languages

    def speak(self, text: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The audio as it is generated; instructions change nothing where the model takes none."""
        try:
            directed = self.voice.with_instructions(instructions)
        except InputError:
            if isinstance(self.voice.speaker, Directable):
                raise
            logger.info("%s takes no instructions; those of a request are ignored", self.model)
            directed = self.voice
        return self.requests.counted(directed.speak(text, voice, speed))

    def count_tokens(self, text: str, seconds: float) -> tuple[int, int]:
        """The tokens of a text, and the frames of its audio."""
        return self.voice.count_tokens(text, seconds)

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Store a voice on this machine."""
        self.voice.speaker.add_voice(name, sound, consent, text)

    def remove_voice(self, name: str) -> None:
        """Remove a stored voice."""
        self.voice.speaker.voices.remove(name)


class ASREndpoint:
    """A `FileTranscriber`. Its model is given, or loaded when it is first needed. Use as `async with`."""

    rate = RATE

    def __init__(
        self,
        model: str,
        recogniser: LocalRecogniser | None,
        make: Callable[[], LocalRecogniser] | None = None,
        speaker_model: str = SPEAKER_MODEL,
    ) -> None:
        self.model, self.requests = model, RequestCounter()
        self._part = OnDemand(recogniser, make)
        self._speaker_model = speaker_model
        self._entered = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()

    async def load(self) -> None:
        """Return when the model is loaded."""
        if await self._part.load():
            await self._entered.enter_async_context(self._part.value)

    def transcribe(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        """The transcript, segment by segment."""
        return self.requests.counted(self._segments(samples, request))

    async def _segments(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        options = TranscriptionOptions(
            languages=request.languages,
            task="translate" if request.translates else "transcribe",
            prompt=request.prompt or None,
            hotwords=request.keywords,
            word_times=request.with_words,
            temperatures=(request.temperature,) if request.temperature else None,
            logprobs=request.with_logprobs,
        )
        turns = await asyncio.to_thread(self._turns, samples, request) if request.by_speaker else None
        if turns is None:
            async for segment in self._part.value.segments(samples, options):
                yield wire_segment(segment)
            return
        for turn in turns:
            sound, begin = with_margin(samples, turn)
            async for segment in self._part.value.segments(sound, options):
                yield wire_segment(segment).shifted(begin, turn.speaker)

    def _turns(self, samples: Samples, request: TranscriptionRequest) -> list[SpeakerTurn] | None:
        """Who speaks when; None where no speaker embeddings are installed."""
        encoder = installed_speaker_encoder(self._speaker_model)
        if encoder is None and request.known_speakers:
            raise InputError(f"known speakers need speaker embeddings: viva models fetch {self._speaker_model}")
        if encoder is None:
            return None
        detector = voice_activity()
        known = [KnownSpeaker(each.name, encoder.embed(_speech_in(each, detector))) for each in request.known_speakers]
        return diarize(samples, encoder.embed, detector, SpeakerLabels(known))


def _speech_in(reference: SpeakerReference, detector: VoiceActivity) -> Samples:
    speech = voiced_samples(reference.samples, detector)
    if len(speech) < MIN_REFERENCE_SPEECH * RATE:
        raise InputError(f"the reference of {reference.name!r} holds less than {MIN_REFERENCE_SPEECH:g} s of speech")
    return speech


def request_gauges(*endpoints: TTSEndpoint | ASREndpoint | None) -> dict[str, float]:
    """Requests of `/v1/audio/*` in progress and started, for `/metrics`."""
    counters = [endpoint.requests for endpoint in endpoints if endpoint is not None]
    active, started = sum(each.active for each in counters), sum(each.started for each in counters)
    return {"audio_requests": float(active), "audio_requests_begun": float(started)}
