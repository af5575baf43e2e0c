"""How a process shares its processors while it serves, and as before when it no longer does."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def serving_pace(on_cpu: bool, threads: int | None = None, switch_seconds: float | None = None) -> Iterator[None]:
    """`on_cpu`, tensors have so many threads, or half the cores; threads give way to one another after so long."""
    before = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(switch_seconds or before[0])
    if on_cpu:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 2) // 2))
    try:
        yield
    finally:
        sys.setswitchinterval(before[0])
        torch.set_num_threads(before[1])
