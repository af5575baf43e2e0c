"""The paged KV cache, and `RowBatch`: the rows of one step that read and extend it.

Keys and values are stored in the model's dtype, or in float8 with a scale per head and row: half the memory of 16 bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST, SMALLEST_SCALE = 448.0, 1e-12  # of FP8; and for heads that are all zero
SCALE = torch.float32
TILE_ROWS = 32  # of the prefill kernel
SCRATCH_PAGE = 0  # belongs to no sequence: rows of padding are written there


@dataclass(frozen=True)
class KVShape:
    """What a model stores for one row: `layers` × (key, value) × `heads` × `head_dim`."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one row, with their scales in float8."""
        scale = SCALE.itemsize if dtype == FP8 else 0
        return 2 * self.layers * self.heads * (self.head_dim * dtype.itemsize + scale)


@dataclass
class PagedCache:
    """Keys and values of all layers.  # each [layer, page, row in page, head, head_dim]"""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # [layer, page, row in page, head], in float8
    value_scales: Tensor | None = None

    @classmethod
    def allocate(
        cls, shape: KVShape, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "PagedCache":
        """A zeroed cache: unwritten rows of a page may be read under a mask, so they must be finite."""
        size = (shape.layers, pages, page_size, shape.heads, shape.head_dim)
        if dtype != FP8:
            return cls(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
        keys, values = (torch.zeros(size, dtype=torch.uint8, device=device).view(FP8) for _ in range(2))
        return cls(keys, values, *(torch.zeros(size[:-1], dtype=SCALE, device=device) for _ in range(2)))

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are stored in float8."""
        return self.key_scales is not None

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and their scales in one layer."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys[layer], self.values[layer], None, None
        return self.keys[layer], self.values[layer], self.key_scales[layer], self.value_scales[layer]

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and their scales if there are any, in dtypes that every device can index."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return self.keys.view(torch.uint8), self.values.view(torch.uint8), self.key_scales, self.value_scales

    @torch.no_grad()
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, `(from, to)`: copy-on-write of forked sequences."""
        if not pairs:
            return
        source = torch.tensor([pair[0] for pair in pairs], device=self.keys.device)
        target = torch.tensor([pair[1] for pair in pairs], device=self.keys.device)
        for tensor in self.tensors():
            tensor[:, target] = tensor[:, source]


@dataclass(frozen=True)
class CachePiece:
    """Consecutive rows of one sequence inside a step: `rows` of the flat batch, from `position` on."""

    rows: slice
    slot: int
    position: int
    visible: Tensor | None = None  # [row, context] bool, where the rows branch; None: causal
    draws: int = 0  # how many of its rows, the last ones, have states that are read
    lone_mode: int | None = None  # the only mode in which rows are ever drawn from its sequence, if there is one

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def context(self) -> int:
        """Rows of the sequence up to the end of this piece."""
        return self.position + self.length


def tiles_of(pieces: Iterable[CachePiece]) -> list[tuple[int, int, int, int]]:
    """The tiles of causal pieces: first row, rows, slot, position of the first row."""
    return [
        (row, min(TILE_ROWS, piece.rows.stop - row), piece.slot, piece.position + row - piece.rows.start)
        for piece in pieces
        for row in range(piece.rows.start, piece.rows.stop, TILE_ROWS)
    ]


@dataclass
class RowBatch:
    """The rows of one step, of many sequences, in one flat batch.

    Rows `[0, singles)` go through the decode kernel one by one, each with its slot and position, so that several may
    belong to one sequence; the others are in `tiles`, which the prefill kernel takes, or in `pieces`. Without kernels,
    all rows are in `pieces`.
    """

    cache: PagedCache
    page_table: Tensor  # [slot, page of the sequence] int32
    slots: Tensor  # [row] int32
    positions: Tensor  # [row] int32
    singles: int
    pieces: tuple[CachePiece, ...]
    cache_positions: Tensor | None = None  # [row] int32: where rows are stored, if not at their positions
    shared_mode: int | None = None  # mode of all rows whose states are read, where the host knows it
    tiles: Tensor | None = None  # [tile, 4] int32: first row, rows (0 to TILE_ROWS), slot, position of the first row

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows' keys and values.  # each [row, head, head_dim]"""
        pages, rows = self.addresses
        stored: tuple[Tensor, ...] = (keys, values)
        if self.cache.is_fp8:
            (keys, key_scales), (values, value_scales) = to_fp8(keys), to_fp8(values)
            stored = (keys, values, key_scales, value_scales)
        for tensor, new in zip(self.cache.tensors(), stored, strict=True):
            tensor[layer, pages, rows] = new

    @cached_property
    def addresses(self) -> tuple[Tensor, Tensor]:
        """Page of each row and its index in the page, for all layers."""
        cache_positions = (self.positions if self.cache_positions is None else self.cache_positions).long()
        page_size = self.cache.page_size
        return self.page_table[self.slots.long(), cache_positions // page_size].long(), cache_positions % page_size

    def read(self, layer: int, piece: CachePiece, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The keys and values of a piece's sequence up to its end; float8 is converted to this dtype.

        # each [context, head, head_dim]
        """
        count = -(-piece.context // self.cache.page_size)
        pages = self.page_table[piece.slot, :count].long()
        keys, values, *scales = (tensor[layer, pages].flatten(0, 1)[: piece.context] for tensor in self.cache.tensors())
        if scales:
            keys, values = widened(keys, scales[0], dtype), widened(values, scales[1], dtype)
        return keys, values


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Heads in float8 (as bytes), each scaled to the range of float8, and the scales.  # [.., head_dim] → .., [..]"""
    wide = rows.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
    return (wide / scale[..., None]).to(FP8).view(torch.uint8), scale


def widened(heads: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads of `to_fp8` as floats.  # [.., head_dim], [..]"""
    wide = torch.promote_types(dtype, torch.float32)
    return (heads.view(FP8).to(wide) * scale[..., None].to(wide)).to(dtype)
