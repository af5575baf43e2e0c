"""Codes → mel in CosyVoice 3: a look-ahead over the codes and a diffusion transformer that does all the rest.

Voices, states, steps, batches and the left window are those of `StreamingFlow`; a reply keeps keys and values of 22
layers at 10 Euler steps in two guidance rows, 1.8 MB a mel frame in 16 bit, so a long one wants `left_chunks`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from vivavoce.models.cosyvoice3_dit import DiT, DiTConfig, RotatedPast, rotary_angles
from vivavoce.models.flow_encoder import LookaheadLayer, silent_after_the_end
from vivavoce.models.flow_matching import GUIDANCE_ROWS, FlowMatching, cosine_times, fixed_noise
from vivavoce.models.flow_state import FlowPass
from vivavoce.models.flow_stream import FlowSizes, StreamingFlow, load_flow
from vivavoce.nn.past import Past


@dataclass(frozen=True)
class LookaheadConfig:
    """Sizes of what stands before the flow: one layer that looks ahead, and each code repeated for its frames."""

    ratio: int = 2  # mel frames per code
    lookahead: int = 3
    dim: int = 1024  # between its two convolutions, where the context is kept
    heads: int = 1
    code_layers: int = 0  # nothing attends before the flow
    frame_layers: int = 0

    @property
    def contexts(self) -> tuple[int, ...]:
        """How many past inputs the causal convolutions need: the look-ahead's, and none for the upsampling."""
        return 2, 0


@dataclass(frozen=True, kw_only=True)
class CosyVoice3FlowConfig(FlowSizes):
    """The published sizes: 25 codes and 50 mel frames per second; `chunk` codes attend to one another in a stream."""

    vocabulary: int = 6_561
    chunk: int = 25
    encoder: LookaheadConfig = field(default_factory=LookaheadConfig)
    estimator: DiTConfig = field(default_factory=DiTConfig)


class CosyVoice3Flow(StreamingFlow):
    """Token-to-mel decoder with a voice prompt."""

    config: CosyVoice3FlowConfig

    def __init__(self, config: CosyVoice3FlowConfig | None = None) -> None:
        config = config or CosyVoice3FlowConfig()
        embedding = nn.Embedding(config.vocabulary, config.mel_bands)
        super().__init__(config, embedding, nn.Linear(config.speaker_dim, config.mel_bands))
        self.pre_lookahead_layer = LookaheadLayer(config.mel_bands, config.lookahead, config.encoder.dim)
        self.decoder = FlowMatching(DiT(config.estimator), config.euler_steps, config.guidance)

    @classmethod
    def load(
        cls,
        source: str | Path,
        config: CosyVoice3FlowConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        tabulate: bool = True,
    ) -> "CosyVoice3Flow":
        """The decoder of a published `flow.pt` file.

        `tabulate` keeps what depends on the time alone as a table for the 10 steps, and drops the layers behind it.
        """
        decoder = load_flow(lambda: cls(config), source, device, dtype)
        if tabulate:
            decoder.tabulate()
        return decoder

    def tabulate(self) -> None:
        """Keep the time conditions of the fixed schedule as a table; the layers that make them go."""
        estimator = self.decoder.estimator
        assert isinstance(estimator, DiT)
        estimator.tabulate(cosine_times(self.config.euler_steps, self.device)[:-1])

    @torch.no_grad()
    def decode(self, given: FlowPass) -> Tensor:
        """Embed, look ahead, solve the flow: the whole model.  # → float32 [stream, frame, band]"""
        config, span, pasts = self.config, given.span, given.pasts
        positions = span.scaled(config.ratio).query_positions()  # [stream, frame]
        embedded = silent_after_the_end(self.input_embedding(given.codes.to(self.device)), span, config.lookahead)
        features = self.pre_lookahead_layer(embedded, pasts.codes).repeat_interleave(config.ratio, dim=1)
        bias = given.bias(config.ratio, features.dtype)
        cos, sin = rotary_angles(positions.repeat_interleave(GUIDANCE_ROWS, dim=0), config.estimator.head_dim)

        def turned_past_at(step: int) -> Past:
            return RotatedPast(pasts.mel_at(step), cos, sin)

        noise = fixed_noise(config.mel_bands, self.device)[positions]
        mel: Tensor = self.decoder(noise, features, given.speaker, given.prompt_mel, bias, turned_past_at)
        return mel
