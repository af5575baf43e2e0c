"""Noise that is a function of its place: the same seed and index give the same number, however a stream is cut."""

import math

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def uniform_at(seed: Tensor, index: Tensor, salt: int = 0) -> Tensor:
    """Uniform numbers in (0, 1) for int64 seeds and indices, broadcast against each other."""
    key = _mixed_32(_low_32(seed) ^ _mixed_32(torch.full_like(seed, salt, dtype=torch.int32)))
    hashed = _mixed_32(_mixed_32(_low_32(index) ^ key) + _low_32(index >> 32))
    return ((hashed >> 9 & 0x7FFFFF).float() + 0.5) / 2**23


def normal_at(seed: Tensor, index: Tensor) -> Tensor:
    """Standard normal numbers for int64 seeds and indices, broadcast against each other."""
    radius = torch.sqrt(-2 * torch.log(uniform_at(seed, index, salt=1)))
    return radius * torch.cos(2 * math.pi * uniform_at(seed, index, salt=2))


def mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (carried in int64) in which every input bit moves every output bit."""
    x = x & LOW_32
    x = _times(x ^ x >> 16, 0x7FEB352D)
    x = _times(x ^ x >> 15, 0x846CA68B)
    return x ^ x >> 16


def _mixed_32(x: Tensor) -> Tensor:
    """`mixed` on int32, whose products wrap as unsigned ones do: four times as fast on a CPU."""
    x = (x ^ x >> 16 & 0xFFFF) * 0x7FEB352D
    x = (x ^ x >> 15 & 0x1FFFF) * (0x846CA68B - 2**32)
    return x ^ x >> 16 & 0xFFFF


def _low_32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def _times(x: Tensor, factor: int) -> Tensor:
    # In two halves, because a full 32 × 32 bit product overflows int64.
    low, high = (x & 0xFFFF) * factor, ((x >> 16) * factor & 0xFFFF) << 16
    return low + high & LOW_32
