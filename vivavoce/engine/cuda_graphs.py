"""The steps of a runner as CUDA graphs, and asynchronous decode.

Asynchronous decode launches step N+1 from the rows on the device before step N is read back, wherever every sequence
of step N is sure to continue unless its new row ends the reply.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vivavoce.engine.sampling import Generation
from vivavoce.engine.scheduler import Work
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.step import Packing, PrefillLayout, Step, StepKind
from vivavoce.nn.cuda_graphs import GraphCapture, Replayed, compiling_ahead


class CapturedStep:
    """A step as a graph, its input and output tensors, and pinned host copies of them.

    With `advance`, a graph that computes the next step's inputs from this one's inputs and outputs, the next step can
    be launched before the rows of this one are read back. Two steps may be in flight, so there are two host outputs.
    """

    def __init__(
        self,
        graph: Replayed,
        inputs: Tensor,
        outputs: Tensor,
        hidden: Tensor,
        advance: Replayed | None = None,
        mode: int | None = None,
    ) -> None:
        self.graph, self.inputs, self.outputs, self.hidden, self.advance = graph, inputs, outputs, hidden, advance
        self.mode = mode
        """The mode that all its rows must have, if it was captured for one."""
        is_pinned = inputs.is_cuda
        self._host_inputs = torch.empty(inputs.shape, dtype=inputs.dtype, pin_memory=is_pinned)
        self._host_outputs = [torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=is_pinned) for _ in range(2)]
        self._done = [torch.cuda.Event() if is_pinned else None for _ in range(2)]
        self._host_array = self._host_inputs.numpy()
        self._last = 0

    def launch(self, packed: np.ndarray) -> int:
        """Launch a step on packed rows; returns a ticket for `read`."""
        np.copyto(self._host_array, packed)
        self.inputs.copy_(self._host_inputs, non_blocking=True)
        return self._replay()

    def launch_next(self) -> int:
        """Launch the step after the last one, in which every sequence continues with its new row; returns a ticket."""
        assert self.advance is not None
        self.advance.replay()
        return self._replay()

    def read(self, ticket: int) -> list[list[int]]:
        """The rows drawn by a step; waits until the device has finished it."""
        done = self._done[ticket]
        if done is not None:
            done.synchronize()
        rows: list[list[int]] = self._host_outputs[ticket].tolist()
        return rows

    def _replay(self) -> int:
        self.graph.replay()
        self._last = ticket = 1 - self._last
        self._host_outputs[ticket].copy_(self.outputs, non_blocking=True)
        done = self._done[ticket]
        if done is not None:
            done.record()
        return ticket


NextModes = Callable[[Tensor, Tensor], Tensor]
"""The modes of sequences after their new rows.  # [sequence], [sequence, channel] → [sequence]"""
MAX_PRELAUNCH_PLAYBACKS = 4  # replies with playback in a step after which the next is launched before it is planned


@dataclass(frozen=True)
class StepSlot:
    """A row of a prelaunched step, and the state its sequence must have for the row to be valid."""

    row: int
    position: int
    generated: int
    revision: int
    generation: Generation | None
    mode: int | None
    """The mode that the step was captured for, if any."""

    @classmethod
    def after(cls, work: Work, row: int, mode: int | None) -> "StepSlot":
        """The slot of the row that follows a work of a single row."""
        sequence = work.sequence
        return cls(row, work.start + 1, sequence.generated + 1, sequence.row_revision, sequence.generation, mode)

    def matches(self, work: Work) -> bool:
        """Whether the slot has computed this work."""
        sequence = work.sequence
        return (
            work.total == 1
            and work.samples
            and (work.start, sequence.generated, sequence.row_revision)
            == (self.position, self.generated, self.revision)
            and sequence.generation is self.generation
            and (self.mode is None or sequence.mode == self.mode)
        )


class PrelaunchedStep:
    """Asynchronous decode: step N+1, launched from the rows on the device before step N is read back or N+1 planned."""

    def __init__(self, captured: CapturedStep, works: list[Work], rows: Mapping[int, int]) -> None:
        self.captured, self.ticket = captured, captured.launch_next()
        self.slots = {work.sequence.id: StepSlot.after(work, rows[work.sequence.id], captured.mode) for work in works}

    def rows_of(self, works: list[Work]) -> dict[int, int]:
        """The rows of the step, by sequence id, for the works that it has computed."""
        rows = {}
        for work in works:
            slot = self.slots.get(work.sequence.id)
            if slot is not None and slot.matches(work):
                rows[work.sequence.id] = slot.row
        return rows

    def read(self) -> list[list[int]]:
        """The rows drawn by the step."""
        return self.captured.read(self.ticket)


def has_next(work: Work, page_size: int) -> bool:
    """Whether a work of one row is followed by another unless its row ends the reply, and has a page for it."""
    sequence, generation = work.sequence, work.sequence.generation
    return (
        work.samples
        and work.total == 1
        and generation is not None
        and sequence.generated + 1 < generation.max_new_rows
        and (sequence.max_unread is None or sequence.unread + 1 < sequence.max_unread)
        and sequence.speculation is None
        and sequence.matcher is None  # which ids the next row may have depends on this one
        and sequence.states is None
        and work.start + 1 < len(sequence.pages) * page_size
        and not _rests_next(sequence)
    )


