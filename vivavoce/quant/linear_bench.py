"""`python -m vivavoce.quant.linear_bench`: small weights on MOSS-Speech's shapes, beside bfloat16 and memory's floor.

Every linear layer of a decoding step by itself, with achieved GB/s. `--sweep` first searches the best tile for each
and keeps it in the user's cache folder, where everything else finds it. Whole steps are `viva bench lm`'s. Needs torch
alone.
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
from vivavoce.kernels import Tile, keep_tiles, tile_name
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.linear import Linear
from vivavoce.nn.quantised import CudaLinear, project, quantised_linear
from vivavoce.nn.quantised_weight import QuantisedWeight, Scheme
from vivavoce.quant.plan import DEVIATION, random_weight

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "float8")
ROWS = (1, 8, 32)
COPIES_BYTES = 400 * 2**20  # of weights that are cycled through, so that no cache holds them
SMALL = MossSpeechConfig(
    vocab_size=2048, audio_vocab_size=1032, hidden_size=256, intermediate_size=512, num_shared_layers=2,
    num_modality_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    modality_pad_token_id=2000, sosp_token_id=2001, eosp_token_id=1024, eos_token_id=2002, pad_token_id=2003,
)  # fmt: skip


def shapes(config: MossSpeechConfig) -> dict[str, tuple[int, int, int]]:
    """Layer → inputs, outputs, how many a step reads."""
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
    place = pick(device)
    config = SMALL if is_small else MossSpeechConfig()
    dtype = torch.bfloat16 if place.kind == "cuda" else torch.float32
    bandwidth = read_bandwidth(place)
    result: dict[str, Any] = {
        "device": place.name, "torch": torch.__version__, "bandwidth_gb_s": bandwidth / 1e9, "dtype": str(dtype),
        "layers": [],
    }  # fmt: skip
    if sweeps and place.kind == "cuda":
        result["sweep"] = _sweep(place, config, rows_swept)
    for scheme in ("float", *able(place)):
        for name, (inputs, outputs, count) in shapes(config).items():
            result["layers"].append(_layer(place, dtype, name, inputs, outputs, count, scheme, bandwidth))
            _print_layer(result["layers"][-1])
    result["all_layers_ms"] = _totals(result["layers"])
    print("all layers of a step, ms:", json.dumps(result["all_layers_ms"]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "linear.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def able(place: Device) -> list[Scheme]:
    """The ways to keep weights that a device can compute with."""
    has_float8 = place.kind == "cuda" and torch.cuda.get_device_capability(place.index) >= (8, 9)
    return [scheme for scheme in SCHEMES if scheme != "float8" or has_float8]


def _layer(
    place: Device, dtype: torch.dtype, name: str, inputs: int, outputs: int, count: int, scheme: str, bandwidth: float
) -> dict[str, Any]:
    gated = name == "gate+up"
    products, size = _products(place, dtype, inputs, outputs, scheme, gated)
    found: dict[str, Any] = {"layer": name, "scheme": scheme, "inputs": inputs, "outputs": outputs, "count": count}
    for rows in ROWS:
        x = torch.randn(rows, inputs, dtype=dtype, device=place.torch_device)
        seconds = _seconds(place, products, x)
        found[f"us_{rows}"] = 1e6 * seconds
        found[f"gb_s_{rows}"] = size / seconds / 1e9
    found["over_floor_1"] = found["us_1"] / 1e6 * bandwidth / size
    return found


def _products(
    place: Device, dtype: torch.dtype, inputs: int, outputs: int, scheme: str, gated: bool
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The same product on several copies of a matrix, and the bytes of one."""
    if scheme == "float":
        size = inputs * outputs * dtype.itemsize
        with torch.device(place.torch_device):
            layers = [Linear(inputs, outputs).to(dtype) for _ in range(_copies(size, place))]
        for layer in layers:
            layer.weight.normal_(0.0, DEVIATION)
        return [lambda x, layer=layer: project(layer, x, gated) for layer in layers], size  # type: ignore[misc]
    size = random_weight(outputs, inputs, scheme, "meta").nbytes  # type: ignore[arg-type]
    small = [random_weight(outputs, inputs, scheme, place.torch_device) for _ in range(_copies(size, place))]  # type: ignore[arg-type]
    products: list[Callable[[Tensor], Tensor]] = []
    for weight in small:
        quantised = quantised_linear(weight, None, dtype)
        if quantised is None:
            products.append(lambda x, weight=weight: functional.linear(x, weight.dequantised(x.dtype)))  # type: ignore[misc]
        else:
            products.append(lambda x, layer=quantised: project(layer, x, gated))  # type: ignore[misc]
    return products, size


