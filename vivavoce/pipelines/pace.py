"""How a process shares its processors while it serves, and as before when it no longer does."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vivavoce.nn.process_settings import switch_interval, torch_threads


@contextmanager
def serving_pace(on_cpu: bool, threads: int | None = None, switch_seconds: float | None = None) -> Iterator[None]:
    """`on_cpu`, tensors have so many threads, or half the cores; threads give way to one another after so long."""
    with ExitStack() as stack:
        if switch_seconds:
            stack.enter_context(switch_interval.held(switch_seconds))
        if on_cpu:
            stack.enter_context(torch_threads.held(threads or max(1, (os.cpu_count() or 2) // 2)))
        yield
