"""The hosts of models: `SpeechHost` for conversations, `AudioHost` for `/v1/audio/*` only, and their loading."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from vivavoce.audio.io import Sound
from vivavoce.cascade.backend import CascadeBackend, ChatPiece, WholeTurns
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.parts import LoadedCascade, LocalRecogniser, TTSSynthesiser, load_cascade
from vivavoce.dialogue.backend import Resolver, is_address
from vivavoce.dialogue.events import Conversation, ConversationSettings, Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.whisper.transcriber import TranscriptionOptions, TranscriptSegment
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions, load_speech
from vivavoce.server.host import ModelAbilities, ModelCard, TranscriptionRequest
from vivavoce.server.hosting.config import DEFAULT_MODEL, ServingOptions
from vivavoce.server.rest.transcripts import WireSegment, WireWord
from vivavoce.server.wire import JsonObject
from vivavoce.tts.interface import open_speech_model

Item = TypeVar("Item")


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


class TTSEndpoint:
    """A `SpeechMaker` and a `VoiceRegistry`."""

    def __init__(self, model: str, voice: TTSSynthesiser) -> None:
        self.model, self.voice, self.requests = model, voice, RequestCounter()
        self.rate = voice.rate

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        return self.voice.voices

    def speak(self, text: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The audio as it is generated; InputError where the model takes no such instructions."""
        return self.requests.counted(self.voice.with_instructions(instructions).speak(text, voice, speed))

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Store a voice on this machine."""
        self.voice.speaker.add_voice(name, sound, consent, text)

    def remove_voice(self, name: str) -> None:
        """Remove a stored voice."""
        self.voice.speaker.voices.remove(name)


class ASREndpoint:
    """A `FileTranscriber`."""

    def __init__(self, model: str, recogniser: LocalRecogniser) -> None:
        self.model, self.recogniser, self.requests = model, recogniser, RequestCounter()
        self.rate = recogniser.rate

    def transcribe(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        """The transcript, segment by segment."""
        return self.requests.counted(self._segments(samples, request))

    async def _segments(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        options = TranscriptionOptions(
            request.language,
            task="translate" if request.translates else "transcribe",
            prompt=request.prompt or None,
            hotwords=request.keywords,
            word_times=request.with_words,
            temperatures=(request.temperature,) if request.temperature else None,
        )
        async for segment in self.recogniser.segments(samples, options):
            yield _wire_segment(segment)


def request_gauges(*endpoints: TTSEndpoint | ASREndpoint | None) -> dict[str, float]:
    """Requests of `/v1/audio/*` in progress and started, for `/metrics`."""
    counters = [endpoint.requests for endpoint in endpoints if endpoint is not None]
    active, started = sum(each.active for each in counters), sum(each.started for each in counters)
    return {"audio_requests": float(active), "audio_requests_begun": float(started)}


def _wire_segment(segment: TranscriptSegment) -> WireSegment:
    words = tuple(WireWord(word.text.strip(), word.start, word.end) for word in segment.words)
    return WireSegment(segment.text, segment.start, segment.end, words, segment.language)


@dataclass
class AudioHost:
    """A `Host` without conversations: it transcribes, speaks, or both; transcription sessions are possible."""

    recogniser: LocalRecogniser | None = None
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    is_ready: bool = False

    @property
    def name(self) -> str:
        """The names of its models."""
        return " and ".join(card.id for card in self.models)

    @property
    def models(self) -> Sequence[ModelCard]:
        """The recogniser and the TTS model."""
        return [ModelCard(each.model) for each in (self.transcriber, self.speech) if each is not None]

    @property
    def voices(self) -> Sequence[str]:
        """None: there are no conversations."""
        return []

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What must be entered while the host is served."""
        return [part for part in (self.options.front_end, self.recogniser) if part is not None]

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A conversation that is only transcribed."""
        if self.recogniser is None:
            raise CapacityError("this server only synthesises speech and has no sessions")
        backend = CascadeBackend(WholeTurns(self.recogniser), NO_CONVERSATION, NO_CONVERSATION)
        return LiveConversation(backend, settings, replace(self.options, transcriber=self.recogniser))

    def gauges(self) -> Mapping[str, float]:
        """Queue depth and requests."""
        waiting = 0 if self.recogniser is None else self.recogniser.waiting
        return {"queue_depth": float(waiting), **request_gauges(self.speech, self.transcriber)}

    async def warm_up(self) -> None:
        """Run every model once; then the host is ready."""
        await _warm_front_end(self.options)
        if self.recogniser is not None:
            await self.recogniser.warm_up()
        if self.speech is not None:
            await self.speech.voice.warm_up()
        self.is_ready = True


class NoConversationBackend:
    """The chat model and the synthesiser of a server that only transcribes."""

    rate = 24_000

    def reply(self, messages: Sequence[JsonObject], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """Raise InputError."""
        raise InputError("this server only transcribes and generates no replies; open a transcription session")

    def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Raise InputError."""
        raise InputError("this server only transcribes and synthesises no speech")


NO_CONVERSATION = NoConversationBackend()


# Conversations

CASCADE = "cascade"
RECENT_REPLIES = 64


