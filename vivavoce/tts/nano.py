"""MOSS-TTS-Nano by torch, on any device. A voice's part of the prompt is computed once and forked for every text."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.device import Device, pick
from vivavoce.errors import CheckpointError
from vivavoce.implementations import choose_nano_generator, choose_nano_lm
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, MossTTSNanoPrompt, NanoTokenizerProtocol
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.nn.process_settings import torch_threads
from vivavoce.nn.quantised import to_int8
from vivavoce.tts.frame_model import ChunkedPlayback, Frames, FrameTTS, SpokenPrefix, beside, spare_cores
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings
from vivavoce.tts.nano_engine import (
    BatchedDecoder,
    CpuFrameGenerator,
    EngineFrameGenerator,
    FrameGenerator,
    SingleDecoder,
    State,
)
from vivavoce.tts.voices import VoiceStore

REPEATS = 5
WORTH = 0.9  # of the time before: less gain than this is not worth a core
SMALLEST_SHARED = 512  # hidden size; the products of smaller models are done before a second thread is awake


def fastest_threads(generator: FrameGenerator) -> int:
    """How many of torch's threads this model speaks fastest with, one core left to the codec.

    What OMP_NUM_THREADS says, holds.
    """
    if not isinstance(generator, CpuFrameGenerator) or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    config = generator.decoder.model.config
    max_threads = max(1, spare_cores()) if config.hidden_size >= SMALLEST_SHARED else 1
    if max_threads == 1:
        return 1
    usual = SpeechSettings().generation(config.n_vq, 1, 0)
    endless = replace(usual, max_new_rows=100, min_new_rows=101)
    frames = generator.frames((), "a", endless)
    try:
        return best_threads(lambda: next(frames), max_threads)
    finally:
        frames.close()


def best_threads(step: Callable[[], object], max_threads: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """The fewest threads that more of are not clearly faster than."""
    best, fastest, count = 1, float("inf"), 1
    while count <= max_threads:
        with torch_threads.held(count):
            seconds = _median_seconds(step, clock)
        if seconds > fastest * WORTH:
            break
        best, fastest, count = count, seconds, 2 * count
    return best


def _median_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    step()
    times = []
    for _ in range(REPEATS):
        began = clock()
        step()
        times.append(clock() - began)
    return sorted(times)[REPEATS // 2]


__all__ = ["NanoTTS", "SpeakingStyle"]
OFFICIAL_CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano"
CODEC_FOLDER = "codec"


class NanoTTS(FrameTTS):
    """Says texts, several at a time if asked from several threads."""

    def __init__(
        self,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
        device: Device,
        settings: SpeechSettings | None = None,
        voices: str | Path | None = None,
    ) -> None:
        if codec.config.quantizer.num_quantizers < model.codebooks:
            raise CheckpointError(
                f"the model writes {model.codebooks} codebooks, the codec has "
                f"{codec.config.quantizer.num_quantizers}; give the codec that belongs to the model"
            )
        self.model, self.codec = model, codec
        self.prompt = MossTTSNanoPrompt(model.config, tokenizer)
        self.settings = settings or SpeechSettings()
        self.shelf = VoiceStore(self.settings.voices, voices)
        self.generator: FrameGenerator
        self.decode: SingleDecoder | BatchedDecoder
        if choose_nano_generator(device, model.transformer.wte.weight.dtype).cls is CpuFrameGenerator:
            self.generator, self.decode, self._beside = (
                CpuFrameGenerator(model, self.prompt),
                SingleDecoder(codec),
                beside(),
            )
        else:
            self.decode, self._beside = BatchedDecoder(codec, device), None
            self.generator = EngineFrameGenerator(model, self.prompt, device)

    @classmethod
    def load(
        cls,
        name: str = "mini-tts",
        device: str = "auto",
        dtype: str = "auto",
        codec: str | None = None,
        codebooks: int | None = None,
        voices: str | Path | None = None,
    ) -> "NanoTTS":
        """A model by its bundled name, folder or hub id; its codec stands in its `codec` folder or is fetched too.

        `dtype` is `auto`, `float32`, `bfloat16`, `float16`, or `int8` on CPUs; `auto` takes int8 where it is faster.
        """
        folder, on = hub.resolve(name), pick(device)
        beside = folder / CODEC_FOLDER
        codec_folder = hub.resolve(codec or (str(beside) if beside.is_dir() else OFFICIAL_CODEC))
        choice = choose_nano_lm(on, dtype, MossTTSNanoConfig.read(folder).hidden_size)
        model = MossTTSNano.load(folder, on.torch_device, choice.dtype, codebooks)
        if choice.is_int8:
            to_int8(model.transformer)
            to_int8(model.local_transformer)
        speaks = cls(
            model,
            MossAudioTokenizerNano.load(codec_folder, on.torch_device),
            SentencePieceTokenizer.load(folder),
            on,
            SpeechSettings.read(folder),
            voices,
        )
        speaks.capture()
        return speaks

    def capture(self) -> None:
        """Capture the steps of a device that has graphs."""
        self.generator.warm_up()
        self.decode.warm_up(self.model.codebooks)

    def warm_up(self) -> None:
        """Do ahead what would make the first text slow."""
        self.capture()

    @contextmanager
    def tuned_threads(self) -> Iterator[None]:
        """Torch has as many threads meanwhile as this model is measured to speak fastest with."""
        with torch_threads.held(fastest_threads(self.generator)):
            yield

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        return self.codec.config.sample_rate

    @property
    def channels(self) -> int:
        """Of what comes out."""
        return self.codec.config.channels

    @property
    def mark(self) -> str:
        """Whose codes its voices have."""
        return self.codec.mark

    def _start_playback(
        self, player: PlaybackClock, clock: Callable[[], float], is_live: bool
    ) -> ChunkedPlayback[State]:
        seconds = 1 / self.codec.config.frame_rate
        beside = self._beside if torch.get_num_threads() <= spare_cores() else None  # no core is left for it
        return ChunkedPlayback(self.decode, self.decode.start(), seconds, player, clock, beside, is_live)

    def _frames(self, text: str, before: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        tokens = self.prompt.count_tokens(text)
        generation = self.settings.generation(self.model.config.n_vq, tokens, seed, greedy)
        return self.generator.frames(before.reference, before.words + text, generation, before.said)

    @property
    def _parallel_parts(self) -> int:
        return self.generator.parallel_parts

    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        def encoded() -> list[list[int]]:
            codes: list[list[int]] = self.codec.reference(sound)[: self.model.codebooks].T.tolist()
            return codes

        return encoded() if isinstance(self.decode, SingleDecoder) else self.decode.call(encoded)