def _copies(size: int, place: Device) -> int:
    return max(3, COPIES_BYTES // size) if place.kind == "cuda" else 2


def _seconds(place: Device, products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """The time of one product; on CUDA all copies are replayed as one graph, so that launching is not measured."""
    for product in products[:2]:
        product(x)
    if place.kind != "cuda":
        return median_seconds(lambda: [product(x) for product in products], place, repeats=3, warm_up=1) / len(products)
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


def _sweep(place: Device, config: MossSpeechConfig, rows_swept: Sequence[int]) -> dict[str, Any]:
    """The best tiles of every layer, kept for whoever comes after."""

    layers = [
        SweptLayer(name, inputs, outputs, scheme, name == "gate+up")
        for scheme in ("bfloat16", *able(place))
        for name, (inputs, outputs, _) in shapes(config).items()
    ]
    compile_ahead([candidate for layer in layers for rows in rows_swept for candidate in candidates(layer, rows)])
    found: dict[str, Any] = {}
    best: dict[str, Tile | None] = {}
    for layer in layers:
        first = layer.weight(place.torch_device)
        copies = _copies(first.nbytes, place)
        weights = [first, *(layer.weight(place.torch_device) for _ in range(copies - 1))]
        for rows in rows_swept:
            name = layer.entry(rows)
            best[name], tried = sweep(layer, rows, weights, lambda products, x: _seconds(place, products, x))
            found[name] = [(taken, repr(tile)) for taken, tile in tried]
            told = "; ".join(f"{taken:.1f} {_told(tile)}" for taken, tile in tried[:4])
            print(f"{layer.name} {name} ({first.nbytes / tried[0][0] / 1e3:.0f} GB/s): {told}", flush=True)
    print("kept in", keep_tiles(place.name, best), flush=True)
    return found


def _told(tile: Tile | None) -> str:
    if tile is None:
        return "library"
    return f"{tile.outputs},{tile.inputs},{tile.stages},{tile.warps},{tile.parts}{',early' if tile.early else ''}"


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.linear_bench", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape, for a rehearsal anywhere")
    parser.add_argument("--sweep", action="store_true", help="search the best tiles and keep them")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows for which tiles are searched")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    run(options.device, options.small, options.sweep, options.out, options.rows)


if __name__ == "__main__":
    main()


logger = logging.getLogger(__name__)

COMPILERS = 12
Weight = Tensor | QuantisedWeight


@dataclass(frozen=True)
class SweptLayer:
    """A linear layer of a step: its matrix, how it is kept, and whether a gate stands behind it."""

    name: str
    inputs: int
    outputs: int
    scheme: str
    is_gated: bool

    def weight(self, device: torch.device) -> Weight:
        """A random matrix, laid out as the kernels want it."""
        if self.scheme == "bfloat16":
            return torch.randn(self.outputs, self.inputs, dtype=torch.bfloat16, device=device).mul_(DEVIATION)
        weight = random_weight(self.outputs, self.inputs, self.scheme, device)  # type: ignore[arg-type]
        return CudaLinear(weight, None, torch.bfloat16).quantised

    def entry(self, rows: int) -> str:
        """What the table calls it."""
        return tile_name(self.scheme, self.inputs, self.outputs, rows, self.is_gated)


@dataclass(frozen=True)
class Candidate:
    """A layer, how many rows meet it, and a tile that may suit them."""

    layer: SweptLayer
    rows: int
    tile: Tile


def candidates(layer: SweptLayer, rows: int) -> list[Candidate]:
    """What is worth trying: up to 200 KB of weights under way in a multiprocessor, and enough warps to widen them."""
    narrow = layer.scheme != "bfloat16"
    if layer.scheme == "int4":
        tiles = [Tile(16, 256, 4, 4, 4), Tile(16, 128, 4, 8, 8), Tile(16, 128, 6, 8, 8), Tile(16, 256, 3, 8, 8),
                 Tile(32, 256, 3, 8, 4), Tile(16, 256, 4, 1), Tile(32, 256, 4, 2)]  # fmt: skip
    elif rows > 1:
        tiles = [Tile(64, 256, 4, 4), Tile(32, 256, 4, 2), Tile(64, 128, 4, 4), Tile(16, 512, 3, 1),
                 Tile(16, 256, 4, 4, 4), Tile(16, 256, 4, 2, 2), Tile(8, 256, 4, 2, 4)]  # fmt: skip
    elif narrow:
        tiles = [Tile(16, 256, 4, 4, 4, True), Tile(16, 256, 5, 2, 2), Tile(4, 4096, 0, 4), Tile(2, 4096, 0, 4),
                 Tile(8, 4096, 0, 8), Tile(4, 4096, 0, 8), Tile(4, 2048, 0, 4), Tile(8, 2048, 0, 4),
                 Tile(2, 2048, 0, 2), Tile(4, 2048, 0, 2), Tile(8, 1024, 0, 2), Tile(4, 1024, 0, 2),
                 Tile(2, 2048, 0, 4)]  # fmt: skip
    else:
        tiles = [Tile(16, 256, 3, 4, 4), Tile(16, 256, 3, 4, 4, True), Tile(32, 128, 4, 4, 2), Tile(1, 2048, 0, 2),
                 Tile(1, 4096, 0, 4), Tile(4, 1024, 0, 4), Tile(2, 2048, 0, 4), Tile(2, 1024, 0, 2)]  # fmt: skip
    return [Candidate(layer, rows, tile) for tile in tiles if tile.stages or rows == 1]


def compile_ahead(wanted: list[Candidate]) -> None:
    """Let other processes compile what will be measured, each a share."""
    shares = [wanted[start::COMPILERS] for start in range(COMPILERS)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, [share for share in shares if share]))


