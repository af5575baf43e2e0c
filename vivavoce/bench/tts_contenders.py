"""Backends compared by `viva bench tts`: an entry of `CONTENDERS` maps a name to a factory of `Contender`.

`PlainNano` is the baseline, MOSS-TTS-Nano as its published PyTorch code runs it: the whole prompt is prefilled for
every text, the local transformer recomputes its prefix for each code, the stop decision computes the full text head,
and the codec decodes one frame at a time, in float32.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce.cpu_speed import is_bfloat16_fast, is_int8_fast
from vivavoce.device import Device
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.export.nano_onnx import CODEC_META, MANIFEST, lm_graphs
from vivavoce.export.nano_onnx_codec import codec_graphs
from vivavoce.export.onnx_graph import export_graph
from vivavoce.models.interface import Row
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, NanoSampling, NanoTokenizerProtocol
from vivavoce.nn.attention import rotate_pairs
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.quantised import to_int8
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, StoredVoice
from vivavoce.tts.nano import EngineFrameGenerator, NanoTTS
from vivavoce.tts.nano_cpu import CpuFrameGenerator
from vivavoce.tts.onnx import OnnxTTS

Samples = NDArray[np.float32]
TEXT = "The train to the coast leaves from platform nine at half past seven."
VOICE = "bench"
VOICE_FRAMES = 50  # a four-second reference
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


class Contender(Protocol):
    """A backend that speaks the benchmark text."""

    name: str
    rate: int

    def stream(self, seed: int) -> Iterator[Samples]:
        """Audio of the text with a cached voice.  # pieces [channel, time]"""
        ...

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame of work of each part, by name."""
        ...


class LetterTokenizer:
    """A tokenizer for random models: one id per letter."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        return [16 + byte % (self.vocabulary - 16) for byte in "".join(text.split()).encode()]


@dataclass(frozen=True)
class FixedLength(SpeechSettings):
    """Settings with a fixed number of frames, because random weights do not sample the stop id."""

    frames: int = 50

    def max_frames(self, tokens: int) -> int:
        """One row more than this is sampled."""
        return self.frames - 1

    def min_frames(self, tokens: int) -> int:
        """Never stop before the last frame."""
        return self.frames


@dataclass(frozen=True)
class TTSBenchSetup:
    """Device, shape and text length of all contenders."""

    device: Device
    shape: str = "true"
    frames: int = 50
    onnx: Path | None = None
    """Folder of exported ONNX graphs; they are exported if missing."""

    @cached_property
    def voice(self) -> StoredVoice:
        """A voice of random codes."""
        config = SHAPES[self.shape][0]
        size = (VOICE_FRAMES, config.n_vq)
        codes = torch.randint(config.audio_vocab_size, size, generator=torch.Generator().manual_seed(1))
        return StoredVoice(VOICE, codes.tolist())

    def model(self, dtype: torch.dtype) -> MossTTSNano:
        return MossTTSNano.random(SHAPES[self.shape][0], self.device.torch_device, dtype)

    def codec(self, dtype: torch.dtype = torch.float32) -> MossAudioTokenizerNano:
        with allocating(self.device.torch_device, dtype):
            codec = MossAudioTokenizerNano(SHAPES[self.shape][1])
        fill_randomly(codec, 0)
        return codec.eval()

    def speaker(self, dtype: torch.dtype, is_int8: bool = False, codec_dtype: torch.dtype = torch.float32) -> NanoTTS:
        """This package's implementation."""
        model = self.model(dtype)
        if is_int8:
            to_int8(model.transformer)
            to_int8(model.local_transformer)
        tokenizer = LetterTokenizer(model.config.vocab_size)
        return NanoTTS(model, self.codec(codec_dtype), tokenizer, self.device, self.settings)

    @property
    def settings(self) -> FixedLength:
        return FixedLength(chunk_tokens=0, voices={VOICE: self.voice}, frames=self.frames)


