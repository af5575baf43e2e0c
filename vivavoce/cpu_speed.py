"""What this machine's CPU is fast at, measured: each question takes a few milliseconds, once a process.

Two ways of computing the same are timed in turn on one thread, and the shortest time of each counts, so that other
work on the machine does not decide. What a library itself knows about the CPU is asked, not measured.
"""

import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.nn.process_settings import quantised_kernels, torch_threads

BFLOAT16_WORTH = 2.0  # times as fast as float32: below, its rounding errors buy too little
SLOW_GELU = 3.0  # times as long as by parts
REPEATS = 4


def speed_ratio(usual: Callable[[], object], other: Callable[[], object], repeats: int = REPEATS) -> float:
    """How many times as fast as the usual way the other is."""
    fastest = [float("inf"), float("inf")]
    with torch_threads.held(1), torch.inference_mode():
        for repeat in range(repeats + 1):
            for index, compute in enumerate((usual, other)):
                began = time.perf_counter()
                compute()
                taken = time.perf_counter() - began
                if repeat:  # the first one allocates
                    fastest[index] = min(fastest[index], taken)
    return fastest[0] / fastest[1]


@cache
def bfloat16_speedup() -> float:
    """Products of many rows in bfloat16, as many times as fast as in float32: above 2 with tiles (AMX)."""
    x, weight = torch.ones(64, 512), torch.ones(512, 512)
    half_x, half_weight = x.bfloat16(), weight.bfloat16()
    return speed_ratio(lambda: functional.linear(x, weight), lambda: functional.linear(half_x, half_weight))


def is_bfloat16_fast() -> bool:
    """Whether bfloat16 is worth its rounding errors on this CPU."""
    return bfloat16_speedup() >= BFLOAT16_WORTH


def has_products_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of a 16-bit dtype for this CPU, if not faster than float32's.

    Otherwise torch takes one number after another, up to a hundred times as long.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[dtype]())


def has_int8_products() -> bool:
    """Whether torch has int8 kernels for this CPU, and it adds up products of int8 without overflow (VNNI)."""
    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and "onednn" in engines and bool(torch.cpu._is_vnni_supported())


@cache
def int8_speedup() -> float:
    """A row times an int8 matrix of two million weights, as many times as fast as in float32; 0 without such products.

    Smaller matrices stay in the caches, and int8 gains little.
    """
    if not has_int8_products():
        return 0.0
    row, weight = torch.ones(1, 2048), torch.ones(1024, 2048)
    packed, product = _packed_int8(weight), torch.ops.quantized.linear_dynamic.default
    return speed_ratio(lambda: functional.linear(row, weight), lambda: product(row, packed, False))


def is_int8_fast() -> bool:
    """Whether int8 products are right and faster than float32's on this CPU."""
    return int8_speedup() >= 1


def _packed_int8(weight: Tensor) -> Any:
    scale, zero = torch.full((len(weight),), 1 / 127, dtype=torch.double), torch.zeros(len(weight), dtype=torch.long)
    with quantised_kernels.held("fbgemm"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantised tensors are deprecated
        quantised = torch._make_per_channel_quantized_tensor(weight.to(torch.int8), scale, zero, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


@cache
def gelu_speedup_by_parts() -> float:
    """A few rows' GELU by erf and products, as many times as fast as torch's, which oneDNN may prepare anew each time.

    On a Neoverse N1 that preparation takes ten times as long as the GELU itself.
    """
    x = torch.ones(1, 2048)
    return speed_ratio(lambda: functional.gelu(x), lambda: torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5))


def is_onednn_slow() -> bool:
    """Whether oneDNN takes longer to prepare what it computes of a few rows than others to compute it."""
    return gelu_speedup_by_parts() >= SLOW_GELU


def weight_only_rows() -> int:
    """Up to how many rows torch's kernels for small weights and bfloat16 inputs beat widening the weights."""
    return 16 if has_products_in(torch.bfloat16) else 4


def uses_mkl() -> bool:
    """Whether torch's float32 products are MKL's: the library decides which memory layout of a matrix is faster."""
    return bool(torch.backends.mkl.is_available())
