"""MOSS-Speech's codec: speech encoder (16 kHz sound → codes), flow decoder and vocoder (codes → mel → 24 kHz sound).

`MossSpeechCodec` is the plain implementation, `GraphedCodec` replays its steps as CUDA graphs; tests hold the two
equal. Named voices are prompts in the codec's folder, one small file each.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
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
from vivavoce.models.cosyvoice.folder import SpeakerEmbedder, mono_samples
from vivavoce.models.flow.cuda import BUCKETS, GraphedFlow
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig, FlowSpeech, SpokenState
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.cuda import GraphedVocoder
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.speech_encoder.cuda import GraphedSpeechStream
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechStream

__all__ = ["CodecSizes", "MossSpeechCodec", "SpokenState", "read_sizes"]

ENCODER_RATE = 16_000
DECODER_RATE = 24_000
MAX_PROMPT_SECONDS = 30.0  # one segment of the speech encoder
SIZES = "sizes.json"  # written by `save`; published folders, all of one size, have no such file
FLOWS = {None: "flow", 5: "flow-chunk-5", 25: "flow-chunk-25"}  # files by codes in a chunk; None: offline
VOCODER = "hift"
SPEAKER = "campplus.onnx"


LEFT_CHUNKS = 8  # past chunks that a reply of `GraphedCodec` attends to
VOICES_FOLDER = "voices"
VOICE_SUFFIX = ".safetensors"
VOICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class NamedVoices:
    """Voice prompts by name: those of a codec's folder, and those added since."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is the codec's; None: prompts are held in memory only."""
        self.folder = None if folder is None else folder / VOICES_FOLDER
        self._prompts: dict[str, VoicePrompt] = {}

    def names(self) -> list[str]:
        """All names, sorted."""
        files = [] if self.folder is None else self.folder.glob(f"*{VOICE_SUFFIX}")
        return sorted({*self._prompts, *(file.stem for file in files)})

    def prompt(self, name: str) -> VoicePrompt:
        if name not in self._prompts:
            file = None if self.folder is None else self.folder / f"{_checked(name)}{VOICE_SUFFIX}"
            if file is None or not file.is_file():
                known = ", ".join(self.names()) or "none"
                raise InputError(f"the codec has no voice {name!r}; it has: {known}")
            self._prompts[name] = read_prompt(file)
        return self._prompts[name]

    def add(self, name: str, prompt: VoicePrompt) -> None:
        """Add a prompt, and write it to the folder if there is one."""
        self._prompts[_checked(name)] = prompt
        if self.folder is not None:
            write_prompt(prompt, self.folder / f"{name}{VOICE_SUFFIX}")

    def copy_to(self, folder: Path) -> None:
        """Write all prompts into another codec's folder."""
        for name in self.names():
            write_prompt(self.prompt(name), folder / VOICES_FOLDER / f"{name}{VOICE_SUFFIX}")


def read_prompt(file: Path) -> VoicePrompt:
    """Read a file written by `write_prompt`."""
    try:
        tensors = load_file(file)
        return VoicePrompt(tensors["codes"].long(), tensors["mel"].float(), tensors["speaker"].float())
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{file} is not a voice with codes, mel and speaker ({error}); create it again"
        ) from error