class NanoContender:
    """`NanoTTS` on random weights."""

    def __init__(self, name: str, speaker: NanoTTS) -> None:
        self.name, self.speaker, self.rate = name, speaker, speaker.rate
        speaker.capture()

    def stream(self, seed: int) -> Iterator[Samples]:
        return self.speaker.stream(TEXT, VOICE, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame of work of each part, by name."""
        generator = self.speaker.generator
        parts = {"codec": self._codec(1), f"codec, {CODEC_CHUNK} at a time": self._codec(CODEC_CHUNK)}
        if isinstance(generator, CpuFrameGenerator):
            return {**_cpu_stages(generator), **parts}
        assert isinstance(generator, EngineFrameGenerator)
        frames = itertools.chain.from_iterable(self._frames(seed) for seed in itertools.count())
        return {"global and local": lambda: next(frames), **parts}

    def _frames(self, seed: int) -> Iterator[tuple[int, ...]]:
        speaker = self.speaker
        generation = speaker.settings.generation(speaker.model.config.n_vq, len(TEXT), seed)
        return iter(speaker.generator.frames(tuple(map(tuple, speaker.voices.get(VOICE).codes)), TEXT, generation))

    def _codec(self, frames: int) -> Callable[[], object]:
        decode, turn = self.speaker.decode, itertools.cycle(range(frames))
        codes = [(0,) * self.speaker.model.codebooks] * frames
        state = decode.start()

        def step() -> None:
            nonlocal state
            if next(turn) == 0:
                _, state = decode(state, codes)

        return step


def _cpu_stages(generator: CpuFrameGenerator) -> dict[str, Callable[[], object]]:
    from vivavoce.tts.frame_sampling import SequenceSampler

    decoder = generator.decoder
    config = decoder.model.config
    rows = generator.prompt.speech(TEXT)
    kv_buffer, frame_buffer = decoder.new_kv_buffer(VOICE_FRAMES + 400).zero_(), decoder.new_frame_buffer()
    hidden = decoder.advance(decoder.model.embed(torch.tensor(rows)), kv_buffer, 0)
    samplings = SpeechSettings().generation(config.n_vq, len(TEXT), 0).per_channel(decoder.model.channels)
    sampler = SequenceSampler(samplings, 0, config.audio_vocab_size)
    codes = (0,) * decoder.model.codebooks

    def local() -> None:
        sampler.start_row(len(rows))
        decoder.sample_frame(hidden, frame_buffer, sampler, may_stop=False)

    return {
        "global": lambda: decoder.advance(decoder.embed_frame(codes), kv_buffer, len(rows) + VOICE_FRAMES),
        "local": local,
    }


Past = list[tuple[Tensor, Tensor]]  # keys and values of each layer: [1, head, row, head_dim]


class PlainNano:
    """The published algorithm, for a fixed number of frames."""

    name = "plain"

    def __init__(
        self,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        rows: Sequence[Row],
        frames: int,
        sampling: NanoSampling,
    ) -> None:
        self.model, self.codec, self.frames, self.sampling = model, codec, frames, sampling
        self.device = model.transformer.wte.weight.device
        self.rows = torch.tensor(rows, device=self.device)
        self.rate = codec.config.sample_rate

    def stream(self, seed: int) -> Iterator[Samples]:
        torch.manual_seed(seed)
        past: Past = []
        hidden = self.read(self.rows, past)
        state, generated = self.codec.decoder_state(), list[Tensor]()
        for _ in range(self.frames):
            codes = self.frame(hidden, generated)
            generated.append(codes)
            sound, state = self.codec.decode_step(state, codes[:, None])
            yield sound.cpu().numpy()
            hidden = self.read(self.row(codes), past)

    def stages(self) -> dict[str, Callable[[], object]]:
        """One frame of work of each part, after a prompt."""
        past: Past = []
        hidden = self.read(self.rows, past)
        codes = self.frame(hidden, [])
        state = self.codec.decoder_state()

        def codec_frame() -> None:
            nonlocal state
            _, state = self.codec.decode_step(state, codes[:, None])

        return {
            "global": lambda: self.read(self.row(codes), list(past)),
            "local": lambda: self.frame(hidden, []),
            "codec": codec_frame,
        }

    def row(self, codes: Tensor) -> Tensor:
        """# [1, channel]"""
        slot = torch.tensor([self.model.config.audio_assistant_slot_token_id], device=self.device)
        return torch.cat([slot, codes])[None]

    @torch.inference_mode()
    def read(self, rows: Tensor, past: Past) -> Tensor:
        """Hidden state of the last new row; keys and values are appended to `past`.  # [1, hidden]"""
        position = past[0][0].shape[2] if past else 0
        states = self._layers(self.model.transformer.h, self.model.embed(rows), position, past)
        return functional.layer_norm(states, states.shape[-1:], *self._norm(self.model.transformer.ln_f))[-1:]

    @torch.inference_mode()
    def frame(self, hidden: Tensor, generated: list[Tensor]) -> Tensor:
        """The next frame's codes; never stops.  # [codebook]"""
        model = self.model
        slot = model.transformer.wte.weight[model.config.audio_assistant_slot_token_id]
        inputs, codes = [hidden[0]], list[Tensor]()
        functional.linear(self._local(inputs), model.transformer.wte.weight)
        inputs.append(slot)
        for codebook in range(model.codebooks):
            logits = model.code_logits(codebook, self._local(inputs)[None])[0]
            earlier = torch.stack([each[codebook] for each in generated]) if generated else None
            codes.append(self._sample_code(logits, earlier))
            inputs.append(model.audio_embeddings.embed(codebook, codes[-1]))
        return torch.stack(codes)

    def _local(self, inputs: list[Tensor]) -> Tensor:
        local = self.model.local_transformer
        states = self._layers(local.h, torch.stack(inputs), 0, [])
        return functional.layer_norm(states, states.shape[-1:], *self._norm(local.ln_f))[-1]

    def _layers(self, layers: torch.nn.ModuleList, x: Tensor, position: int, past: Past) -> Tensor:
        is_first = not past
        positions = slice(position, position + x.shape[0])
        cos, sin = self.model.rotary.cos[positions], self.model.rotary.sin[positions]
        for index, layer in enumerate(layers):

            def attend(queries: Tensor, keys: Tensor, values: Tensor, index: int = index) -> Tensor:
                new = [rotate_pairs(keys, cos, sin).transpose(0, 1)[None], values.transpose(0, 1)[None]]
                if not is_first:
                    new = [torch.cat(pair, dim=2) for pair in zip(past[index], new, strict=True)]
                    past[index] = (new[0], new[1])
                else:
                    past.append((new[0], new[1]))
                rotated = rotate_pairs(queries, cos, sin).transpose(0, 1)[None]
                causal = queries.shape[0] > 1
                mixed = functional.scaled_dot_product_attention(rotated, new[0], new[1], is_causal=causal)
                return mixed[0].transpose(0, 1)

            x = layer(x, attend)
        return x

    def _sample_code(self, logits: Tensor, earlier: Tensor | None) -> Tensor:
        sampling = self.sampling
        if earlier is not None:
            seen_logits = logits[earlier]
            penalty = sampling.audio_repetition_penalty
            logits = logits.scatter(
                0, earlier, torch.where(seen_logits < 0, seen_logits * penalty, seen_logits / penalty)
            )
        scores, ids = (logits / sampling.audio_temperature).topk(min(sampling.audio_top_k, len(logits)))
        probabilities = scores.softmax(-1)
        kept = probabilities.cumsum(-1) - probabilities < sampling.audio_top_p
        return ids[torch.multinomial(probabilities * kept, 1)[0]]

    @staticmethod
    def _norm(norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
        return norm.weight, norm.bias, norm.eps


def _plain(setup: TTSBenchSetup) -> Contender:
    speaker = setup.speaker(torch.float32)
    rows = speaker.prompt.clone(TEXT, setup.voice.codes)
    return PlainNano(speaker.model, speaker.codec, rows, setup.frames, NanoSampling())


def _onnx(setup: TTSBenchSetup) -> Contender:
    if setup.onnx is None:
        raise InputError("the onnx backend needs a folder for its graphs: give --onnx FOLDER")

    model, codec = setup.model(torch.float32), setup.codec()
    tokenizer = LetterTokenizer(model.config.vocab_size)
    return OnnxContender(setup.onnx, model, codec, tokenizer, setup.settings, (TEXT, VOICE))


def _own_backend(
    name: str, dtype: torch.dtype, is_int8: bool = False, codec_dtype: torch.dtype = torch.float32
) -> Callable[[TTSBenchSetup], Contender]:
    def make(setup: TTSBenchSetup) -> Contender:
        if codec_dtype is torch.bfloat16 and not is_bfloat16_fast():
            raise InputError(f"a bfloat16 codec needs a CPU with AMX, and this is {setup.device.name}")
        if is_int8 and (setup.device.kind != "cpu" or not is_int8_fast()):
            raise InputError(f"int8 speech needs an x86 CPU with VNNI, and this is {setup.device.name}")
        if dtype not in setup.device.dtypes:
            raise InputError(f"{setup.device.name} does not run {name}")
        return NanoContender(name, setup.speaker(dtype, is_int8, codec_dtype))

    return make


def _eager(setup: TTSBenchSetup) -> Contender:
    """Without CUDA graphs, to show their effect."""
    if not setup.device.graphs:
        raise InputError(f"{setup.device.name} has no CUDA graphs to disable")
    ungraphed = replace(setup, device=replace(setup.device, graphs=False))
    return NanoContender("bfloat16-eager", ungraphed.speaker(torch.bfloat16))


CONTENDERS: dict[str, Callable[[TTSBenchSetup], Contender]] = {
    "plain": _plain,
    "float32": _own_backend("float32", torch.float32),
    "int8": _own_backend("int8", torch.float32, is_int8=True),
    "int8-amx": _own_backend("int8-amx", torch.float32, is_int8=True, codec_dtype=torch.bfloat16),
    "bfloat16": _own_backend("bfloat16", torch.bfloat16),
    "bfloat16-eager": _eager,
    "float16": _own_backend("float16", torch.float16),
    "onnx": _onnx,
}
ON_DEVICE = {"cpu": ("plain", "float32", "int8", "int8-amx", "onnx"), "npu": ("plain", "float16")}
ELSEWHERE = ("plain", "bfloat16", "bfloat16-eager")


NEEDED = ("moss_tts_prefill", "moss_tts_decode_step", "moss_tts_local_fixed_sampled_frame")
NEEDED_OF_CODEC = ("moss_audio_tokenizer_decode_step",)


class OnnxContender:
    """`OnnxTTS` on random weights, with torch's thread count."""

    name = "onnx"

    def __init__(
        self,
        folder: Path,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
        settings: SpeechSettings,
        text_and_voice: tuple[str, str],
    ) -> None:
        _export(folder, model, codec)
        threads = torch.get_num_threads()
        self._speaker = OnnxTTS(folder, folder, threads=threads, tokenizer=tokenizer, settings=settings)
        self._text_and_voice, self.rate = text_and_voice, self._speaker.rate

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        return self._speaker.stream(*self._text_and_voice, SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """No per-stage timing."""
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
