"""The search for the fastest tiles of the linear kernels on a GPU, for `viva tune`.

Each layer of MOSS-Speech's steps is measured in each weight format and batch size, beside the library's product, with
every tile worth trying. The best are stored by device and shape, see `vivavoce.kernels.tiles`.
"""

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional

from vivavoce import kernels
from vivavoce.cores import usable_cores
from vivavoce.device import Device, pick
from vivavoce.errors import InputError
from vivavoce.kernels import Tile, store_tiles, tile_name
from vivavoce.models.moss_speech.model import MossSpeechConfig
from vivavoce.nn.quantised import CudaLinear
from vivavoce.nn.quantised_weight import QuantisedWeight
from vivavoce.quant.linear_bench import copies, seconds, shapes
from vivavoce.quant.plan import DEVIATION, random_weight, supported_schemes

logger = logging.getLogger(__name__)

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
FORMATS = ("bfloat16", "int8", "float8", "int4")
MAX_FLOAT_ROWS = 32  # beyond, the library is fastest for float matrices
PROGRAMS = range(90, 541)  # of a launch that may occupy a large GPU: fewer leave it idle
Weight = Tensor | QuantisedWeight


@dataclass(frozen=True)
class TunedLayer:
    """A linear layer of a step: shape, weight format, and whether a gated activation follows."""

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

    layer: TunedLayer
    rows: int
    tile: Tile


@dataclass(frozen=True)
class Found:
    """The best of a layer and batch size: microseconds and tile (None: the library), and what the library takes."""

    layer: TunedLayer
    rows: int
    microseconds: float
    tile: Tile | None
    library: float | None


def tune(device: str, formats: Sequence[str], rows: Sequence[int], progress: Progress) -> tuple[list[Found], Path]:
    """Search, and store the best."""
    target = pick(device)
    if target.kind != "cuda" or not kernels.AVAILABLE:
        raise InputError(f"{target.name} has no tiles to search: the kernels need an NVIDIA GPU and Triton")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no format of weights; known are {', '.join(FORMATS)}")
    supported = supported_schemes(target)
    layers = [
        TunedLayer(name, inputs, outputs, scheme, name == "gate+up")
        for scheme in formats
        if scheme == "bfloat16" or scheme in supported
        for name, (inputs, outputs, _) in shapes(MossSpeechConfig()).items()
    ]
    tried = [candidate for layer in layers for count in rows for candidate in candidates(layer, count)]
    compiling = progress.add_task("compiling", total=len(tried))
    compile_ahead(tried, lambda: progress.advance(compiling))
    measuring = progress.add_task("measuring", total=len(layers) * len(rows))
    found = []
    for layer in layers:
        weights = _weights(layer, target)
        for count in rows:
            found.append(_best(layer, count, weights, target))
            progress.advance(measuring)
    return found, store_tiles(target.name, {best.layer.entry(best.rows): best.tile for best in found})


def candidates(layer: TunedLayer, rows: int) -> list[Candidate]:
    """Tiles worth trying: up to 200 KB of weights in flight per SM, and enough warps to dequantise them."""
    if layer.scheme == "bfloat16":
        tiles = _of_floats(rows)
    elif rows == 1:
        tiles = _of_one_row(layer.scheme)
    else:
        tiles = [*_of_few_rows(layer.scheme, rows), *_of_batches(layer, rows)]
    return [Candidate(layer, rows, tile) for tile in tiles]


def _of_floats(rows: int) -> list[Tile]:
    if rows == 1:
        return [Tile(16, 256, 3, 4, 4), Tile(16, 256, 3, 4, 4, True), Tile(32, 128, 4, 4, 2), Tile(1, 2048, 0, 2),
                Tile(1, 4096, 0, 4), Tile(4, 1024, 0, 4), Tile(2, 2048, 0, 4), Tile(2, 1024, 0, 2)]  # fmt: skip
    few = [Tile(64, 256, 4, 4), Tile(32, 256, 4, 2), Tile(64, 128, 4, 4), Tile(16, 512, 3, 1),
           Tile(16, 256, 4, 4, 4), Tile(16, 256, 4, 2, 2), Tile(8, 256, 4, 2, 4)]  # fmt: skip
    return few if rows <= MAX_FLOAT_ROWS else []


def _of_one_row(scheme: str) -> list[Tile]:
    if scheme == "int4":
        return [Tile(16, 256, 4, 4, 4), Tile(16, 128, 4, 8, 8), Tile(16, 128, 6, 8, 8), Tile(16, 256, 3, 8, 8),
                Tile(32, 256, 3, 8, 4)]  # fmt: skip
    return [Tile(16, 256, 4, 4, 4, True), Tile(16, 256, 5, 2, 2), Tile(4, 4096, 0, 4), Tile(2, 4096, 0, 4),
            Tile(8, 4096, 0, 8), Tile(4, 4096, 0, 8), Tile(4, 2048, 0, 4), Tile(8, 2048, 0, 4), Tile(2, 2048, 0, 2),
            Tile(4, 2048, 0, 2), Tile(8, 1024, 0, 2), Tile(4, 1024, 0, 2), Tile(2, 2048, 0, 4)]  # fmt: skip


