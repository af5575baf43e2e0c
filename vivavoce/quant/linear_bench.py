"""`python -m vivavoce.quant.linear_bench`: quantised linear layers of MOSS-Speech beside bfloat16 and the memory floor.

Every linear layer of a decoding step in isolation, with achieved GB/s. `viva bench lm` measures whole steps, and
`viva tune` searches the tiles of the kernels. Needs torch only.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.device import Device, pick
from vivavoce.evaluation.machine import median_seconds, read_bandwidth
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised import project, quantised_linear
from vivavoce.quant.plan import DEVIATION, SMALL, random_weight, supported_schemes

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
COPIES_BYTES = 400 * 2**20  # weights cycled through, more than any cache holds


def shapes(config: MossSpeechConfig) -> dict[str, tuple[int, int, int]]:
    """Layer → inputs, outputs, count per step."""
    layers = config.num_shared_layers + 2 * config.num_modality_layers
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "gate+up": (hidden, 2 * inner, layers),
        "down": (inner, hidden, layers),
        "qkv": (hidden, heads, layers),
        "out": (config.num_attention_heads * config.head_dim, hidden, layers),
    }


def run(device: str, is_small: bool, out: Path | None) -> dict[str, Any]:
    """Measure, print, write `linear.json`."""
    target = pick(device)
    config = SMALL if is_small else MossSpeechConfig()
    dtype = torch.bfloat16 if target.kind == "cuda" else torch.float32
    bandwidth = read_bandwidth(target)
    result: dict[str, Any] = {
        "device": target.name, "torch": torch.__version__, "bandwidth_gb_s": bandwidth / 1e9, "dtype": str(dtype),
        "layers": [],
    }  # fmt: skip
    for scheme in ("float", *supported_schemes(target)):
        for name, (inputs, outputs, count) in shapes(config).items():
            result["layers"].append(_layer(target, dtype, name, inputs, outputs, count, scheme, bandwidth))
            _print_layer(result["layers"][-1])
    result["all_layers_ms"] = _totals(result["layers"])
    print("all layers of a step, ms:", json.dumps(result["all_layers_ms"]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "linear.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _layer(
    target: Device, dtype: torch.dtype, name: str, inputs: int, outputs: int, count: int, scheme: str, bandwidth: float
) -> dict[str, Any]:
    gated = name == "gate+up"
    products, size = _products(target, dtype, inputs, outputs, scheme, gated)
    found: dict[str, Any] = {"layer": name, "scheme": scheme, "inputs": inputs, "outputs": outputs, "count": count}
    for rows in ROWS:
        x = torch.randn(rows, inputs, dtype=dtype, device=target.torch_device)
        taken = seconds(target, products, x)
        found[f"us_{rows}"] = 1e6 * taken
        found[f"gb_s_{rows}"] = size / taken / 1e9
    found["over_floor_1"] = found["us_1"] / 1e6 * bandwidth / size
    return found


def _products(
    target: Device, dtype: torch.dtype, inputs: int, outputs: int, scheme: str, gated: bool
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The product on several copies of a matrix, and the bytes of one copy."""
    if scheme == "float":
        size = inputs * outputs * dtype.itemsize
        with torch.device(target.torch_device):
            layers = [Linear(inputs, outputs).to(dtype) for _ in range(copies(size, target))]
        for layer in layers:
            layer.weight.normal_(0.0, DEVIATION)
        return [lambda x, layer=layer: project(layer, x, gated) for layer in layers], size  # type: ignore[misc]
    size = random_weight(outputs, inputs, scheme, "meta").nbytes  # type: ignore[arg-type]
    small = [random_weight(outputs, inputs, scheme, target.torch_device) for _ in range(copies(size, target))]  # type: ignore[arg-type]
    products: list[Callable[[Tensor], Tensor]] = []
    for weight in small:
        quantised = quantised_linear(weight, None, dtype)
        if quantised is None:
            products.append(lambda x, weight=weight: functional.linear(x, weight.dequantised(x.dtype)))  # type: ignore[misc]
        else:
            products.append(lambda x, layer=quantised: project(layer, x, gated))  # type: ignore[misc]
    return products, size


def copies(size: int, target: Device) -> int:
    """Matrices of this many bytes that exceed any cache together."""
    return max(3, COPIES_BYTES // size) if target.kind == "cuda" else 2


def seconds(target: Device, products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Time of one product; on CUDA all copies run in one graph, which excludes launch overhead."""
    for product in products[:2]:
        product(x)
    if target.kind != "cuda":
        return median_seconds(lambda: [product(x) for product in products], target, repeats=3, warm_up=1) / len(
            products
        )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[1] / len(products)


def _print_layer(found: dict[str, Any]) -> None:
    times = "  ".join(f"{rows}: {found[f'us_{rows}']:8.1f} us {found[f'gb_s_{rows}']:6.0f} GB/s" for rows in ROWS)
    print(f"{found['layer']:8s} {found['scheme']:7s} {times}  over floor {found['over_floor_1']:.2f}", flush=True)


def _totals(layers: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    schemes = dict.fromkeys(found["scheme"] for found in layers)
    return {
        scheme: {
            str(rows): round(sum(f[f"us_{rows}"] * f["count"] for f in layers if f["scheme"] == scheme) / 1e3, 3)
            for rows in ROWS
        }
        for scheme in schemes
    }


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.linear_bench", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape that runs anywhere")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    run(options.device, options.small, options.out)


if __name__ == "__main__":
    main()
