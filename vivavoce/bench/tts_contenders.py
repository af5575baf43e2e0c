"""Who takes part in `viva bench tts`: one text, said by each in its own way.

A contender is a name in `CONTENDERS` and a function that makes a `Speaks` of a `TTSBenchSetup`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.bench.tts_plain import PlainNano
from vivavoce.cpu_speed import is_bfloat16_fast, is_int8_fast
from vivavoce.device import Device
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.export.nano_onnx import CODEC_META, MANIFEST, lm_graphs
from vivavoce.export.nano_onnx_codec import codec_graphs
from vivavoce.export.onnx_graph import export_graph
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, NanoSampling, NanoTokenizerProtocol
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.quantised import to_int8
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings
from vivavoce.tts.nano import NanoTTS
from vivavoce.tts.nano_engine import CpuFrameGenerator, EngineFrameGenerator
from vivavoce.tts.onnx import OnnxTTS
from vivavoce.tts.voices import StoredVoice

Samples = NDArray[np.float32]
TEXT = "The train to the coast leaves from platform nine at half past seven."
VOICE = "bench"
VOICE_FRAMES = 50  # four seconds of a reference
CODEC_CHUNK = 8

TINY_LM = MossTTSNanoConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, max_positions=2048, n_vq=4,
    audio_vocab_size=64, audio_pad_token_id=64,
)  # fmt: skip


def _stage(inputs: int, outputs: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, 1, seconds, d_model=32, num_heads=2, dim_feedforward=64)


TINY_CODEC = MossAudioTokenizerConfig(
    sample_rate=8000,
    encoder=(20, _stage(20, 24, 0.8), 8, _stage(192, 24, 1.6), 8),
    decoder=(8, _stage(24, 192, 1.6), 8, _stage(24, 20, 0.8), 20),
    quantizer=QuantizerConfig(192, 32, 192, num_quantizers=4, codebook_size=64, codebook_dim=4),
)
SHAPES = {"true": (MossTTSNanoConfig(), MossAudioTokenizerConfig()), "tiny": (TINY_LM, TINY_CODEC)}


class Speaks(Protocol):
    """Says the bench's text."""

    name: str
    rate: int

    def stream(self, seed: int) -> Iterator[Samples]:
        """The sound of the text, in a voice that was used before.  # pieces [channel, time]"""
        ...

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame's work of each part."""
        ...


class SpelledText:
    """A tokenizer of random models: an id a letter."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """The ids of a text."""
        return [16 + byte % (self.vocabulary - 16) for byte in "".join(text.split()).encode()]


@dataclass(frozen=True)
class FixedLength(SpeechSettings):
    """Every text takes as many frames: random weights do not know when to stop."""

    frames: int = 50

    def longest(self, tokens: int) -> int:
        """One row more is drawn than this."""
        return self.frames - 1

    def fewest(self, tokens: int) -> int:
        """Never before the last."""
        return self.frames


@dataclass(frozen=True)
class TTSBenchSetup:
    """What all contenders are given: the device, the shape, and how much to say."""

    device: Device
    shape: str = "true"
    frames: int = 50
    onnx: Path | None = None
    """Where graphs of random weights are, or will be."""

    @cached_property
    def voice(self) -> StoredVoice:
        """A reference of random codes."""
        config = SHAPES[self.shape][0]
        size = (VOICE_FRAMES, config.n_vq)
        codes = torch.randint(config.audio_vocab_size, size, generator=torch.Generator().manual_seed(1))
        return StoredVoice(VOICE, codes.tolist())

    def model(self, dtype: torch.dtype) -> MossTTSNano:
        """Random weights: speed does not depend on their values."""
        return MossTTSNano.random(SHAPES[self.shape][0], self.device.torch_device, dtype)

    def codec(self, dtype: torch.dtype = torch.float32) -> MossAudioTokenizerNano:
        """Likewise."""
        with allocating(self.device.torch_device, dtype):
            codec = MossAudioTokenizerNano(SHAPES[self.shape][1])
        fill_randomly(codec, 0)
        return codec.eval()

    def speaker(self, dtype: torch.dtype, is_int8: bool = False, codec_dtype: torch.dtype = torch.float32) -> NanoTTS:
        """The house's own way."""
        model = self.model(dtype)
        if is_int8:
            to_int8(model.transformer)
            to_int8(model.local_transformer)
        tokenizer = SpelledText(model.config.vocab_size)
        return NanoTTS(model, self.codec(codec_dtype), tokenizer, self.device, self.settings)

    @property
    def settings(self) -> FixedLength:
        """How the text is said."""
        return FixedLength(chunk_tokens=0, voices={VOICE: self.voice}, frames=self.frames)


