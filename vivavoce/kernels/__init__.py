"""Triton kernels. Each names its PyTorch reference, which runs wherever the kernel does not.

Callers ask `usable` (and `takes`, `takes_float32`, `takes_one_row` or `tile_for` where a kernel has limits of its own)
before they call a kernel. Nothing else imports the modules of this package, which need Triton.
"""

import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

from vivavoce.kernels.tiles import (
    FUSED_NORM_ROWS,
    Entries,
    Tile,
    is_supported,
    name_around,
    store_tiles,
    tile_for,
    tile_name,
    window_attention_name,
)
from vivavoce.kernels.tiles import tiles as known_tiles

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE or TYPE_CHECKING:
    from vivavoce.kernels.adaptive_norm import add_moments, norm_affine, scaled_snake
    from vivavoce.kernels.decode_attention import (
        Pages,
        one_row_decode,
        page_attention,
        paged_decode,
        store_rows,
        takes_one_row,
    )
    from vivavoce.kernels.dequantise import dequantised_linear
    from vivavoce.kernels.float32_linear import float32_linear, takes_float32
    from vivavoce.kernels.norms import (
        add_layer_norm,
        add_rms_norm,
        layer_norm,
        modulated_norm,
        norm_linear,
        silu_multiply,
        snake,
    )
    from vivavoce.kernels.prefill_attention import paged_prefill
    from vivavoce.kernels.rotary import norm_rotate_store, rotate_first_head
    from vivavoce.kernels.row_linear import MAX_UNTILED_ROWS, row_linear, row_tile_linear, takes
    from vivavoce.kernels.sampling import MAX_DRAW_COLUMNS, draw, gumbel_noise, small_vocabulary_draw, transcript_rules
    from vivavoce.kernels.small_batch_linear import small_batch_linear
    from vivavoce.kernels.streaming import MAX_CHUNK_FRAMES, chunk_attention, stream_conv
    from vivavoce.kernels.window_attention import window_attention


def usable(x: Tensor) -> bool:
    """Whether the kernels can take a tensor: Triton is installed, and it is on a CUDA device and needs no gradient."""
    return AVAILABLE and x.is_cuda and not x.requires_grad


__all__ = [
    "AVAILABLE",
    "FUSED_NORM_ROWS",
    "MAX_CHUNK_FRAMES",
    "MAX_DRAW_COLUMNS",
    "MAX_UNTILED_ROWS",
    "Entries",
    "Pages",
    "Tile",
    "add_layer_norm",
    "add_moments",
    "add_rms_norm",
    "chunk_attention",
    "dequantised_linear",
    "draw",
    "float32_linear",
    "gumbel_noise",
    "is_supported",
    "known_tiles",
    "layer_norm",
    "modulated_norm",
    "name_around",
    "norm_affine",
    "norm_linear",
    "norm_rotate_store",
    "one_row_decode",
    "page_attention",
    "paged_decode",
    "paged_prefill",
    "rotate_first_head",
    "row_linear",
    "row_tile_linear",
    "scaled_snake",
    "silu_multiply",
    "small_batch_linear",
    "small_vocabulary_draw",
    "snake",
    "store_rows",
    "store_tiles",
    "stream_conv",
    "takes",
    "takes_float32",
    "takes_one_row",
    "tile_for",
    "tile_name",
    "transcript_rules",
    "usable",
    "window_attention",
    "window_attention_name",
]
