"""Tile sizes of the linear kernels, measured per device and shape.

`viva tune` measures them beside cuBLAS and stores the best in the user's cache folder (`VIVA_CACHE`). Those of an H200
are bundled. A float matrix without an entry is left to cuBLAS; a quantised one, for which cuBLAS has no product, gets a
tile that fits any shape.
"""

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from vivavoce.nn.quantised_weight import QuantisedWeight

MAX_ROWS = 64
MAX_QUANTISED_ROWS = 512  # beyond, dequantising the matrix for the library's product costs little
SMALL_BATCH_ROWS = 160  # up to which products of the flow and the vocoder have small tiles
FUSED_NORM_ROWS = 320  # up to which repeating the norm in every program of the product is cheaper than a launch
CHAINED_ROWS = 640  # up to which launches of the flow and the vocoder overlap
MAX_FUSED_ROWS = 16  # of a layer fused with its norm and residual
MIN_COLUMNS = 16  # of a warp in a fused layer
CHAINED = "voice of few rows in a chain"  # key of the entry that enables dependent launch for the flow and the vocoder
GROUPS = (32, 64, 128)  # sizes of int4 groups that the kernels support
CACHE_VARIABLE = "VIVA_CACHE"
FILE = "linear_tiles.json"


@dataclass(frozen=True)
class Tile:
    """Outputs and inputs that a program multiplies per iteration, and its warps.

    `stages` is the depth of the software pipeline; 0 selects the kernel for one row, without tensor cores. The inputs
    of small batches are split into `parts` (up to 8), multiplied in one product. `early` prefetches the first weights
    before the preceding kernel has ended. With `split` the tile is one of `batch_linear`, whose inputs are split among
    this many programs.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1
    early: bool = False
    split: int = 0


FITTING_ONE = {"int8": Tile(16, 256, 4, 4, 4), "float8": Tile(16, 256, 4, 4, 4), "int4": Tile(16, 128, 4, 8, 8)}
FITTING_MORE = {"int8": Tile(32, 256, 4, 2), "float8": Tile(32, 256, 4, 2), "int4": Tile(16, 256, 4, 1)}
# The same where a program has less shared memory.
SMALL_ONE = FITTING_ONE | {"int8": Tile(16, 128, 4, 4, 4), "float8": Tile(16, 128, 4, 4, 4)}
SMALL_MORE = {"int8": Tile(32, 128, 3, 2), "float8": Tile(32, 128, 3, 2), "int4": Tile(16, 128, 3, 1)}
FITTING_BATCH = Tile(64, 64, 3, 4, split=1)
LARGE_SHARED_MEMORY = 160 << 10  # bytes a program may have; data-centre GPUs have 163 KiB and more, others 99
Entries = dict[str, Tile | None]  # None: cuBLAS is faster
BUNDLED = Path(__file__).with_name("bundled_tiles.json")


def scheme_of(weight: Tensor | QuantisedWeight) -> str:
    """The format of a matrix, as in the keys of entries."""
    return weight.scheme if isinstance(weight, QuantisedWeight) else str(weight.dtype).removeprefix("torch.")


def tile_for(weight: Tensor | QuantisedWeight, x: Tensor, gated: bool) -> Tile | None:
    """The tile for these rows; None: cuBLAS is faster, or the kernels do not support the matrix."""
    rows = x.shape[0]
    data = weight.data if isinstance(weight, QuantisedWeight) else weight
    limit = MAX_QUANTISED_ROWS if isinstance(weight, QuantisedWeight) else MAX_ROWS
    if rows > limit or not is_supported(weight):
        return None
    name = tile_name(scheme_of(weight), x.shape[1], data.shape[0], rows, gated)
    measured = tiles(x.device)
    if name in measured or not isinstance(weight, QuantisedWeight):
        return measured.get(name)
    return _fitting(weight, rows, has_large_shared_memory(x.device))


def _fitting(weight: QuantisedWeight, rows: int, is_large: bool) -> Tile | None:
    """A tile for any shape, where none was measured."""
    if rows == 1:
        return (FITTING_ONE if is_large else SMALL_ONE)[weight.scheme]
    if fits_batch(FITTING_BATCH, weight):
        return FITTING_BATCH
    return (FITTING_MORE if is_large else SMALL_MORE)[weight.scheme] if rows <= MAX_ROWS else None


def fits_batch(tile: Tile, weight: QuantisedWeight) -> bool:
    """Whether `batch_linear` can use this tile: its columns divide those of each part of the inputs."""
    columns = weight.group if weight.scheme == "int4" else tile.inputs
    return tile.split > 0 and weight.is_interleaved and weight.inputs % (tile.split * columns) == 0


def tile_name(scheme: str, inputs: int, outputs: int, rows: int, gated: bool) -> str:
    """The key of an entry. Above one, rows are rounded up to a power of two of at least 8."""
    counted = 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())
    return f"{scheme} {inputs}x{outputs}{' gated' if gated else ''} rows {counted}"


def tile_around(weight: Tensor, rows: int) -> Tile | None:
    """The tile of a layer fused with its norm and residual; None: another kernel, or cuBLAS, is faster."""
    name = name_around(weight.dtype, weight.shape[0], weight.shape[1], rows)
    return tiles(weight.device).get(name) if rows <= MAX_FUSED_ROWS else None


def name_around(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> str:
    """The key of the entry of a fused layer; rows are rounded up to a power of two."""
    return f"around {str(dtype).removeprefix('torch.')} {inputs}x{outputs} rows {1 << (rows - 1).bit_length()}"


def fits(tile: Tile, inputs: int, normed: bool) -> bool:
    """Whether a fused layer can use this tile: its columns divide the inputs, and its warps divide the columns."""
    main, rest = two_powers(tile.inputs)
    return (
        inputs % tile.inputs == 0
        and main + rest == tile.inputs
        and (rest == 0 or rest >= MIN_COLUMNS * tile.warps)
        and main >= MIN_COLUMNS * tile.warps
        and (not normed or tile.inputs == inputs)
    )


def two_powers(columns: int) -> tuple[int, int]:
    """The largest power of two in a number, and the rest, if that is a power of two (else 0)."""
    main = 1 << (columns.bit_length() - 1)
    return main, columns - main if (columns - main) & (columns - main - 1) == 0 else 0


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have as much shared memory as on data-centre GPUs."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    limit: int = getattr(properties, "shared_memory_per_block_optin", 0)  # absent from type stubs
    return limit >= LARGE_SHARED_MEMORY


def product_blocks(x: Tensor, rows: int) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs of a tile, and its warps: small batches get many small tiles."""
    if rows > FUSED_NORM_ROWS:
        return 64, 64, 64, 4
    inputs = 128 if x.dtype == torch.float32 and not has_large_shared_memory(x.device) else 256
    return (16 if rows <= SMALL_BATCH_ROWS else 32), 32, inputs, 4


