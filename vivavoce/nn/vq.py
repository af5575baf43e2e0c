"""Residual vector quantisation, and counter-based noise."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Codebook(nn.Module):
    """A table of vectors, indexed by code."""

    codebook: Tensor

    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.zeros(entries, size))

    def nearest(self, x: Tensor) -> Tensor:
        """The code of the vector closest to each input.  # [.., size] → [..]"""
        nearness = 2 * x @ self.codebook.T - self.codebook.square().sum(-1)  # |x|² is the same for every code
        return nearness.argmax(dim=-1)

    def forward(self, codes: Tensor) -> Tensor:
        """The vectors of codes.  # [..] → [.., size]"""
        return functional.embedding(codes, self.codebook)


class ResidualVQ(nn.Module):
    """Projection in, a stack of codebooks, projection out. It works in float32 whatever surrounds it."""

    def __init__(self, inputs: int, size: int, outputs: int, codebooks: int, entries: int) -> None:
        super().__init__()
        self.entries = entries
        self.input_proj = nn.Conv1d(inputs, size, 1)
        self.quantizers = nn.ModuleList(Codebook(entries, size) for _ in range(codebooks))
        self.output_proj = nn.Conv1d(size, outputs, 1)

    def encode(self, x: Tensor) -> Tensor:
        """Codes, the coarsest first.  # [batch, inputs, time] → [batch, codebook, time]"""
        residual = self.input_proj(x.float()).transpose(1, 2)
        return residual_codes(self.quantizers, residual)

    def decode(self, codes: Tensor) -> Tensor:
        """The vectors of codes; the finest may be left out.  # [batch, codebook, time] → [batch, outputs, time]"""
        decoded: Tensor = self.output_proj(sum_of_codes(self.quantizers, codes).transpose(1, 2))
        return decoded


class ProjectedCodebook(nn.Module):
    """Short vectors between projections. The nearest is by cosine similarity; the output is not normalised."""

    def __init__(self, size: int, codebook_dim: int, entries: int) -> None:
        super().__init__()
        self.in_proj = nn.Conv1d(size, codebook_dim, 1)
        self.codebook = nn.Embedding(entries, codebook_dim)
        self.out_proj = nn.Conv1d(codebook_dim, size, 1)

    def nearest(self, x: Tensor) -> Tensor:
        """The code of largest cosine similarity.  # [.., size] → [..]"""
        direction = functional.normalize(pointwise(self.in_proj, x), dim=-1)
        return (direction @ functional.normalize(self.codebook.weight, dim=-1).T).argmax(dim=-1)

    def forward(self, codes: Tensor) -> Tensor:
        """The vectors of codes.  # [..] → [.., size], projected"""
        return pointwise(self.out_proj, self.codebook(codes))


class ProjectedResidualVQ(nn.Module):
    """Residual quantisation by projected codebooks, channels last. It works in float32 whatever surrounds it."""

    def __init__(
        self, input_dim: int, rvq_dim: int, output_dim: int, num_quantizers: int, codebook_size: int, codebook_dim: int
    ) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(input_dim, rvq_dim, 1)
        self.quantizers = nn.ModuleList(
            ProjectedCodebook(rvq_dim, codebook_dim, codebook_size) for _ in range(num_quantizers)
        )
        self.output_proj = nn.Conv1d(rvq_dim, output_dim, 1)

    def encode(self, x: Tensor) -> Tensor:
        """Codes, the coarsest first.  # [batch, time, input] → [batch, codebook, time]"""
        residual = pointwise(self.input_proj, x.float())
        return residual_codes(self.quantizers, residual)

    def decode(self, codes: Tensor) -> Tensor:
        """The vectors of codes; the finest may be left out.  # [batch, codebook, time] → [batch, time, output]"""
        return pointwise(self.output_proj, sum_of_codes(self.quantizers, codes))


def residual_codes(codebooks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Each codebook's nearest code of the residual of those before it.  # [batch, time, size] → [batch, book, time]"""
    codes: list[Tensor] = []
    for codebook in codebooks:
        assert isinstance(codebook, Codebook | ProjectedCodebook)
        codes.append(codebook.nearest(x))
        x = x - codebook(codes[-1])
    return torch.stack(codes, dim=1)


def sum_of_codes(codebooks: Iterable[nn.Module], codes: Tensor) -> Tensor:
    """The sum of the vectors of codes of the first codebooks.  # [batch, book, time] → [batch, time, size]"""
    pairs = zip(codebooks, codes.unbind(dim=1), strict=False)
    return torch.stack([codebook(code) for codebook, code in pairs]).sum(dim=0)


def pointwise(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution of one tap where channels are last."""
    return functional.linear(x, conv.weight[..., 0], conv.bias)


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
