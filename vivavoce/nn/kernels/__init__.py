"""Triton kernels, each with a plain PyTorch twin that is the reference: the twin runs wherever these do not."""

import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

from vivavoce.nn.kernels.tiles import (
    Entries,
    Tile,
    keep_tiles,
    name_around,
    tile_for,
    tile_name,
    window_attention_name,
)
from vivavoce.nn.kernels.tiles import tiles as known_tiles

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE or TYPE_CHECKING:
    from vivavoce.nn.kernels.add_layer_norm import add_layer_norm
    from vivavoce.nn.kernels.chunk_attention import LONGEST_CHUNK, chunk_attention
    from vivavoce.nn.kernels.draw import draw
    from vivavoce.nn.kernels.few_row_linear import few_row_linear
    from vivavoce.nn.kernels.gumbel_noise import gumbel_noise
    from vivavoce.nn.kernels.modulated_norm import modulated_norm
    from vivavoce.nn.kernels.narrow_draw import WIDEST_DRAW, narrow_draw
    from vivavoce.nn.kernels.norm_linear import norm_linear
    from vivavoce.nn.kernels.norm_mish import norm_mish
    from vivavoce.nn.kernels.one_row_decode import one_row_decode, takes_one_row
    from vivavoce.nn.kernels.page_attention import page_attention, store_rows
    from vivavoce.nn.kernels.paged_decode import paged_decode
    from vivavoce.nn.kernels.rms_norm import add_rms_norm
    from vivavoce.nn.kernels.rotary_store import norm_rotate_store
    from vivavoce.nn.kernels.rotate_first_head import rotate_first_head
    from vivavoce.nn.kernels.row_linear import MOST_ROWS, row_linear, takes
    from vivavoce.nn.kernels.row_pages import Pages
    from vivavoce.nn.kernels.row_tile_linear import row_tile_linear
    from vivavoce.nn.kernels.silu_multiply import silu_multiply
    from vivavoce.nn.kernels.snake import snake
    from vivavoce.nn.kernels.stream_conv import stream_conv
    from vivavoce.nn.kernels.transcript_rules import transcript_rules
    from vivavoce.nn.kernels.window_attention import window_attention


def usable(x: Tensor) -> bool:
    """Whether the kernels can take a tensor: it is where they run, and no gradient is wanted, for none goes through."""
    return AVAILABLE and x.is_cuda and not x.requires_grad


__all__ = [
    "AVAILABLE",
    "LONGEST_CHUNK",
    "MOST_ROWS",
    "WIDEST_DRAW",
    "Entries",
    "Pages",
    "Tile",
    "add_layer_norm",
    "add_rms_norm",
    "chunk_attention",
    "draw",
    "few_row_linear",
    "gumbel_noise",
    "keep_tiles",
    "known_tiles",
    "modulated_norm",
    "name_around",
    "narrow_draw",
    "norm_linear",
    "norm_mish",
    "norm_rotate_store",
    "one_row_decode",
    "page_attention",
    "paged_decode",
    "rotate_first_head",
    "row_linear",
    "row_tile_linear",
    "silu_multiply",
    "snake",
    "store_rows",
    "stream_conv",
    "takes",
    "takes_one_row",
    "tile_for",
    "tile_name",
    "transcript_rules",
    "usable",
    "window_attention",
    "window_attention_name",
]
