"""A step captured as a CUDA graph, and the way of its rows there and back."""

import numpy as np
import torch
from torch import Tensor


class Captured:
    """A step as a graph, with the tensor it reads and those it writes, each beside its twin in pinned memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, given: Tensor, made: Tensor, hidden: Tensor) -> None:
        self.graph, self.given, self.made, self.hidden = graph, given, made, hidden
        self._sent = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        self._got = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        self._written = self._sent.numpy()

    def replay(self, packed: np.ndarray) -> list[list[int]]:
        """The rows that this step makes; the device is done with it all when this returns."""
        np.copyto(self._written, packed)
        self.given.copy_(self._sent, non_blocking=True)
        self.graph.replay()
        self._got.copy_(self.made, non_blocking=True)
        torch.cuda.current_stream(self.given.device).synchronize()
        rows: list[list[int]] = self._got.tolist()
        return rows
