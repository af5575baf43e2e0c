"""Products with packed weights on CPUs, in C.

The source is compiled for this machine's CPU on first use, and the result is kept in the cache folder.

Without a C compiler (or with `VIVA_COMPILE=0`) `library` is None, and callers use PyTorch instead.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from vivavoce.kernels.tiles import cache_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("block_linear.c")
SWITCH = "VIVA_COMPILE"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
SECONDS = 120  # a compiler that takes longer hangs


class Matrix(ctypes.Structure):
    """A packed matrix: addresses of its blocks and of its bias (or None), its outputs and the number of its format."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, and the reason is logged."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        logger.warning("no C compiler was found, so chat models run on dequantised weights; install gcc or clang")
        return None
    try:
        return _declared(ctypes.CDLL(str(_compiled(compiler)), mode=os.RTLD_NOW))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels could not be compiled (%s): dequantised weights are used", error, exc_info=True)
        return None


def is_available() -> bool:
    """Whether packed weights can be multiplied on this CPU; the first call may compile for some seconds."""
    return library() is not None


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    size, address = ctypes.c_int64, ctypes.c_void_p
    kernels.block_linear.argtypes = [ctypes.POINTER(Matrix), size, address, size, size, address, address, size]
    kernels.block_linear.restype = None
    kernels.block_linear_scratch.argtypes = [size, size]
    kernels.block_linear_scratch.restype = size
    return kernels


def _compiled(compiler: str) -> Path:
    """The shared library for this source, compiler and CPU."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    made_from = [SOURCE.read_bytes(), compiler.encode(), native.encode(), _cpu_features(), *map(str.encode, FLAGS)]
    target = cache_folder() / f"block_linear-{hashlib.sha256(b'|'.join(made_from)).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *FLAGS, native, "-o", str(built), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        built.replace(target)  # whole or not at all, though several processes may compile
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - start, target)
    return target


def _cpu_features() -> bytes:
    """What tells CPUs apart that share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine()).encode()
