"""Codes → mel: the flow-matching decoder of MOSS-Speech and CosyVoice 2. How it streams is in `flow_stream.py`."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.models.flow_encoder import FlowEncoder, FlowEncoderConfig
from vivavoce.models.flow_estimator import FlowEstimator, FlowEstimatorConfig
from vivavoce.models.flow_matching import FlowMatching, fixed_noise
from vivavoce.models.flow_state import FlowPass
from vivavoce.models.flow_stream import FlowSizes, StreamingFlow, load_flow


@dataclass(frozen=True, kw_only=True)
class FlowConfig(FlowSizes):
    """Sizes of a conformer and a UNet."""

    encoder: FlowEncoderConfig
    estimator: FlowEstimatorConfig = field(default_factory=FlowEstimatorConfig)

    @classmethod
    def moss_speech(cls, chunk: int = 5) -> "FlowConfig":
        """12.5 codes and 50 mel frames per second; chunks of 5 or of 25 codes, by the checkpoint."""
        return cls(vocabulary=20_480, chunk=chunk, encoder=FlowEncoderConfig(ratio=4))

    @classmethod
    def cosyvoice2(cls) -> "FlowConfig":
        """25 codes and 50 mel frames per second."""
        return cls(vocabulary=6_561, chunk=25, encoder=FlowEncoderConfig(ratio=2))


class FlowDecoder(StreamingFlow):
    """Token-to-mel decoder with a voice prompt."""

    config: FlowConfig

    def __init__(self, config: FlowConfig) -> None:
        embedding = nn.Embedding(config.vocabulary, config.encoder.dim)
        super().__init__(config, embedding, nn.Linear(config.speaker_dim, config.mel_bands))
        self.encoder = FlowEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.dim, config.mel_bands)
        self.decoder = FlowMatching(FlowEstimator(config.estimator), config.euler_steps, config.guidance)

    @classmethod
    def load(
        cls,
        source: str | Path,
        config: FlowConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "FlowDecoder":
        """The decoder of a published `flow*.pt` file."""
        return load_flow(lambda: cls(config), source, device, dtype)

    @torch.no_grad()
    def decode(self, given: FlowPass) -> Tensor:
        """Embed, encode, solve the flow: the whole model.  # → float32 [stream, frame, band]"""
        ratio, pasts = self.config.ratio, given.pasts
        embedded = self.input_embedding(given.codes.to(self.device))
        code_bias, frame_bias = (given.bias(positions, embedded.dtype) for positions in (1, ratio))
        encoded = self.encoder(embedded, given.span, code_bias, frame_bias, pasts.codes, pasts.frames)
        features = self.encoder_proj(encoded)
        noise = fixed_noise(self.config.mel_bands, self.device)[given.span.scaled(ratio).query_positions()]
        mel: Tensor = self.decoder(noise, features, given.speaker, given.prompt_mel, frame_bias, pasts.mel_at)
        return mel
