"""`python -m vivavoce.quant.linear_bench`: quantised linear layers of MOSS-Speech beside bfloat16 and the memory floor.

Every linear layer of a decoding step in isolation, with achieved GB/s. `--sweep` first autotunes the kernel tiles and
stores them in the user's cache folder. `viva bench lm` measures whole steps. Needs torch only.
"""

import argparse
import json
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce import kernels
from vivavoce.device import Device, pick
from vivavoce.evaluation.machine import median_seconds, read_bandwidth
from vivavoce.kernels import Tile, store_tiles, tile_name
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised import CudaLinear, project, quantised_linear
from vivavoce.nn.quantised_weight import QuantisedWeight
from vivavoce.quant.plan import DEVIATION, SMALL, random_weight, supported_schemes

logger = logging.getLogger(__name__)

ROWS = (1, 8, 32)
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


def run(
    device: str, is_small: bool, sweeps: bool, out: Path | None, rows_swept: Sequence[int] = ROWS
) -> dict[str, Any]:
    """Measure, print, write `linear.json`."""
    target = pick(device)
    config = SMALL if is_small else MossSpeechConfig()
    dtype = torch.bfloat16 if target.kind == "cuda" else torch.float32
    bandwidth = read_bandwidth(target)
    result: dict[str, Any] = {
        "device": target.name, "torch": torch.__version__, "bandwidth_gb_s": bandwidth / 1e9, "dtype": str(dtype),
        "layers": [],
    }  # fmt: skip
    if sweeps and target.kind == "cuda":
        result["sweep"] = _sweep(target, config, rows_swept)
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
        seconds = _seconds(target, products, x)
        found[f"us_{rows}"] = 1e6 * seconds
        found[f"gb_s_{rows}"] = size / seconds / 1e9
    found["over_floor_1"] = found["us_1"] / 1e6 * bandwidth / size
    return found


def _products(
    target: Device, dtype: torch.dtype, inputs: int, outputs: int, scheme: str, gated: bool
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The product on several copies of a matrix, and the bytes of one copy."""
    if scheme == "float":
        size = inputs * outputs * dtype.itemsize
        with torch.device(target.torch_device):
            layers = [Linear(inputs, outputs).to(dtype) for _ in range(_copies(size, target))]
        for layer in layers:
            layer.weight.normal_(0.0, DEVIATION)
        return [lambda x, layer=layer: project(layer, x, gated) for layer in layers], size  # type: ignore[misc]
    size = random_weight(outputs, inputs, scheme, "meta").nbytes  # type: ignore[arg-type]
    small = [random_weight(outputs, inputs, scheme, target.torch_device) for _ in range(_copies(size, target))]  # type: ignore[arg-type]
    products: list[Callable[[Tensor], Tensor]] = []
    for weight in small:
        quantised = quantised_linear(weight, None, dtype)
        if quantised is None:
            products.append(lambda x, weight=weight: functional.linear(x, weight.dequantised(x.dtype)))  # type: ignore[misc]
        else:
            products.append(lambda x, layer=quantised: project(layer, x, gated))  # type: ignore[misc]
    return products, size


def _copies(size: int, target: Device) -> int:
    return max(3, COPIES_BYTES // size) if target.kind == "cuda" else 2


def _seconds(target: Device, products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
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


def _sweep(target: Device, config: MossSpeechConfig, rows_swept: Sequence[int]) -> dict[str, Any]:
    """Autotune the tiles of every layer and store them."""

    layers = [
        SweptLayer(name, inputs, outputs, scheme, name == "gate+up")
        for scheme in ("bfloat16", *supported_schemes(target))
        for name, (inputs, outputs, _) in shapes(config).items()
    ]
    compile_ahead([candidate for layer in layers for rows in rows_swept for candidate in candidates(layer, rows)])
    found: dict[str, Any] = {}
    best: dict[str, Tile | None] = {}
    for layer in layers:
        first = layer.weight(target.torch_device)
        copies = _copies(first.nbytes, target)
        weights = [first, *(layer.weight(target.torch_device) for _ in range(copies - 1))]
        for rows in rows_swept:
            name = layer.entry(rows)
            best[name], tried = sweep(layer, rows, weights, lambda products, x: _seconds(target, products, x))
            found[name] = [(taken, repr(tile)) for taken, tile in tried]
            summary = "; ".join(f"{taken:.1f} {_tile_text(tile)}" for taken, tile in tried[:4])
            print(f"{layer.name} {name} ({first.nbytes / tried[0][0] / 1e3:.0f} GB/s): {summary}", flush=True)
    print("stored in", store_tiles(target.name, best), flush=True)
    return found


def _tile_text(tile: Tile | None) -> str:
    if tile is None:
        return "library"
    return f"{tile.outputs},{tile.inputs},{tile.stages},{tile.warps},{tile.parts}{',early' if tile.early else ''}"


COMPILERS = 12
Weight = Tensor | QuantisedWeight


@dataclass(frozen=True)
class SweptLayer:
    """A linear layer of a step: shape, weight scheme, and whether a gated activation follows."""

    name: str
    inputs: int
    outputs: int
    scheme: str
    is_gated: bool

    def weight(self, device: torch.device) -> Weight:
        """A random matrix in the kernels' layout."""
        if self.scheme == "bfloat16":
            return torch.randn(self.outputs, self.inputs, dtype=torch.bfloat16, device=device).mul_(DEVIATION)
        weight = random_weight(self.outputs, self.inputs, self.scheme, device)  # type: ignore[arg-type]
        return CudaLinear(weight, None, torch.bfloat16).quantised

    def entry(self, rows: int) -> str:
        """Key in the tile table."""
        return tile_name(self.scheme, self.inputs, self.outputs, rows, self.is_gated)


@dataclass(frozen=True)
class Candidate:
    """A layer, a batch size, and a tile to try."""

    layer: SweptLayer
    rows: int
    tile: Tile


def candidates(layer: SweptLayer, rows: int) -> list[Candidate]:
    """Tiles worth trying: up to 200 KB of weights in flight per SM, and enough warps to dequantise them."""
    is_quantised = layer.scheme != "bfloat16"
    if layer.scheme == "int4":
        tiles = [Tile(16, 256, 4, 4, 4), Tile(16, 128, 4, 8, 8), Tile(16, 128, 6, 8, 8), Tile(16, 256, 3, 8, 8),
                 Tile(32, 256, 3, 8, 4), Tile(16, 256, 4, 1), Tile(32, 256, 4, 2)]  # fmt: skip
    elif rows > 1:
        tiles = [Tile(64, 256, 4, 4), Tile(32, 256, 4, 2), Tile(64, 128, 4, 4), Tile(16, 512, 3, 1),
                 Tile(16, 256, 4, 4, 4), Tile(16, 256, 4, 2, 2), Tile(8, 256, 4, 2, 4)]  # fmt: skip
    elif is_quantised:
        tiles = [Tile(16, 256, 4, 4, 4, True), Tile(16, 256, 5, 2, 2), Tile(4, 4096, 0, 4), Tile(2, 4096, 0, 4),
                 Tile(8, 4096, 0, 8), Tile(4, 4096, 0, 8), Tile(4, 2048, 0, 4), Tile(8, 2048, 0, 4),
                 Tile(2, 2048, 0, 2), Tile(4, 2048, 0, 2), Tile(8, 1024, 0, 2), Tile(4, 1024, 0, 2),
                 Tile(2, 2048, 0, 4)]  # fmt: skip
    else:
        tiles = [Tile(16, 256, 3, 4, 4), Tile(16, 256, 3, 4, 4, True), Tile(32, 128, 4, 4, 2), Tile(1, 2048, 0, 2),
                 Tile(1, 4096, 0, 4), Tile(4, 1024, 0, 4), Tile(2, 2048, 0, 4), Tile(2, 1024, 0, 2)]  # fmt: skip
    return [Candidate(layer, rows, tile) for tile in tiles if tile.stages or rows == 1]


def compile_ahead(wanted: list[Candidate]) -> None:
    """Compile all candidates in parallel processes."""
    shares = [wanted[start::COMPILERS] for start in range(COMPILERS)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, [share for share in shares if share]))


