"""MOSS-Speech's codec: the ear (16 kHz sound → codes) and the voice (codes → mel → 24 kHz sound), both as streams."""

import copy
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vivavoce.audio.io import Sound
from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.cosyvoice.folder import SpeakerEmbedder
from vivavoce.models.flow.cuda import BUCKETS, GraphedFlow
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig, FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import GraphedVocoder, HiFTStream
from vivavoce.models.speech_encoder.cuda import GraphedSpeechEncoder
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechStream

__all__ = ["CodecSizes", "MossSpeechCodec", "SpokenState", "read_sizes"]

EAR_RATE = 16_000
VOICE_RATE = 24_000
LONGEST_PROMPT_SECONDS = 30.0  # one segment of the encoder; more only costs memory and time
SIZES = "sizes.json"  # ours, for checkpoints of other sizes than the published one, which has no such file
FLOWS = {None: "flow", 5: "flow-chunk-5", 25: "flow-chunk-25"}  # files by codes in a chunk; None: offline
VOCODER = "hift"
SPEAKER = "campplus.onnx"


LEFT_CHUNKS = 8  # that a CUDA-graph reply attends to
VOICES_FOLDER = "voices"
VOICE_SUFFIX = ".safetensors"
VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class NamedVoices:
    """Prompts by name: those of a codec's folder, and those kept since."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is the codec's; None: there is none, and what is kept lasts as long as this."""
        self.folder = None if folder is None else folder / VOICES_FOLDER
        self._prompts: dict[str, VoicePrompt] = {}

    def names(self) -> list[str]:
        """All names, in the order of the alphabet."""
        files = [] if self.folder is None else self.folder.glob(f"*{VOICE_SUFFIX}")
        return sorted({*self._prompts, *(file.stem for file in files)})

    def prompt(self, name: str) -> VoicePrompt:
        """The prompt of this name."""
        if name not in self._prompts:
            file = None if self.folder is None else self.folder / f"{_checked(name)}{VOICE_SUFFIX}"
            if file is None or not file.is_file():
                known = ", ".join(self.names()) or "none"
                raise InputError(f"the codec has no voice {name!r}; it has: {known}")
            self._prompts[name] = read_prompt(file)
        return self._prompts[name]

    def keep(self, name: str, prompt: VoicePrompt) -> None:
        """Keep a prompt under a name, in the folder too where there is one."""
        self._prompts[_checked(name)] = prompt
        if self.folder is not None:
            write_prompt(prompt, self.folder / f"{name}{VOICE_SUFFIX}")

    def copy_to(self, folder: Path) -> None:
        """Write all of them into another codec's folder."""
        for name in self.names():
            write_prompt(self.prompt(name), folder / VOICES_FOLDER / f"{name}{VOICE_SUFFIX}")


def read_prompt(file: Path) -> VoicePrompt:
    """The prompt of a file that `write_prompt` made."""
    try:
        tensors = load_file(file)
        return VoicePrompt(tensors["codes"].long(), tensors["mel"].float(), tensors["speaker"].float())
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{file} is not a voice with codes, mel and speaker ({error}); make it anew") from error


