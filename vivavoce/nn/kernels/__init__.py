"""Triton kernels, each with a plain PyTorch twin that is the reference: the twin runs wherever these do not."""

import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE or TYPE_CHECKING:
    from vivavoce.nn.kernels.chunk_attention import LONGEST_CHUNK, chunk_attention
    from vivavoce.nn.kernels.gumbel_noise import gumbel_noise
    from vivavoce.nn.kernels.norm_linear import norm_linear
    from vivavoce.nn.kernels.norm_mish import norm_mish
    from vivavoce.nn.kernels.paged_decode import paged_decode
    from vivavoce.nn.kernels.rms_norm import add_rms_norm
    from vivavoce.nn.kernels.rotary_store import norm_rotate_store
    from vivavoce.nn.kernels.silu_multiply import silu_multiply
    from vivavoce.nn.kernels.stream_conv import stream_conv
    from vivavoce.nn.kernels.weight_only_gemv import Tile, takes, weight_only_linear


def usable(x: Tensor) -> bool:
    """Whether the kernels can take a tensor: it is where they run, and no gradient is wanted, for none goes through."""
    return AVAILABLE and x.is_cuda and not x.requires_grad


__all__ = [
    "AVAILABLE",
    "LONGEST_CHUNK",
    "Tile",
    "add_rms_norm",
    "chunk_attention",
    "gumbel_noise",
    "norm_linear",
    "norm_mish",
    "norm_rotate_store",
    "paged_decode",
    "silu_multiply",
    "stream_conv",
    "takes",
    "usable",
    "weight_only_linear",
]