class NanoSpeaks:
    """`NanoTTS` on random weights."""

    def __init__(self, name: str, speaker: NanoTTS) -> None:
        self.name, self.speaker, self.rate = name, speaker, speaker.rate
        speaker.capture()

    def stream(self, seed: int) -> Iterator[Samples]:
        """The sound of the text."""
        return self.speaker.stream(TEXT, VOICE, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame's work of each part."""
        mouth = self.speaker.mouth
        parts = {"codec": self._codec(1), f"codec, {CODEC_CHUNK} at a time": self._codec(CODEC_CHUNK)}
        if isinstance(mouth, CpuFrameGenerator):
            return {**_cpu_stages(mouth), **parts}
        assert isinstance(mouth, EngineFrameGenerator)
        frames = itertools.chain.from_iterable(self._frames(seed) for seed in itertools.count())
        return {"global and local": lambda: next(frames), **parts}

    def _frames(self, seed: int) -> Iterator[tuple[int, ...]]:
        speaker = self.speaker
        generation = speaker.settings.generation(speaker.model.config.n_vq, len(TEXT), seed)
        return iter(speaker.mouth.frames(tuple(map(tuple, speaker.shelf.get(VOICE).codes)), TEXT, generation))

    def _codec(self, frames: int) -> Callable[[], object]:
        decode, turn = self.speaker.decode, itertools.cycle(range(frames))
        codes = [(0,) * self.speaker.model.codebooks] * frames
        state = decode.start()

        def step() -> None:
            nonlocal state
            if next(turn) == 0:
                _, state = decode(state, codes)

        return step


def _cpu_stages(mouth: CpuFrameGenerator) -> dict[str, Callable[[], object]]:
    from vivavoce.tts.nano_cpu import SequenceDraw

    decoder = mouth.decoder
    config = decoder.model.config
    rows = mouth.prompt.speech(TEXT)
    room, frame_room = decoder.room(VOICE_FRAMES + 400).zero_(), decoder.frame_room()
    hidden = decoder.after(decoder.model.embed(torch.tensor(rows)), room, 0)
    samplings = SpeechSettings().generation(config.n_vq, len(TEXT), 0).per_channel(decoder.model.channels)
    draw = SequenceDraw(samplings, 0, config.audio_vocab_size)
    codes = (0,) * decoder.model.codebooks

    def local() -> None:
        draw.start_row(len(rows))
        decoder.frame(hidden, frame_room, draw, may_stop=False)

    return {"global": lambda: decoder.after(decoder.embedded(codes), room, len(rows) + VOICE_FRAMES), "local": local}


def _plain(setup: TTSBenchSetup) -> Speaks:
    speaker = setup.speaker(torch.float32)
    rows = speaker.prompt.clone(TEXT, setup.voice.codes)
    return PlainNano(speaker.model, speaker.codec, rows, setup.frames, NanoSampling())


def _onnx(setup: TTSBenchSetup) -> Speaks:
    if setup.onnx is None:
        raise InputError("graphs are exported into, and taken from, the folder that --onnx names")

    model, codec = setup.model(torch.float32), setup.codec()
    tokenizer = SpelledText(model.config.vocab_size)
    return OnnxSpeaks(setup.onnx, model, codec, tokenizer, setup.settings, (TEXT, VOICE))


def _ours(
    name: str, dtype: torch.dtype, is_int8: bool = False, codec_dtype: torch.dtype = torch.float32
) -> Callable[[TTSBenchSetup], Speaks]:
    def make(setup: TTSBenchSetup) -> Speaks:
        if codec_dtype is torch.bfloat16 and not is_bfloat16_fast():
            raise InputError(f"a bfloat16 codec needs a CPU with AMX, and this is {setup.device.name}")
        if is_int8 and (setup.device.kind != "cpu" or not is_int8_fast()):
            raise InputError(f"int8 speech needs an x86 CPU with VNNI, and this is {setup.device.name}")
        if dtype not in setup.device.dtypes:
            raise InputError(f"{setup.device.name} does not run {name}")
        return NanoSpeaks(name, setup.speaker(dtype, is_int8, codec_dtype))

    return make


def _eager(setup: TTSBenchSetup) -> Speaks:
    """Without graphs: what they are worth."""
    if not setup.device.graphs:
        raise InputError(f"{setup.device.name} has no graphs to do without")
    without = replace(setup, device=replace(setup.device, graphs=False))
    return NanoSpeaks("bfloat16-eager", without.speaker(torch.bfloat16))


CONTENDERS: dict[str, Callable[[TTSBenchSetup], Speaks]] = {
    "plain": _plain,
    "float32": _ours("float32", torch.float32),
    "int8": _ours("int8", torch.float32, is_int8=True),
    "int8-amx": _ours("int8-amx", torch.float32, is_int8=True, codec_dtype=torch.bfloat16),
    "bfloat16": _ours("bfloat16", torch.bfloat16),
    "bfloat16-eager": _eager,
    "float16": _ours("float16", torch.float16),
    "onnx": _onnx,
}
ON_DEVICE = {"cpu": ("plain", "float32", "int8", "int8-amx", "onnx"), "npu": ("plain", "float16")}
ELSEWHERE = ("plain", "bfloat16", "bfloat16-eager")


NEEDED = ("moss_tts_prefill", "moss_tts_decode_step", "moss_tts_local_fixed_sampled_frame")
NEEDED_OF_CODEC = ("moss_audio_tokenizer_decode_step",)


class OnnxSpeaks:
    """`OnnxTTS` on random weights, with as many threads as torch has."""

    name = "onnx"

    def __init__(
        self,
        folder: Path,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
        settings: SpeechSettings,
        said: tuple[str, str],
    ) -> None:
        _export(folder, model, codec)
        threads = torch.get_num_threads()
        self._speaker = OnnxTTS(folder, folder, threads=threads, tokenizer=tokenizer, settings=settings)
        self._said, self.rate = said, self._speaker.rate

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        """The sound of the text."""
        return self._speaker.stream(*self._said, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """Its parts are the runtime's own."""
        return {}


def _export(folder: Path, model: MossTTSNano, codec: MossAudioTokenizerNano) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    graphs = chain(lm_graphs(model), codec_graphs(codec))
    for graph in graphs:
        if graph.name in NEEDED + NEEDED_OF_CODEC and not (folder / f"{graph.name}.onnx").is_file():
            with stage(f"exporting {graph.name}"):
                export_graph(graph, folder, check=False)
    sizes = codec.config
    meta = {"sample_rate": sizes.sample_rate, "channels": sizes.channels, "frame_samples": sizes.frame_samples}
    (folder / MANIFEST).write_text(json.dumps({"tts_config": asdict(model.config)}), encoding="utf8")
    (folder / CODEC_META).write_text(json.dumps(meta), encoding="utf8")
