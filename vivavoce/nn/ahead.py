"""Kernels compiled before anybody waits for them, many at a time: one after another they take a minute."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vivavoce.nn import kernels

_is_ahead: ContextVar[bool] = ContextVar("compiling_ahead", default=False)


def is_compiling_ahead() -> bool:
    """Whether kernels are only compiled just now: what they would have written is anything."""
    return _is_ahead.get()


@contextmanager
def compiling_ahead() -> Iterator[bool]:
    """Within, this thread launches no kernel: others compile them meanwhile, and are done when it is left.

    Do there what will be done again; False is given where that would be for nothing. It may be nested, and entered by
    several threads at once.
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
            with _Compilers(min(32, os.cpu_count() or 1)) as compilers, AsyncCompileMode(compilers):
                yield True
        finally:
            _is_ahead.reset(token)


class _Patch:
    """Triton's launch and compile functions, replaced while any thread compiles ahead; other threads see no change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: dict[str, tuple[Any, Any]] = {}  # by name, what was there and what is there instead

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
            if _is_ahead.get():  # or the next launch, a moment later, would ask for it again
                self.device_caches[device][0][key] = kernel
            return kernel

        self._replaced = {"run": (run, only_compile), "_do_compile": (compile_now, compile_once)}
        for name, (_, instead) in self._replaced.items():
            setattr(jit_function, name, instead)

    def _restore(self, jit_function: Any) -> None:
        for name, (original, instead) in self._replaced.items():
            if getattr(jit_function, name) is instead:  # else another tool has wrapped ours, which does nothing now
                setattr(jit_function, name, original)
        self._replaced = {}


_patch = _Patch()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and bring them to the device."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """The kernel, ready to be launched."""
        return super().submit(_loaded, fn, *args, **kwargs)


def _loaded(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = compiled(*args, **kwargs)
    kernel._init_handles()  # compiles its launcher, which takes as long as the kernel itself
    return kernel


__all__ = ["compiling_ahead", "is_compiling_ahead"]
