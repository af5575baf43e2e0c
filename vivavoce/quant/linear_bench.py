"""`python -m vivavoce.quant.linear_bench`: small weights on MOSS-Speech's shapes, beside bfloat16 and memory's floor.

First every linear layer of a decoding step by itself, with achieved GB/s; `--sweep` tries other tiles. Then whole steps
of the engine with 9.1 B random weights, under a cap on memory (24 GB unless said otherwise). Needs torch alone.
"""

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.bench.memory import median_seconds, read_bandwidth
from vivavoce.device import Device, pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.models.moss_speech import MossSpeechConfig
from vivavoce.nn import kernels
from vivavoce.nn.quantised_linear import quantised_linear
from vivavoce.nn.quantised_weight import QuantisedWeight, Scheme
from vivavoce.quant.random_model import random_moss_speech, random_weight

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "float8")
ROWS = (1, 8, 32)
COPIES_BYTES = 512 * 2**20  # of weights that are cycled through, so that no cache holds them
SMALL = MossSpeechConfig(
    vocab_size=2048, audio_vocab_size=1032, hidden_size=256, intermediate_size=512, num_shared_layers=2,
    num_modality_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    modality_pad_token_id=2000, sosp_token_id=2001, eosp_token_id=1024, eos_token_id=2002, pad_token_id=2003,
)  # fmt: skip
SWEEP_OUTPUTS, SWEEP_INPUTS, SWEEP_WARPS = (1, 2, 4, 8), (1024, 2048, 4096), (2, 4, 8)


def shapes(config: MossSpeechConfig) -> dict[str, tuple[int, int, int]]:
    """Layer → inputs, outputs, how many a step reads."""
    layers = config.num_shared_layers + 2 * config.num_modality_layers
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (hidden, heads, layers),
        "out": (config.num_attention_heads * config.head_dim, hidden, layers),
        "gate+up": (hidden, 2 * inner, layers),
        "down": (inner, hidden, layers),
    }


