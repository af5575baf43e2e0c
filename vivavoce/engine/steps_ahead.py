"""Steps that a device begins before they are planned, from what it made itself: it need not wait for the host.

While texts are written one row at a time, the next step is known but for the rows this one makes, and those are on the
device already. So it is begun before they are read. When it is planned, what fits the plan is there; a text that ended
meanwhile, or was rewound, was computed for nothing, and whoever has joined is computed beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vivavoce.engine.captured import Captured
from vivavoce.engine.sampling import Generation
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence

NextModes = Callable[[Tensor, Tensor], Tensor]
"""The modes of sequences behind the rows they made.  # [sequence], [sequence, channel] → [sequence]"""
FEW_HEARD = 4  # replies with listeners, of a step behind which the next is begun


@dataclass(frozen=True)
class StepSlot:
    """A row of a step that was begun ahead, and of what reply it must be to count."""

    row: int
    position: int
    generated: int
    revision: int
    generation: Generation | None
    mode: int | None
    """In which the step computes it, where all its rows are in one."""

    @classmethod
    def after(cls, work: Work, row: int, mode: int | None) -> "StepSlot":
        """The one that follows a single row."""
        sequence = work.sequence
        return cls(row, work.start + 1, sequence.generated + 1, sequence.row_revision, sequence.generation, mode)

    def holds(self, work: Work) -> bool:
        """Whether this work is the one that was done ahead."""
        sequence = work.sequence
        return (
            work.total == 1
            and work.samples
            and (work.start, sequence.generated, sequence.row_revision)
            == (self.position, self.generated, self.revision)
            and sequence.generation is self.generation
            and (self.mode is None or sequence.mode == self.mode)
        )


class StepAhead:
    """A step that was begun before it was planned: everybody of the one before goes on by the row it makes."""

    def __init__(self, captured: Captured, works: list[Work], rows: Mapping[int, int]) -> None:
        self.captured, self.ticket = captured, captured.go_on()
        self.places = {work.sequence.id: StepSlot.after(work, rows[work.sequence.id], captured.mode) for work in works}

    def rows_of(self, works: list[Work]) -> dict[int, int]:
        """The rows of the step that hold these works, by sequence, as far as they do."""
        found = {}
        for work in works:
            place = self.places.get(work.sequence.id)
            if place is not None and place.holds(work):
                found[work.sequence.id] = place.row
        return found

    def made(self) -> list[list[int]]:
        """What each row of the step made."""
        return self.captured.rows(self.ticket)


def has_next(work: Work, page_size: int) -> bool:
    """Whether a single row is followed by another unless it ends the reply, and there is room for that one."""
    sequence, generation = work.sequence, work.sequence.generation
    return (
        work.samples
        and work.total == 1
        and generation is not None
        and sequence.generated + 1 < generation.max_new_rows
        and (sequence.most_unread is None or sequence.unread + 1 < sequence.most_unread)
        and sequence.speculation is None
        and sequence.states is None
        and work.start + 1 < len(sequence.pages) * page_size
        and not _rests_next(sequence)
    )


def goes_on(works: list[Work], page_size: int) -> bool:
    """Whether a step of these works may begin the one behind it: who is in that must be known.

    Of many whose replies are heard it is not: they rest, and make room for others, as their listeners' needs have it.
    """
    heard = sum(work.sequence.listener is not None for work in works)
    return heard <= FEW_HEARD and all(has_next(work, page_size) for work in works)


def _rests_next(sequence: Sequence) -> bool:
    """Whether its next row is the last of its first sound, which then has the device for itself."""
    listener, made = sequence.listener, sequence.generated + 1
    return listener is not None and listener.awaits_sound(sequence.generated) and listener.is_voiced(made)


def follow(given: Tensor, made: Tensor, channels: int, filler: int, next_modes: NextModes) -> None:
    """Let every packed row of a step be the one it made, where it is not there to fill the step up.  # [row, …] each"""
    goes = given[:, channels] != filler
    given[:, channels + 2] = next_modes(given[:, channels + 2], made)
    given[:, :channels] = made
    given[:, channels + 1] += goes
    given[:, channels + 3] += goes
