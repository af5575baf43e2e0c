"""What all draws of a step have in common: it decides how they are computed, and which graph can replay the step."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from vivavoce.engine.scheduler import Work

GRAPHED_DRAFT = 8  # rows of a draft that a graph has room for; steps with a longer one run eagerly


@dataclass(frozen=True)
class StepKind:
    """What holds for every draw of a step."""

    narrow: bool = True
    """The candidates are surely among the best few."""
    plain: bool = False
    """The likeliest id is taken, and nobody's penalties count."""
    counts: bool = True
    """Rows are added to the histories of which penalties ask. Where nobody asks, they are caught up with later."""
    ahead: int = 0
    """Drafted rows that may stand before a draw."""
    mode: int | None = None
    """The mode of all who make a row, where the model says that knowing it spares work."""

    @classmethod
    def of(cls, works: list[Work], lone_modes: Many[int]) -> "StepKind":
        """The kind of a step of these works, on a model that is spared work where all are in one of these modes."""
        asked = [work.sequence.generation for work in works if work.sequence.generation is not None]
        drawn = [work.sequence.generation for work in works if work.samples and work.sequence.generation is not None]
        counts = any(generation.penalises for generation in asked)
        ahead = max(work.drafted.depth for work in works)
        return cls(
            narrow=all(generation.is_narrow for generation in drawn),
            plain=bool(drawn) and not counts and all(generation.is_greedy for generation in drawn),
            counts=counts,
            ahead=ahead,
            mode=None if ahead else _shared_mode(works, lone_modes),
        )

    @property
    def graphed(self) -> "StepKind":
        """The kind of the graph that steps of this kind replay: there are few, so that few are captured."""
        return replace(self, counts=not self.plain, ahead=GRAPHED_DRAFT if self.ahead else 0)


def _shared_mode(works: list[Work], lone_modes: Many[int]) -> int | None:
    if any(work.sequence.speculation is not None for work in works):
        return None  # drafts may be made of states that the mode would spare
    modes = {work.sequence.mode for work in works if work.samples}
    return modes.pop() if len(modes) == 1 and modes <= set(lone_modes) else None
