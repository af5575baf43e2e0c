"""An activation without aliasing: the signal is raised to twice its rate, activated there, and brought back."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TAPS = 12
REACH = 5  # an output of AntiAliased depends on this many inputs to either side of its own


def kaiser_sinc(cutoff: float = 0.25, half_width: float = 0.3, taps: int = TAPS) -> Tensor:
    """A low-pass filter whose gain at 0 Hz is 1; `cutoff` and `half_width` in cycles per sample.  # [1, 1, taps]"""
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    window = torch.kaiser_window(taps, periodic=False, beta=_kaiser_beta(attenuation), dtype=torch.float64)
    time = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    response = window * torch.sinc(2 * cutoff * time)
    return (response / response.sum()).float().view(1, 1, taps)


def _kaiser_beta(attenuation: float) -> float:
    """Kaiser's own formula for the window that reaches an attenuation in dB."""
    if attenuation > 50:
        return 0.1102 * (attenuation - 8.7)
    if attenuation >= 21:
        return 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    return 0.0


class Upsample2(nn.Module):
    """Twice the rate; the edges are held."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc())

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, time] → [batch, channel, 2 time]"""
        channels, edge = x.shape[1], TAPS // 2 - 1
        held = functional.pad(x, (edge, edge), mode="replicate")
        raised = functional.conv_transpose1d(held, 2 * self.filter.expand(channels, -1, -1), stride=2, groups=channels)
        surplus = 3 * edge  # two samples for each held input, and the filter's own run-out
        return raised[..., surplus:-surplus]


class LowPass(nn.Module):
    """Holds the filter of the way down under its published name."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", kaiser_sinc())


class Downsample2(nn.Module):
    """Half the rate; the edges are held."""

    def __init__(self) -> None:
        super().__init__()
        self.lowpass = LowPass()

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, 2 time] → [batch, channel, time]"""
        channels = x.shape[1]
        held = functional.pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
        return functional.conv1d(held, self.lowpass.filter.expand(channels, -1, -1), stride=2, groups=channels)


class AntiAliased(nn.Module):
    """`act` at twice the rate of its input, filtered on the way up and on the way down."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act
        self.upsample = Upsample2()
        self.downsample = Downsample2()

    def forward(self, x: Tensor) -> Tensor:
        """# [batch, channel, time] → the same"""
        activated: Tensor = self.downsample(self.act(self.upsample(x)))
        return activated