def write_prompt(prompt: VoicePrompt, file: Path) -> None:
    """One file with codes, mel and the speaker's vector."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"codes": prompt.codes.to(torch.int32), "mel": prompt.mel, "speaker": prompt.speaker}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _checked(name: str) -> str:
    if not VOICE_NAME.fullmatch(name):
        raise InputError(f"a voice cannot be named {name!r}; use letters, digits, - and _")
    return name


class MossSpeechCodec(FlowSpeech):
    """Encoder, flow decoder and vocoder of one checkpoint, and the way between them."""

    flow: FlowDecoder
    vocoder: HiFTStream

    def __init__(
        self,
        encoder: SpeechEncoder,
        flow: FlowDecoder,
        vocoder: HiFT,
        speaker: SpeakerEmbedder | None = None,
        look_right: int | None = 8,
        named: NamedVoices | None = None,
    ) -> None:
        super().__init__(flow, HiFTStream(vocoder, look_right))
        self.ear = SpeechStream(encoder)
        self.speaker = speaker
        self.mel = VocoderMel(MATCHA_24KHZ)
        self.named = named or NamedVoices()
        self.ready: dict[str, FlowVoice] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int | None = 5,
    ) -> "MossSpeechCodec":
        """A codec's folder. `chunk` picks the flow weights: 5 or 25 codes for streams, None for offline use.

        Published folders have `.pt` files and a speaker network. Ours have `.safetensors`, and voices instead of it.
        """
        if chunk not in FLOWS:
            raise InputError(f"the codec is published for chunks of 5 or 25 codes, or None for offline, not {chunk}")
        folder = Path(folder)
        flow, vocoder = _sizes(folder, chunk)
        speaker, named = folder / "flow" / SPEAKER, NamedVoices(folder)
        return cls(
            SpeechEncoder.load(folder, device, dtype),
            FlowDecoder.load(_weights(folder, FLOWS[chunk]), flow, device, dtype),
            HiFT.load(_weights(folder, VOCODER), device, vocoder),
            None if named.names() and not speaker.is_file() else SpeakerEmbedder(speaker),
            named=named,
        )

    def save(self, folder: str | Path, chunk: int | None = 5) -> None:
        """Write weights, sizes and voices so that `load` takes them; the speaker's ONNX is not ours to write."""
        folder = Path(folder)
        (folder / "flow").mkdir(parents=True, exist_ok=True)
        encoder, vocoder = self.ear.encoder, self.vocoder.hift
        config = dataclasses.asdict(encoder.config) | {"pooling_position": encoder.config.quantize_position}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf8")
        _save(encoder, folder / "model.safetensors", "encoder.")
        _save(self.flow, folder / "flow" / f"{FLOWS[chunk]}.safetensors")
        _save(vocoder, folder / "flow" / f"{VOCODER}.safetensors")
        sizes = {"flow": dataclasses.asdict(self.flow.config), "vocoder": dataclasses.asdict(vocoder.config)}
        (folder / "flow" / SIZES).write_text(json.dumps(sizes, indent=2), encoding="utf8")
        self.named.copy_to(folder)

    @property
    def samples_per_code(self) -> int:
        """24 kHz samples that one code becomes."""
        return self.flow.config.ratio * self.vocoder.hift.config.hop

    def encode(self, sound: Sound) -> Tensor:
        """The codes of a whole sound of any rate.  # [code]"""
        return self.ear.encode(self._samples(sound, EAR_RATE))

    def voice(self, sound: Sound, speaker: Tensor | None = None) -> FlowVoice:
        """The voice of a recording, all of it that can be computed before a reply. Make it once and share it."""
        if sound.seconds > LONGEST_PROMPT_SECONDS:
            raise InputError(
                f"the voice recording has {sound.seconds:.1f} s; give at most {LONGEST_PROMPT_SECONDS:.0f}"
            )
        if speaker is None:
            if self.speaker is None:
                named = ", ".join(self.voices()) or "it has none"
                raise InputError(
                    f"this codec has no speaker network; give the speaker's vector or a voice's name: {named}"
                )
            speaker = self.speaker.embed(self._samples(sound, EAR_RATE))
        codes = self.encode(sound)
        mel = self.mel(self._samples(sound, VOICE_RATE)[None])[0].T  # [frame, band]
        # Codes are rounded up to 80 ms and mel frames are not, so the end of either may stand alone. Whole chunks of
        # prompt let the first chunk of every reply be all reply.
        whole, chunk = min(len(codes), len(mel) // self.flow.config.ratio), self.flow.config.chunk
        whole -= whole % chunk if whole >= chunk else 0
        if whole == 0:
            raise InputError(f"the voice recording has {sound.seconds:.2f} s; give at least a second")
        return self.flow.voice(VoicePrompt(codes[:whole], mel[: whole * self.flow.config.ratio], speaker))

    def voices(self) -> list[str]:
        """The names of the voices that come with the codec or were kept."""
        return self.named.names()

    def named_voice(self, name: str) -> FlowVoice:
        """One of `voices()`, computed once and shared."""
        if name not in self.ready:
            self.ready[name] = self.flow.voice(self.named.prompt(name))
        return self.ready[name]

    def save_voice(self, name: str, prompt: VoicePrompt) -> None:
        """Keep a voice under a name; a codec that was loaded from a folder writes it there."""
        voice = self.flow.voice(prompt)
        self.named.keep(name, prompt)
        self.ready[name] = voice

    def speak(self, codes: Tensor, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> Tensor:
        """A whole reply as one stream makes it.  # [code] → [sample]"""
        sound, _ = self.step(self.start(voice, left_chunks, seed), codes, final=True)
        return sound

    def _samples(self, sound: Sound, rate: int) -> Tensor:
        return torch.from_numpy(sound.mono().resampled(rate).samples[0])


def _weights(folder: Path, name: str) -> Path:
    """The file of a part: ours if it is there, else the published one."""
    ours = folder / "flow" / f"{name}.safetensors"
    return ours if ours.is_file() else ours.with_suffix(".pt")


def _save(module: nn.Module, file: Path, prefix: str = "") -> None:
    tensors = {prefix + name: tensor.detach().cpu() for name, tensor in published_tensors(module).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


class GraphedCodec(MossSpeechCodec):
    """The codec on CUDA; its steps give what the codec's give. Replies look back over a left window."""

    def __init__(self, codec: MossSpeechCodec) -> None:
        self._exact_ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.encoder = GraphedSpeechEncoder(codec.ear.encoder)
        # Another encoder, stepped alike.
        self.ear = SpeechStream(cast(SpeechEncoder, self.encoder), keep_for_exact=False)
        self.named, self.ready = codec.named, {}
        self.flow = GraphedFlow(codec.flow)  # type: ignore[assignment]  # another flow, streamed alike
        self.vocoder: GraphedVocoder = GraphedVocoder(codec.vocoder)

    def encode(self, sound: Sound) -> Tensor:
        """The codes of a whole sound of any rate.  # [code]"""
        return self._exact_ear.encode(self._samples(sound, EAR_RATE))

    def beside(self) -> "GraphedCodec":
        """The same codec with graphs of its own, for another lane of the device; states go from one to the other."""
        codec = copy.copy(self)
        codec.flow = cast(Any, self.flow).beside()
        codec.vocoder = self.vocoder.beside()
        return codec

    def start(self, voice: FlowVoice, left_chunks: int | None = LEFT_CHUNKS, seed: int = 0) -> SpokenState:
        """A reply about to begin."""
        return super().start(voice, left_chunks, seed)

    @property
    def spare_bytes(self) -> int:
        """Memory of windows that were given back."""
        return cast(GraphedFlow, self.flow).spare.nbytes

    def give_back(self, used: Sequence[SpokenState], after: Sequence[SpokenState]) -> None:
        """These states were used up by those after them, and the device is done: others may write where they lie."""
        for old, new in zip(used, after, strict=True):
            if old.flow.cache is not None and new.flow.cache is not None:
                cast(GraphedFlow, self.flow).spare.give(old.flow.cache, new.flow.cache)

    def warm_up(
        self,
        voice: FlowVoice,
        batches: Sequence[int] = BUCKETS,
        sizes: Sequence[int] = (),
        left_chunks: int | None = None,
    ) -> None:
        """Capture first hops, those after them, and hops of these sizes in codes: no conversation waits for it.

        From then on batches are filled up to one of these.
        """
        config = self.flow.config
        begins, longer = config.chunk + config.lookahead, [size for size in sizes if size != config.chunk]
        # Whoever has to wait for his first sound in a crowd has codes for a longer hop when he gets it.
        replies = [
            [begins, *[config.chunk] * 3, *longer],
            *([begins, size] for size in longer if size <= 2 * config.chunk),
        ]
        left_chunks = LEFT_CHUNKS if left_chunks is None else left_chunks
        if max(batches) > BUCKETS[-1]:
            raise InputError(f"batches go up to {BUCKETS[-1]}; {max(batches)} was asked for")
        flow = cast(GraphedFlow, self.flow)
        first = (len(voice.codes) + config.chunk) // config.chunk * config.chunk - voice.sink
        flow.buckets = self.vocoder.buckets = sorted(batches)
        flow.times, flow.longest_prefix = sorted({first, config.chunk, *sizes}), voice.sink
        with self.vocoder.learning():
            for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
                for pieces in replies:
                    self._try(voice, left_chunks, streams, pieces)

    def _try(self, voice: FlowVoice, left_chunks: int, streams: int, pieces: Sequence[int]) -> None:
        """Replies that are made of such pieces."""
        states = [self.start(voice, left_chunks, seed) for seed in range(streams)]
        for size in pieces:
            codes, before = [torch.zeros(size, dtype=torch.int64)] * streams, states
            sounds, states = self.step_batch(before, codes, [False] * streams)
            torch.cat(sounds).cpu()  # until it is done
            self.give_back(before, states)


class CodecSizes(NamedTuple):
    """What a sizes file says of a flow and of a vocoder; None where it is silent."""

    flow: FlowConfig | None
    vocoder: HiFTConfig | None


def read_sizes(file: Path) -> CodecSizes:
    """The sizes that a file gives."""
    try:
        given = json.loads(file.read_text(encoding="utf8"))
        flow, vocoder = given.get("flow"), given.get("vocoder")
        if flow is not None:
            flow["encoder"] = FlowEncoderConfig(**flow["encoder"])
            flow["estimator"] = FlowEstimatorConfig(**flow["estimator"])
            flow = FlowConfig(**flow)
        if vocoder is not None:
            lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
            vocoder = HiFTConfig(**(vocoder | lists))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not give the sizes of a flow and a vocoder ({error})") from error
    return CodecSizes(flow, vocoder)


def _sizes(folder: Path, chunk: int | None) -> tuple[FlowConfig, HiFTConfig]:
    """The sizes of a folder's flow and vocoder: the published ones, unless it says otherwise."""
    file = folder / "flow" / SIZES
    if not file.is_file():
        return FlowConfig.moss_speech(chunk or 5), HiFTConfig()
    flow, vocoder = read_sizes(file)
    if flow is None or vocoder is None:
        raise CheckpointError(f"{file} must give the sizes of a flow and of a vocoder; one is missing")
    return flow, vocoder
