"""The hosts of models: `SpeechHost` for conversations, `AudioHost` for `/v1/audio/*` only, and their loading."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from safetensors import safe_open

from vivavoce import hub
from vivavoce.audio.gtcrn import gtcrn
from vivavoce.audio.resample import LiveResampler
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatModel, ChatPiece
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.parts import CascadeParts, LoadedCascade, load_cascade, open_chat
from vivavoce.cascade.summary import ChatSummaryWriter
from vivavoce.cascade.tool_delegate import ToolDelegate
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.backend import RecognitionAbilities, ReplyTranscriber, Resolver, TurnTranscriber, is_address
from vivavoce.dialogue.conversation import Conversation
from vivavoce.dialogue.fillers import FILLERS, FillerVoice
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.sequence import Admission
from vivavoce.errors import CapacityError, InputError
from vivavoce.hub.languages import spoken_languages
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_speech
from vivavoce.s2s.options import MossSpeechOptions
from vivavoce.s2s.read_aloud import ReadAloud
from vivavoce.server.host import ModelAbilities, ModelCard
from vivavoce.server.hosting.config import DEFAULT_MODEL, ServingOptions
from vivavoce.server.hosting.endpoints import ASREndpoint, TTSEndpoint, request_gauges
from vivavoce.server.wire import JsonObject
from vivavoce.stacks import PARTS, STACKS, stack_named
from vivavoce.tts.interface import open_speech_model
from vivavoce.tts.text import numbers_as_words

logger = logging.getLogger(__name__)


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
    def abilities(self) -> ModelAbilities:
        """Of transcription sessions; there are no others."""
        recognition = recognition_abilities(self.recogniser)
        return ModelAbilities(False, False, False, False, False, recognition)

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
            await self.speech.warm_up()
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
BUNDLED_ASR, BUNDLED_TTS = "mini-asr", "mini-tts"  # behind `/v1/audio/*` where no others are named; loaded when used
RECENT_REPLIES = 64
OWN_TEXT_BRANCH = "self"  # the tool model that is the speech-to-speech model itself


@dataclass
class SpeechHost:
    """A `Host` of a speech-to-speech model or a cascade, and of the models behind `/v1/audio/*`."""

    name: str
    pipeline: MossSpeechBackend | LoadedCascade
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    recogniser: LocalRecogniser | None = None
    """Transcribes the user's turns instead of the model itself."""
    card: ModelCard | None = None
    """What is known of the model; None: its name."""
    speech: TTSEndpoint | None = None
    transcriber: ASREndpoint | None = None
    sees_images: bool = False
    """Whether its chat endpoint does."""
    reader: ReadAloud | None = None
    """Speaks given words in the voice of a speech-to-speech model that was trained to."""
    tool_chat: ChatModel | None = None
    """Decides on the tool calls of a speech-to-speech model."""
    fillers: FillerVoice | None = None
    """Speaks while a tool or a slow chat model works."""
    is_ready: bool = False

    @property
    def models(self) -> Sequence[ModelCard]:
        """The conversation model."""
        return [self.card or ModelCard(self.name)]

    @property
    def voices(self) -> Sequence[str]:
        """Names of the voices, the default first."""
        return list(self.pipeline.voices)

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation."""
        transcriber = self.recogniser or self.pipeline.words
        options = replace(self.options, transcriber=transcriber, fillers=self.fillers)
        if self.tool_chat is None or transcriber is None:
            return LiveConversation(self.pipeline, settings, options)
        return LiveConversation(ToolDelegate(self.pipeline, self.tool_chat, transcriber), settings, options)

    async def announce(self, text: str, voice: str | None, speed: float) -> AsyncGenerator[Samples, None]:
        """The sound of a text: by the cascade's synthesizer, by a speech-to-speech model that reads it aloud, or by the
        TTS model beside one."""
        if isinstance(self.pipeline, LoadedCascade):
            async for samples in self.pipeline.voice.speak(text, voice, speed):
                yield samples
            return
        if self.reader is not None and await self.reader.can_read(text):
            async for samples in self.reader.speak(text, voice, speed):
                yield samples
            return
        assert self.speech is not None
        await self.speech.load()
        filters = LiveResampler(self.speech.rate, self.pipeline.output_rate)
        state = filters.initial_state()
        named = voice if voice in self.speech.voices else None  # the TTS model has other voices
        async for samples in self.speech.speak(text, named, speed, ""):
            output, state = filters.step(state, samples[None])
            yield output[0]
        yield filters.flush(state)[0]

    @property
    def abilities(self) -> ModelAbilities:
        """A chat endpoint takes tools and reasoning, a local chat model tools if its template has them."""
        recognition = recognition_abilities(self.recogniser or self.pipeline.words, self.models[0].languages)
        if not isinstance(self.pipeline, LoadedCascade):
            return ModelAbilities(
                tools=bool(self.pipeline.options.calls_tools)
                or (self.tool_chat is not None and getattr(self.tool_chat, "offers_tools", True)),
                reasoning=False,
                retention_ratio=isinstance(self.pipeline, MossSpeechBackend),
                images=False,
                json_schema=self.pipeline.grammars.is_available,
                recognition=recognition,
            )
        chat = self.pipeline.chat
        is_local = isinstance(chat, LocalChat)
        return ModelAbilities(
            tools=chat.offers_tools if isinstance(chat, LocalChat) else True,
            reasoning=not is_local,
            retention_ratio=False,
            images=self.sees_images and not is_local,
            json_schema=chat.follows_schemas if isinstance(chat, LocalChat) else True,
            recognition=recognition,
        )

    @property
    def parts(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """What must be entered while the host is served."""
        tool_chat = self.tool_chat if isinstance(self.tool_chat, LocalChat) else None
        parts = (self.pipeline, self.options.front_end, self.recogniser, self.transcriber, tool_chat)
        return [part for part in parts if part is not None]

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
            if isinstance(self.pipeline.voice, TTSSynthesiser) and self.pipeline.voices:
                await self._warm_fillers()
        else:
            await self.pipeline.warm_up()
            if self.recogniser is not None:
                await self.recogniser.warm_up()
            if self.speech is not None:
                await self.speech.warm_up()
            if isinstance(self.tool_chat, LocalChat):
                await self.tool_chat.load_compiler()
            await self._warm_fillers()
        self.is_ready = True

    async def _warm_fillers(self) -> None:
        if self.fillers is not None:
            spoken = [each for each in self.models[0].languages if each in FILLERS]
            await self.fillers.warm_up(spoken or ["en"], self.settings)


def recognition_abilities(transcriber: ReplyTranscriber | None, languages: Sequence[str] = ()) -> RecognitionAbilities:
    """What the transcription of the user follows; a model that transcribes itself does so in its own languages."""
    if isinstance(transcriber, TurnTranscriber):
        return transcriber.abilities
    return RecognitionAbilities(False, False, False, tuple(languages))


async def _warm_front_end(options: DialogueOptions) -> None:
    await asyncio.to_thread(gtcrn)  # a client may ask for noise suppression; it is compiled on first use
    if options.front_end is not None:
        await options.front_end.warm_up(options.activity, options.echo)


def load_models(options: ServingOptions) -> SpeechHost | AudioHost:
    """The host of these options, its models loaded; it is ready once its parts are entered and warm."""
    dialogue = replace(options.dialogue(), front_end=options.conversation.front_end(options.models_use_cores))
    settings = options.settings()
    if options.is_cascade:
        return _cascade_host(options, dialogue, settings)
    recogniser = _load_recogniser(options)
    speakers = options.conversation.speaker_model
    transcriber = (
        None if recogniser is None else ASREndpoint(_short_name(options.asr), recogniser, speaker_model=speakers)
    )
    if options.audio_only:
        return AudioHost(recogniser, _load_speech_endpoint(options), transcriber, dialogue, settings)
    model = options.model or DEFAULT_MODEL
    reads_turns, tool_chat = options.turns_as_text, _tool_chat(options)
    by_itself = None if options.tool_model is None else options.tool_model == OWN_TEXT_BRANCH
    replies = MossSpeechOptions(
        captioner="model" if recogniser is None or reads_turns else recogniser,
        recogniser=recogniser if reads_turns else None,
        normalise=numbers_as_words if model == DEFAULT_MODEL else None,  # its training had no digits
        words_first=dialogue.speaking.moderation is not None,
        calls_tools=by_itself,
        writes_summaries=by_itself,
        summary_writer=None if tool_chat is None else ChatSummaryWriter(tool_chat),
        admission=Admission(max_speech_load=options.server.max_speech_load),
    )
    pipeline = load_speech(model, options.device, options.codec, options.voice, replies, options.dtype, options.engine)
    host = SpeechHost(_short_name(model), pipeline, dialogue, settings, recogniser, card=_speech_card(options))
    host.tool_chat = tool_chat
    if model == DEFAULT_MODEL:
        host.reader = ReadAloud(pipeline)
    host.transcriber = transcriber or ASREndpoint(
        BUNDLED_ASR,
        None,
        partial(LocalRecogniser.load, BUNDLED_ASR, "auto", options.device, options.asr_gate),
        speakers,
    )
    host.speech = _load_speech_endpoint(options) or TTSEndpoint(
        BUNDLED_TTS, None, partial(_synthesiser, BUNDLED_TTS, options.device)
    )
    if options.conversation.filler_seconds > 0 and host.abilities.tools:
        # The model itself answers at once; a chat model that decides on calls may be slow.
        host.fillers = FillerVoice(host.announce, options.conversation.filler_seconds, tool_chat is not None)
    return host


def _tool_chat(options: ServingOptions) -> ChatModel | None:
    """The chat model that decides on tool calls of a speech-to-speech model, and sums up its conversations."""
    if options.tool_model in (None, OWN_TEXT_BRANCH):
        return None
    parts = CascadeParts(chat=options.tool_model, chat_model=options.chat_model, chat_key=options.chat_key)
    return open_chat(parts, options.device)


def _speech_card(options: ServingOptions) -> ModelCard:
    """What a visitor is told of a speech-to-speech model."""
    model = options.model or DEFAULT_MODEL
    card = _stack_card(options, _short_name(model))
    if options.turns_as_text and card is not None:
        return card
    if card is None:
        known = STACKS["mini"] if model == DEFAULT_MODEL else STACKS["s2s"]
        card = ModelCard(
            _short_name(model),
            languages=spoken_languages(model),
            introduction=known.introduction,
            examples=known.examples,
        )
    return replace(card, parameters=count_parameters(hub.resolve(model)))


def _stack_card(options: ServingOptions, id: str) -> ModelCard | None:
    """What a visitor is told of a stack; None where models were named one by one."""
    if options.stack is None:
        return None
    named = {part: str(getattr(options, part)) for part in PARTS if getattr(options, part) is not None}
    stack = stack_named(options.stack).with_parts(**named)
    parts = tuple(_short_name(model) for model in stack.models)
    return ModelCard(
        id,
        parameters=stack.parameters,
        languages=stack.languages,
        introduction=stack.introduction,
        examples=stack.examples,
        stack=stack.name,
        parts=parts,
    )


def count_parameters(folder: Path) -> int | None:
    """The parameters in the weights of a model's folder and its codec; None where several are packed in one number."""
    count = 0
    for file in sorted(folder.rglob("*.safetensors")):
        if file.parent.name == "voices":
            continue
        with safe_open(file, "np") as weights:
            slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - it is no mapping
            if not all(each.get_dtype().startswith(("F", "BF", "I8")) for each in slices):
                return None
            count += sum(math.prod(each.get_shape()) for each in slices)
    return count or None


