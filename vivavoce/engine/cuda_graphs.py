"""The steps of a runner as CUDA graphs: one for each number of rows and kind of step, captured once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.sampling import Generation
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.step import Packing, StepKind
from vivavoce.nn.cuda_graphs import GraphCapture, Replayed, compiling_ahead


class Captured:
    """A step as a graph, with the tensor it reads and those it writes, each beside its twin in pinned memory.

    With `following`, which makes of what a step was given and made what the next one is given, it can go on by itself
    before anybody has seen its rows. So two steps may be under way, and there are two places to which rows come.
    """

    def __init__(
        self,
        graph: Replayed,
        given: Tensor,
        made: Tensor,
        hidden: Tensor,
        following: Replayed | None = None,
        mode: int | None = None,
    ) -> None:
        self.graph, self.given, self.made, self.hidden, self.following = graph, given, made, hidden, following
        self.mode = mode
        """In which all its rows must be, if there is one."""
        pinned = given.is_cuda
        self._sent = torch.empty(given.shape, dtype=given.dtype, pin_memory=pinned)
        self._got = [torch.empty(made.shape, dtype=made.dtype, pin_memory=pinned) for _ in range(2)]
        self._done = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._written = self._sent.numpy()
        self._turn = 0

    def start(self, packed: np.ndarray) -> int:
        """Begin a step of these rows; a ticket for what it makes."""
        np.copyto(self._written, packed)
        self.given.copy_(self._sent, non_blocking=True)
        return self._replay()

    def go_on(self) -> int:
        """Begin the step that follows the one begun last, if every sequence goes on by the row it makes; a ticket."""
        assert self.following is not None
        self.following.replay()
        return self._replay()

    def rows(self, ticket: int) -> list[list[int]]:
        """The rows that a step made; the device is done with it all when this returns."""
        done = self._done[ticket]
        if done is not None:
            done.synchronize()
        rows: list[list[int]] = self._got[ticket].tolist()
        return rows

    def _replay(self) -> int:
        self.graph.replay()
        self._turn = ticket = 1 - self._turn
        self._got[ticket].copy_(self.made, non_blocking=True)
        done = self._done[ticket]
        if done is not None:
            done.record()
        return ticket


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
        and (sequence.max_unread is None or sequence.unread + 1 < sequence.max_unread)
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


BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Step = Callable[[Tensor, StepKind], tuple[Tensor, Tensor]]
"""Computes packed rows, each by itself: the rows they make, and the states these come of."""


class StepGraphs:
    """Captures a step when it is first asked for."""

    def __init__(self, step: Step, packing: Packing, device: torch.device, next_modes: NextModes | None) -> None:
        self.step, self.packing, self.device, self.next_modes = step, packing, device, next_modes
        self._captured: dict[tuple[int, StepKind], Captured] = {}
        self._capture = GraphCapture(device)  # of one memory for all buckets

    def __len__(self) -> int:
        return len(self._captured)

    def of(self, bucket: int, kind: StepKind) -> Captured:
        """The captured step of so many rows, of a kind that is `graphed`."""
        key = (bucket, kind)
        if key not in self._captured:
            given = self._blank(bucket, kind)
            graph, (made, hidden) = self._capture(lambda: self.step(given, kind))
            following, next_modes = None, self.next_modes
            if next_modes is not None and self.goes_on(bucket, kind):
                channels, filler = self.packing.model.channels, self.packing.filler
                following, _ = self._capture(lambda: follow(given, made, channels, filler, next_modes))
            self._captured[key] = Captured(graph, given, made, hidden, following, kind.mode)
        return self._captured[key]

    def goes_on(self, bucket: int, kind: StepKind) -> bool:
        """Whether all that the step behind such a one is given is what this one makes: no draft, no rows recalled."""
        is_asked = kind.plain or bucket <= FEW_HEARD
        return is_asked and not kind.ahead and not self.packing.recall

    def warm_up(self, buckets: tuple[int, ...], lone_modes: tuple[int, ...]) -> None:
        """Capture ahead what steps of these sizes without drafts replay."""
        kinds = [StepKind(), *(StepKind(mode=mode) for mode in lone_modes), StepKind(plain=True, counts=False)]
        # The largest first: the smaller ones reuse its memory.
        steps = [(bucket, kind) for bucket in sorted(buckets, reverse=True) for kind in kinds]
        with compiling_ahead() as is_ahead:
            for bucket, kind in steps if is_ahead else ():
                self.step(self._blank(bucket, kind), kind)
        for bucket, kind in steps:
            self.of(bucket, kind)

    def _blank(self, bucket: int, kind: StepKind) -> Tensor:
        """Packed rows that only fill a step up."""
        return torch.from_numpy(self.packing.pack([], [], kind.ahead, bucket)[0]).to(self.device)
