"""Where attention keeps its past: keys and values in pages, and the rows of one step that read and extend them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SCRATCH_PAGE = 0  # belongs to nobody; rows that only fill a batch up to its bucket write there


@dataclass(frozen=True)
class KVShape:
    """What a model stores for one row: `layers` × (key, value) × `heads` × `head_dim`."""

    layers: int
    heads: int
    head_dim: int

    def bytes_per_row(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values one row costs."""
        return 2 * self.layers * self.heads * self.head_dim * dtype.itemsize


@dataclass
class PagedCache:
    """Keys and values of all layers.  # each [layer, page, row in page, head, head_dim]"""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, shape: KVShape, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "PagedCache":
        """A zeroed cache: a page is never read before it is written, but its unwritten rows may be, under a mask."""
        size = (shape.layers, pages, page_size, shape.heads, shape.head_dim)
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))

    @property
    def page_size(self) -> int:
        return int(self.keys.shape[2])

    @torch.no_grad()
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages, `(from, to)`: what a fork does before it writes into a page it shares."""
        if not pairs:
            return
        source = torch.tensor([pair[0] for pair in pairs], device=self.keys.device)
        target = torch.tensor([pair[1] for pair in pairs], device=self.keys.device)
        for tensor in (self.keys, self.values):
            tensor[:, target] = tensor[:, source]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one sequence inside a step: `rows` of the flat batch, from `position` on."""

    rows: slice
    slot: int
    position: int
    visible: Tensor | None = None  # [row, context] bool, where the rows branch; None: each sees all before it

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def context(self) -> int:
        """Rows of the sequence once this piece is written."""
        return self.position + self.length


@dataclass
class RowBatch:
    """The rows of one step, flat: many sequences, prefill pieces and single rows side by side.

    Rows `[0, singles)` are attended one by one by the decode kernel (each knows its slot and position, so several of
    them may belong to one sequence); the others in `pieces`. Where there is no kernel, everything is in `pieces`.
    """

    cache: PagedCache
    page_table: Tensor  # [slot, page of the sequence] int32
    slots: Tensor  # [row] int32
    positions: Tensor  # [row] int32
    singles: int
    pieces: tuple[Piece, ...]
    places: Tensor | None = None  # [row] int32: where rows are stored, where that is not by their position
    shared_mode: int | None = None  # of all rows whose states are asked for, where it is known beforehand

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new rows' keys and values.  # each [row, head, head_dim]"""
        pages, rows = self.addresses
        self.cache.keys[layer, pages, rows] = keys
        self.cache.values[layer, pages, rows] = values

    @cached_property
    def addresses(self) -> tuple[Tensor, Tensor]:
        """The page of each row, and its place there: the same for all layers."""
        places = (self.positions if self.places is None else self.places).long()
        page_size = self.cache.page_size
        return self.page_table[self.slots.long(), places // page_size].long(), places % page_size

    def read(self, layer: int, piece: Piece) -> tuple[Tensor, Tensor]:
        """All keys and values a piece may attend to.  # each [context, head, head_dim]"""
        count = -(-piece.context // self.cache.page_size)
        pages = self.page_table[piece.slot, :count].long()
        keys = self.cache.keys[layer, pages].flatten(0, 1)[: piece.context]
        values = self.cache.values[layer, pages].flatten(0, 1)[: piece.context]
        return keys, values
