"""The search for the tiles of `vivavoce.nn.kernels.tiles`: every candidate measured beside the library's product.

Candidates are compiled first, side by side in processes of their own; what they make stays in Triton's cache on disk.
"""

import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.nn import kernels
from vivavoce.nn.kernels import Tile, tile_name
from vivavoce.nn.quantised_linear import CudaLinear
from vivavoce.nn.quantised_weight import QuantisedWeight
from vivavoce.quant.random_model import DEVIATION, random_weight

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
