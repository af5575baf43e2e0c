"""Measurements of this machine's CPU, by which implementations are chosen: a few milliseconds each, once per process.

Two implementations are timed in turn on one thread, and the shortest time of each counts, so that other load on the
machine has little influence. What a library reports about the CPU is not measured.
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

BFLOAT16_WORTH = 2.0  # speedup over float32 from which bfloat16 is worth its rounding errors
SLOW_GELU = 3.0  # speedup by parts from which oneDNN's GELU counts as slow
REPEATS = 4
MIN_THREADED_WIDTH = (
    512  # hidden size of a model; products of one row of smaller ones end before a second thread starts
)


def speed_ratio(usual: Callable[[], object], other: Callable[[], object], repeats: int = REPEATS) -> float:
    """Speedup of `other` over `usual`."""
    fastest = [float("inf"), float("inf")]
    with torch_threads.held(1), torch.inference_mode():
        for repeat in range(repeats + 1):
            for index, compute in enumerate((usual, other)):
                start = time.perf_counter()
                compute()
                seconds = time.perf_counter() - start
                if repeat:  # the first one allocates
                    fastest[index] = min(fastest[index], seconds)
    return fastest[0] / fastest[1]


@cache
def bfloat16_speedup() -> float:
    """Speedup of bfloat16 over float32 in products of many rows: above 2 with AMX, 0 if it is not supported."""
    if not has_products_in(torch.bfloat16):
        return 0.0
    x, weight = torch.ones(64, 512), torch.ones(512, 512)
    half_x, half_weight = x.bfloat16(), weight.bfloat16()
    return speed_ratio(lambda: functional.linear(x, weight), lambda: functional.linear(half_x, half_weight))


def is_bfloat16_fast() -> bool:
    """Whether bfloat16 is worth its rounding errors on this CPU."""
    return bfloat16_speedup() >= BFLOAT16_WORTH


def has_products_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports products in a 16-bit dtype on this CPU, which need not be faster than in float32.

    Without, torch uses scalar code, which takes up to a hundred times as long.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[dtype]())


def has_int8_products() -> bool:
    """Whether torch has int8 kernels for this CPU, and the CPU sums int8 products without overflow (VNNI)."""
    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and "onednn" in engines and bool(torch.cpu._is_vnni_supported())


@cache
def int8_speedup() -> float:
    """Speedup of int8 over float32 for one row and a matrix of two million weights; 0 if int8 is not supported.

    Smaller matrices stay in the caches, where int8 gains little.
    """
    if not has_int8_products():
        return 0.0
    row, weight = torch.ones(1, 2048), torch.ones(1024, 2048)
    packed, product = _packed_int8(weight), torch.ops.quantized.linear_dynamic.default
    return speed_ratio(lambda: functional.linear(row, weight), lambda: product(row, packed, False))


def is_int8_fast() -> bool:
    """Whether int8 products are exact and at least as fast as float32 on this CPU."""
    return int8_speedup() >= 1


def _packed_int8(weight: Tensor) -> Any:
    scale, zero = torch.full((len(weight),), 1 / 127, dtype=torch.double), torch.zeros(len(weight), dtype=torch.long)
    with quantised_kernels.held("fbgemm"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantised tensors are deprecated
        quantised = torch._make_per_channel_quantized_tensor(weight.to(torch.int8), scale, zero, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)


@cache
def gelu_speedup_by_parts() -> float:
    """Speedup of a small GELU from erf and products over torch's, which oneDNN may prepare anew with every call.

    On a Neoverse N1 the preparation takes ten times as long as the GELU.
    """
    x = torch.ones(1, 2048)
    return speed_ratio(lambda: functional.gelu(x), lambda: torch.erf(x * 0.5**0.5).add_(1.0).mul_(x).mul_(0.5))


def is_onednn_slow() -> bool:
    """Whether oneDNN's preparation dominates operations on a few rows."""
    return gelu_speedup_by_parts() >= SLOW_GELU


def weight_only_rows() -> int:
    """Rows up to which torch's weight-only kernels (bfloat16 inputs) are faster than dequantising the weights."""
    return 16 if has_products_in(torch.bfloat16) else 4


def uses_mkl() -> bool:
    """Whether torch's float32 products are MKL's, on which the fastest layout of a matrix depends."""
    return bool(torch.backends.mkl.is_available())
