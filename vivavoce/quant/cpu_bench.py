"""`python -m vivavoce.quant.cpu_bench`: linear layers of the MOSS-TTS-Nano and CosyVoice language models on a CPU.

All layers of a decoding step in sequence, by each kernel of torch, including those this project does not use. CPU time
of one thread, or wall time of several; the ratios to float32 are what matters.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.nn.process_settings import quantised_kernels, torch_threads
from vivavoce.nn.quantised import quantised_linear
from vivavoce.nn.quantised_weight import Activations, InputRange, Scheme, quantise

SHAPES = {  # (inputs, outputs) of a layer's matrices, and layers
    "MOSS-TTS-Nano": ([(768, 2304), (768, 768), (768, 3072), (3072, 768)], 12),
    "CosyVoice": ([(896, 1152), (896, 896), (896, 9728), (4864, 896)], 24),
}
ROWS = (1, 8, 64)
ROUNDS = 5
RANGE = InputRange(8 / 255, 128)  # for approximately normal inputs
Product = Callable[[Tensor], Tensor]


def _ours(
    scheme: Scheme, activations: Activations = "float", span: InputRange | None = None
) -> Callable[[Tensor], Product]:
    def make(weight: Tensor) -> Product:
        layer = quantised_linear(
            quantise(weight, scheme, activations=activations, input_range=span), None, torch.float32
        )
        return layer or (lambda x: functional.linear(x, weight))

    return make


def _float32(weight: Tensor) -> Product:
    return lambda x: functional.linear(x, weight)


def _onednn_dynamic(weight: Tensor) -> Product:
    rounded = quantise(weight, "int8")
    assert rounded.scale is not None
    with quantised_kernels.held("onednn"):
        zeros = torch.zeros(len(weight), dtype=torch.long)
        quantised = torch._make_per_channel_quantized_tensor(rounded.data, rounded.scale.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
    product: Any = torch.ops.quantized.linear_dynamic.default._op
    return lambda x: product(x, packed, False)


def _onednn_static(weight: Tensor) -> Product:
    rounded = quantise(weight, "int8")
    packed, zeros = torch.ops.onednn.qlinear_prepack(rounded.data, None), torch.zeros(len(weight), dtype=torch.int32)
    product: Any = torch.ops.onednn.qlinear_pointwise.default._op
    scale, zero = RANGE.scale, RANGE.zero

    def multiplied(x: Tensor) -> Tensor:
        given = torch.quantize_per_tensor(x, scale, zero, torch.quint8).int_repr()
        kinds: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        return product(given, scale, zero, packed, rounded.scale, zeros, *kinds)

    return multiplied


KERNELS: dict[str, Callable[[Tensor], Product]] = {
    "float32": _float32,
    "fp16": _ours("float16"),
    "bf16": _ours("bfloat16"),
    "int8-dynamic": _ours("int8", "dynamic"),
    "int8-static": _ours("int8", "static", RANGE),
    "int8-weight": _ours("int8"),
    "int4-weight": _ours("int4"),
    "int8 dynamic by oneDNN (not used)": _onednn_dynamic,
    "int8 static by oneDNN (not used)": _onednn_static,
}


@torch.inference_mode()
def run(threads: int, out: Path | None = None, names: Sequence[str] = tuple(SHAPES)) -> list[dict[str, Any]]:
    """Measure, print, write `cpu.json`."""
    with torch_threads.held(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = _measured(names)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "cpu.json").write_text(json.dumps(found, indent=2), encoding="utf8")
    return found


def _measured(names: Sequence[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in names:
        shapes, layers = SHAPES[name]
        products_by_kernel = {
            kernel: [make(torch.randn(o, i) * 0.02) for _ in range(layers) for i, o in shapes]
            for kernel, make in KERNELS.items()
        }
        for rows in ROWS:
            inputs = [torch.randn(rows, i) for _ in range(layers) for i, _ in shapes]
            taken = {kernel: _best(products, inputs) for kernel, products in products_by_kernel.items()}
            found.append(
                {"model": name, "rows": rows, "ms": {kernel: 1e3 * seconds for kernel, seconds in taken.items()}}
            )
            for kernel, seconds in taken.items():
                ratio = taken["float32"] / seconds
                print(f"{name:14s} {rows:3d} rows  {kernel:36s} {1e3 * seconds:8.2f} ms  {ratio:5.2f}x", flush=True)
    return found


def _best(products: Sequence[Product], inputs: Sequence[Tensor]) -> float:
    """Fastest of several rounds through all layers after a warm-up."""
    clock, times = time.process_time if torch.get_num_threads() == 1 else time.perf_counter, []
    for _ in range(ROUNDS + 1):
        started = clock()
        for product, x in zip(products, inputs, strict=True):
            product(x)
        times.append(clock() - started)
    return min(times[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.cpu_bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    run(options.threads, options.out)


if __name__ == "__main__":
    main()