def can_prelaunch(works: list[Work], page_size: int) -> bool:
    """Whether the step after these works can be launched unplanned: its sequences must be known.

    With many playbacks they are not: replies rest, and others take their place, by the leads of their playbacks.
    """
    playbacks = sum(work.sequence.listener is not None for work in works)
    return playbacks <= MAX_PRELAUNCH_PLAYBACKS and all(has_next(work, page_size) for work in works)


def _rests_next(sequence: Sequence) -> bool:
    """Whether its next row completes the first audio, for whose decoding the reply then rests."""
    listener, generated = sequence.listener, sequence.generated
    return listener is not None and listener.awaits_first_audio(generated) and listener.has_first_audio(generated + 1)


def advance_inputs(inputs: Tensor, outputs: Tensor, channels: int, filler: int, next_modes: NextModes) -> None:
    """Turn the packed rows of a step, in place, into those of the next; rows of padding stay.  # [row, …] each"""
    is_real = inputs[:, channels] != filler
    inputs[:, channels + 2] = next_modes(inputs[:, channels + 2], outputs)
    inputs[:, :channels] = outputs
    inputs[:, channels + 1] += is_real
    inputs[:, channels + 3] += is_real


BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_BUCKETS = (64, 128, 256, 512)


class StepGraphs:
    """The graphs of a runner, captured when first used: one for each bucket (number of rows) and kind of step.

    Those of decode steps take rows one by one, those of prefills in tiles.
    """

    def __init__(self, step: Step, packing: Packing, device: torch.device, next_modes: NextModes | None) -> None:
        self.step, self.packing, self.device, self.next_modes = step, packing, device, next_modes
        self._captured: dict[tuple[int, StepKind], CapturedStep] = {}
        self._prefills: dict[tuple[int, StepKind], CapturedStep] = {}
        self._capture = GraphCapture(device)  # all buckets share its memory

    def __len__(self) -> int:
        return len(self._captured) + len(self._prefills)

    def layout(self, bucket: int) -> PrefillLayout:
        """The input of a captured prefill."""
        return PrefillLayout(bucket, self.packing.columns())

    def of_prefill(self, bucket: int, kind: StepKind) -> CapturedStep:
        """The captured prefill of this many rows."""
        key = (bucket, kind)
        if key not in self._prefills:
            inputs, layout = self._prefill_padding(bucket), self.layout(bucket)
            graph, (outputs, hidden) = self._capture(lambda: self.step.of_tiles(inputs, layout, kind))
            self._prefills[key] = CapturedStep(graph, inputs, outputs, hidden)
        return self._prefills[key]

    def of(self, bucket: int, kind: StepKind) -> CapturedStep:
        """The captured step of this many rows, of a kind that is `graphed`."""
        key = (bucket, kind)
        if key not in self._captured:
            inputs = self._padding(bucket, kind)
            graph, (outputs, hidden) = self._capture(lambda: self.step.of_singles(inputs, kind))
            advance, next_modes = None, self.next_modes
            if next_modes is not None and self.can_prelaunch(bucket, kind):
                channels, filler = self.packing.model.channels, self.packing.filler
                advance, _ = self._capture(lambda: advance_inputs(inputs, outputs, channels, filler, next_modes))
            self._captured[key] = CapturedStep(graph, inputs, outputs, hidden, advance, kind.mode)
        return self._captured[key]

    def can_prelaunch(self, bucket: int, kind: StepKind) -> bool:
        """Whether the inputs of the next step follow from this one's: without drafts and without recalled rows."""
        is_useful = kind.plain or bucket <= MAX_PRELAUNCH_PLAYBACKS
        return is_useful and not kind.draft_depth and not self.packing.recall

    def warm_up(self, buckets: tuple[int, ...], lone_modes: tuple[int, ...], prefill_buckets: tuple[int, ...]) -> None:
        """Capture the steps and prefills of these sizes, without drafts."""
        kinds = [StepKind(), *(StepKind(mode=mode) for mode in lone_modes), StepKind(plain=True, counts=False)]
        # The largest first: the smaller ones reuse its memory.
        steps = [(bucket, kind) for bucket in sorted(buckets, reverse=True) for kind in kinds]
        with compiling_ahead() as is_ahead:
            for bucket, kind in steps if is_ahead else ():
                self.step.of_singles(self._padding(bucket, kind), kind)
            for bucket in prefill_buckets if is_ahead else ():
                self.step.of_tiles(self._prefill_padding(bucket), self.layout(bucket), StepKind())
        for bucket in sorted(prefill_buckets, reverse=True):
            self.of_prefill(bucket, StepKind())
        for bucket, kind in steps:
            self.of(bucket, kind)

    def _padding(self, bucket: int, kind: StepKind) -> Tensor:
        """Packed rows of padding."""
        return torch.from_numpy(self.packing.pack([], [], kind.draft_depth, bucket)[0]).to(self.device)

    def _prefill_padding(self, bucket: int) -> Tensor:
        """The input of a prefill without works."""
        packed, _ = self.packing.pack([], [], 0, bucket)
        return torch.from_numpy(self.layout(bucket).join(packed, [], [])).to(self.device)
