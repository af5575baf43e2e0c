"""Kernels compiled before anybody waits for them, many at a time: one after another they take a minute."""

import os
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

    Do there what will be done again; False is given where that would be for nothing.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, or an older one
        yield False
        return
    run, compile_now = JITFunction.run, JITFunction._do_compile

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _is_ahead.get(), **kwargs)

    def compile_once(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        kernel = compile_now(self, key, signature, device, *rest)
        if _is_ahead.get():  # or the next launch, a moment later, would ask for it again
            self.device_caches[device][0][key] = kernel
        return kernel

    token = _is_ahead.set(kernels.AVAILABLE)
    JITFunction.run, JITFunction._do_compile = only_compile, compile_once
    try:
        with _Compilers(min(32, os.cpu_count() or 1)) as compilers, AsyncCompileMode(compilers):
            yield True
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_now
        _is_ahead.reset(token)


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
