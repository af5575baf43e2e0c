"""A step captured as a CUDA graph, and the way of its rows there and back."""

import numpy as np
import torch
from torch import Tensor

from vivavoce.nn.graph_capture import Replayed


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
