"""Flow matching and its estimator: a causal one-level UNet of residual convolutions and transformers.

`CausalConditionalDecoder` of CosyVoice 2: nothing is down- or upsampled, so one chunk mask serves all layers. It has no
position encoding: the convolutions distinguish the frames, so the order of keys does not matter to attention.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.nn.cuda_graphs import is_compiling_ahead
from vivavoce.nn.linear import PackedLinear, norm_linear, norm_mish
from vivavoce.nn.streaming import Past
from vivavoce.nn.vocoder import CausalConv1d

TIME_SCALE = 1000.0
KERNEL = 3


@dataclass(frozen=True)
class FlowEstimatorConfig:
    """Sizes of the estimator; the published ones are the same for all models of the family."""

    in_channels: int = 320
    out_channels: int = 80
    channels: int = 256
    middle_blocks: int = 12
    transformers: int = 4  # per block
    heads: int = 8
    head_dim: int = 64
    expansion: int = 4  # of the feed-forward and of the time embedding

    @property
    def context(self) -> int:
        """Cached inputs of each causal convolution."""
        return KERNEL - 1

    @property
    def attention_layers(self) -> int:
        """Attention layers, each with cached keys and values."""
        return (self.middle_blocks + 2) * self.transformers

    @property
    def context_channels(self) -> list[int]:
        """Input channels of each causal convolution, in forward order."""
        residual = [self.channels, self.channels] * self.middle_blocks
        down = [self.in_channels, self.channels, self.channels]
        up = [2 * self.channels, self.channels, self.channels]
        return [*down, *residual, *up, self.channels]


class CausalBlock(nn.Module):
    """Causal convolution, norm over channels, Mish."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"0": CausalConv1d(in_channels, channels, KERNEL), "2": nn.LayerNorm(channels)})

    def forward(self, x: Tensor, past: Past, added: Tensor | None = None) -> Tensor:
        """`added` is added after the activation.  # [row, time, channel], [channel]"""
        conv, norm = self.block["0"], self.block["2"]
        assert isinstance(conv, CausalConv1d)
        assert isinstance(norm, nn.LayerNorm)
        return norm_mish(past.convolve(conv, x), norm, added)


class ResidualBlock(nn.Module):
    """Two causal blocks with the time added between them, around a 1×1 convolution."""

    def __init__(self, in_channels: int, channels: int, time_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(time_dim, channels))
        self.block1 = CausalBlock(in_channels, channels)
        self.block2 = CausalBlock(channels, channels)
        self.res_conv = nn.Conv1d(in_channels, channels, 1)

    def forward(self, x: Tensor, time: Tensor, past: Past) -> Tensor:
        """`time` is the output of `mlp` for the time embedding.  # [row, time, channel], [channel]"""
        h = self.block2(self.block1(x, past, time), past)
        return pointwise(self.res_conv, x, residual=h)