@dataclass
class SpeechHost:
    """A `Host` of a speech-to-speech model or a cascade, and of the models behind `/v1/audio/*`."""

    name: str
    pipeline: MossSpeechBackend | LoadedCascade
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    recogniser: LocalRecogniser | None = None
    """Transcribes the user's turns instead of the model itself."""
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    is_ready: bool = False

    @property
    def models(self) -> Sequence[ModelCard]:
        """The conversation model."""
        return [ModelCard(self.name)]

    @property
    def voices(self) -> Sequence[str]:
        """Names of the voices, the default first."""
        return list(self.pipeline.voices)

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation."""
        transcriber = self.recogniser or self.pipeline.words
        return LiveConversation(self.pipeline, settings, replace(self.options, transcriber=transcriber))

    @property
    def abilities(self) -> ModelAbilities:
        """A chat endpoint takes tools and reasoning; models in this process take neither."""
        has_endpoint = isinstance(self.pipeline, LoadedCascade) and not isinstance(self.pipeline.chat, LocalChat)
        return ModelAbilities(has_endpoint, has_endpoint, isinstance(self.pipeline, MossSpeechBackend))

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What must be entered while the host is served."""
        return [part for part in (self.pipeline, self.options.front_end, self.recogniser) if part is not None]

    def gauges(self) -> Mapping[str, float]:
        """Queue depth and requests; KV cache use and deadline slack where the engine is in this process."""
        gauges = {"queue_depth": float(self.pipeline.waiting), **request_gauges(self.speech, self.transcriber)}
        generator = self.pipeline.chat if isinstance(self.pipeline, LoadedCascade) else self.pipeline
        if isinstance(generator, LocalChat | MossSpeechBackend):
            pool = generator.core.scheduler.pool
            gauges["kv_used_ratio"] = (pool.size - pool.free) / pool.size
            slack = generator.core.slack.recent_min_slack(generator.core.scheduler.now())
            if slack is not None:
                gauges["engine_slack_seconds"] = slack
        return gauges | self._stage_gauges()

    def _stage_gauges(self) -> dict[str, float]:
        """Median seconds of the stages before a reply's first sound, and of the audio front end, recently."""
        gauges = {}
        if isinstance(self.pipeline, MossSpeechBackend) and self.pipeline.first_sounds:
            recent = [first.seconds for first in list(self.pipeline.first_sounds)[-RECENT_REPLIES:]]
            gauges = {f"stage_{part}_seconds": median(each[part] for each in recent) for part in recent[0]}
        delay = None if self.options.front_end is None else self.options.front_end.delay
        return gauges if delay is None else gauges | {"stage_front_end_seconds": delay}

    async def warm_up(self) -> None:
        """Run every stage once; then the host is ready."""
        await _warm_front_end(self.options)
        if isinstance(self.pipeline, LoadedCascade):
            await self.pipeline.warm_up(self.settings)
        else:
            await self.pipeline.warm_up()
            if self.recogniser is not None:
                await self.recogniser.warm_up()
            if self.speech is not None:
                await self.speech.voice.warm_up()
        self.is_ready = True


async def _warm_front_end(options: DialogueOptions) -> None:
    if options.front_end is not None:
        await options.front_end.warm_up(options.activity, options.echo)


def load_models(options: ServingOptions) -> SpeechHost | AudioHost:
    """The host of these options, its models loaded; it is ready once its parts are entered and warm."""
    dialogue = replace(options.dialogue(), front_end=options.conversation.front_end())
    settings = options.settings()
    if options.is_cascade:
        return _cascade_host(options, dialogue, settings)
    recogniser = _load_recogniser(options)
    transcriber = None if recogniser is None else ASREndpoint(_short_name(options.asr), recogniser)
    if options.audio_only:
        return AudioHost(recogniser, _load_speech_endpoint(options), transcriber, dialogue, settings)
    model = options.model or DEFAULT_MODEL
    replies = MossSpeechOptions(captioner=recogniser or "model", words_first=dialogue.speaking.moderation is not None)
    pipeline = load_speech(model, options.device, options.codec, options.voice, replies, options.dtype, options.engine)
    host = SpeechHost(_short_name(model), pipeline, dialogue, settings, recogniser)
    host.transcriber, host.speech = transcriber, _load_speech_endpoint(options)
    return host


def _cascade_host(options: ServingOptions, dialogue: DialogueOptions, settings: ConversationSettings) -> SpeechHost:
    cascade = load_cascade(options.cascade, options.device)
    host = SpeechHost(CASCADE, cascade, dialogue, settings)
    if isinstance(cascade.voice, TTSSynthesiser):
        host.speech = TTSEndpoint(_short_name(options.cascade.tts), cascade.voice)
    if isinstance(cascade.asr, LocalRecogniser):
        host.transcriber = ASREndpoint(_short_name(options.cascade.asr), cascade.asr)
    return host


def _load_recogniser(options: ServingOptions) -> LocalRecogniser | None:
    if options.asr is None:
        return None
    return LocalRecogniser.load(_local(options.asr), options.asr_backend, options.device, options.asr_gate)


def _load_speech_endpoint(options: ServingOptions) -> TTSEndpoint | None:
    if options.tts is None:
        return None
    synthesiser = TTSSynthesiser(open_speech_model(_local(options.tts), options.device))
    return TTSEndpoint(_short_name(options.tts), synthesiser)


def _local(model: str | Resolver) -> str:
    if not isinstance(model, str) or is_address(model):
        raise InputError(f"only a cascade's asr and tts can be addresses; name a model instead of {model}")
    return model


def _short_name(model: str | Resolver | None) -> str:
    return Path(str(model)).name
