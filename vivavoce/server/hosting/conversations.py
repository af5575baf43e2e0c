"""The host of conversations: one speech-to-speech model or cascade, shared by all sessions."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.parts import LoadedCascade, LocalRecogniser, TTSSynthesiser, load_cascade
from vivavoce.dialogue.backend import Resolver, is_address
from vivavoce.dialogue.events import Conversation, ConversationSettings
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import InputError
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions, load_speech
from vivavoce.server.host import ModelCard
from vivavoce.server.hosting.audio import ASREndpoint, AudioHost, TTSEndpoint, request_gauges
from vivavoce.server.hosting.config import DEFAULT_MODEL, ServingOptions
from vivavoce.tts.interface import open_speech_model

CASCADE = "cascade"


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
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What must be entered while the host is served."""
        return [self.pipeline, *([] if self.recogniser is None else [self.recogniser])]

    def gauges(self) -> Mapping[str, float]:
        """Queue depth and requests; KV cache use and deadline slack where the engine is in this process."""
        found = {"queue_depth": float(self.pipeline.waiting), **request_gauges(self.speech, self.transcriber)}
        generator = self.pipeline.chat if isinstance(self.pipeline, LoadedCascade) else self.pipeline
        if isinstance(generator, LocalChat | MossSpeechBackend):
            pool = generator.core.scheduler.pool
            found["kv_used_ratio"] = (pool.size - pool.free) / pool.size
            slack = generator.core.slack.recent_min_slack(generator.core.scheduler.now())
            if slack is not None:
                found["engine_slack_seconds"] = slack
        return found

    async def warm_up(self) -> None:
        """Run every stage once; then the host is ready."""
        if isinstance(self.pipeline, LoadedCascade):
            await self.pipeline.warm_up(self.settings)
        else:
            await self.pipeline.warm_up()
            if self.recogniser is not None:
                await self.recogniser.warm_up()
            if self.speech is not None:
                await self.speech.voice.warm_up()
        self.is_ready = True


def load_models(options: ServingOptions) -> SpeechHost | AudioHost:
    """The host of these options, its models loaded; it is ready once its parts are entered and warm."""
    dialogue, settings = options.dialogue(), options.settings()
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
