"""State of many streams in arrays: a stream has one row of each from its start to its end."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

FIRST_CAPACITY = 16
FEW = 4  # streams, under which numpy is quicker: torch takes longer to begin an operation


class RowArray:
    """An array [row, …] that is indexed as one; `values` may be replaced by a larger array."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, initial: float, capacity: int) -> None:
        self.initial = initial
        self.values: NDArray[Any] = np.full((capacity, *shape), initial, dtype)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return self.values[rows]

    def __setitem__(self, rows: Any, values: Any) -> None:
        self.values[rows] = values

    def grow(self, capacity: int) -> None:
        """Add rows."""
        more = np.full((capacity - len(self.values), *self.values.shape[1:]), self.initial, self.values.dtype)
        self.values = np.concatenate([self.values, more])


class Rows:
    """Assigns rows to streams, the same in all of its arrays; a row that is released is used again."""

    def __init__(self) -> None:
        self._capacity = FIRST_CAPACITY
        self._free = list(range(FIRST_CAPACITY))
        self._arrays: list[RowArray] = []

    def array(self, shape: tuple[int, ...], dtype: DTypeLike, initial: float) -> RowArray:
        """A new array whose rows have this initial value."""
        self._arrays.append(RowArray(shape, dtype, initial, self._capacity))
        return self._arrays[-1]

    def take(self) -> int:
        """A free row, with its initial values."""
        if not self._free:
            self._free = list(range(self._capacity, 2 * self._capacity))
            self._capacity *= 2
            for array in self._arrays:
                array.grow(self._capacity)
        row = self._free.pop(0)
        for array in self._arrays:
            array.values[row] = array.initial
        return row

    def release(self, row: int) -> None:
        """Make a row free."""
        self._free.append(row)
