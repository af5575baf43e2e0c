"""Counter-based Gumbel noise: what the plain twin does in some eighty small operations, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(value):
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def noise_of(seed, position, ids, salt):
    """Gumbel noise of ids at a place, float64."""
    state = _mix(seed.to(tl.uint32))
    state = _mix(state ^ (seed >> 32).to(tl.uint32))
    state = _mix(state + position.to(tl.uint32) * 0x9E3779B9)
    state = _mix(state + salt)
    bits = _mix(_mix(state + ids.to(tl.uint32) * 0xC2B2AE3D) ^ state)
    uniform = ((bits >> 8).to(tl.float64) + 0.5) / 16777216.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def _gumbel_noise(seeds_ptr, positions_ptr, ids_ptr, noise_ptr, candidates, SALT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < candidates
    ids = tl.load(ids_ptr + row * candidates + column, mask=inside, other=0)
    noise = noise_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids, SALT)
    tl.store(noise_ptr + row * candidates + column, noise, mask=inside)


def salt_of(channel: int) -> int:
    """What a channel adds to the hash."""
    return ((channel + 1) * 0x85EBCA77) & 0xFFFFFFFF


def gumbel_noise(seeds: Tensor, positions: Tensor, channel: int, ids: Tensor) -> Tensor:
    """Noise of each candidate id, float64. Twin: `vivavoce.engine.sampling.gumbel_noise`."""
    ids = ids.contiguous()
    noise = torch.empty(ids.shape, dtype=torch.float64, device=ids.device)
    block = min(1024, triton.next_power_of_2(ids.shape[1]))
    grid = (ids.shape[0], triton.cdiv(ids.shape[1], block))
    _gumbel_noise[grid](
        seeds.contiguous(), positions.contiguous(), ids, noise, ids.shape[1],
        SALT=salt_of(channel), BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return noise
