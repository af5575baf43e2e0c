"""Products and decoder steps with packed weights, layers of synthesizers, and noise suppression, on CPUs, in C.

The sources are compiled for this machine's CPU on first use, and the result is kept in the cache folder.

Without a C compiler (or with `VIVA_COMPILE=0`) a library is None, and callers use PyTorch or numpy instead.
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

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("block_linear.c", "decoder_step.c", "threads.c"))
HEADERS = tuple(FOLDER / name for name in ("kernels.h", "block_tiles.h"))
SYNTHESIS = tuple(FOLDER / name for name in ("snake_conv.c", "lstm.c", "threads.c"))
SYNTHESIS_HEADERS = tuple(FOLDER / name for name in ("kernels.h", "vectors.h", "exponential.h"))
GTCRN, GTCRN_HEADERS = (FOLDER / "gtcrn.c",), (FOLDER / "exponential.h",)
SWITCH = "VIVA_COMPILE"
TARGET = "VIVA_CPU_TARGET"  # the compiler's options for another CPU than this one, as -mavx2
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


class Matrices(ctypes.Structure):
    """The matrices of one layer: those of the same input."""

    _fields_ = (("matrices", ctypes.POINTER(Matrix)), ("count", ctypes.c_int64))


class Layer(ctypes.Structure):
    """A decoder layer: addresses of its norms' weights (of queries and keys, or None), and its matrices."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "output_norm", "q_norm", "k_norm")),
        *((name, Matrices) for name in ("qkv", "output", "gate_up", "down")),
    )


class CompiledDecoder(ctypes.Structure):
    """The layers of a decoder, the addresses of its cosines and sines, and its sizes."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "inner", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_double),
    )


class Cache(ctypes.Structure):
    """Addresses of keys, values and a sequence's pages, sizes in rows and floats, and the position of the new row."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "pages")),
        *((name, ctypes.c_int64) for name in ("page_size", "page_stride", "layer_stride", "position")),
    )


class SnakeConv(ctypes.Structure):
    """A convolution: addresses of its filters at all points, in panels, and of its bias (or None), and its sizes."""

    _fields_ = (
        ("filters", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "taps", "dilation")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Products and decoder steps; None where they cannot be had, and the reason is logged."""
    kernels = _loaded("packed", SOURCES, HEADERS, "chat models run on dequantised weights")
    return None if kernels is None else _declared(kernels)


def is_available() -> bool:
    """Whether packed weights can be multiplied on this CPU; the first call may compile for some seconds."""
    return library() is not None


@functools.cache
def synthesis_library() -> ctypes.CDLL | None:
    """Convolutions of Snake activations, and LSTMs; None: as `library`."""
    kernels = _loaded("synthesis", SYNTHESIS, SYNTHESIS_HEADERS, "Kokoro speaks by PyTorch, which takes longer")
    if kernels is not None:
        size, address, conv = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(SnakeConv)
        kernels.snake_conv_panel.restype = kernels.snake_conv_scratch.restype = kernels.lstm_panel.restype = size
        kernels.snake_conv_scratch.argtypes = [conv, size, size]
        kernels.snake_conv.argtypes = [conv, *(address,) * 3, size, *(address,) * 4, size]
        kernels.channel_moments.argtypes = [address, size, size, address, address]
        kernels.bidirectional_lstm.argtypes = [*(address,) * 4, size, size, address, address, size]
        for function in (kernels.snake_conv, kernels.channel_moments, kernels.bidirectional_lstm):
            function.restype = None
        _share_threads(kernels)
    return kernels


@functools.cache
def gtcrn_library() -> ctypes.CDLL | None:
    """The network that suppresses noise, which compiles within a second; None: as `library`."""
    kernels = _loaded("gtcrn", GTCRN, GTCRN_HEADERS, "noise is suppressed by numpy, at many times the cost")
    if kernels is not None:
        size, address = ctypes.c_int64, ctypes.c_void_p
        kernels.gtcrn_weights.restype = kernels.gtcrn_state.restype = size
        kernels.gtcrn_frames.argtypes = [address, address, size, address, size, size, address]
        kernels.gtcrn_frames.restype = None
    return kernels


def _loaded(name: str, sources: tuple[Path, ...], headers: tuple[Path, ...], instead: str) -> ctypes.CDLL | None:
    """A library of these sources; `instead` says what happens without it."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        logger.warning("no C compiler was found, so %s; install gcc or clang", instead)
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, name, sources, headers)), mode=os.RTLD_NOW)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels could not be compiled (%s): %s", error, instead, exc_info=True)
        return None


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    size, address = ctypes.c_int64, ctypes.c_void_p
    kernels.block_linear.argtypes = [ctypes.POINTER(Matrix), size, address, size, size, address, address, size]
    kernels.block_linear.restype = None
    kernels.block_linear_scratch.argtypes = [size, size]
    kernels.block_linear_scratch.restype = size
    decoder, cache = ctypes.POINTER(CompiledDecoder), ctypes.POINTER(Cache)
    kernels.decoder_step.argtypes = [decoder, cache, address, address, address, size]
    kernels.decoder_step.restype = None
    kernels.decoder_step_scratch.argtypes = [decoder, size]
    kernels.decoder_step_scratch.restype = size
    _share_threads(kernels)
    return kernels


def _share_threads(kernels: ctypes.CDLL) -> None:
    """Let the kernels run on the threads of PyTorch's OpenMP, so that both use one pool; without it they use one."""
    parallel = _openmp_parallel()
    if parallel is None:
        logger.warning("PyTorch's OpenMP library was not found, so the CPU kernels run on one thread")
    kernels.set_parallel.argtypes, kernels.set_parallel.restype = [ctypes.c_void_p], None
    kernels.set_parallel(parallel)


@functools.cache
def _openmp_parallel() -> int | None:
    """The address of `GOMP_parallel` in this process; wheels of PyTorch have a library of their own."""
    import torch

    package = Path(torch.__file__).parent
    folders = package / "lib", package.with_name("torch.libs")
    for file in (None, *(file for folder in folders for file in sorted(folder.glob("lib*omp*")))):
        try:
            library = ctypes.CDLL(None if file is None else str(file), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):  # not loaded, or another library
            continue
    return None


def _compiled(compiler: str, name: str, sources: tuple[Path, ...], headers: tuple[Path, ...]) -> Path:
    """The shared library for these sources, compiler and CPU."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    target_options = os.environ.get(TARGET) or native
    texts = [file.read_bytes() for file in (*sources, *headers)]
    made_from = [*texts, compiler.encode(), target_options.encode(), _cpu_features(), *map(str.encode, FLAGS)]
    target = cache_folder() / f"{name}-{hashlib.sha256(b'|'.join(made_from)).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *FLAGS, *target_options.split(), "-o", str(built), *map(str, sources), "-lm"]
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