def write_prompt(prompt: VoicePrompt, file: Path) -> None:
    """Write codes, mel and speaker vector as one safetensors file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"codes": prompt.codes.to(torch.int32), "mel": prompt.mel, "speaker": prompt.speaker}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _checked(name: str) -> str:
    if not VOICE_NAME.fullmatch(name):
        raise InputError(f"a voice cannot be named {name!r}; use letters, digits, - and _")
    return name


class MossSpeechCodec(FlowSpeech):
    """Speech encoder, flow decoder and vocoder of one checkpoint."""

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
        self.speech_encoder = SpeechStream(encoder)
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
        """Load a folder. `chunk` selects the flow weights: 5 or 25 codes for streams, None for offline use.

        Published folders have `.pt` files and a speaker network; saved ones have `.safetensors` and named voices.
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
        """Write weights, sizes and voices for `load`; the speaker network (ONNX) is not written."""
        folder = Path(folder)
        (folder / "flow").mkdir(parents=True, exist_ok=True)
        encoder, vocoder = self.speech_encoder.encoder, self.vocoder.hift
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
        """24 kHz samples per code."""
        return self.flow.config.ratio * self.vocoder.hift.config.hop

    def encode(self, sound: Sound) -> Tensor:
        """Codes of a whole sound of any rate.  # [code]"""
        return self.speech_encoder.encode(mono_samples(sound, ENCODER_RATE))

    def voice(self, sound: Sound, speaker: Tensor | None = None) -> FlowVoice:
        """The voice of a recording with its flow cache precomputed; it can be shared by any number of replies."""
        if sound.seconds > MAX_PROMPT_SECONDS:
            raise InputError(f"the voice recording has {sound.seconds:.1f} s; give at most {MAX_PROMPT_SECONDS:.0f}")
        if speaker is None:
            if self.speaker is None:
                named = ", ".join(self.voices()) or "it has none"
                raise InputError(
                    f"this codec has no speaker network; give the speaker's vector or a voice's name: {named}"
                )
            speaker = self.speaker.embed(mono_samples(sound, ENCODER_RATE))
        codes = self.encode(sound)
        mel = self.mel(mono_samples(sound, DECODER_RATE)[None])[0].T  # [frame, band]
        # Codes are rounded up to 80 ms and mel frames are not, so their ends may differ. With whole chunks of prompt,
        # the first chunk of every reply holds only reply codes.
        length, chunk = min(len(codes), len(mel) // self.flow.config.ratio), self.flow.config.chunk
        length -= length % chunk if length >= chunk else 0
        if length == 0:
            raise InputError(f"the voice recording has {sound.seconds:.2f} s; give at least a second")
        return self.flow.voice(VoicePrompt(codes[:length], mel[: length * self.flow.config.ratio], speaker))

    def voices(self) -> list[str]:
        """Names of the voices in the codec's folder or saved since."""
        return self.named.names()

    def named_voice(self, name: str) -> FlowVoice:
        """One of `voices()`; computed once and cached."""
        if name not in self.ready:
            self.ready[name] = self.flow.voice(self.named.prompt(name))
        return self.ready[name]

    def save_voice(self, name: str, prompt: VoicePrompt) -> None:
        """Save a voice under a name, in the codec's folder if it has one."""
        voice = self.flow.voice(prompt)
        self.named.add(name, prompt)
        self.ready[name] = voice

    def speak(self, codes: Tensor, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> Tensor:
        """The sound of a whole reply.  # [code] → [sample]"""
        sound, _ = self.step(self.start(voice, left_chunks, seed), codes, final=True)
        return sound


def _weights(folder: Path, name: str) -> Path:
    """The `.safetensors` file of a part if there is one, else the published `.pt`."""
    ours = folder / "flow" / f"{name}.safetensors"
    return ours if ours.is_file() else ours.with_suffix(".pt")


def _save(module: nn.Module, file: Path, prefix: str = "") -> None:
    tensors = {prefix + name: tensor.detach().cpu() for name, tensor in published_tensors(module).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


class GraphedCodec(MossSpeechCodec):
    """The codec on CUDA, its steps replayed as graphs; replies attend to a left window of chunks."""

    def __init__(self, codec: MossSpeechCodec) -> None:
        self._exact_encoder, self.speaker, self.mel = codec.speech_encoder, codec.speaker, codec.mel
        self.speech_encoder = GraphedSpeechStream(codec.speech_encoder.encoder)  # type: ignore[assignment]  # as above
        self.named, self.ready = codec.named, {}
        self.flow = GraphedFlow(codec.flow)  # type: ignore[assignment]  # same streaming interface
        self.vocoder: GraphedVocoder = GraphedVocoder(codec.vocoder)

    def encode(self, sound: Sound) -> Tensor:
        """Codes of a whole sound by the plain encoder: graphs serve streams only.  # [code]"""
        return self._exact_encoder.encode(mono_samples(sound, ENCODER_RATE))

    def with_own_graphs(self) -> "GraphedCodec":
        """The same codec with its own graphs, for another CUDA stream; states can move between the two."""
        codec = copy.copy(self)
        codec.flow = cast(Any, self.flow).with_own_graphs()
        codec.vocoder = self.vocoder.with_own_graphs()
        return codec

    def pause_before_parts(self, before_part: Callable[[], None]) -> None:
        """Capture passes in parts from now on, and call this before each part."""
        cast(GraphedFlow, self.flow).pause_before_parts(before_part)
        self.vocoder.pause_before_parts(before_part)

    def start(self, voice: FlowVoice, left_chunks: int | None = LEFT_CHUNKS, seed: int = 0) -> SpokenState:
        """The state of a new reply."""
        return super().start(voice, left_chunks, seed)

    @property
    def pooled_bytes(self) -> int:
        """Memory of released windows in the pool."""
        return cast(GraphedFlow, self.flow).pool.nbytes

    def release_windows(self, used: Sequence[SpokenState], after: Sequence[SpokenState]) -> None:
        """Return the windows of used states to the pool; the device must have finished reading them."""
        for old, new in zip(used, after, strict=True):
            if old.flow.cache is not None and new.flow.cache is not None:
                cast(GraphedFlow, self.flow).pool.release(old.flow.cache, new.flow.cache)

    def warm_up(
        self,
        voice: FlowVoice,
        batches: Sequence[int] = BUCKETS,
        sizes: Sequence[int] = (),
        left_chunks: int | None = None,
        first_units: Sequence[int] = (1,),
    ) -> None:
        """Capture first hops of `first_units` chunks, the hops after them, and hops of `sizes` codes, ahead of use.

        From then on batches are padded to one of the captured sizes.
        """
        config = self.flow.config
        first_size, other_sizes = config.chunk + config.lookahead, [size for size in sizes if size != config.chunk]
        # Under load a reply waits for its first hop; by then it has codes for a longer second one.
        replies = [
            [first_size, *[config.chunk] * 3, *other_sizes],
            *([first_size, size] for size in other_sizes if size <= 2 * config.chunk),
            *([first_size + (units - 1) * config.chunk, config.chunk] for units in first_units if units > 1),
        ]
        left_chunks = LEFT_CHUNKS if left_chunks is None else left_chunks
        if max(batches) > BUCKETS[-1]:
            raise InputError(f"a batch has at most {BUCKETS[-1]} replies, not {max(batches)}")
        flow = cast(GraphedFlow, self.flow)
        first = (len(voice.codes) + config.chunk) // config.chunk * config.chunk - voice.sink
        flow.buckets = self.vocoder.buckets = sorted(batches)
        flow.hop_sizes, flow.max_prefix = sorted({first, config.chunk, *sizes}), voice.sink
        with self.vocoder.recording_shapes():
            for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
                for pieces in replies:
                    self._run_replies(voice, left_chunks, streams, pieces)

    def _run_replies(self, voice: FlowVoice, left_chunks: int, streams: int, pieces: Sequence[int]) -> None:
        """Step a batch of replies through pieces of these sizes, which captures their graphs."""
        states = [self.start(voice, left_chunks, seed) for seed in range(streams)]
        for size in pieces:
            codes, previous = [torch.zeros(size, dtype=torch.int64)] * streams, states
            sounds, states = self.step_batch(previous, codes, [False] * streams)
            torch.cat(sounds).cpu()  # synchronise
            self.release_windows(previous, states)


class CodecSizes(NamedTuple):
    """Flow and vocoder sizes of a sizes file; None where absent."""

    flow: FlowConfig | None
    vocoder: HiFTConfig | None


def read_sizes(file: Path) -> CodecSizes:
    try:
        values = json.loads(file.read_text(encoding="utf8"))
        flow, vocoder = values.get("flow"), values.get("vocoder")
        if flow is not None:
            flow["encoder"] = FlowEncoderConfig(**flow["encoder"])
            flow["estimator"] = FlowEstimatorConfig(**flow["estimator"])
            flow = FlowConfig(**flow)
        if vocoder is not None:
            lists = {name: tuple(value) for name, value in vocoder.items() if isinstance(value, list)}
            vocoder = HiFTConfig(**(vocoder | lists))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not have the sizes of a flow and a vocoder ({error})") from error
    return CodecSizes(flow, vocoder)


def _sizes(folder: Path, chunk: int | None) -> tuple[FlowConfig, HiFTConfig]:
    """Flow and vocoder sizes of a folder: those of its sizes file, else the published ones."""
    file = folder / "flow" / SIZES
    if not file.is_file():
        return FlowConfig.moss_speech(chunk or 5), HiFTConfig()
    flow, vocoder = read_sizes(file)
    if flow is None or vocoder is None:
        raise CheckpointError(f"{file} must have the sizes of a flow and of a vocoder; one is missing")
    return flow, vocoder
