"""Layers of Kokoro that take a voice's style: adaptive normalisation and the residual block of predictors and decoder.

Rows of a batch may have different lengths. A mask (1 inside a row, 0 behind its end) then keeps statistics and
convolutions of a row independent of the padding; without a mask all rows have the full length.
"""

import math

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


class AdaptiveNorm(nn.Module):
    """Normalise every channel over time, then scale and shift it by the style (AdaIN)."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, x: Tensor, style: Tensor, mask: Tensor | None = None) -> Tensor:
        """# [batch, channel, time], [batch, style] → [batch, channel, time]"""
        scale, shift = self.affine(style, *channel_statistics(x, mask))
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
            inner, x = masked(self.pool(inner), mask), x.repeat_interleave(2, dim=-1)
        inner = masked(self.conv1(inner), mask)
        inner = self.conv2(masked(functional.leaky_relu(self.norm2(inner, style, mask), SLOPE), mask))
        shortcut = x if self.conv1x1 is None else self.conv1x1(x)
        return masked((inner + shortcut) * math.sqrt(0.5), mask)
