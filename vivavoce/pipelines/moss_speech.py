"""Speech to speech with MOSS-Speech: one engine, one ear and one voice, shared by all conversations."""

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from vivavoce.audio.buzz import buzz
from vivavoce.dialogue.chunking import Grain, LeadPolicy
from vivavoce.dialogue.gathering import Gathering
from vivavoce.dialogue.interface import ConversationSettings
from vivavoce.dialogue.pipeline import Heard, Mind, ReplyPlan, Transcriber
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import Sampling
from vivavoce.engine.streaming import StreamingEngine
from vivavoce.errors import InputError
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.moss_speech import MossSpeech
from vivavoce.models.moss_speech_codec import EAR_RATE, VOICE_RATE, MossSpeechCodec, SpokenState
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt
from vivavoce.models.speech_encoder_stream import SpeechStreamState
from vivavoce.models.tokenizer import TextTokenizer
from vivavoce.pipelines.moss_speech_mind import MossSpeechMind
from vivavoce.pipelines.moss_speech_words import MossSpeechWords

EarJob = tuple[SpeechStreamState, Tensor, bool]  # samples, and whether the turn ends with them
EarResult = tuple[list[int], SpeechStreamState]
VoiceJob = tuple[SpokenState | FlowVoice, Tensor, bool]  # where the reply stands, or in which voice it begins
VoiceResult = tuple[Tensor, SpokenState]


@dataclass(frozen=True)
class MossSpeechOptions:
    """How replies are made where the client does not say."""

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.6, top_k=20, top_p=0.95))
    most_output_tokens: int = 1500
    """Two minutes of speech."""
    seed: int | None = None
    """Replies are the same for the same conversation; None: never twice."""
    left_chunks: int | None = 10
    """How many chunks the voice looks back, which bounds what a long reply keeps."""
    longest_loop: int | None = 50
    """Codes that may repeat one another at the end of a reply before it is taken for stuck; None: any."""
    captioner: Transcriber | Literal["model"] | None = None
    """Gives the words of a spoken reply, for captions and moderation; "model": the language model itself does."""
    caption_seconds: float = 1.6
    """Words are told for at least so much sound, to its next pause, or three times as much."""
    words_first: bool = False
    """Whether sound waits for its words, so that they can be checked before anybody hears it."""
    threads: int | None = None
    """Torch threads on a CPU; None: half its cores, for engine and voice work at the same time."""
    voices_together: int | None = None
    """Replies whose sound is made in one pass; None: 16, on a CPU 4, where a pass saves less and all wait for it."""


class MossSpeechPipeline:
    """Use as `async with`: it owns the engine's thread, and one thread each for ears and voices."""

    input_rate = EAR_RATE
    output_rate = VOICE_RATE
    transcribes = False

    def __init__(
        self,
        core: Engine,
        codec: MossSpeechCodec,
        prompt: MossSpeechPrompt,
        tokenizer: TextTokenizer,
        voices: Mapping[str, FlowVoice],
        options: MossSpeechOptions | None = None,
    ) -> None:
        if not isinstance(core.model, MossSpeech):
            raise InputError(f"this pipeline runs MOSS-Speech, not {type(core.model).__name__}")
        if not voices:
            raise InputError("a pipeline needs at least one voice")
        self.core, self.model = core, core.model
        self.engine = StreamingEngine(core)
        self.codec, self.prompt, self.tokenizer = codec, prompt, tokenizer
        self.voices = dict(voices)
        self.options = options or MossSpeechOptions()
        flow = codec.flow.config
        self.policy = LeadPolicy(Grain(flow.chunk, flow.lookahead, codec.samples_per_code / VOICE_RATE))
        self.words = MossSpeechWords(self)
        together = self.options.voices_together or (4 if codec.ear.device.type == "cpu" else 16)
        self.ear: Gathering[EarJob, EarResult] = Gathering("viva-ear", self._hear)
        self.voice: Gathering[VoiceJob, VoiceResult] = Gathering("viva-voice", self._speak, together, kind=_pass)

    async def __aenter__(self) -> Self:
        if self.codec.ear.device.type == "cpu":
            torch.set_num_threads(self.options.threads or max(1, (os.cpu_count() or 2) // 2))
        await self.engine.__aenter__()
        self.ear.start()
        self.voice.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close_engine()
        await self.ear.close()
        await self.voice.close()
        gc.unfreeze()

    def open(self, heard: Heard) -> Mind:
        """A mind without a past."""
        return MossSpeechMind(self)

    async def warm_up(self) -> None:
        """Hear and say something once, so that the first caller does not wait for what is slow only at first."""
        mind = self.open(lambda item, text, is_final: None)
        settings = ConversationSettings(most_output_tokens=3 * self.policy.grain.frames)
        mind.remember((), settings)
        mind.listen(buzz(1.0, EAR_RATE).samples[0])
        reply = mind.reply(ReplyPlan("item_warm_up", settings, played=lambda: 0.0))
        async for _ in reply.pieces():
            pass
        reply.drop()
        await mind.close()
        # What is loaded stays. Were the collector to look at all of it now and then, every conversation would wait.
        gc.collect()
        gc.freeze()

    def voice_of(self, name: str | None) -> FlowVoice:
        """The voice of this name; clients name voices of other services, so an unknown name is the first voice."""
        return self.voices.get(name or "", next(iter(self.voices.values())))

    @torch.inference_mode()
    def _hear(self, jobs: Sequence[EarJob]) -> list[EarResult]:
        codes, states = self.codec.ear.step_batch(*(list(each) for each in zip(*jobs, strict=True)))
        return [(new.tolist(), state) for new, state in zip(codes, states, strict=True)]

    @torch.inference_mode()
    def _speak(self, jobs: Sequence[VoiceJob]) -> list[VoiceResult]:
        # A reply's state is made here: it is megabytes, for which the event loop has no time.
        begun = [state if isinstance(state, SpokenState) else self._begun(state) for state, _, _ in jobs]
        sounds, states = self.codec.step_batch(begun, [codes for _, codes, _ in jobs], [last for _, _, last in jobs])
        return [(sound.float().cpu(), state) for sound, state in zip(sounds, states, strict=True)]

    def _begun(self, voice: FlowVoice) -> SpokenState:
        return self.codec.start(voice, self.options.left_chunks)


def _pass(job: VoiceJob) -> tuple[bool, int, bool]:
    """What must be equal for the sound of two replies to be made in one pass."""
    state, codes, is_last = job
    return isinstance(state, SpokenState), len(codes), is_last
