"""Who converses behind the server: one pipeline for all who connect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vivavoce.dialogue.interface import Conversation, ConversationSettings
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.loading import load_speech
from vivavoce.pipelines.cascade_loading import LoadedCascade, load_cascade
from vivavoce.pipelines.local_chat import LocalChat
from vivavoce.pipelines.moss_speech import MossSpeechOptions, MossSpeechPipeline
from vivavoce.pipelines.recogniser_ear import RecogniserEar
from vivavoce.pipelines.speaker_voice import SpeakerVoice
from vivavoce.server.host import ModelCard
from vivavoce.serving.audio import FileListener, TextSpeaker
from vivavoce.serving.choices import DEFAULT_MODEL, ServingChoices
from vivavoce.speech.loading import open_speech_model

CASCADE = "cascade"


@dataclass
class SpeechHost:
    """A `Host`: a speech-to-speech model or a cascade, and whoever speaks and writes beside it."""

    name: str
    pipeline: MossSpeechPipeline | LoadedCascade
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    ear: RecogniserEar | None = None
    """Hears the user's words instead of the model itself."""
    speech: TextSpeaker | None = None
    transcriber: FileListener | None = None
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

    def gauges(self) -> Mapping[str, float]:
        """What waits to be heard and spoken; and how full the engine's cache is, where the engine is here."""
        found = {"queue_depth": float(self.pipeline.ear.waiting)}
        if isinstance(self.pipeline, MossSpeechPipeline):
            found["queue_depth"] += self.pipeline.voice.waiting
        thinks = self.pipeline.chat if isinstance(self.pipeline, LoadedCascade) else self.pipeline
        if isinstance(thinks, LocalChat | MossSpeechPipeline):
            pool = thinks.core.scheduler.pool
            found["kv_used_ratio"] = (pool.size - pool.free) / pool.size
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


def host_of(choices: ServingChoices) -> SpeechHost:
    """The host that is meant, its models loaded; it is ready once its pipeline is entered and warm."""
    options, settings = choices.dialogue(), choices.settings()
    if choices.is_cascade:
        parts = choices.cascade
        cascade = load_cascade(parts, choices.device)
        speech, transcriber = (
            TextSpeaker(_short(parts.tts), cascade.voice),
            FileListener(_short(parts.asr), cascade.ear),
        )
        return SpeechHost(CASCADE, cascade, options, settings, None, speech, transcriber)
    model, ear = choices.model or DEFAULT_MODEL, None
    if choices.asr is not None:
        ear = RecogniserEar.load(choices.asr, choices.asr_backend, choices.device)
    replies = MossSpeechOptions(captioner=ear or "model", words_first=options.speaking.moderation is not None)
    pipeline = load_speech(model, choices.device, choices.codec, choices.voice, replies, choices.dtype, choices.engine)
    host = SpeechHost(_short(model), pipeline, options, settings, ear)
    if ear is not None:
        host.transcriber = FileListener(_short(choices.asr or ""), ear)
    if choices.tts is not None:
        host.speech = TextSpeaker(_short(choices.tts), SpeakerVoice(open_speech_model(choices.tts, choices.device)))
    return host


def _short(model: str) -> str:
    return Path(model).name