def _of_few_rows(scheme: str, rows: int) -> list[Tile]:
    """Tiles of `small_batch_linear`."""
    if rows > MAX_FLOAT_ROWS:
        return []
    if scheme == "int4":
        return [Tile(16, 256, 4, 1), Tile(32, 256, 4, 2), Tile(16, 256, 4, 4, 4)]
    return [Tile(64, 128, 4, 4), Tile(32, 256, 4, 2), Tile(16, 512, 3, 1)]


def _of_batches(layer: TunedLayer, rows: int) -> Iterable[Tile]:
    """Tiles of `batch_linear`: outputs, inputs, stages and warps, with the inputs split as far as it may help."""
    if layer.scheme == "int4":
        blocks = [(64, 64, 4, 4), (64, 64, 6, 4), (128, 64, 4, 8)]
    elif rows <= 16:
        blocks = [(32, 256, 4, 4), (32, 128, 6, 4), (64, 128, 4, 4), (64, 128, 6, 4)]
    elif rows <= 32:
        blocks = [(32, 256, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4)]
    elif rows <= 64:
        blocks = [(64, 64, 6, 4), (64, 64, 8, 4), (64, 128, 4, 4), (64, 128, 3, 4), (128, 64, 5, 8)]
    else:
        blocks = [(128, 64, 5, 8), (128, 64, 4, 8), (128, 64, 6, 8), (128, 128, 3, 8), (64, 64, 4, 4)]
    outputs = layer.outputs // (2 if layer.is_gated else 1)
    for width, inputs, stages, warps in blocks:
        for split in (1, 2, 4, 6, 8):
            is_even = layer.inputs % (split * inputs) == 0
            if is_even and -(-outputs // width) * split in PROGRAMS:
                yield Tile(width, inputs, stages, warps, split=split)


def compile_ahead(wanted: Sequence[Candidate], advance: Callable[[], None]) -> None:
    """Compile all candidates in parallel processes."""
    with ProcessPoolExecutor(max(1, usable_cores() - 1), multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_compile, wanted, chunksize=4):
            advance()


def _compile(candidate: Candidate) -> None:
    device = torch.device("cuda")
    x = torch.ones(candidate.rows, candidate.layer.inputs, dtype=torch.bfloat16, device=device)
    try:
        _product(candidate, candidate.layer.weight(device))(x)
    except Exception:  # a tile too large for the GPU fails again, and is left out, when it is timed
        logger.debug("%s failed", candidate, exc_info=True)


def _weights(layer: TunedLayer, target: Device) -> list[Weight]:
    first = layer.weight(target.torch_device)
    return [first, *(layer.weight(target.torch_device) for _ in range(copies(first.nbytes, target) - 1))]


@torch.inference_mode()
def _best(layer: TunedLayer, rows: int, weights: Sequence[Weight], target: Device) -> Found:
    x = torch.randn(rows, layer.inputs, dtype=torch.bfloat16, device=target.torch_device)
    library = None
    best: tuple[float, Tile | None] = (float("inf"), None)
    if layer.scheme == "bfloat16":
        library = 1e6 * seconds(target, [_library(layer, weight) for weight in weights], x)
        best = library, None
    for candidate in candidates(layer, rows):
        try:
            taken = 1e6 * seconds(target, [_product(candidate, weight) for weight in weights], x)
        except Exception as error:  # a tile that this GPU has no room for
            logger.debug("%s failed", candidate, exc_info=True)
            logger.info("%s is left out: %s", candidate, type(error).__name__)
            continue
        if taken < best[0]:
            best = taken, candidate.tile
    return Found(layer, rows, best[0], best[1], library)


def _product(candidate: Candidate, weight: Weight) -> Callable[[Tensor], Tensor]:
    return lambda x: kernels.small_batch_linear(_normed(x), weight, None, candidate.tile, candidate.layer.is_gated)


def _library(layer: TunedLayer, weight: Weight) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight, Tensor)
    if layer.is_gated:
        return lambda x: kernels.silu_multiply(functional.linear(_normed(x), weight))
    return lambda x: functional.linear(_normed(x), weight)


def _normed(x: Tensor) -> Tensor:
    """A small kernel before every product, as in a real step, so that weight prefetch can overlap with it."""
    return kernels.add_rms_norm(x, None, x[0], 1e-6)[0]