def _compile(share: list[Candidate]) -> None:
    device = torch.device("cuda")
    for candidate in share:
        x = torch.ones(candidate.rows, candidate.layer.inputs, dtype=torch.bfloat16, device=device)
        try:
            _product(candidate, candidate.layer.weight(device))(x)
        except Exception as error:  # a tile too large for the GPU is reported again when it is timed
            logger.debug("%s failed", candidate, exc_info=True)
            print(f"{candidate}: {type(error).__name__}", flush=True)


def sweep(
    layer: SweptLayer,
    rows: int,
    weights: list[Weight],
    seconds: Callable[[list[Callable[[Tensor], Tensor]], Tensor], float],
) -> tuple[Tile | None, list[tuple[float, Any]]]:
    """The best tile (None if the library is fastest), and microseconds of all candidates, fastest first."""
    x = torch.randn(rows, layer.inputs, dtype=torch.bfloat16, device=weights[0].data.device)
    tried: list[tuple[float, Tile | None]] = []
    if layer.scheme == "bfloat16":
        tried.append((1e6 * seconds([_library(layer, weight) for weight in weights], x), None))
    for candidate in candidates(layer, rows):
        try:
            taken = seconds([_product(candidate, weight) for weight in weights], x)
            tried.append((1e6 * taken, candidate.tile))
        except Exception as error:
            logger.debug("%s failed", candidate, exc_info=True)
            print(f"{candidate}: {type(error).__name__}", flush=True)
    tried.sort(key=lambda pair: pair[0])
    return (tried[0][1] if tried else None), [(round(taken, 1), tile) for taken, tile in tried]


def _product(candidate: Candidate, weight: Weight) -> Callable[[Tensor], Tensor]:
    return lambda x: kernels.small_batch_linear(_normed(x), weight, None, candidate.tile, candidate.layer.is_gated)


def _library(layer: SweptLayer, weight: Weight) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight, Tensor)
    if layer.is_gated:
        return lambda x: kernels.silu_multiply(functional.linear(_normed(x), weight))
    return lambda x: functional.linear(_normed(x), weight)


def _normed(x: Tensor) -> Tensor:
    """A small kernel before every product, as in a real step, so that weight prefetch can overlap with it."""
    return kernels.add_rms_norm(x, None, x[0], 1e-6)[0]


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.linear_bench", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape that runs anywhere")
    parser.add_argument("--sweep", action="store_true", help="search the best tiles and store them")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows for which tiles are searched")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    run(options.device, options.small, options.sweep, options.out, options.rows)


if __name__ == "__main__":
    main()
