"""Rotary position embedding: half-split (`rotate`), or interleaved (`rotate_pairs`) as GPT-J has it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Cosines and sines of every position a model may reach, in float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float) -> None:
        super().__init__()
        cos, sin = rotation(torch.arange(positions), head_dim, theta)
        self.register_buffer("cos", cos, persistent=False)  # [position, head_dim / 2]
        self.register_buffer("sin", sin, persistent=False)


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, in float32.  # [..] → [.., head_dim / 2] twice"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of heads against the second.  # x [row, head, dim], cos and sin [row, dim / 2]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each even element of heads against the next one.  # x [.., head, dim], cos and sin [.., dim / 2]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    even, odd = wide.unbind(-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def turning(cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    """`rotate_pairs` by these angles, as a product of complex numbers where a device has them: a third of the calls."""
    if cos.device.type not in ("cpu", "cuda"):
        return lambda x: rotate_pairs(x, cos, sin)
    turns = torch.complex(cos, sin)[..., None, :]

    def turn(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(wide) * turns).flatten(-2).to(x.dtype)

    return turn


def sinusoids(positions: int, channels: int, max_wavelength: float = 10_000.0) -> Tensor:
    """Sines in the first half of the channels, cosines in the second, wavelengths from 2π to 2π `max_wavelength`."""
    steps = torch.log(torch.tensor(max_wavelength)) / (channels // 2 - 1)
    rates = torch.exp(-steps * torch.arange(channels // 2))
    angles = torch.arange(positions)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