def _compile(share: list[Candidate]) -> None:
    device = torch.device("cuda")
    for candidate in share:
        x = torch.ones(candidate.rows, candidate.layer.inputs, dtype=torch.bfloat16, device=device)
        try:
            _product(candidate, candidate.layer.weight(device))(x)
        except Exception as error:  # a tile too large for the processor is no news; measuring it will say so again
            logger.debug("%s failed", candidate, exc_info=True)
            print(f"{candidate}: {type(error).__name__}", flush=True)


def sweep(
    layer: SweptLayer,
    rows: int,
    weights: list[Weight],
    seconds: Callable[[list[Callable[[Tensor], Tensor]], Tensor], float],
) -> tuple[Tile | None, list[tuple[float, Any]]]:
    """The best tile, None where the library beats all, and microseconds of everything tried, the fastest first."""
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
    return lambda x: kernels.few_row_linear(_normed(x), weight, None, candidate.tile, candidate.layer.is_gated)


def _library(layer: SweptLayer, weight: Weight) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight, Tensor)
    if layer.is_gated:
        return lambda x: kernels.silu_multiply(functional.linear(_normed(x), weight))
    return lambda x: functional.linear(_normed(x), weight)


def _normed(x: Tensor) -> Tensor:
    """Something small before every product, as in a step: who asks early for weights has them on the way meanwhile."""
    return kernels.add_rms_norm(x, None, x[0], 1e-6)[0]
