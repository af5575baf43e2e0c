"""CosyVoice 3's estimator: a diffusion transformer whose layers are scaled, shifted and gated by the flow's time.

Two things are as they are because the weights were trained so: positions rotate the first head alone, and the last norm
takes scale before shift where the others take shift before scale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.errors import InputError
from vivavoce.models.flow.estimator import GUIDANCE_ROWS, FlowMatching, cosine_times, fixed_noise
from vivavoce.models.flow.model import LookaheadLayer, silent_after_the_end
from vivavoce.models.flow.state import FlowPass
from vivavoce.models.flow.stream import FlowSizes, StreamingFlow, load_flow
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.norm import modulated_norm
from vivavoce.nn.rope import rotate_pairs
from vivavoce.nn.streaming import Past
from vivavoce.nn.vocoder import CausalConv1d

TIME_SCALE = 1000.0
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
        """How many past inputs each causal convolution needs."""
        return self.position_kernel - 1

    @property
    def attention_layers(self) -> int:
        """How many layers keep keys and values."""
        return self.blocks

    @property
    def context_channels(self) -> list[int]:
        """Input channels of each causal convolution, in forward order."""
        return [self.dim] * POSITION_CONVOLUTIONS


class RotatedPast:
    """A past before which queries and new keys of the first head are turned by their positions."""

    def __init__(self, past: Past, cos: Tensor, sin: Tensor) -> None:
        """# cos and sin [row, time, head_dim / 2]"""
        self._past = past
        self._cos, self._sin = cos, sin

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention by the past; queries and keys are overwritten."""
        if kernels.usable(query):
            kernels.rotate_first_head(query, keys_values[0], self._cos, self._sin)
        else:
            for turned in (query, keys_values[0]):
                first_head = turned[:, :1].transpose(1, 2)  # [row, time, 1, dim]
                first_head.copy_(rotate_pairs(first_head, self._cos, self._sin))
        return self._past.attend(query, keys_values, bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution by the past."""
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
        self.rates = waves // 2

    def forward(self, times: Tensor) -> Tensor:
        """# [step] → [step, dim]"""
        rates = torch.exp(torch.arange(self.rates, device=times.device) * (-math.log(10_000) / (self.rates - 1)))
        angles = TIME_SCALE * times.float()[:, None] * rates
        first = self.time_mlp[0]
        assert isinstance(first, Linear)
        embedding: Tensor = self.time_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1).to(first.weight.dtype))
        return embedding


class Modulation(nn.Module):
    """What a norm makes of the time embedding."""

    def __init__(self, dim: int, conditions: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim * conditions, bias=True)

    def forward(self, embedding: Tensor) -> Tensor:
        """# [step, dim] → [step, condition, dim]"""
        return self.linear(functional.silu(embedding)).unflatten(-1, (-1, embedding.shape[-1]))


class InputEmbedding(nn.Module):
    """Noisy mel and its conditions → the width of the blocks, with positions from two wide causal convolutions."""

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
        places = x
        for convolution in self.conv_pos_embed.values():
            assert isinstance(convolution, nn.ModuleList)
            conv = convolution[0]
            assert isinstance(conv, CausalConv1d)
            places = functional.mish(past.convolve(conv, places))
        return x + places


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
    """The residual stream, and with its gate what is still to be added to it: the next norm does that on its way."""

    x: Tensor  # [row, time, dim]
    gated: tuple[Tensor, Tensor] | None = None  # [dim], [row, time, dim]

    def normed(self, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The stream with everything added, and its norm, scaled and shifted."""
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
        shift, scale, gate, late_shift, late_scale, late_gate = conditions
        x, normed = stream.normed(scale, shift)
        x, normed = Residual(x, (gate, self.attn(normed, bias, past))).normed(late_scale, late_shift)
        return Residual(x, (late_gate, self.ff(normed)))


class RotaryConstant(nn.Module):
    """The frequencies as the published file holds them. They follow from the size and are not read from here, so that
    casting the model to half precision does not round them."""

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
        """What modulates each norm and gate at each time; no frame has part in it.  # [step] → [step, condition, dim]

        Conditions are six a block, then two for the last norm.
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
        """Keep the conditions of these times and let go of the layers that make them: 43 % of all weights."""
        self.table = self.time_conditions(times)
        del self.time_embed, self.norm_out
        for block in self.transformer_blocks:
            del block.attn_norm

    def forward(self, rows: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """`past` must turn the first head: see `RotatedPast`.

        # rows [row, time, (noisy, features, speaker, prompt) · band], time_conditions [condition, dim]
        """
        stream = Residual(self.input_embed(rows, past))
        *of_blocks, of_last = time_conditions.split(BLOCK_CONDITIONS)
        for block, conditions in zip(self.transformer_blocks, of_blocks, strict=True):
            stream = block(stream, conditions, bias, past)
        scale, shift = of_last
        return self.proj_out(stream.normed(scale, shift)[1])


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
