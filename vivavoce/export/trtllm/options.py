"""Options of a TensorRT-LLM checkpoint: version, parallelism, precision, and the weight layout of that precision.

Weights are int8 or int4 per output channel, or fp8 per matrix. Weight-only kernels read a matrix [in, out] whose rows
are shuffled for tensor cores in an order that depends on the GPU: `WeightLayout.of(sm)`. A stored int8 tensor is taken
as shuffled already, so an engine must be built for the GPU that the checkpoint was written for.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vivavoce.errors import InputError

PATTERN = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")
FINAL = 10_000  # a release comes after its candidates


class Version(NamedTuple):
    """A release or release candidate, ordered."""

    major: int
    minor: int
    patch: int
    candidate: int

    def __str__(self) -> str:
        rc = "" if self.candidate == FINAL else f"rc{self.candidate}"
        return f"{self.major}.{self.minor}.{self.patch}{rc}"


def parse_version(text: str) -> Version:
    """Parse 0.13, 1.2.1 or 1.3.0rc20."""
    found = PATTERN.fullmatch(text.strip().removeprefix("v"))
    if found is None:
        raise InputError(f"{text!r} is not a version of TensorRT-LLM; write it like 0.21.0, 1.2.1 or 1.3.0rc20")
    major, minor, patch, candidate = found.groups()
    return Version(int(major), int(minor), int(patch or 0), FINAL if candidate is None else int(candidate))


OLDEST = parse_version("0.13.0")
QWEN3_ENGINES = parse_version("1.0.0")
LAST_ENGINES = parse_version("1.3.0rc20")


@dataclass(frozen=True)
class CheckpointFormat:
    """Differences of `config.json` between versions; the tensors are the same."""

    version: Version

    @property
    def has_engines(self) -> bool:
        """Whether this version builds engines; later ones have the PyTorch backend only."""
        return self.version <= LAST_ENGINES

    @property
    def has_qwen3(self) -> bool:
        """Whether it supports query and key norms (`Qwen3ForCausalLM`)."""
        return self.version >= QWEN3_ENGINES

    @property
    def general_keys(self) -> dict[str, object]:
        """Keys of every decoder that only some versions have."""
        keys: dict[str, object] = {}
        if self.version < parse_version("0.16.0"):
            keys["share_embedding_table"] = False  # later versions detect it
        if self.version >= parse_version("0.19.0"):
            keys["runtime_defaults"] = None
        return keys

    @property
    def qwen_keys(self) -> dict[str, object]:
        """Keys of the Qwen family that only some versions have."""
        return {"use_logn_attn": False} if self.version >= parse_version("0.16.0") else {}

    @property
    def quantization_keys(self) -> dict[str, object]:
        """Keys of `quantization`; unknown ones are refused."""
        return {"clamp_val": None, "use_meta_recipe": False} if self.version >= parse_version("0.14.0") else {}


def format_of(text: str) -> CheckpointFormat:
    """The format of a version (0.13 or newer)."""
    version = parse_version(text)
    if version < OLDEST:
        raise InputError(f"TensorRT-LLM {version} is older than {OLDEST}, the first version this writes for")
    return CheckpointFormat(version)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TP_SIZES = (1, 2, 4, 8)
ALGORITHMS = {"none": None, "int8": "W8A16", "int4": "W4A16", "fp8": "FP8"}
KV_ALGORITHMS = {"none": None, "int8": "INT8", "fp8": "FP8"}
ARCHITECTURES = {80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell", 103: "Blackwell", 120: "RTX"}
FIRST_WITH_FP8 = 89


@dataclass(frozen=True)
class TrtLlmOptions:
    """Sharding, precision and version of a checkpoint. `sm` is the GPU of the weight-only layout."""

    tp: int = 1
    dtype: str = "bfloat16"
    quantise: str = "none"
    kv_cache: str = "none"
    sm: int = 90
    version: str = "1.2.1"
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Largest input of each linear by checkpoint name, for fp8."""

    def __post_init__(self) -> None:
        _among("--tp", self.tp, TP_SIZES)
        _among("--dtype", self.dtype, DTYPES)
        _among("--quantise", self.quantise, ALGORITHMS)
        _among("--kv-cache", self.kv_cache, KV_ALGORITHMS)
        _among("--sm", self.sm, ARCHITECTURES)
        format_of(self.version)
        if "fp8" in (self.quantise, self.kv_cache) and self.sm < FIRST_WITH_FP8:
            raise InputError(
                f"an sm {self.sm} GPU ({ARCHITECTURES[self.sm]}) has no fp8; take int8, or --sm 89 or newer"
            )
        if self.quantise == "fp8" and not self.peaks:
            raise InputError("fp8 needs calibrated activation ranges: give --calibration rows.json, or take int8")
        if self.quantise == "int4" and self.kv_cache == "int8":
            raise InputError("int4 weights do not go with an int8 cache; take --kv-cache fp8 or none")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of everything that is not quantised."""
        return DTYPES[self.dtype]

    @property
    def format(self) -> CheckpointFormat:
        return format_of(self.version)

    def quantization(self, exclude: list[str] | None = None) -> dict[str, Any]:
        """The `quantization` section of a config; `exclude` lists linears that are not quantised."""
        return {
            "quant_algo": ALGORITHMS[self.quantise],
            "kv_cache_quant_algo": KV_ALGORITHMS[self.kv_cache],
            "group_size": 128,
            "smoothquant_val": 0.5,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": exclude,
            **self.format.quantization_keys,
        }

    def mapping(self) -> dict[str, int]:
        """The `mapping` section of a config."""
        return {"world_size": self.tp, "tp_size": self.tp, "pp_size": 1, "cp_size": 1}


def _among(option: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value}; it can be {', '.join(str(one) for one in allowed)}")


FP8_PEAK = 448.0
INT8_PEAK = 127.0
TILE_ROWS = 64  # inputs per interleaved tile
BYTE_ORDER = (0, 2, 1, 3)
NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class RoundedWeight(NamedTuple):
    """Codes and scales."""

    codes: Tensor  # int8 [in, out], in int4's range for 4 bits
    scales: Tensor  # [out]


def round_per_channel(weight: Tensor, bits: int) -> RoundedWeight:
    """Symmetric per-channel quantisation.  # [out, in] → [in, out]"""
    steps = 1 << (bits - 1)
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / steps
    codes = (wide / scales[:, None]).round().clamp(-steps, steps - 1)
    return RoundedWeight(codes.T.to(torch.int8).contiguous(), scales)


