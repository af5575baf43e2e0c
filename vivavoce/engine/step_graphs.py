"""The steps of a runner as CUDA graphs: one for each number of rows and kind of step, captured once."""

from collections.abc import Callable

import torch
from torch import Tensor

from vivavoce.engine.captured import Captured
from vivavoce.engine.packing import Packing
from vivavoce.engine.step_kind import StepKind
from vivavoce.engine.steps_ahead import FEW_HEARD, NextModes, follow
from vivavoce.nn.ahead import compiling_ahead
from vivavoce.nn.graph_capture import GraphCapture

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
