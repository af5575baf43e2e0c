"""CosyVoice 3's flow: a diffusion transformer whose layers are scaled, shifted and gated by the flow's time.

As trained: rotary positions apply to the first head only, and the last norm's conditions are scale then shift, where
the others are shift then scale.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.errors import InputError
from vivavoce.models.flow.estimator import GUIDANCE_ROWS, FlowMatching, cosine_times, fixed_noise, time_waves
from vivavoce.models.flow.model import LookaheadLayer, pad_lookahead
from vivavoce.models.flow.state import FlowPass
from vivavoce.models.flow.stream import FlowSizes, StreamingFlow, load_flow
from vivavoce.nn.attention import rotate_pairs
from vivavoce.nn.linear import Linear, PackedLinear, modulated_norm
from vivavoce.nn.streaming import Past
from vivavoce.nn.vocoder import CausalConv1d

POSITION_CONVOLUTIONS = 2
BLOCK_CONDITIONS = 6  # shift, scale and gate of the attention, then of the feed-forward
FINAL_CONDITIONS = 2  # scale, shift
NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class DiTConfig:
    """The published sizes."""

    mel_bands: int = 80
    dim: int = 1024
    blocks: int = 22
    heads: int = 16
    head_dim: int = 64
    expansion: int = 2  # of the feed-forward
    time_waves: int = 256
    position_kernel: int = 31
    position_groups: int = 16

    @property
    def context(self) -> int:
        """Cached inputs of each causal convolution."""
        return self.position_kernel - 1

    @property
    def attention_layers(self) -> int:
        """Attention layers, each with cached keys and values."""
        return self.blocks

    @property
    def context_channels(self) -> list[int]:
        """Input channels of each causal convolution, in forward order."""
        return [self.dim] * POSITION_CONVOLUTIONS


class RotatedPast:
    """A past that first rotates queries and new keys of the first head."""

    def __init__(self, past: Past, cos: Tensor, sin: Tensor) -> None:
        """# cos and sin [row, time, head_dim / 2]"""
        self._past = past
        self._cos, self._sin = cos, sin

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Rotate in place, then attend."""
        if kernels.usable(query):
            kernels.rotate_first_head(query, keys_values[0], self._cos, self._sin)
        else:
            for rotated in (query, keys_values[0]):
                first_head = rotated[:, :1].transpose(1, 2)  # [row, time, 1, dim]
                first_head.copy_(rotate_pairs(first_head, self._cos, self._sin))
        return self._past.attend(query, keys_values, bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """# [row, time, channel]"""
        return self._past.convolve(conv, x)


def rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, always in float32.  # [.., ] → [.., head_dim / 2] twice"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * ROTARY_BASE**-exponents
    return angles.cos(), angles.sin()