def round_to_fp8(weight: Tensor, peak: float) -> Tensor:
    """A matrix scaled by `448 / peak`, in float8.  # [out, in]"""
    return (weight.float() * (FP8_PEAK / peak)).clamp(-FP8_PEAK, FP8_PEAK).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class WeightLayout:
    """Weight-only code layout of a GPU generation."""

    interleaves_columns: bool

    @classmethod
    def of(cls, sm: int) -> "WeightLayout":
        """Hopper reads columns in sequence; Ampere, Ada and RTX 50 read interleaved tiles of several columns."""
        if sm in (100, 103):
            raise InputError(
                f"versions of TensorRT-LLM differ in how they lay out int8 and int4 for an sm {sm}; take --quantise fp8"
            )
        return cls(interleaves_columns=sm != 90)

    def arrange(self, codes: Tensor, bits: int) -> Tensor:
        """Codes in the order of the kernels.  # int8 [in, out] → int8 [in, out], two to a byte for 4 bits"""
        check_arrangeable(codes.shape, bits, self)
        inputs, outputs = codes.shape
        columns = codes[_row_order(inputs, bits)].T.contiguous()  # [out, in]: what follows is column-major
        if self.interleaves_columns:
            together = 16 // bits
            tiles = columns.view(outputs // together, together, inputs // TILE_ROWS, TILE_ROWS)
            columns = tiles.transpose(1, 2)
        order = BYTE_ORDER if bits == 8 else NIBBLE_ORDER  # so that pairs can be unpacked by masks
        dealt = columns.reshape(-1, len(order))[:, list(order)].reshape(-1)
        return _packed(dealt, bits).view(inputs, outputs * bits // 8)


def _row_order(inputs: int, bits: int) -> Tensor:
    """Within each block of 16 (int8) or 32 (int4) inputs, pairs are ordered by warp lane."""
    block = 128 // bits
    pairs = torch.arange(block).view(block // 8, 4, 2)  # four pairs to a run of eight
    within = pairs.transpose(0, 1).reshape(-1)
    return (torch.arange(0, inputs, block)[:, None] + within).reshape(-1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes offset to unsigned, as bytes; of two 4-bit codes the first is the low nibble."""
    positive = codes.to(torch.int16) + (1 << (bits - 1))
    if bits == 4:
        positive = positive[::2] | positive[1::2] << 4
    return positive.to(torch.uint8).view(torch.int8)


def check_arrangeable(shape: "torch.Size | tuple[int, ...]", bits: int, layout: WeightLayout) -> None:
    """Raise if the kernels do not support a matrix of this size [in, out]."""
    inputs, outputs = shape
    rows = TILE_ROWS if layout.interleaves_columns else 128 // bits
    columns = max(8, 16 // bits)
    if inputs % rows or outputs % columns:
        raise InputError(
            f"a matrix of {inputs} inputs and {outputs} outputs has no int{bits} layout: inputs must be a multiple of "
            f"{rows} and outputs of {columns}; take a smaller --tp or leave --quantise out"
        )
