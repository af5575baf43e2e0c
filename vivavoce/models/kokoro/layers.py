"""Layers of Kokoro that take a voice's style: adaptive normalisation and the residual block of predictors and decoder.

Rows of a batch may have different lengths. A mask (1 inside a row, 0 behind its end) then keeps statistics and
convolutions of a row independent of the padding; without a mask all rows have the full length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
SLOPE = 0.2


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero behind the end of each row.  # [batch, channel, time], [batch, 1, time]"""
    return x if mask is None else x * mask


def channel_statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance over time.  # [batch, channel, time] → [batch, channel, 1] twice"""
    if mask is None:
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return mean, variance
    length = mask.sum(-1, keepdim=True)
    mean = (x * mask).sum(-1, keepdim=True) / length
    variance = ((x - mean).square() * mask).sum(-1, keepdim=True) / length
    return mean, variance


@dataclass(frozen=True)
class NormStatistics:
    """Means and variances of all norms of a generator, one after another, and the features they were taken over."""

    means: Tensor  # [batch, channel]
    variances: Tensor  # [batch, channel]
    features: Tensor  # [batch] float

    def towards(self, other: "NormStatistics", share: float) -> "NormStatistics":
        """Statistics between these and others."""
        return NormStatistics(
            torch.lerp(self.means, other.means, share),
            torch.lerp(self.variances, other.variances, share),
            torch.lerp(self.features, other.features, share),
        )


class RunningStatistics:
    """Merges the statistics of each norm of a pass with those of earlier features, and keeps the result."""

    def __init__(self, features: Tensor, earlier: NormStatistics | None) -> None:
        """`features` [batch]: of this pass."""
        self._total = features.float() if earlier is None else features + earlier.features
        self._share = None if earlier is None else (earlier.features / self._total)[:, None]
        self._spread = None if self._share is None else self._share * (1 - self._share)  # of two means
        self._earlier, self._place = earlier, 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def merged(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics of the next norm.  # [batch, channel] twice"""
        if self._earlier is not None and self._share is not None and self._spread is not None:
            span = slice(self._place, self._place + mean.shape[1])
            earlier, share = self._earlier.means[:, span], self._share
            away = earlier - mean
            mean = torch.lerp(mean, earlier, share)
            variance = torch.lerp(variance, self._earlier.variances[:, span], share)
            variance = torch.addcmul(variance, away, away * self._spread)
            self._place = span.stop
        self._kept.append((mean, variance))
        return mean, variance

    def result(self) -> NormStatistics:
        """The merged statistics of all norms."""
        means, variances = zip(*self._kept, strict=True)
        return NormStatistics(torch.cat(means, dim=1), torch.cat(variances, dim=1), self._total)


class AdaptiveNorm(nn.Module):
    """Normalise every channel over time, then scale and shift it by the style (AdaIN)."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(
        self, x: Tensor, style: Tensor, mask: Tensor | None = None, running: RunningStatistics | None = None
    ) -> Tensor:
        """# [batch, channel, time], [batch, style] → [batch, channel, time]"""
        mean, variance = channel_statistics(x, mask)
        if running is not None:
            merged = running.merged(mean[..., 0], variance[..., 0])
            mean, variance = merged[0][..., None], merged[1][..., None]
        scale, shift = self.affine(style, mean, variance)
        return torch.addcmul(shift, x, scale)

    def affine(self, style: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """The factor and the summand that normalise, scale and shift.  # [batch, channel, 1] twice"""
        gain, bias = self.fc(style)[..., None].chunk(2, dim=1)
        scale = (1 + gain) * torch.rsqrt(variance + EPSILON)
        return scale, bias - mean * scale


class StyledLayerNorm(nn.Module):
    """Layer norm whose gain and bias come from the style."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)
        self.channels = channels

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """# [batch, time, channel], [batch, style] → [batch, time, channel]"""
        gain, bias = self.fc(style)[:, None].chunk(2, dim=-1)
        normalised = functional.layer_norm(x, (self.channels,), eps=EPSILON)
        return (1 + gain) * normalised + bias


class StyledResBlock(nn.Module):
    """(x + conv(act(norm(conv(act(norm(x)))))) / √2; `upsamples` doubles the time axis."""

    def __init__(self, inputs: int, outputs: int, style: int, upsamples: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = AdaptiveNorm(style, inputs), AdaptiveNorm(style, outputs)
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else None
        self.pool = (
            nn.ConvTranspose1d(inputs, inputs, 3, stride=2, padding=1, output_padding=1, groups=inputs)
            if upsamples
            else None
        )

    def forward(self, x: Tensor, style: Tensor, mask: Tensor | None = None) -> Tensor:
        """# [batch, input, time] → [batch, output, time or 2 · time]"""
        inner = masked(functional.leaky_relu(self.norm1(x, style, mask), SLOPE), mask)
        if self.pool is not None:
            mask = None if mask is None else mask.repeat_interleave(2, dim=-1)
            inner, x = masked(doubled(inner, self.pool), mask), x.repeat_interleave(2, dim=-1)
        inner = masked(self.conv1(inner), mask)
        inner = self.conv2(masked(functional.leaky_relu(self.norm2(inner, style, mask), SLOPE), mask))
        shortcut = x if self.conv1x1 is None else self.conv1x1(x)
        return masked((inner + shortcut) * math.sqrt(0.5), mask)


def doubled(x: Tensor, pool: nn.ConvTranspose1d) -> Tensor:
    """A transposed convolution of three taps and a stride of two, each channel alone; PyTorch takes one by one.

    # [batch, channel, time] → [batch, channel, 2 · time]
    """
    assert pool.bias is not None
    before, same, after = pool.weight.unbind(-1)  # [channel, 1] each
    bias, following = pool.bias[:, None], functional.pad(x[..., 1:], (0, 1))
    return torch.stack([x * same + bias, x * after + following * before + bias], dim=-1).flatten(-2)
