"""Which turns of a long call the model still sees: the oldest go first, the instructions never."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HistoryWindow:
    """Shares of a context: above `high` the oldest turns are dropped until `low` is reached, so that it is rare."""

    high: float = 0.75
    low: float = 0.5


def first_kept(
    lengths: Sequence[int], fixed: int, capacity: int, first: int = 0, window: HistoryWindow | None = None
) -> int:
    """The first turn to keep, of turns with these lengths, where those before `first` are dropped already.

    `fixed` rows are always there. The last turn stays, whatever its length.
    """
    window = window or HistoryWindow()
    first = min(first, max(0, len(lengths) - 1))
    if fixed + sum(lengths[first:]) <= window.high * capacity:
        return first
    while first < len(lengths) - 1 and fixed + sum(lengths[first:]) > window.low * capacity:
        first += 1
    return first
