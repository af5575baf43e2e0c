"""Process-wide settings (threads, default dtype, quantised engine, cuDNN's choices) as context managers.

The original value is restored after the last holder, also when holders overlap in several threads or raise.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch

from vivavoce.cores import usable_cores

Value = TypeVar("Value")


class SharedSetting(Generic[Value]):
    """A setting that several holders may share; they may end in any order, and the latest holder's value applies."""

    def __init__(self, get: Callable[[], Value], set_to: Callable[[Value], object]) -> None:
        self._get, self._set = get, set_to
        self._lock = threading.Lock()
        self._held: dict[object, Value] = {}  # the original value, then those of the holders, in order
        self._in_force: Value | None = None  # None: never held

    @contextmanager
    def held(self, value: Value) -> Iterator[None]:
        """Set this value for the duration of the block, or of a decorated function."""
        holder = object()
        with self._lock:
            self._held = self._held or {self: self._get()}
            self._held[holder] = self._in_force = value
            self._set(value)
        try:
            yield
        finally:
            with self._lock:
                del self._held[holder]
                self._in_force = next(reversed(self._held.values()))
                self._set(self._in_force)
                if len(self._held) == 1:
                    self._held = {}

    def apply(self) -> None:
        """Set the value in force on the calling thread, where each thread has its own copy, as of OpenMP's threads."""
        value = self._in_force
        if value is not None and self._get() != value:
            self._set(value)


class ExclusiveSetting(Generic[Value]):
    """A setting that one thread holds at a time, because objects created meanwhile depend on it; it may be nested."""

    def __init__(self, get: Callable[[], Value], set_to: Callable[[Value], object]) -> None:
        self._get, self._set = get, set_to
        self._lock = threading.RLock()

    @contextmanager
    def held(self, value: Value) -> Iterator[None]:
        """Set this value for the duration of the block, after waiting for other threads."""
        with self._lock:
            previous = self._get()
            self._set(value)
            try:
                yield
            finally:
                self._set(previous)


def _set_quantised_kernels(name: str) -> None:
    torch.backends.quantized.engine = name


def _set_cudnn_benchmark(is_on: bool) -> None:
    torch.backends.cudnn.benchmark = is_on


def _set_cudnn_tf32(is_on: bool) -> None:
    torch.backends.cudnn.allow_tf32 = is_on


torch_threads = SharedSetting(torch.get_num_threads, torch.set_num_threads)
switch_interval = SharedSetting(sys.getswitchinterval, sys.setswitchinterval)
cudnn_benchmark = SharedSetting(lambda: torch.backends.cudnn.benchmark, _set_cudnn_benchmark)
cudnn_tf32 = SharedSetting(lambda: torch.backends.cudnn.allow_tf32, _set_cudnn_tf32)
default_dtype = ExclusiveSetting(torch.get_default_dtype, torch.set_default_dtype)
quantised_kernels: ExclusiveSetting[str] = ExclusiveSetting(
    lambda: torch.backends.quantized.engine, _set_quantised_kernels
)


FEW_OBJECTS = 1000  # Python 3.12 starts with some hundred frozen objects


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection during the block, and collect others only on request.

    Automatic collections stall all threads at any time. For the process's entry point only. `gc.unfreeze` unfreezes
    everything, so it is left out if the caller had frozen objects itself.
    """
    is_first, was_enabled = gc.get_freeze_count() < FEW_OBJECTS, gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if is_first:
            gc.unfreeze()


def serving_threads() -> int:
    """Torch threads of a model on the CPU: half the cores, as two models are run at a time."""
    return max(1, usable_cores() // 2)


@contextmanager
def serving_pace(on_cpu: bool, threads: int | None = None, switch_seconds: float | None = None) -> Iterator[None]:
    """Set torch's threads for models on the CPU (by default half the cores), and Python's switch interval if given."""
    with ExitStack() as stack:
        if switch_seconds:
            stack.enter_context(switch_interval.held(switch_seconds))
        if on_cpu:
            stack.enter_context(torch_threads.held(threads or serving_threads()))
        yield
