"""Who converses behind the server: one pipeline for all who connect."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from vivavoce.cascade.loading import LoadedCascade, load_cascade
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.parts import LocalRecogniser, TTSSynthesiser
from vivavoce.dialogue.backend import Resolver, is_address
from vivavoce.dialogue.events import Conversation, ConversationSettings
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import InputError
from vivavoce.s2s.loading import load_speech
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions
from vivavoce.server.host import ModelCard
from vivavoce.server.hosting.audio import ASREndpoint, AudioHost, TTSEndpoint, requests
from vivavoce.server.hosting.config import DEFAULT_MODEL, ServingOptions
from vivavoce.tts.interface import open_speech_model

CASCADE = "cascade"


@dataclass
class SpeechHost:
    """A `Host`: a speech-to-speech model or a cascade, and whoever speaks and writes beside it."""

    name: str
    pipeline: MossSpeechBackend | LoadedCascade
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    ear: LocalRecogniser | None = None
    """Hears the user's words instead of the model itself."""
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    is_ready: bool = False

    @property
    def models(self) -> Sequence[ModelCard]:
        """The one that converses."""
        return [ModelCard(self.name)]

    @property
    def voices(self) -> Sequence[str]:
        """Its voices, the default first."""
        return list(self.pipeline.voices)

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation."""
        words = self.ear or self.pipeline.words
        return LiveConversation(self.pipeline, settings, replace(self.options, transcriber=words))

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What runs while it is served."""
        return [self.pipeline, *([] if self.ear is None else [self.ear])]

    def gauges(self) -> Mapping[str, float]:
        """What waits to be heard and spoken; and how full the engine's cache is, where the engine is here."""
        found = {"queue_depth": float(self.pipeline.ear.waiting), **requests(self.speech, self.transcriber)}
        if isinstance(self.pipeline, MossSpeechBackend):
            found["queue_depth"] += self.pipeline.voice.waiting
        thinks = self.pipeline.chat if isinstance(self.pipeline, LoadedCascade) else self.pipeline
        if isinstance(thinks, LocalChat | MossSpeechBackend):
            pool = thinks.core.scheduler.pool
            found["kv_used_ratio"] = (pool.size - pool.free) / pool.size
            slack = thinks.core.slack.least(thinks.core.scheduler.now())
            if slack is not None:
                found["engine_slack_seconds"] = slack
        return found

    async def warm_up(self) -> None:
        """Let everything work once; then clients may come."""
        if isinstance(self.pipeline, LoadedCascade):
            await self.pipeline.warm_up(self.settings)
        else:
            await self.pipeline.warm_up()
            if self.ear is not None:
                await self.ear.warm_up()
            if self.speech is not None:
                await self.speech.voice.warm_up()
        self.is_ready = True


def host_of(choices: ServingOptions) -> SpeechHost | AudioHost:
    """The host that is meant, its models loaded; it is ready once its parts are entered and warm."""
    options, settings = choices.dialogue(), choices.settings()
    if choices.audio_only:
        return _audio_host(choices, options, settings)
    if choices.is_cascade:
        cascade = load_cascade(choices.cascade, choices.device)
        host = SpeechHost(CASCADE, cascade, options, settings)
        if isinstance(cascade.voice, TTSSynthesiser):
            host.speech = TTSEndpoint(_short(choices.cascade.tts), cascade.voice)
        if isinstance(cascade.ear, LocalRecogniser):
            host.transcriber = ASREndpoint(_short(choices.cascade.asr), cascade.ear)
        return host
    model, ear = choices.model or DEFAULT_MODEL, _ear(choices)
    replies = MossSpeechOptions(captioner=ear or "model", words_first=options.speaking.moderation is not None)
    pipeline = load_speech(model, choices.device, choices.codec, choices.voice, replies, choices.dtype, choices.engine)
    host = SpeechHost(_short(model), pipeline, options, settings, ear)
    host.transcriber, host.speech = _listener(choices, ear), _speaker(choices)
    return host


def _audio_host(choices: ServingOptions, options: DialogueOptions, settings: ConversationSettings) -> AudioHost:
    ear = _ear(choices)
    return AudioHost(ear, _speaker(choices), _listener(choices, ear), options, settings)


def _ear(choices: ServingOptions) -> LocalRecogniser | None:
    if choices.asr is None:
        return None
    return LocalRecogniser.load(_here(choices.asr), choices.asr_backend, choices.device, choices.asr_gate)


def _listener(choices: ServingOptions, ear: LocalRecogniser | None) -> ASREndpoint | None:
    return None if ear is None else ASREndpoint(_short(choices.asr), ear)


def _speaker(choices: ServingOptions) -> TTSEndpoint | None:
    if choices.tts is None:
        return None
    voice = TTSSynthesiser(open_speech_model(_here(choices.tts), choices.device))
    return TTSEndpoint(_short(choices.tts), voice)


def _here(model: str | Resolver) -> str:
    if not isinstance(model, str) or is_address(model):
        raise InputError(f"only a cascade's ear and voice can be elsewhere; name a model that is here, not {model}")
    return model


def _short(model: str | Resolver | None) -> str:
    return Path(str(model)).name
