"""Triton kernels, each with a plain PyTorch twin that is the reference: the twin runs wherever these do not."""

import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE or TYPE_CHECKING:
    from vivavoce.nn.kernels.gumbel_noise import gumbel_noise
    from vivavoce.nn.kernels.paged_decode import paged_decode
    from vivavoce.nn.kernels.rms_norm import add_rms_norm
    from vivavoce.nn.kernels.rotary_store import norm_rotate_store
    from vivavoce.nn.kernels.silu_multiply import silu_multiply


def usable(x: Tensor) -> bool:
    """Whether a tensor is where the kernels run."""
    return AVAILABLE and x.is_cuda


__all__ = ["AVAILABLE", "add_rms_norm", "gumbel_noise", "norm_rotate_store", "paged_decode", "silu_multiply", "usable"]
