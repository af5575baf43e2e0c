"""Kokoro with random weights of the published shape in `viva bench tts`: no weights, no phonemiser."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.bench.tts_contenders import TEXT, TTSBenchSetup
from vivavoce.models.kokoro.config import AlbertConfig, GeneratorConfig, KokoroConfig
from vivavoce.models.kokoro.model import Kokoro
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS
from vivavoce.tts.phonemes import Phonemes

MODEL = "kokoro"  # `--model kokoro`; the published weights are kokoro-82m
SPOKEN = "ðə tɹˈAn tə ðə kˈOst lˈivz fɹʌm plˈætfˌɔɹm nˈIn æt hˈæf pˈæst sˈɛvən."  # the phonemes of the benchmark's text
FRAMES_A_PHONEME = 2.4
TINY = KokoroConfig(
    hidden=32, style=8, layers=1, max_duration=50, decoder_channels=48,
    bert=AlbertConfig(hidden=32, heads=4, feed_forward=48, layers=2),
    generator=GeneratorConfig(channels=32),
)  # fmt: skip


class RandomKokoro:
    """Speaks the benchmark's text with random weights; a phoneme is about as long as with the published ones."""

    def __init__(self, dtype: str, setup: TTSBenchSetup) -> None:
        self.name = dtype
        config = TINY if setup.shape == "tiny" else KokoroConfig()
        with TemporaryDirectory() as folder:
            self._model = KokoroTTS(
                random_kokoro(config, setup.device.torch_device),
                write_vocabulary(Path(folder), config),
                setup.device,
                dtype,
                phonemise=lambda text, accent, known: Phonemes(SPOKEN, ()),
            )
            self._model.voice_statistics("af_heart", len(SPOKEN))
        self._model.capture()
        self.rate = self._model.rate

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        """Audio of the text."""
        return self._model.stream(TEXT, "af_heart", SpeakingStyle(seed=seed))

    def stages(self) -> dict[str, Callable[[], object]]:
        """No per-stage timing."""
        return {}


@torch.no_grad()
def random_kokoro(config: KokoroConfig, device: torch.device) -> Kokoro:
    """The model, its durations and pitch near those of the published weights."""
    with allocating(device, torch.float32, drawn=False):
        model = Kokoro(config).eval().requires_grad_(False)
    fill_randomly(model)
    share = FRAMES_A_PHONEME / config.max_duration
    duration = model.predictor.duration_proj.linear_layer
    duration.weight *= 0.1
    duration.bias.fill_(math.log(share / (1 - share)))
    cast(Tensor, model.predictor.F0_proj.bias).fill_(150.0)
    model.decoder.generator.conv_post.weight *= 0.02
    for name, parameter in model.named_parameters():
        if ".alpha" in name:
            parameter.fill_(1.0)
    return model


def write_vocabulary(folder: Path, config: KokoroConfig) -> Path:
    """A folder with the benchmark's phonemes and a random voice."""
    vocabulary = {phoneme: number for number, phoneme in enumerate(sorted(set(SPOKEN)), start=1)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf8")
    (folder / "voices").mkdir()
    table = np.random.default_rng(0).standard_normal((len(SPOKEN), 2 * config.style))
    (0.1 * table).astype("<f4").tofile(folder / "voices" / "af_heart.bin")
    return folder
