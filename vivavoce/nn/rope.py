"""Rotary position embedding, half-split: the first half of a head is rotated against the second."""

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Cosines and sines of every position a model may reach, in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)  # [position, head_dim / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their row's angle.  # x [row, head, dim], cos and sin [row, dim / 2]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
