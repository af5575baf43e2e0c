"""Snake: an activation that is periodic, for sound."""

import torch
from torch import Tensor, nn

from vivavoce.nn import kernels

NEVER_ZERO = 1e-9


class Snake(nn.Module):
    """x + sin²(αx) / α with one α per channel, kept on a linear scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:  # [batch, channel, time]
        """The activation of every sample."""
        if kernels.usable(x) and x.stride(-1) == 1 and x.numel() and not self.alpha.requires_grad:
            return kernels.snake(x, self.alpha, NEVER_ZERO)
        alpha = self.alpha[:, None]
        return x + torch.sin(x * alpha).square() / (alpha + NEVER_ZERO)


class SnakeBeta(nn.Module):
    """x + sin²(αx) / β with one α and one β per channel, kept as their logarithms unless `log_scale` is off."""

    def __init__(self, channels: int, log_scale: bool = True) -> None:
        super().__init__()
        self.log_scale = log_scale
        neutral = torch.zeros(channels) if log_scale else torch.ones(channels)
        self.alpha = nn.Parameter(neutral)
        self.beta = nn.Parameter(neutral.clone())

    def forward(self, x: Tensor) -> Tensor:  # [batch, channel, time]
        """The activation of every sample."""
        alpha, beta = self.alpha[:, None], self.beta[:, None]
        if self.log_scale:
            alpha, beta = alpha.exp(), beta.exp()
        return x + torch.sin(x * alpha).square() / (beta + NEVER_ZERO)