class DiTTimeEmbedding(nn.Module):
    """Sinusoids of the flow's time through two linears."""

    def __init__(self, waves: int, dim: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(Linear(waves, dim, bias=True), nn.SiLU(), Linear(dim, dim, bias=True))
        self.waves = waves

    def forward(self, times: Tensor) -> Tensor:
        """# [step] → [step, dim]"""
        first = self.time_mlp[0]
        assert isinstance(first, Linear)
        embedding: Tensor = self.time_mlp(time_waves(times, self.waves).to(first.weight.dtype))
        return embedding


class Modulation(nn.Module):
    """Conditions of a norm from the time embedding."""

    def __init__(self, dim: int, conditions: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim * conditions, bias=True)

    def forward(self, embedding: Tensor) -> Tensor:
        """# [step, dim] → [step, condition, dim]"""
        return self.linear(functional.silu(embedding)).unflatten(-1, (-1, embedding.shape[-1]))


class InputEmbedding(nn.Module):
    """Projects noisy mel and conditions to the block width and adds convolutional positions."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.bands = config.mel_bands
        self.proj = Linear(4 * config.mel_bands, config.dim, bias=True)
        self.conv_pos_embed = nn.ModuleDict(
            {
                f"conv{number}": nn.ModuleList(
                    [CausalConv1d(config.dim, config.dim, config.position_kernel, groups=config.position_groups)]
                )
                for number in range(1, POSITION_CONVOLUTIONS + 1)
            }
        )

    def forward(self, rows: Tensor, past: Past) -> Tensor:
        """# [row, time, (noisy, features, speaker, prompt) · band] → [row, time, dim]"""
        noisy, features, speaker, prompt_mel = rows.split(self.bands, dim=-1)
        x = self.proj(torch.cat([noisy, prompt_mel, features, speaker], dim=-1))
        positions = x
        for convolution in self.conv_pos_embed.values():
            assert isinstance(convolution, nn.ModuleList)
            conv = convolution[0]
            assert isinstance(conv, CausalConv1d)
            positions = functional.mish(past.convolve(conv, positions))
        return x + positions


class DiTAttention(nn.Module):
    """Multi-head self-attention over a past."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        inner = config.heads * config.head_dim
        self.packed = PackedLinear(config.dim, {"to_q": inner, "to_k": inner, "to_v": inner}, bias=True)
        self.to_out = nn.ModuleList([Linear(inner, config.dim, bias=True)])

    def forward(self, x: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, dim], bias [row, 1, time, key]"""
        query_key_value = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = past.attend(query_key_value[0], query_key_value[1:], bias)
        out: Tensor = self.to_out[0](y.transpose(1, 2).flatten(2))
        return out


class DiTFeedForward(nn.Module):
    """Two linears with an approximate GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.ff = nn.ModuleDict(
            {"0": nn.ModuleList([Linear(dim, hidden, bias=True)]), "2": Linear(hidden, dim, bias=True)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """# [row, time, dim]"""
        hidden = functional.gelu(self.ff["0"][0](x), approximate="tanh")  # type: ignore[index]
        y: Tensor = self.ff["2"](hidden)
        return y


class Residual(NamedTuple):
    """The residual stream and a gated branch not yet added to it: the next norm fuses the add."""

    x: Tensor  # [row, time, dim]
    gated: tuple[Tensor, Tensor] | None = None  # [dim], [row, time, dim]

    def normed(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after the add, and its modulated norm."""
        return modulated_norm(self.x, self.gated, scale, shift, NORM_EPS)


class DiTBlock(nn.Module):
    """Attention and feed-forward, each between a modulated norm and a gate."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn_norm = Modulation(config.dim, BLOCK_CONDITIONS)
        self.attn = DiTAttention(config)
        self.ff = DiTFeedForward(config.dim, config.dim * config.expansion)

    def forward(self, stream: Residual, conditions: Tensor, bias: Tensor | None, past: Past) -> Residual:
        """# conditions [6, dim]"""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = conditions
        x, normed = stream.normed(scale, shift)
        x, normed = Residual(x, (gate, self.attn(normed, bias, past))).normed(ff_scale, ff_shift)
        return Residual(x, (ff_gate, self.ff(normed)))


class RotaryConstant(nn.Module):
    """Holds the published `inv_freq` tensor; unused, since half-precision casts would round it."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", ROTARY_BASE**-exponents)


class DiT(nn.Module):
    """Noisy mel with its conditions → velocity."""

    table: Tensor | None

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.time_embed = DiTTimeEmbedding(config.time_waves, config.dim)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryConstant(config.head_dim)
        self.transformer_blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.blocks))
        self.norm_out = Modulation(config.dim, FINAL_CONDITIONS)
        self.proj_out = Linear(config.dim, config.mel_bands, bias=True)
        self.register_buffer("table", None, persistent=False)

    def time_conditions(self, times: Tensor) -> Tensor:
        """Scales, shifts and gates at each time, independent of the frames.  # [step] → [step, condition, dim]

        Six conditions per block, then two for the last norm.
        """
        if self.table is not None:
            if len(self.table) != len(times):
                raise InputError(
                    f"the time conditions were tabulated for {len(self.table)} steps and cannot serve {len(times)}; "
                    "load the flow with tabulate=False"
                )
            return self.table
        embedding = self.time_embed(times)
        blocks = cast(Iterable[DiTBlock], self.transformer_blocks)
        modulations = [*(block.attn_norm for block in blocks), self.norm_out]
        return torch.cat([modulation(embedding) for modulation in modulations], dim=1)

    @torch.no_grad()
    def tabulate(self, times: Tensor) -> None:
        """Precompute the conditions of these times and delete the layers that compute them: 43 % of all weights."""
        self.table = self.time_conditions(times)
        del self.time_embed, self.norm_out
        for block in self.transformer_blocks:
            del block.attn_norm

    def forward(self, rows: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """`past` must rotate the first head: see `RotatedPast`.

        # rows [row, time, (noisy, features, speaker, prompt) · band], time_conditions [condition, dim]
        """
        stream = Residual(self.input_embed(rows, past))
        *block_conditions, last_conditions = time_conditions.split(BLOCK_CONDITIONS)
        for block, conditions in zip(self.transformer_blocks, block_conditions, strict=True):
            stream = block(stream, conditions, bias, past)
        scale, shift = last_conditions
        return self.proj_out(stream.normed(scale, shift)[1])


@dataclass(frozen=True)
class LookaheadConfig:
    """Sizes of the encoder: one look-ahead layer, then each code repeated for its frames."""

    ratio: int = 2  # mel frames per code
    lookahead: int = 3
    dim: int = 1024  # between its two convolutions; width of the cached context
    heads: int = 1
    code_layers: int = 0  # no attention before the flow
    frame_layers: int = 0

    @property
    def contexts(self) -> tuple[int, ...]:
        """Cached inputs of the look-ahead convolution; the upsampling has no convolution."""
        return 2, 0


@dataclass(frozen=True, kw_only=True)
class CosyVoice3FlowConfig(FlowSizes):
    """The published sizes: 25 codes and 50 mel frames per second, chunks of `chunk` codes."""

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

        `tabulate` precomputes the time conditions of the 10 steps and deletes the layers that compute them.
        """
        decoder = load_flow(lambda: cls(config), source, device, dtype)
        if tabulate:
            decoder.tabulate()
        return decoder

    def tabulate(self) -> None:
        """Precompute the time conditions of the fixed schedule."""
        estimator = self.decoder.estimator
        assert isinstance(estimator, DiT)
        estimator.tabulate(cosine_times(self.config.euler_steps, self.device)[:-1])

    @torch.no_grad()
    def decode(self, flow_pass: FlowPass) -> Tensor:
        """The whole model: embed, look ahead, solve the flow.  # → float32 [stream, frame, band]"""
        config, span, pasts = self.config, flow_pass.span, flow_pass.pasts
        positions = span.scaled(config.ratio).query_positions()  # [stream, frame]
        embedded = pad_lookahead(self.input_embedding(flow_pass.codes.to(self.device)), span, config.lookahead)
        features = self.pre_lookahead_layer(embedded, pasts.codes).repeat_interleave(config.ratio, dim=1)
        bias = flow_pass.bias(config.ratio, features.dtype)
        cos, sin = rotary_angles(positions.repeat_interleave(GUIDANCE_ROWS, dim=0), config.estimator.head_dim)

        def rotated_past_at(step: int) -> Past:
            return RotatedPast(pasts.mel_at(step), cos, sin)

        noise = fixed_noise(config.mel_bands, self.device)[positions]
        mel: Tensor = self.decoder(noise, features, flow_pass.speaker, flow_pass.prompt_mel, bias, rotated_past_at)
        return mel
