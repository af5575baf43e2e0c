"""Speech to speech with MOSS-Speech: one engine, one speech encoder and one vocoder, shared by all conversations.

`load_speech` and `load_moss_speech` make a backend from a checkpoint, with its codec local or remote.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch

from vivavoce import hub
from vivavoce.audio.chunking import LONGER_GAP, ChunkGapEstimate, ChunkUnit, LeadPolicy
from vivavoce.audio.io import read
from vivavoce.audio.level import buzz
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.dialogue.backend import ConversationState, OnTranscript, ReplyPlan, ReplyTranscriber
from vivavoce.dialogue.settings import ConversationSettings, Tool
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sequence import Admission
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.implementations import (
    choose_moss_speech_codec,
    choose_moss_speech_lm,
    choose_moss_speech_text_prompts,
)
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE, GraphedCodec, MossSpeechCodec
from vivavoce.models.moss_speech.cpu import CpuCodec, CpuMossSpeech
from vivavoce.models.moss_speech.model import TEXT, MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.process_settings import serving_pace
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.executor import DeadlineExecutor, executor_for
from vivavoce.runtime.grammars import ReplyGrammars
from vivavoce.s2s.captions import MossSpeechTranscriber
from vivavoce.s2s.conversation import MossSpeechConversation
from vivavoce.s2s.local_codec import SOON_SECONDS, LocalCodec
from vivavoce.s2s.options import MossSpeechOptions, checkpoint_options
from vivavoce.s2s.remote_codec import SPEECH_ENCODER, VOCODER, RemoteCodec, RemoteSpeechEncoder, RemoteVocoder
from vivavoce.s2s.reply import FirstSound, MossSpeechReply
from vivavoce.s2s.speech_cost import BusySeconds, SpeechCost
from vivavoce.s2s.written_turns import WrittenTurnConversation

MAX_FIRST_SOUNDS = 256
MANY_STARTING = 3  # replies without output from which on they delay each other's next chunks: on a GPU the first chunk
# is then two units long, which takes a pass as long as one does
CUSHION_SECONDS = 0.5  # sound buffered by each of them before its output starts: more than a first chunk
BUSY_REPLIES = 3.0  # replies from which on a CPU uses long chunks, which cost half as much per second of sound
COMPILING_PASSES = 2  # of a model, in which TorchScript compiles it
FEW_CONVERSATIONS = 16  # too few to fill batches of the speech encoder


class TurnPace(NamedTuple):
    """Codes of an open turn that are encoded in one pass, and prefilled in one step; the rest is left to its end."""

    encoded: int
    prefilled: int


CPU_PACE, QUICK_PACE = TurnPace(3, 1), TurnPace(1, 1)
CROWDED_PACE = TurnPace(32, 64)  # a step with a prefill is not replayed as a graph, and delays all replies


class MossSpeechBackend:
    """The `ConversationBackend` of MOSS-Speech. Use as `async with`.

    Engine, speech encoder and vocoder are tasks of `executor`, or of the executor that all models of the device share;
    closing the backend removes its tasks and leaves the executor to the others.
    """

    input_rate = ENCODER_RATE
    output_rate = DECODER_RATE

    def __init__(
        self,
        core: Engine,
        codec: MossSpeechCodec,
        prompt: MossSpeechPrompt,
        tokenizer: TextTokenizer,
        voices: Mapping[str, FlowVoice],
        options: MossSpeechOptions | None = None,
        executor: DeadlineExecutor | None = None,
    ) -> None:
        if not isinstance(core.model, MossSpeech):
            raise InputError(f"this backend runs MOSS-Speech, not {type(core.model).__name__}")
        if not voices:
            raise InputError("a backend needs at least one voice")
        self.core, self.model = core, core.model
        self.codec, self.prompt, self.tokenizer = codec, prompt, tokenizer
        self.voices = dict(voices)
        self.options = options or MossSpeechOptions()
        self.grammars = ReplyGrammars(tokenizer.to_json, self.model.vocabularies[TEXT], self.model.config.eos_token_id)
        if self.options.calls_tools and not self.grammars.is_available:
            raise MissingDependencyError("tool calls of this model need llguidance: pip install 'vivavoce[tools]'")
        self.transcribes = self.options.recogniser is not None
        executor = executor or executor_for(core.runner.device)
        self.engine = AsyncEngine(core, executor)
        unit = chunk_unit(codec)
        is_graphed = isinstance(codec, GraphedCodec)
        self.policy = chunk_policy(unit, core.runner.device.type, is_graphed)
        is_slow = core.runner.device.type == "cpu" and not is_graphed
        self._busy_policy = replace(self.policy, min_later_units=2) if is_slow else self.policy
        self._crowded_policy = replace(self.policy, first_units=2) if is_graphed else self.policy
        self.second_chunk_gap = ChunkGapEstimate(margin=0.13, is_batched=True) if is_graphed else ChunkGapEstimate()
        self._stack = ExitStack()  # process settings to restore when it closes
        self.conversations: weakref.WeakSet[MossSpeechConversation] = weakref.WeakSet()
        """Those that `open` has returned and that are not closed."""
        self.first_sounds: deque[FirstSound] = deque(maxlen=MAX_FIRST_SOUNDS)
        """Stage times of the latest replies."""
        self.speaking: set[MossSpeechReply] = set()
        """Replies whose sound is being generated."""
        self.beginning: set[MossSpeechReply] = set()
        """Those of them without output so far."""
        self.words = MossSpeechTranscriber(self)
        self.local_codec = LocalCodec(codec, self.options.left_chunks, self.options.voices_together, executor)
        self.urgent = self.local_codec.urgent
        self.speech_encoder, self.vocoder = self.local_codec.speech_encoder, self.local_codec.vocoder
        self.speech_cost: SpeechCost | None = None
        """What replies cost on a CPU; None: admission control does not need it."""
        if is_slow and self.options.admission is not None:
            self.speech_cost = SpeechCost(executor.max_threads, self.vocoder.workers)

    async def __aenter__(self) -> Self:
        on_cpu = self.codec.speech_encoder.device.type == "cpu"
        self._stack.enter_context(serving_pace(on_cpu, self.options.threads, self.options.switch_seconds))
        await self.engine.__aenter__()
        self.speech_encoder.start()
        self.vocoder.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close_engine()
        await self.speech_encoder.close()
        await self.vocoder.close()
        self._stack.close()

    @property
    def sums_up(self) -> bool:
        """Whether long conversations are summed up."""
        return self.options.summary_writer is not None or bool(self.options.writes_summaries)

    @property
    def transcriber(self) -> ReplyTranscriber:
        """The recogniser beside the model, or the model itself."""
        captioner = self.options.captioner
        beside = None if isinstance(captioner, str) else captioner
        return self.options.recogniser or beside or self.words

    @property
    def waiting(self) -> int:
        """Jobs queued for the speech encoder and the vocoder."""
        return self.speech_encoder.waiting + self.vocoder.waiting

    def open(self, heard: OnTranscript) -> ConversationState:
        """The state of a new conversation; `CapacityError` where time, cache or memory do not allow one more."""
        if self.options.admission is not None:
            self._check_capacity(self.options.admission)
        recogniser = self.options.recogniser
        conversation = (
            MossSpeechConversation(self) if recogniser is None else WrittenTurnConversation(self, recogniser, heard)
        )
        self.conversations.add(conversation)
        return conversation

    def _check_capacity(self, admission: Admission) -> None:
        """Raise CapacityError where one more conversation is not admitted; for lack of time never the only one."""
        slack = load = None
        if active := sum(conversation.is_active for conversation in self.conversations):
            slack = self.core.slack.recent_min_slack(self.core.scheduler.now())
            load = None if self.speech_cost is None else self.speech_cost.load(active + 1)
        voice = self._reply_bytes()
        free = self.core.free_bytes + self.local_codec.pooled_bytes
        rows = min(admission.rows, self.core.capacity)  # a small cache has room for the only conversation too
        replace(admission, rows=rows).check(slack, self.core.free_rows, free, voice, load)

    def _reply_bytes(self) -> float:
        """Memory that the sound of one reply takes on this device."""
        return self.local_codec.reply_bytes(self.voice_of(None))

    def note_sound(self, seconds: float, is_start: bool) -> None:
        """Note that a chunk of this much sound was made, which is the start of a reply or not."""
        if self.speech_cost is not None:
            self.speech_cost.note(seconds, self._busy, is_start)

    def note_decision(self) -> None:
        """Note that a decision on tools was made."""
        if self.speech_cost is not None:
            self.speech_cost.note_decision(self._busy)

    @property
    def _busy(self) -> BusySeconds:
        return BusySeconds(self.core.slack.busy, self.vocoder.busy)

    @property
    def demand(self) -> float:
        """Replies being generated, plus half of the open turns, whose replies come soon."""
        return len(self.speaking) + 0.5 * sum(conversation.has_open_turn for conversation in self.conversations)

    @property
    def chunks(self) -> LeadPolicy:
        """The chunk policy at the present load."""
        if len(self.beginning) >= MANY_STARTING:
            return self._crowded_policy
        # The demand is computed only where it matters: with hundreds of conversations it takes a while.
        return (
            self._busy_policy if self._busy_policy is not self.policy and self.demand >= BUSY_REPLIES else self.policy
        )

    @property
    def cushion(self) -> float:
        """Seconds of sound that a reply buffers before its first output, so that it does not run dry under load."""
        if self.second_chunk_gap.is_batched:
            lasts = max(CUSHION_SECONDS, LONGER_GAP * self.second_chunk_gap.seconds)
            return lasts if len(self.beginning) >= MANY_STARTING else 0.0
        policy = self.chunks
        chunk = policy.min_later_units * policy.unit.frames * policy.unit.frame_seconds
        return self.second_chunk_gap.cushion(chunk, self.demand) if policy.min_later_units > 1 else 0.0

    @property
    def turn_pace(self) -> TurnPace:
        """How an open turn is encoded and prefilled at the present load."""
        if not isinstance(self.codec, GraphedCodec):
            return CPU_PACE
        return QUICK_PACE if len(self.conversations) <= FEW_CONVERSATIONS else CROWDED_PACE

    async def warm_up(self) -> None:
        """Run some replies, so that the first conversation does not pay for initialisation and graph capture."""
        await self.engine.warm_up()
        if self.options.calls_tools:
            await self.grammars.compiler()
        await self._warm_up_codec()
        settings = ConversationSettings(max_output_tokens=3 * self.policy.unit.frames)
        await self._reply_once(settings)
        if self.options.calls_tools:
            for _ in range(COMPILING_PASSES):
                await self._reply_once(replace(settings, tools=(Tool("warm_up"),)))
        if self.speech_cost is not None:
            self.speech_cost.restart(self._busy)

    async def _reply_once(self, settings: ConversationSettings) -> None:
        conversation = MossSpeechConversation(self)
        conversation.set_history((), settings)
        conversation.listen(buzz(1.0, ENCODER_RATE).samples[0])
        reply = conversation.reply(ReplyPlan("item_warm_up", settings, played=lambda: 0.0))
        async for _ in reply.pieces():
            pass
        reply.drop()
        await conversation.close()

    async def _warm_up_codec(self) -> None:
        voices, batches = list(self.voices.values()), self.options.warm_batches
        await asyncio.to_thread(self.local_codec.warm_up, voices, batches, self.policy.sizes())

    def voice_of(self, name: str | None) -> FlowVoice:
        """The voice of this name. Clients name voices of other services, so an unknown name gets the first voice."""
        return self.voices.get(name or "", next(iter(self.voices.values())))


class RemoteCodecPipeline(MossSpeechBackend):
    """MOSS-Speech with speech encoder and vocoder on another machine."""

    def __init__(
        self,
        core: Engine,
        codec: RemoteCodec,
        prompt: MossSpeechPrompt,
        tokenizer: TextTokenizer,
        options: MossSpeechOptions | None = None,
    ) -> None:
        super().__init__(core, cast(Any, codec), prompt, tokenizer, cast(Any, codec.voices), options)
        self.speech_encoder, self.vocoder = (
            cast(Any, RemoteSpeechEncoder(codec.resolve, SPEECH_ENCODER)),
            cast(Any, RemoteVocoder(codec.resolve, VOCODER)),
        )
        self.speech_cost = None  # most of it arises elsewhere

    def _reply_bytes(self) -> float:
        """None: its server has them."""
        return 0.0

    async def _warm_up_codec(self) -> None:
        """Its server has."""


def chunk_unit(codec: MossSpeechCodec) -> ChunkUnit:
    """The chunks that a codec makes sound of."""
    flow = codec.flow.config
    return ChunkUnit(flow.chunk, flow.lookahead, codec.samples_per_code / DECODER_RATE)


def chunk_policy(unit: ChunkUnit, device: str, is_graphed: bool) -> LeadPolicy:
    """The chunk policy: on a CPU two chunks cost little more than one; with CUDA graphs long hops are cheapest."""
    if is_graphed:
        # A hop of few replies takes hardly longer for two units than for one.
        return LeadPolicy(unit, share=0.8, doubles=True, making=SOON_SECONDS, min_later_units=2)
    if device == "cpu":
        return LeadPolicy(unit, share=1.0, max_seconds=2 * unit.frames * unit.frame_seconds, end=1.6)
    return LeadPolicy(unit)


def load_speech(
    name: str,
    device: str = "auto",
    codec: str | RemoteCodec | None = None,
    voice: Path | None = None,
    options: MossSpeechOptions | None = None,
    dtype: str = "auto",
    limits: EngineLimits | None = None,
) -> MossSpeechBackend:
    """A speech-to-speech model with the codec in its folder, the named one, or the one it was published with."""
    folder, known = hub.resolve(name), hub.known(name)
    if codec is None and known is not None and not (folder / hub.CODEC_FOLDER).is_dir():
        codec = known.codec
    source = hub.resolve(codec) if isinstance(codec, str) else codec
    return load_moss_speech(folder, source, voice, device, dtype, limits, options)


def load_moss_speech(
    folder: Path,
    codec: Path | RemoteCodec | None = None,
    voice: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    limits: EngineLimits | None = None,
    options: MossSpeechOptions | None = None,
    executor: DeadlineExecutor | None = None,
) -> MossSpeechBackend:
    """A backend on a checkpoint; `codec` where its folder has none, `voice` a recording of the voice to use.

    `executor` runs the models, started by the caller; None: the executor that all models of the device share.
    """
    device_info = pick(device)
    MossSpeechConfig.read(folder)  # raises for another kind of model, before the codec is missed
    checkpoint_settings = checkpoint_options(folder, options or MossSpeechOptions(captioner="model"))
    if isinstance(codec, RemoteCodec):
        model = _language_model(folder, device_info, dtype)
        core, tokenizer = (
            Engine(model, device_info, resolve_dtype(dtype, device_info), limits),
            TextTokenizer.load(folder),
        )
        return RemoteCodecPipeline(
            core, codec, MossSpeechPrompt(model.config, tokenizer), tokenizer, checkpoint_settings
        )
    if codec is None:
        codec = folder / hub.CODEC_FOLDER
        if not codec.is_dir():
            raise InputError(f"{folder} has no codec; name one, such as fnlp/MOSS-Speech-Codec")
    model, tokenizer = _language_model(folder, device_info, dtype), TextTokenizer.load(folder)
    loaded_codec = load_codec(codec, device_info)
    return MossSpeechBackend(
        Engine(model, device_info, resolve_dtype(dtype, device_info), limits),
        loaded_codec,
        MossSpeechPrompt(model.config, tokenizer),
        tokenizer,
        codec_voices(loaded_codec, codec, voice),
        checkpoint_settings,
        executor,
    )


def _language_model(folder: Path, device_info: Device, dtype: str) -> MossSpeech:
    model = MossSpeech.load(folder, device_info.torch_device, resolve_dtype(dtype, device_info))
    choice = choose_moss_speech_lm(device_info, dtype, CpuMossSpeech.suits(model))
    if choice.cls is not CpuMossSpeech:
        return model
    return CpuMossSpeech(model, choose_moss_speech_text_prompts(device_info, dtype).dtype)


def load_codec(folder: Path, device_info: Device) -> MossSpeechCodec:
    """The codec in a folder, in the implementation chosen for the device."""
    codec = MossSpeechCodec.load(folder, device_info.torch_device)
    choice = choose_moss_speech_codec(device_info)
    if choice.cls is GraphedCodec:
        codec.flow.to(choice.dtype)  # its cache is read at every hop; encoder and vocoder stay in float32
        return GraphedCodec(codec)
    return CpuCodec(codec, choice.dtype) if choice.cls is CpuCodec else codec


@torch.no_grad()
def codec_voices(codec: MossSpeechCodec, folder: Path, recording: Path | None) -> dict[str, FlowVoice]:
    """The voice of the recording, if any, then the codec's named voices."""
    voices = {} if recording is None else {recording.stem: codec.voice(read(recording))}
    voices |= {name: codec.named_voice(name) for name in codec.voices()}
    if not voices:
        raise InputError(f"{folder} has no voice; give a recording of one, at most 30 s")
    return voices
