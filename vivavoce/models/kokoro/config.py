"""Shape and phoneme vocabulary of a Kokoro model, from `config.json` or `tokenizer.json`."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError

RATE = 24_000
BOUNDARY = 0  # the id before and after the phonemes of a text


@dataclass(frozen=True)
class AlbertConfig:
    """PL-BERT: an ALBERT over phonemes, one layer's weights used by all layers."""

    hidden: int = 768
    embedding: int = 128
    heads: int = 12
    feed_forward: int = 2048
    layers: int = 12
    positions: int = 512
    epsilon: float = 1e-12


@dataclass(frozen=True)
class GeneratorConfig:
    """iSTFTNet: features at two per frame → sound."""

    channels: int = 512
    upsample_rates: tuple[int, ...] = (10, 6)
    upsample_kernels: tuple[int, ...] = (20, 12)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    source_kernels: tuple[int, ...] = (7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    n_fft: int = 20
    fft_hop: int = 5

    @property
    def hop(self) -> int:
        """Samples of one feature."""
        return math.prod(self.upsample_rates) * self.fft_hop


@dataclass(frozen=True)
class KokoroConfig:
    """The published values of Kokoro-82M."""

    symbols: int = 178
    hidden: int = 512
    style: int = 128
    """Size of each half of a voice's vector: the sound's, then the prosody's."""
    layers: int = 3
    text_kernel: int = 5
    max_duration: int = 50
    decoder_channels: int = 1024  # not in the published config
    text_residual: int = 64
    bert: AlbertConfig = field(default_factory=AlbertConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)

    @property
    def max_phonemes(self) -> int:
        """Phonemes of the longest text, without the two boundaries."""
        return self.bert.positions - 2

    @property
    def frame_samples(self) -> int:
        """Samples of one frame of the duration predictor."""
        return 2 * self.generator.hop


def read_config(folder: Path) -> KokoroConfig:
    """The config of a published folder; the ONNX publication has none, and its values are the defaults."""
    file = folder / "config.json"
    content = _read_json(file) if file.is_file() else {}
    if "istftnet" not in content:
        return KokoroConfig()
    try:
        bert, sound = content["plbert"], content["istftnet"]
        return KokoroConfig(
            symbols=content["n_token"],
            hidden=content["hidden_dim"],
            style=content["style_dim"],
            layers=content["n_layer"],
            text_kernel=content["text_encoder_kernel_size"],
            max_duration=content["max_dur"],
            decoder_channels=content.get("decoder_channels", KokoroConfig.decoder_channels),
            bert=AlbertConfig(
                hidden=bert["hidden_size"],
                heads=bert["num_attention_heads"],
                feed_forward=bert["intermediate_size"],
                layers=bert["num_hidden_layers"],
                positions=bert["max_position_embeddings"],
            ),
            generator=GeneratorConfig(
                channels=sound["upsample_initial_channel"],
                upsample_rates=tuple(sound["upsample_rates"]),
                upsample_kernels=tuple(sound["upsample_kernel_sizes"]),
                resblock_kernels=tuple(sound["resblock_kernel_sizes"]),
                dilations=tuple(sound["resblock_dilation_sizes"][0]),
                n_fft=sound["gen_istft_n_fft"],
                fft_hop=sound["gen_istft_hop_size"],
            ),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} is not a Kokoro config ({error!r}); fetch it again") from error


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Phoneme → id, from `config.json` or `tokenizer.json`."""
    for name, keys in (("config.json", ("vocab",)), ("tokenizer.json", ("model", "vocab"))):
        content: Any = _read_json(folder / name) if (folder / name).is_file() else {}
        for key in keys:
            content = content.get(key, {}) if isinstance(content, dict) else {}
        if content and isinstance(content, dict):
            return {str(phoneme): int(number) for phoneme, number in content.items()}
    raise CheckpointError(f"{folder} has no phoneme vocabulary: neither config.json nor tokenizer.json; fetch it again")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from error
    return content if isinstance(content, dict) else {}
