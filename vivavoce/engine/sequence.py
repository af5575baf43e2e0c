"""The engine's view of one conversation: its rows, the pages of their keys and values, and the reply under way."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from vivavoce.engine.listener import PlaybackDeadline
from vivavoce.engine.sampling import Generation
from vivavoce.engine.speculative import Speculation
from vivavoce.models.interface import Row

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


@dataclass(eq=False)
class Sequence:
    """Rows in order, of which the first `cached` have keys and values in `pages`."""

    id: int
    rows: list[Row] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    last_used: int = 0
    is_open: bool = True
    is_wanted: bool = False
    """Rows were added that nobody has computed yet. An evicted sequence that nobody asks for is not."""
    page_revision: int = 0
    """Counts changes of `pages`, by which a copy of the page table knows that it is stale."""
    row_revision: int = 0
    """Counts rewinds: rows that were there are gone, and what was derived from them is stale."""

    generation: Generation | None = None
    generated: int = 0
    mode: int = 0
    unread: int = 0
    """Rows made that the consumer has not taken yet; with `most_unread` it makes a slow consumer pause the reply."""
    most_unread: int | None = None
    listener: PlaybackDeadline | None = None
    """Who hears the reply while it is made, if anybody does."""
    served: float = 0.0
    """When a step last computed some of its rows, on the scheduler's clock."""
    voiced: float | None = None
    """When the rows of its first sound were there."""
    speculation: Speculation | None = None
    hidden: Tensor | None = None
    """The model's state from which the newest row was drawn, kept where a draft is made of it."""
    states: list[Tensor] | None = None
    """The states from which all rows of the reply were drawn, [row, …] each, where somebody keeps them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_generating(self) -> bool:
        """Whether a reply is being made."""
        return self.generation is not None

    @property
    def first_counted(self) -> int:
        """From which row on repetition penalties count."""
        if self.generation is None or self.generation.penalise_prompt:
            return 0
        return len(self.rows) - self.generated

    @property
    def is_paused(self) -> bool:
        """Whether the reply waits for its consumer."""
        return self.most_unread is not None and self.unread >= self.most_unread

    @property
    def awaits_sound(self) -> bool:
        """Whether somebody has heard nothing of the reply because its first rows are not there."""
        return self.is_generating and self.listener is not None and self.listener.awaits_sound(self.generated)

    @property
    def runs_dry(self) -> float | None:
        """When its listener will have heard all there is; None: nobody listens."""
        return None if self.listener is None else self.listener.runs_dry(self.generated)

    @property
    def pending(self) -> int:
        """Rows without keys and values yet."""
        return len(self.rows) - self.cached

    @property
    def has_work(self) -> bool:
        """Whether a step should compute some of its rows."""
        if self.is_generating:
            return not self.is_paused
        return self.is_wanted and self.pending > 0


def rows_in_common(first: list[Row], second: list[Row]) -> int:
    """How many rows both begin with."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(place for place in range(length) if first[place] != second[place])
