"""Memory of a call, measured in a process of its own: threads of other tests allocate in this one."""

import multiprocessing
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from vivavoce.audio.io import TooLongError, blocks, read


def peak_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What a function of a module returns, and the most memory that Python's allocators held meanwhile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_traced, function, args).result()


def is_too_long(data: bytes, rate: int, max_seconds: float) -> bool:
    """Whether a recording is refused because it is longer."""
    try:
        read(data, rate, max_seconds=max_seconds)
    except TooLongError:
        return True
    return False


def seconds_of(source: Any, rate: int | None = None, block_seconds: float | None = None) -> float:
    """The length of a recording that is read as a whole or block by block."""
    if block_seconds is None:
        return read(source, rate).seconds
    return sum(block.seconds for block in blocks(source, seconds=block_seconds, rate=rate))


def _traced(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    tracemalloc.start()
    result = function(*args)
    return result, tracemalloc.get_traced_memory()[1]