def window_attention_name(rows: int, heads: int, dim: int) -> str:
    """The key of the entry for cross-attention of this many rows."""
    return f"window attention {heads}x{dim} rows {1 << (rows - 1).bit_length()}"


def is_supported(weight: Tensor | QuantisedWeight) -> bool:
    """Whether kernels can read a matrix."""
    if not isinstance(weight, QuantisedWeight):
        return weight.dtype == torch.bfloat16
    if not weight.is_interleaved:
        return False
    if weight.scheme == "float8":
        return not weight.data.is_cuda or torch.cuda.get_device_capability(weight.data.device) >= (8, 9)
    if weight.scheme == "int4":
        assert weight.scale is not None
        in_pairs = weight.scale.stride() == (2, 2 * weight.outputs)
        return weight.group in GROUPS and in_pairs and weight.scale.dtype == torch.float16
    return True


@functools.cache
def tiles(device: torch.device) -> Entries:
    """Entries of a device: the bundled ones, overridden by the user's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _read(BUNDLED).get(name, {}) | _stored_tiles().get(name, {})


def store_tiles(device: str, found: Entries) -> Path:
    """Add entries measured on a device to the user's file."""
    everything = _stored_tiles()
    everything[device] = everything.get(device, {}) | found
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    named = {
        name: {key: tile and asdict(tile) for key, tile in entries.items()} for name, entries in everything.items()
    }
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(named, indent=1), encoding="utf8")
    fresh.replace(file)
    tiles.cache_clear()
    return file


def _stored_tiles() -> dict[str, Entries]:
    try:
        return _read(_file())
    except (OSError, ValueError, TypeError, AttributeError):  # no file, or an unreadable one
        return {}


def _read(file: Path) -> dict[str, Entries]:
    given = json.loads(file.read_text(encoding="utf8"))
    return {name: {key: tile and Tile(**tile) for key, tile in entries.items()} for name, entries in given.items()}


def cache_folder() -> Path:
    """The folder of what was measured or compiled for this machine."""
    folder = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "viva"
    return Path(folder)


def _file() -> Path:
    return cache_folder() / FILE
