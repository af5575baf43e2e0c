"""CUDA graphs (capture and replay), kernels compiled ahead in parallel, and CUDA streams.

`Graphed` captures a function of tensors once per key and replays it; `compiling_ahead` compiles the Triton kernels of
a warm-up on many threads before anything is captured.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from vivavoce import kernels
from vivavoce.cores import usable_cores
from vivavoce.nn.process_settings import cudnn_benchmark

Result = TypeVar("Result")
log = logging.getLogger(__name__)
# Captures of several threads share the allocator's bookkeeping. None is latency-critical, so they are serialised.
_one_at_a_time = threading.RLock()


class Replayed(Protocol):
    """A captured action."""

    def replay(self) -> None:
        """Run it on the current stream, with the captured input and output tensors."""
        ...


class EagerReplay:
    """An action that could not be captured: a replay runs it and copies its results to the same output tensors."""

    def __init__(self, action: Callable[[], Result], result: Result) -> None:
        self._action = action
        self._outputs = _tensors(result)

    def replay(self) -> None:
        """Run the action."""
        with torch.no_grad():
            for output, new in zip(self._outputs, _tensors(self._action()), strict=True):
                output.copy_(new)


class PartsReplay:
    """An action that was captured in parts; `before_part` is called before each of them."""

    def __init__(self, parts: Sequence[Replayed], before_part: Callable[[], None]) -> None:
        self.parts, self._before_part = parts, before_part

    def replay(self) -> None:
        """Run the parts one after another."""
        for part in self.parts:
            self._before_part()
            part.replay()


class GraphCapture:
    """Captures actions as CUDA graphs on one stream; the graphs share their memory.

    Where `before_part` is set, an action may divide itself by `cut` into parts, and a replay calls `before_part` before
    each: long work can wait there while urgent work has the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.before_part: Callable[[], None] | None = None
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made when first needed: there may be no CUDA device at all
        self._pool: Any = None
        self._parts: list[torch.cuda.CUDAGraph] = []  # of the action that is being captured, the last one not ended

    def __call__(self, action: Callable[[], Result]) -> tuple[Replayed, Result]:
        """An action as a graph, and its output: a tensor, a tuple of tensors, or None.

        The action is run several times. If it fails, its error is raised; if only the capture fails, a warning is
        logged and every replay runs the action.
        """
        current = torch.cuda.current_stream(self._device)
        # The kernels of a graph have the priority of the stream that captured them, wherever it is replayed.
        stream = self._stream = self._stream or torch.cuda.Stream(current.device, priority=current.priority)
        # In cuDNN's benchmark mode convolutions of a new shape are timed, which a capture does not allow.
        with _one_at_a_time, cudnn_benchmark.held(False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # Eagerly first: kernels are compiled, engines chosen and workspaces allocated, none of it in a capture.
                action()
                try:
                    return self._captured(action, stream)
                except RuntimeError:
                    log.warning("a CUDA graph could not be captured; these steps run without one", exc_info=True)
                    result = _copies(action())
                    return EagerReplay(action, result), result
                finally:
                    current.wait_stream(stream)

    def cut(self) -> None:
        """Within an action: what follows is a part of its own. Without `before_part`, or outside a capture, nothing."""
        if self._parts and self.before_part is not None:
            self._parts[-1].capture_end()
            self._begin_part()

    def _captured(self, action: Callable[[], Result], stream: torch.cuda.Stream) -> tuple[Replayed, Result]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            self._begin_part()
            result = action()
            self._parts[-1].capture_end()
        except BaseException:
            pool, self._pool = self._pool, None  # later graphs use a new one: the state of this one is unknown
            _abandon(self._parts[-1], pool, stream)
            raise
        finally:
            parts, self._parts = self._parts, []
        return (parts[0] if self.before_part is None else PartsReplay(parts, self.before_part)), result

    def _begin_part(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._parts.append(graph)
        # Not `torch.cuda.graph`: it returns spare memory to the driver, for which running sessions would wait.
        # "thread_local": allocations of other threads are allowed meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """End a failed capture so that stream, allocator and random generator remain usable.

    `capture_end` raises on an invalidated capture before it notifies the allocator of the end.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # it was notified
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch._C._cuda_releasePool(stream.device.index, pool)
    graph.reset()
    try:
        torch.empty(1, device=stream.device).normal_()
    except RuntimeError:  # the default generator still assumes a capture: another one, completed, resets it
        with suppress(RuntimeError):
            mending = torch.cuda.CUDAGraph()
            mending.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=stream.device)
            mending.capture_end()


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _copies(result: Any) -> Any:
    """Copies that may be written to inside and outside inference mode."""
    if result is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return result.clone() if isinstance(result, Tensor) else tuple(each.clone() for each in result)


_is_ahead: ContextVar[bool] = ContextVar("compiling_ahead", default=False)


def is_compiling_ahead() -> bool:
    """Whether kernels are only compiled now, not launched: their outputs are undefined."""
    return _is_ahead.get()


@contextmanager
def compiling_ahead() -> Iterator[bool]:
    """In this block the thread's Triton kernels are compiled by a thread pool instead of launched.

    Run a warm-up inside, then again outside. Yields False where nothing would be compiled. It may be nested, and used
    by several threads concurrently.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, or an older one
        yield False
        return
    if _is_ahead.get():
        yield True
        return
    with _patch.applied_to(JITFunction):
        token = _is_ahead.set(kernels.AVAILABLE)
        try:
            with _Compilers(min(32, usable_cores())) as compilers, AsyncCompileMode(compilers):
                yield True
        finally:
            _is_ahead.reset(token)


class _Patch:
    """Triton's launch and compile functions, replaced while any thread compiles ahead; other threads see no change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: dict[str, tuple[Any, Any]] = {}  # by name: the original and its replacement

    @contextmanager
    def applied_to(self, jit_function: Any) -> Iterator[None]:
        """The first user replaces the functions and the last restores them."""
        with self._lock:
            if not self._users:
                self._replace(jit_function)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore(jit_function)

    def _replace(self, jit_function: Any) -> None:
        run, compile_now = jit_function.run, jit_function._do_compile

        def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or _is_ahead.get(), **kwargs)

        def compile_once(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
            kernel = compile_now(self, key, signature, device, *rest)
            if _is_ahead.get():  # otherwise the next launch would compile it again
                self.device_caches[device][0][key] = kernel
            return kernel

        self._replaced = {"run": (run, only_compile), "_do_compile": (compile_now, compile_once)}
        for name, (_, instead) in self._replaced.items():
            setattr(jit_function, name, instead)

    def _restore(self, jit_function: Any) -> None:
        for name, (original, instead) in self._replaced.items():
            if getattr(jit_function, name) is instead:  # if another tool has wrapped it, it stays and has no effect
                setattr(jit_function, name, original)
        self._replaced = {}


_patch = _Patch()


class _Compilers(ThreadPoolExecutor):
    """A thread pool that compiles kernels and loads them onto the device."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """The kernel, ready to be launched."""
        return super().submit(_loaded, fn, *args, **kwargs)


def _loaded(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = compiled(*args, **kwargs)
    kernel._init_handles()  # compiles its launcher, which takes as long as the kernel itself
    return kernel


Key = TypeVar("Key", bound=Hashable)
Function = Callable[[Key, Sequence[Tensor]], tuple[Tensor, ...]]


class Graphed(Generic[Key]):
    """A function whose calls are captured once per key as a CUDA graph, then replayed.

    Calls with the same key must have tensors of the same shapes. The function may not synchronise with the device. The
    first call of a key runs it several times and captures it, which takes tenths of a second: warm up before serving.
    On other devices, and where the capture fails, the function is called directly. Captures share their memory, so
    calls must be made one after another on one stream.
    """

    def __init__(self, function: Function[Key]) -> None:
        self.function = function
        self._captured: dict[Key, tuple[Replayed, list[Tensor], tuple[Tensor, ...]]] = {}
        self.blank: dict[Key, tuple[Tensor, ...]] = {}
        """Outputs by key while kernels are only compiled."""
        self._capture = GraphCapture()  # one for all keys, so that their graphs share memory

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def pause_before_parts(self, before_part: Callable[[], None]) -> None:
        """Divide later captures at each `cut`, and call this before each part when they are replayed."""
        self._capture.before_part = before_part

    def cut(self) -> None:
        """Within the function: divide its graph here."""
        self._capture.cut()

    @property
    def captured(self) -> int:
        """The number of captured keys."""
        return len(self._captured)

    def __call__(self, key: Key, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The function's results, as copies."""
        if not tensors[0].is_cuda:
            return self.function(key, tensors)
        if is_compiling_ahead():
            return self._compiled(key, tensors)
        if key not in self._captured:
            self.capture(key, tensors)
        graph, inputs, outputs = self._captured[key]
        for held, tensor in zip(inputs, tensors, strict=True):
            held.copy_(tensor)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def capture(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Capture a key. Side effects of the function happen several times."""
        if is_compiling_ahead():
            return
        with torch.inference_mode(False), torch.no_grad():  # later calls may be in inference mode or not
            inputs = [tensor.clone() for tensor in tensors]
        graph, outputs = self._capture(lambda: self.function(key, inputs))
        self._captured[key] = (graph, inputs, outputs)

    def _compiled(self, key: Key, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Zeros of the results' shapes, while the kernels are compiled."""
        if key not in self.blank:
            self.blank[key] = tuple(torch.zeros_like(output) for output in self.function(key, tensors))
        return self.blank[key]


URGENT, USUAL = -1, 0  # priorities of CUDA streams; lower is first


class CudaStream:
    """A CUDA stream, used by one thread at a time; on other devices it does nothing.

    The allocator reuses memory on the stream it was allocated on, so the end of a block synchronises: its tensors may
    then be used on other streams and freed.
    """

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, URGENT if urgent else USUAL) if device.type == "cuda" else None

    @contextmanager
    def __call__(self, waits: bool = True) -> Iterator[None]:
        """Run the block on this stream, after the work queued on the default stream.

        Without `waits`, the end of the block does not synchronise, and no tensor may be used on another stream.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if not (default := torch.cuda.default_stream(self._device)).query():
                self._stream.wait_stream(default)
            yield
            if waits:
                self._stream.synchronize()

    def wait(self) -> None:
        """Synchronise. Call it before reading results back: a copy to pageable memory would wait inside the driver and
        block all other threads that call it."""
        if self._stream is not None:
            self._stream.synchronize()


def bucket_for(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of these ascending sizes that holds `wanted`."""
    return next(size for size in sizes if size >= wanted)
