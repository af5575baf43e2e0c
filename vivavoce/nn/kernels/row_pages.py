"""Where the keys and values go that a packed projection of a few rows makes."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.paged import RowBatch


@dataclass(frozen=True)
class Pages:
    """The pages of a layer, and who writes to them."""

    batch: RowBatch
    layer: int

    def given(self) -> tuple[tuple[Tensor, ...], int]:
        """Keys, values, slots, positions and page table, as kernels take them, and the size of a page."""
        batch, cache = self.batch, self.batch.cache
        tensors = cache.keys[self.layer], cache.values[self.layer], batch.slots, batch.positions, batch.page_table
        return tensors, cache.page_size


@triton.jit
def cached_at(
    slots_ptr, positions_ptr, page_table_ptr, table_width, row, exists, WIDTH: tl.constexpr, PAGE: tl.constexpr
):
    """Where the keys of rows begin in the pages of a layer."""
    slot = tl.load(slots_ptr + row, mask=exists, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=exists, other=0)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE, mask=exists, other=0)
    return (page.to(tl.int64) * PAGE + position % PAGE) * WIDTH
