"""MOSS-Audio-Tokenizer-Nano's sizes and `config.json`, and the checks of a reference recording; loads without torch."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import Sound
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config

MODEL_TYPE = "moss-audio-tokenizer"
SUPPORTED_STAGE = {
    "causal": True,
    "gating": "none",
    "norm": "layer_norm",
    "positional_embedding": "rope",
}


MIN_REFERENCE_SECONDS = 0.4
MAX_REFERENCE_SECONDS = 60.0


@dataclass(frozen=True)
class StageConfig:
    """A causal transformer at one rate; it attends to `context_duration` seconds."""

    input_dimension: int
    output_dimension: int
    num_layers: int
    context_duration: float
    d_model: int = 256
    num_heads: int = 4
    dim_feedforward: int = 1024
    max_period: float = 10_000.0


@dataclass(frozen=True)
class QuantizerConfig:
    """Residual codebooks, each with its own projections."""

    input_dim: int = 768
    rvq_dim: int = 512
    output_dim: int = 768
    num_quantizers: int = 16
    codebook_size: int = 1024
    codebook_dim: int = 8


Chain = tuple[int | StageConfig, ...]  # patch sizes and transformers, in forward order

ENCODER: Chain = (
    240,
    StageConfig(240, 384, 4, 4.0),
    2,
    StageConfig(768, 384, 2, 6.0),
    2,
    StageConfig(768, 384, 2, 8.0),
    2,
    StageConfig(768, 192, 4, 10.0),
    4,
)
DECODER: Chain = (
    4,
    StageConfig(192, 768, 4, 10.0),
    2,
    StageConfig(384, 768, 2, 8.0),
    2,
    StageConfig(384, 768, 2, 6.0),
    2,
    StageConfig(384, 240, 4, 4.0),
    240,
)


@dataclass(frozen=True)
class MossAudioTokenizerConfig:
    """The published sizes; `config.json` of a checkpoint overrides them."""

    sample_rate: int = 48_000
    channels: int = 2
    encoder: Chain = ENCODER
    decoder: Chain = DECODER
    quantizer: QuantizerConfig = QuantizerConfig()

    @property
    def frame_samples(self) -> int:
        """Samples per channel of a frame."""
        return math.prod(part for part in self.encoder if isinstance(part, int)) // self.channels

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sample_rate / self.frame_samples

    @classmethod
    def read(cls, folder: str | Path) -> "MossAudioTokenizerConfig":
        """The configuration of a checkpoint folder."""
        file = Path(folder) / "config.json"
        values = read_config(file, "MOSS-Audio-Tokenizer-Nano")
        kind = values.get("model_type")
        if kind != MODEL_TYPE:
            raise CheckpointError(f"{file} describes a {kind!r} model, not {MODEL_TYPE!r}")
        try:
            quantizer = {name: values["quantizer_kwargs"][name] for name in asdict(QuantizerConfig())}
            config = cls(
                values["sampling_rate"],
                values["number_channels"],
                tuple(_part(part, file) for part in values["encoder_kwargs"]),
                tuple(_part(part, file) for part in values["decoder_kwargs"]),
                QuantizerConfig(**quantizer),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{file} does not have the sizes of a codec ({error})") from error
        config.check(values, file)
        return config

    def check(self, values: dict[str, Any], file: Path) -> None:
        """Raise `CheckpointError` for variants that this implementation does not support."""
        kind = values.get("quantizer_type", "rlfq")
        if kind != "rlfq":
            raise CheckpointError(f"{file} has the quantizer {kind!r}; only 'rlfq' is supported")
        if self.channels > 1 and not values.get("enable_channel_interleave"):
            raise CheckpointError(f"{file} has {self.channels} channels that are not interleaved, which is unsupported")
        frame = values.get("downsample_rate", self.frame_samples)
        patches = [math.prod(part for part in chain if isinstance(part, int)) for chain in (self.encoder, self.decoder)]
        if patches != [frame * self.channels] * 2:
            raise CheckpointError(f"{file}: patches of {patches} samples do not make frames of {frame} per channel")

    def write(self, folder: str | Path) -> None:
        """Write `config.json` as the published checkpoint has it."""
        content = {
            "model_type": MODEL_TYPE,
            "sampling_rate": self.sample_rate,
            "downsample_rate": self.frame_samples,
            "number_channels": self.channels,
            "enable_channel_interleave": True,
            "encoder_kwargs": [_published(part) for part in self.encoder],
            "decoder_kwargs": [_published(part) for part in self.decoder],
            "quantizer_type": "rlfq",
            "quantizer_kwargs": asdict(self.quantizer),
        }
        (Path(folder) / "config.json").write_text(json.dumps(content, indent=2), encoding="utf8")


def reference_samples(sound: Sound, rate: int, channels: int) -> NDArray[np.float32]:
    """A reference recording at a codec's rate and number of channels.  # [channel, time]"""
    if not MIN_REFERENCE_SECONDS <= sound.seconds <= MAX_REFERENCE_SECONDS:
        raise InputError(
            f"the reference voice has {sound.seconds:.2f} s; give {MIN_REFERENCE_SECONDS} to "
            f"{MAX_REFERENCE_SECONDS:.0f} s of speech, three to eight are best"
        )
    fits = sound if sound.channels in (1, channels) else sound.mono()
    samples = fits.resampled(rate).samples
    return np.broadcast_to(samples, (channels, samples.shape[1]))


def _part(values: dict[str, Any], file: Path) -> int | StageConfig:
    if values["module_type"] == "PatchedPretransform":
        return int(values["patch_size"])
    if values["module_type"] != "Transformer":
        raise CheckpointError(f"{file} has a {values['module_type']!r} stage, which is not supported")
    for name, supported in SUPPORTED_STAGE.items():
        if values.get(name, supported) != supported:
            raise CheckpointError(f"{file} has {name} {values[name]!r}; only {supported!r} is supported")
    return StageConfig(**{name: values[name] for name in StageConfig.__dataclass_fields__})


def _published(part: int | StageConfig) -> dict[str, Any]:
    if isinstance(part, int):
        return {"module_type": "PatchedPretransform", "patch_size": part}
    return {"module_type": "Transformer"} | asdict(part) | SUPPORTED_STAGE
