"""The block formats of GGUF files: how weights are packed, and their dequantisation in PyTorch.

A block of 32 weights, or of 256 in the K formats, has a scale in half precision. In the K formats a block has 8 or 16
groups, whose scales are integers that multiply it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_BLOCK, LARGE_BLOCK = 32, 256
Q5_0_BYTES = 22


@dataclass(frozen=True)
class BlockFormat:
    """A format: its number in GGUF files, its weights and bytes per block, and how blocks become floats."""

    name: str
    number: int
    weights: int
    bytes: int
    decode: Callable[[Tensor], Tensor]  # [block, byte] → [block, weight], float32

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of a matrix."""
        return inputs // self.weights * self.bytes

    def dequantised(self, data: Tensor) -> Tensor:
        """The weights as float32.  # [.., byte] uint8 → [.., weight]"""
        return self.decode(data.reshape(-1, self.bytes)).view(*data.shape[:-1], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """A number in half precision.  # [block, byte] → [block, 1]"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes, then the high halves.  # [.., n] → [.., 2 n]"""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """The bits of four bytes, as 0 or 16.  # [block, 4] → [block, 32]"""
    bits = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (packed[:, :, None] >> bits & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16) * _half(blocks, 0)


def q5_0_as_q8_0(data: Tensor) -> Tensor:
    """The same numbers in bytes: codes of five bits with their scale fit into int8.  # [.., byte] uint8"""
    blocks = data.reshape(-1, Q5_0_BYTES)
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) - 16  # wraps around, as int8 does
    return torch.cat([blocks[:, :2], codes], dim=1).view(*data.shape[:-1], -1)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Two bits of each of 32 bytes, then the next two of each, and so on.  # [block, 64] → [block, 8, 32]"""
    shifts = torch.tensor([0, 2, 4, 6], device=packed.device, dtype=torch.uint8)
    return (packed.view(-1, 2, 1, 32) >> shifts[:, None] & 3).flatten(1, 2)


def _grouped(codes: Tensor, scales: Tensor, minimums: Tensor | float) -> Tensor:
    """`scale * code - minimum`.  # codes [block, 256], scales and minimums [block, group]"""
    values = codes.float().view(*scales.shape, -1) * scales[..., None]
    return (values - (minimums[..., None] if isinstance(minimums, Tensor) else minimums)).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :16]
    scales, minimums = _half(blocks, 80) * (packed & 15), _half(blocks, 82) * (packed >> 4)
    return _grouped(_pairs_of_bits(blocks[:, 16:80].contiguous()).flatten(1), scales, minimums)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 96:104])
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)
    high = (blocks[:, None, 104:108] >> shifts[:, None] & 3).flatten(1)
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    third = blocks[:, None, :32] >> bits[:, None] & 1
    codes = _pairs_of_bits(blocks[:, 32:96].contiguous()) | third << 2
    return _grouped(codes.flatten(1).float() - 4, scales, 0.0)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K: eight of 6 bits each, in 12 bytes.  # [block, 8] each"""
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minimums


def _nibbles_by_32(packed: Tensor) -> Tensor:
    """# [block, 128] → [block, 8, 32]"""
    return _nibbles(packed.view(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _grouped(_nibbles_by_32(blocks[:, 16:].contiguous()).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    fifth = (blocks[:, None, 16:48] >> bits[:, None] & 1) << 4
    codes = _nibbles_by_32(blocks[:, 48:].contiguous()) | fifth
    return _grouped(codes.flatten(1), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [block, 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts[:, None] & 3).flatten(2)
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return _grouped((low | high << 4).flatten(1).float() - 32, scales, 0.0)


FORMATS = {
    each.number: each
    for each in (
        BlockFormat("Q4_0", 2, SMALL_BLOCK, 18, _q4_0),
        BlockFormat("Q4_1", 3, SMALL_BLOCK, 20, _q4_1),
        BlockFormat("Q5_0", 6, SMALL_BLOCK, Q5_0_BYTES, _q5_0),
        BlockFormat("Q5_1", 7, SMALL_BLOCK, 24, _q5_1),
        BlockFormat("Q8_0", 8, SMALL_BLOCK, 34, _q8_0),
        BlockFormat("Q2_K", 10, LARGE_BLOCK, 84, _q2_k),
        BlockFormat("Q3_K", 11, LARGE_BLOCK, 110, _q3_k),
        BlockFormat("Q4_K", 12, LARGE_BLOCK, 144, _q4_k),
        BlockFormat("Q5_K", 13, LARGE_BLOCK, 176, _q5_k),
        BlockFormat("Q6_K", 14, LARGE_BLOCK, 210, _q6_k),
    )
}