def _cascade_host(options: ServingOptions, dialogue: DialogueOptions, settings: ConversationSettings) -> SpeechHost:
    cascade = load_cascade(options.cascade, options.device)
    card = _stack_card(options, CASCADE)
    host = SpeechHost(CASCADE, cascade, dialogue, settings, card=card, sees_images=options.chat_images)
    if options.conversation.filler_seconds > 0:
        host.fillers = FillerVoice(host.announce, options.conversation.filler_seconds)
    if isinstance(cascade.voice, TTSSynthesiser):
        host.speech = TTSEndpoint(_short_name(options.cascade.tts), cascade.voice)
    if isinstance(cascade.asr, LocalRecogniser):
        name, speakers = _short_name(options.cascade.asr), options.conversation.speaker_model
        host.transcriber = ASREndpoint(name, cascade.asr, speaker_model=speakers)
    return host


def _load_recogniser(options: ServingOptions) -> LocalRecogniser | None:
    if options.asr is None:
        return None
    return LocalRecogniser.load(_local(options.asr), options.asr_backend, options.device, options.asr_gate)


def _load_speech_endpoint(options: ServingOptions) -> TTSEndpoint | None:
    if options.tts is None:
        return None
    return TTSEndpoint(_short_name(options.tts), _synthesiser(_local(options.tts), options.device))


def _synthesiser(name: str, device: str) -> TTSSynthesiser:
    return TTSSynthesiser(open_speech_model(name, device))


def _local(model: str | Resolver) -> str:
    if not isinstance(model, str) or is_address(model):
        raise InputError(f"only a cascade's asr and tts can be addresses; name a model instead of {model}")
    return model


def _short_name(model: str | Resolver | None) -> str:
    return Path(str(model)).name