def run(device: str, is_small: bool, cap_gb: float, sweep: bool, out: Path | None) -> dict[str, Any]:
    """Measure, print, write `linear.json`."""
    place = pick(device)
    config = SMALL if is_small else MossSpeechConfig()
    dtype = torch.bfloat16 if place.kind == "cuda" else torch.float32
    bandwidth = read_bandwidth(place)
    result: dict[str, Any] = {
        "device": place.name, "torch": torch.__version__, "bandwidth_gb_s": bandwidth / 1e9, "dtype": str(dtype),
        "layers": [], "steps": [],
    }  # fmt: skip
    for name, (inputs, outputs, count) in shapes(config).items():
        for scheme in ("float", *_able(place)):
            result["layers"].append(_layer(place, dtype, name, inputs, outputs, count, scheme, bandwidth))
            _print_layer(result["layers"][-1])
    result["all_layers_ms"] = _totals(result["layers"])
    print("all layers of a step, ms:", json.dumps(result["all_layers_ms"]), flush=True)
    if sweep and place.kind == "cuda":
        result["sweep"] = [
            _swept(place, dtype, name, *shape[:2], scheme)
            for name, shape in shapes(config).items()
            for scheme in _able(place)
        ]
    kept: list[Scheme | None] = [None, *_able(place)]
    for each in kept:
        result["steps"].append(_engine_steps(place, dtype, config, each, cap_gb))
        print(json.dumps(result["steps"][-1]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "linear.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _able(place: Device) -> list[Scheme]:
    has_float8 = place.kind == "cuda" and torch.cuda.get_device_capability(place.index) >= (8, 9)
    return [scheme for scheme in SCHEMES if scheme != "float8" or has_float8]


def _layer(
    place: Device, dtype: torch.dtype, name: str, inputs: int, outputs: int, count: int, scheme: str, bandwidth: float
) -> dict[str, Any]:
    products, size = _products(place, dtype, inputs, outputs, scheme)
    found: dict[str, Any] = {"layer": name, "scheme": scheme, "inputs": inputs, "outputs": outputs, "count": count}
    for rows in ROWS:
        x = torch.randn(rows, inputs, dtype=dtype, device=place.torch_device)
        seconds = _seconds(place, products, x)
        found[f"us_{rows}"] = 1e6 * seconds
        found[f"gb_s_{rows}"] = size / seconds / 1e9
    found["over_floor_1"] = found["us_1"] / 1e6 * bandwidth / size
    return found


def _products(
    place: Device, dtype: torch.dtype, inputs: int, outputs: int, scheme: str, tile: Any = None
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The same product on several copies of a matrix, and the bytes of one."""
    if scheme == "float":
        size = inputs * outputs * dtype.itemsize
        copies = [
            torch.randn(outputs, inputs, dtype=dtype, device=place.torch_device) for _ in range(_copies(size, place))
        ]
        return [lambda x, weight=weight: functional.linear(x, weight) for weight in copies], size  # type: ignore[misc]
    size = random_weight(outputs, inputs, scheme, "meta").nbytes  # type: ignore[arg-type]
    small = [random_weight(outputs, inputs, scheme, place.torch_device) for _ in range(_copies(size, place))]  # type: ignore[arg-type]
    return [_product(weight, place, tile) for weight in small], size


def _product(weight: QuantisedWeight, place: Device, tile: Any) -> Callable[[Tensor], Tensor]:
    if place.kind == "cuda" and kernels.AVAILABLE:
        return lambda x: kernels.weight_only_linear(x, weight, None, tile)
    layer = quantised_linear(weight, None, torch.float32)
    return layer or (lambda x: functional.linear(x, weight.dequantised(x.dtype)))


def _copies(size: int, place: Device) -> int:
    return max(2, COPIES_BYTES // size) if place.kind == "cuda" else 2


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
    return median_seconds(graph.replay, place, repeats=20) / len(products)


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


def _swept(place: Device, dtype: torch.dtype, name: str, inputs: int, outputs: int, scheme: Scheme) -> dict[str, Any]:
    """The best tiles for one row; one that does not compile or fit is passed over."""
    x = torch.randn(1, inputs, dtype=dtype, device=place.torch_device)
    tried: list[tuple[float, tuple[int, int, int]]] = []
    for out_block in SWEEP_OUTPUTS:
        for in_block in SWEEP_INPUTS:
            for warps in SWEEP_WARPS:
                tile = kernels.Tile(out_block, in_block, warps)
                try:
                    products, _ = _products(place, dtype, inputs, outputs, scheme, tile)
                    tried.append((1e6 * _seconds(place, products, x), (out_block, in_block, warps)))
                except Exception as error:  # a tile too large for the registers is no news
                    print(f"{name} {scheme} {tile}: {type(error).__name__}", flush=True)
    best = sorted(tried)[:5]
    print(f"sweep {name} {scheme}: " + "; ".join(f"{tile} {taken:.1f} us" for taken, tile in best), flush=True)
    return {"layer": name, "scheme": scheme, "best": best}


def _engine_steps(
    place: Device, dtype: torch.dtype, config: MossSpeechConfig, scheme: Scheme | None, cap_gb: float
) -> dict[str, Any]:
    """Whole steps at batch 1 and 8, and the most memory they took; a model over the cap says so."""
    found: dict[str, Any] = {"scheme": scheme or "float", "cap_gb": cap_gb}
    if place.kind == "cuda":
        total = torch.cuda.get_device_properties(place.index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gb * 1e9 / total), place.index)
        torch.cuda.reset_peak_memory_stats(place.index)
    try:
        model = random_moss_speech(config, scheme, place.torch_device, dtype)
        found["model_gb"] = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 1e9
        engine = Engine(model, place, dtype, EngineLimits(cache_rows=8192, sequences_per_step=8))
        for batch in (1, 8):
            found[f"step_ms_{batch}"] = 1e3 * _step_seconds(engine, config, batch, place)
        if place.kind == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_reserved(place.index) / 1e9
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        model = engine = None  # type: ignore[assignment]
        gc.collect()
        if place.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, place.index)
    return found


def _step_seconds(engine: Engine, config: MossSpeechConfig, batch: int, place: Device) -> float:
    prompt = [(config.modality_pad_token_id, code % 1000) for code in range(256)]
    generation = Generation(Sampling(0.7, 20, 0.95), max_new_rows=60, min_new_rows=60)
    sequences = [engine.open(prompt) for _ in range(batch)]
    for sequence in sequences:
        engine.generate(sequence, generation)
    for _ in range(8 + batch):
        engine.step()
    seconds = median_seconds(engine.step, place, repeats=20)
    for sequence in sequences:
        engine.close(sequence)
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.linear_bench", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a small shape, for a rehearsal anywhere")
    parser.add_argument("--cap", type=float, default=24.0, help="gigabytes of GPU memory to stay below")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    run(options.device, options.small, options.cap, options.sweep, options.out)


if __name__ == "__main__":
    main()