def _product(
    x: Tensor, layer: nn.Module, norm: nn.LayerNorm | None = None, gelu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """`gelu(layer(norm(x))) + residual`, in one kernel launch unless the layer is quantised."""
    if isinstance(layer, nn.Linear | PackedLinear):
        return norm_linear(x, layer.weight, layer.bias, norm, gelu, residual)
    y: Tensor = layer(x if norm is None else norm(x))
    y = functional.gelu(y) if gelu else y
    return y if residual is None else y + residual


class EstimatorAttention(nn.Module):
    """Multi-head self-attention over a past, without positions."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.packed = PackedLinear(dim, {"to_q": inner, "to_k": inner, "to_v": inner})
        self.to_out = nn.Sequential(nn.Linear(inner, dim))

    def forward(self, x: Tensor, norm: nn.LayerNorm, bias: Tensor | None, past: Past) -> Tensor:
        """x + attention(norm(x)).  # [row, time, dim], bias [row, 1, time, key]"""
        packed = _product(x, self.packed, norm)
        query_key_value = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = past.attend(query_key_value[0], query_key_value[1:], bias)
        return _product(y.transpose(1, 2).flatten(2), self.to_out[0], residual=x)


class EstimatorFeedForward(nn.Module):
    """Two linears with a GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"0": nn.ModuleDict({"proj": nn.Linear(dim, hidden)}), "2": nn.Linear(hidden, dim)})

    def forward(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """x + feed_forward(norm(x)).  # [row, time, dim]"""
        hidden = _product(x, self.net["0"]["proj"], norm, gelu=True)  # type: ignore[index]
        return _product(hidden, self.net["2"], residual=x)


class EstimatorTransformer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: FlowEstimatorConfig) -> None:
        super().__init__()
        dim = config.channels
        self.norm1 = nn.LayerNorm(dim)
        self.attn1 = EstimatorAttention(dim, config.heads, config.head_dim)
        self.norm3 = nn.LayerNorm(dim)
        self.ff = EstimatorFeedForward(dim, dim * config.expansion)

    def forward(self, x: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# [row, time, dim]"""
        y: Tensor = self.ff(self.attn1(x, self.norm1, bias, past), self.norm3)
        return y


class EstimatorStage(nn.ModuleList):
    """A residual block, its transformers and, at the ends of the UNet, a causal convolution."""

    def __init__(self, config: FlowEstimatorConfig, in_channels: int, closing: bool) -> None:
        channels = config.channels
        residual = ResidualBlock(in_channels, channels, channels * config.expansion)
        transformers = nn.ModuleList(EstimatorTransformer(config) for _ in range(config.transformers))
        super().__init__([residual, transformers])
        if closing:
            self.append(CausalConv1d(channels, channels, KERNEL))

    def forward(self, x: Tensor, time: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """Residual block and transformers; the closing convolution is `close`.  # [row, time, channel]"""
        x = self[0](x, time, past)
        for transformer in self[1]:  # type: ignore[attr-defined]
            x = transformer(x, bias, past)
        return x

    def close(self, x: Tensor, past: Past) -> Tensor:
        """The closing convolution.  # [row, time, channel]"""
        conv = self[2]
        assert isinstance(conv, CausalConv1d)
        return past.convolve(conv, x)


def time_waves(times: Tensor, waves: int) -> Tensor:
    """Sines and cosines of the flow's time at geometric rates.  # [step] → [step, waves], float32"""
    half = waves // 2
    rates = torch.exp(torch.arange(half, device=times.device) * (-math.log(10_000) / (half - 1)))
    angles = TIME_SCALE * times.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class EstimatorTimeEmbedding(nn.Module):
    """Sinusoids of the flow's time through two linears."""

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, times: Tensor) -> Tensor:
        """# [step] → [step, dim]"""
        waves = time_waves(times, self.linear_1.in_features).to(self.linear_1.weight.dtype)
        embedding: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return embedding


class FlowEstimator(nn.Module):
    """Noisy mel with its conditions → velocity."""

    def __init__(self, config: FlowEstimatorConfig) -> None:
        super().__init__()
        channels = config.channels
        self.time_mlp = EstimatorTimeEmbedding(config.in_channels, channels * config.expansion)
        self.down_blocks = nn.ModuleList([EstimatorStage(config, config.in_channels, closing=True)])
        self.mid_blocks = nn.ModuleList(
            EstimatorStage(config, channels, closing=False) for _ in range(config.middle_blocks)
        )
        self.up_blocks = nn.ModuleList([EstimatorStage(config, 2 * channels, closing=True)])
        self.final_block = CausalBlock(channels, channels)
        self.final_proj = nn.Conv1d(channels, config.out_channels, 1)

    def time_conditions(self, times: Tensor) -> Tensor:
        """The vectors that the stages add at each time, equal for all frames.  # [step] → [step, stage, channel]"""
        embedding = self.time_mlp(times)
        stages = [*self.down_blocks, *self.mid_blocks, *self.up_blocks]
        return torch.stack([stage[0].mlp(embedding) for stage in stages], dim=1)

    def forward(self, x: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """# x [row, time, in_channels], time_conditions [stage, channel] → [row, time, out_channels]"""
        first, *middle, last = time_conditions
        down, up = self.down_blocks[0], self.up_blocks[0]
        assert isinstance(down, EstimatorStage)
        assert isinstance(up, EstimatorStage)
        skip = down(x, first, bias, past)
        x = down.close(skip, past)
        for stage, time in zip(self.mid_blocks, middle, strict=True):
            x = stage(x, time, bias, past)
        x = up(torch.cat([x, skip], dim=-1), last, bias, past)
        x = self.final_block(up.close(x, past), past)
        return pointwise(self.final_proj, x)


def pointwise(conv: nn.Conv1d, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """A 1×1 convolution over channels-last activations plus a residual.  # [row, time, channel]"""
    return norm_linear(x, conv.weight.squeeze(-1), conv.bias, residual=residual)


MAX_FRAMES = 15_000
GUIDANCE_ROWS = 2  # with the conditions, and without


@functools.cache
def fixed_noise(bands: int, device: torch.device) -> Tensor:
    """The initial noise of every reply; the published models draw it once, from seed 0.  # [frame, band]"""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, bands, MAX_FRAMES, generator=generator, device="cpu", dtype=torch.float32)
    return noise[0].T.contiguous().to(device)


def cosine_times(steps: int, device: torch.device) -> Tensor:
    """Boundaries of the Euler steps: small steps first.  # [step + 1]"""
    return 1 - torch.cos(torch.linspace(0, 1, steps + 1, device=device) * (0.5 * math.pi))


class Estimator(Protocol):
    """The velocity network: a UNet in CosyVoice 2 and MOSS-Speech, a transformer in CosyVoice 3."""

    def time_conditions(self, times: Tensor) -> Tensor:
        """Everything that depends only on the time.  # [step] → [step, …]"""
        ...

    def __call__(self, rows: Tensor, time_conditions: Tensor, bias: Tensor | None, past: Past) -> Tensor:
        """The velocity at one step.  # [row, frame, 4 · band], noise first → [row, frame, band]"""
        ...


class FlowMatching(nn.Module):
    """Euler solver with classifier-free guidance: the estimator runs on conditional and unconditional rows."""

    estimator: Estimator

    def __init__(self, estimator: Estimator, steps: int, guidance: float) -> None:
        super().__init__()
        self.steps = steps
        self.guidance = guidance
        self.estimator = estimator

    def forward(
        self,
        noise: Tensor,  # float32 [stream, frame, band]
        features: Tensor,  # [stream, frame, band]
        speaker: Tensor,  # [stream, band]
        prompt_mel: Tensor,  # [stream, frame, band], zero after the prompt
        bias: Tensor | None,  # [stream, 1, frame, key]
        past_at: Callable[[int], Past],
    ) -> Tensor:
        """The mel.  # float32 [stream, frame, band]"""
        times = cosine_times(self.steps, noise.device)
        time_conditions = self.estimator.time_conditions(times[:-1])
        conditions = torch.cat([features, speaker[:, None].expand_as(features), prompt_mel], dim=-1)
        guided = torch.stack([conditions, torch.zeros_like(conditions)], dim=1)
        if bias is not None:
            bias = bias.repeat_interleave(GUIDANCE_ROWS, dim=0)
        x = noise
        for step in range(1 if is_compiling_ahead() else self.steps):  # all steps launch the same kernels
            noisy = x.to(guided.dtype)[:, None].expand(-1, GUIDANCE_ROWS, -1, -1)
            rows = torch.cat([noisy, guided], dim=-1).flatten(0, 1)
            velocity = self.estimator(rows, time_conditions[step], bias, past_at(step)).float()
            with_conditions, without = velocity.unflatten(0, (-1, GUIDANCE_ROWS)).unbind(1)
            velocity = (1 + self.guidance) * with_conditions - self.guidance * without
            x = x + (times[step + 1] - times[step]) * velocity
        return x
