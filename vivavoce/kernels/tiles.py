"""Tile sizes of the small-batch linear kernels, measured per device and shape.

`python -m vivavoce.quant.linear_bench --sweep` measures them against cuBLAS and stores the best in the user's cache
folder (`VIVA_CACHE`). Those of an H200 are bundled. A float matrix without an entry is left to cuBLAS; a quantised one,
for which cuBLAS has no product, gets a tile that fits any shape.
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
    before the preceding kernel has ended.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1
    early: bool = False


FITTING_ONE = {"int8": Tile(16, 256, 4, 4, 4), "float8": Tile(16, 256, 4, 4, 4), "int4": Tile(16, 128, 4, 8, 8)}
FITTING_MORE = {"int8": Tile(32, 256, 4, 2), "float8": Tile(32, 256, 4, 2), "int4": Tile(16, 256, 4, 1)}
# The same where a program has less shared memory.
SMALL_ONE = FITTING_ONE | {"int8": Tile(16, 128, 4, 4, 4), "float8": Tile(16, 128, 4, 4, 4)}
SMALL_MORE = {"int8": Tile(32, 128, 3, 2), "float8": Tile(32, 128, 3, 2), "int4": Tile(16, 128, 3, 1)}
LARGE_SHARED_MEMORY = 160 << 10  # bytes a program may have; data-centre GPUs have 163 KiB and more, others 99
Entries = dict[str, Tile | None]  # None: cuBLAS is faster
BUNDLED: dict[str, Entries] = {
    "NVIDIA H200": {
        CHAINED: Tile(0, 0, 0, 0),
        "bfloat16 4096x24576 gated rows 1": Tile(1, 4096, 0, 4),
        "bfloat16 12288x4096 rows 1": Tile(2, 2048, 0, 4),
        "bfloat16 4096x6144 rows 1": Tile(2, 2048, 0, 4),
        "bfloat16 4096x4096 rows 1": Tile(2, 2048, 0, 4),
        "int8 4096x24576 gated rows 1": Tile(4, 2048, 0, 2),
        "int8 12288x4096 rows 1": Tile(8, 2048, 0, 4),
        "int8 4096x6144 rows 1": Tile(8, 2048, 0, 4),
        "int8 4096x4096 rows 1": Tile(4, 2048, 0, 4),
        "int4 4096x24576 gated rows 1": Tile(16, 128, 4, 8, 8),
        "int4 12288x4096 rows 1": Tile(16, 128, 4, 8, 8),
        "int4 4096x6144 rows 1": Tile(16, 128, 4, 8, 8),
        "int4 4096x4096 rows 1": Tile(16, 128, 4, 8, 8),
        "float8 4096x24576 gated rows 1": Tile(4, 2048, 0, 2),
        "float8 12288x4096 rows 1": Tile(4, 4096, 0, 8),
        "float8 4096x6144 rows 1": Tile(4, 2048, 0, 4),
        "float8 4096x4096 rows 1": Tile(4, 2048, 0, 4),
        "bfloat16 4096x24576 gated rows 8": Tile(32, 256, 4, 2),
        "bfloat16 4096x24576 gated rows 32": Tile(64, 128, 4, 4),
        "bfloat16 12288x4096 rows 8": Tile(32, 256, 4, 2),
        "bfloat16 12288x4096 rows 32": None,
        "bfloat16 4096x6144 rows 8": Tile(32, 256, 4, 2),
        "bfloat16 4096x6144 rows 32": None,
        "bfloat16 4096x4096 rows 8": Tile(32, 256, 4, 2),
        "bfloat16 4096x4096 rows 32": Tile(64, 256, 4, 4),
        "int8 4096x24576 gated rows 8": Tile(64, 128, 4, 4),
        "int8 4096x24576 gated rows 32": Tile(64, 128, 4, 4),
        "int8 12288x4096 rows 8": Tile(32, 256, 4, 2),
        "int8 12288x4096 rows 32": Tile(16, 512, 3, 1),
        "int8 4096x6144 rows 8": Tile(32, 256, 4, 2),
        "int8 4096x6144 rows 32": Tile(64, 256, 4, 4),
        "int8 4096x4096 rows 8": Tile(32, 256, 4, 2),
        "int8 4096x4096 rows 32": Tile(16, 512, 3, 1),
        "int4 4096x24576 gated rows 8": Tile(16, 256, 4, 1),
        "int4 4096x24576 gated rows 32": Tile(32, 256, 4, 2),
        "int4 12288x4096 rows 8": Tile(16, 256, 4, 1),
        "int4 12288x4096 rows 32": Tile(16, 256, 4, 4, 4),
        "int4 4096x6144 rows 8": Tile(16, 256, 4, 1),
        "int4 4096x6144 rows 32": Tile(16, 512, 3, 4, 4),
        "int4 4096x4096 rows 8": Tile(16, 256, 4, 1),
        "int4 4096x4096 rows 32": Tile(16, 256, 4, 4, 4),
        "float8 4096x24576 gated rows 8": Tile(64, 128, 4, 4),
        "float8 4096x24576 gated rows 32": Tile(64, 128, 4, 4),
        "float8 12288x4096 rows 8": Tile(32, 256, 4, 2),
        "float8 12288x4096 rows 32": Tile(16, 512, 3, 1),
        "float8 4096x6144 rows 8": Tile(32, 256, 4, 2),
        "float8 4096x6144 rows 32": Tile(64, 256, 4, 4),
        "float8 4096x4096 rows 8": Tile(32, 256, 4, 2),
        "float8 4096x4096 rows 32": Tile(16, 512, 3, 1),
        "around bfloat16 1280x3840 rows 8": Tile(16, 1280, 0, 4, early=True),
        "around bfloat16 1280x1280 rows 8": Tile(16, 1280, 0, 4, early=True),
        "around bfloat16 1280x5120 rows 8": Tile(16, 1280, 0, 4),
        "around bfloat16 5120x1280 rows 8": Tile(16, 2560, 0, 8, early=True),
        "around bfloat16 1280x51865 rows 8": Tile(16, 1280, 0, 4, early=True),
        "window attention 20x64 rows 8": Tile(0, 256, 0, 8),
    }
}


def scheme_of(weight: Tensor | QuantisedWeight) -> str:
    """The format of a matrix, as in the keys of entries."""
    return weight.scheme if isinstance(weight, QuantisedWeight) else str(weight.dtype).removeprefix("torch.")


def tile_for(weight: Tensor | QuantisedWeight, x: Tensor, gated: bool) -> Tile | None:
    """The tile for these rows; None: cuBLAS is faster, or the kernels do not support the matrix."""
    rows = x.shape[0]
    data = weight.data if isinstance(weight, QuantisedWeight) else weight
    if rows > MAX_ROWS or not _is_supported(weight, data):
        return None
    scheme = scheme_of(weight)
    name = tile_name(scheme, x.shape[1], data.shape[0], rows, gated)
    is_large = has_large_shared_memory(x.device)
    one, more = (FITTING_ONE, FITTING_MORE) if is_large else (SMALL_ONE, SMALL_MORE)
    return tiles(x.device).get(name, (one if rows == 1 else more).get(scheme))


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


def _is_supported(weight: Tensor | QuantisedWeight, data: Tensor) -> bool:
    if not isinstance(weight, QuantisedWeight):
        return weight.dtype == torch.bfloat16
    if weight.scheme == "float8":
        return not data.is_cuda or torch.cuda.get_device_capability(data.device) >= (8, 9)
    if weight.scheme == "int4":
        assert weight.scale is not None
        in_pairs = weight.scale.stride() == (2, 2 * weight.outputs)
        return weight.group in GROUPS and in_pairs and weight.scale.dtype == torch.float16
    return weight.scheme == "int8"


@functools.cache
def tiles(device: torch.device) -> Entries:
    """Entries of a device: the bundled ones, overridden by the user's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return BUNDLED.get(name, {}) | _stored_tiles().get(name, {})


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
        given = json.loads(_file().read_text(encoding="utf8"))
        return {name: {key: tile and Tile(**tile) for key, tile in entries.items()} for name, entries in given.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # no file, or an unreadable one
        return {}


def cache_folder() -> Path:
    """The folder of what was measured or compiled for this machine."""
    folder = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "viva"
    return Path(folder)


def _file() -> Path:
    return cache_folder() / FILE
