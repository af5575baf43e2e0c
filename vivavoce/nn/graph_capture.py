"""CUDA graph capture for the whole package: one at a time, after an eager run, and eager for good where it fails."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vivavoce.nn.process_settings import cudnn_benchmark

Made = TypeVar("Made")
log = logging.getLogger(__name__)
# Captures of several threads share the allocator's bookkeeping, and none of them is in a hurry.
_one_at_a_time = threading.RLock()


class Replayed(Protocol):
    """What was captured and can be done again."""

    def replay(self) -> None:
        """Do it again on the current stream, from the same inputs into the same outputs."""
        ...


class EagerReplay:
    """An action that could not be captured: it is run instead, its results copied to where a graph would leave them."""

    def __init__(self, action: Callable[[], Made], made: Made) -> None:
        self._action = action
        self._outputs = _tensors(made)

    def replay(self) -> None:
        """Run the action."""
        with torch.no_grad():
            for output, new in zip(self._outputs, _tensors(self._action()), strict=True):
                output.copy_(new)


class GraphCapture:
    """Captures actions as CUDA graphs on one stream; the graphs share their memory."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made when first needed: there may be no CUDA device at all
        self._pool: Any = None

    def __call__(self, action: Callable[[], Made]) -> tuple[Replayed, Made]:
        """An action as a graph, and the tensors it leaves its results in: a tensor, a tuple of tensors, or None.

        It is run a few times. An action that fails by itself raises; one that only its capture fails for is replayed
        by running it, and a warning is logged.
        """
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(stream.device)
        # While cuDNN's benchmark mode is on, a convolution of a new shape is timed, which no capture allows.
        with _one_at_a_time, cudnn_benchmark.held(False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Eagerly first: kernels are compiled, engines chosen and workspaces allocated, which no graph may hold.
                action()
                try:
                    return self._captured(action, stream)
                except RuntimeError:
                    log.warning("a CUDA graph could not be captured; these steps run without one", exc_info=True)
                    made = _copies(action())
                    return EagerReplay(action, made), made
                finally:
                    current.wait_stream(stream)

    def _captured(self, action: Callable[[], Made], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Made]:
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        # Not `torch.cuda.graph`: it gives spare memory back to the driver, and sessions that are served meanwhile wait.
        # "thread_local": what other threads allocate meanwhile is no error.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            made = action()
            graph.capture_end()
        except BaseException:
            self._pool = None  # later graphs take another one: what is in this one is not certain
            _abandon(graph, pool, stream)
            raise
        self._pool = pool
        return graph, made


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """Leave a failed capture with stream, allocator and random generator as usable as before.

    `capture_end` raises on an invalidated capture before it tells the allocator that the capture is over.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
    graph.reset()
    try:
        torch.empty(1, device=stream.device).normal_()
    except RuntimeError:  # the default generator believes that it is still captured: the next capture's end mends it
        with suppress(RuntimeError):
            mending = torch.cuda.CUDAGraph()
            mending.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=stream.device)
            mending.capture_end()


def _tensors(made: Any) -> list[Tensor]:
    if made is None:
        return []
    return [made] if isinstance(made, Tensor) else list(made)


def _copies(made: Any) -> Any:
    """Tensors of their own, which may be written to in inference mode and outside."""
    if made is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return made.clone() if isinstance(made, Tensor) else tuple(each.clone() for each in made)
