"""The fixed positions of Whisper's encoder."""

import torch
from torch import Tensor


def sinusoids(positions: int, channels: int, longest: float = 10_000.0) -> Tensor:
    """Sines in the first half of the channels, cosines in the second, of wavelengths from 2π to 2π · `longest`."""
    steps = torch.log(torch.tensor(longest)) / (channels // 2 - 1)
    rates = torch.exp(-steps * torch.arange(channels // 2))
    angles = torch.arange(positions)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
