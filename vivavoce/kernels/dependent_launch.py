"""Programmatic dependent launch (Hopper and later): a kernel starts before the previous one has ended.

Such a kernel must call `wait_for_previous` before it reads or writes anything but weights. Where the GPU or Triton does
not support it, kernels run one after another.
"""

import functools

import torch
import triton
import triton.language as tl

from vivavoce.kernels.tiles import CHAINED, CHAINED_ROWS, tiles

LINE_BYTES = 128  # of a cache line

try:
    from triton.language.extra.cuda import gdc_launch_dependents as launch_next
    from triton.language.extra.cuda import gdc_wait as wait_for_previous

    KNOWN = True
except ImportError:  # an older Triton: these are never called

    @triton.jit
    def launch_next():
        tl.debug_barrier()

    @triton.jit
    def wait_for_previous():
        tl.debug_barrier()

    KNOWN = False


@functools.cache
def is_dependent(device: torch.device) -> bool:
    """Whether a device supports dependent launch."""
    return KNOWN and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls `wait_for_previous`."""
    return {"DEPENDENT": True, "launch_pdl": True} if is_dependent(device) else {"DEPENDENT": False}


def chained(device: torch.device, rows: int) -> dict[str, bool]:
    """As `dependent`, for kernels of the flow and the vocoder: for small batches on devices where it was measured."""
    is_measured = rows <= CHAINED_ROWS and tiles(device).get(CHAINED) is not None
    return dependent(device) if is_measured else {"DEPENDENT": False}


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, then let the next one start."""
    if DEPENDENT:
        wait_for_previous()
        launch_next()


@triton.jit
def begin_small(DEPENDENT: tl.constexpr):
    """As `begin`, for short kernels: the next kernel starts first, so that it can prefetch its weights."""
    if DEPENDENT:
        launch_next()
        wait_for_previous()


@triton.jit
def fetch_near(row_ptr, SIZE: tl.constexpr, LINE: tl.constexpr):
    """Prefetch rows into L2, a cache line at a time.  # pointers [row, 1]"""
    line = row_ptr + (tl.arange(0, SIZE // LINE) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_lines(ptr, lines, LINE: tl.constexpr):
    """Prefetch a matrix of this many cache lines into L2, each program a share."""
    SHARES: tl.constexpr = 128
    for first in range(tl.program_id(0) * SHARES, lines, tl.num_programs(0) * SHARES):
        line = tl.minimum(first + tl.arange(0, SHARES), lines - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + line * LINE],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


__all__ = [
    "LINE_BYTES",
    "begin",
    "begin_small",
    "chained",
    "dependent",
    "fetch_lines",
    "fetch_near",
    "is_dependent",
    "launch_next",
    "wait_for_previous",
]
