"""What the user may choose of a TensorRT-LLM checkpoint, and which choices go together."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vivavoce.errors import InputError

PATTERN = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")
FINAL = 10_000  # a release comes after its candidates


class Version(NamedTuple):
    """A release or a release candidate, in the order they came out."""

    major: int
    minor: int
    patch: int
    candidate: int

    def __str__(self) -> str:
        rc = "" if self.candidate == FINAL else f"rc{self.candidate}"
        return f"{self.major}.{self.minor}.{self.patch}{rc}"


def parse_version(text: str) -> Version:
    """A version as people write it: 0.13, 1.2.1, 1.3.0rc20."""
    found = PATTERN.fullmatch(text.strip().removeprefix("v"))
    if found is None:
        raise InputError(f"{text!r} is no version of TensorRT-LLM; write it like 0.21.0, 1.2.1 or 1.3.0rc20")
    major, minor, patch, candidate = found.groups()
    return Version(int(major), int(minor), int(patch or 0), FINAL if candidate is None else int(candidate))


OLDEST = parse_version("0.13.0")
QWEN3_ENGINES = parse_version("1.0.0")
LAST_ENGINES = parse_version("1.3.0rc20")


@dataclass(frozen=True)
class CheckpointFormat:
    """How a version wants its `config.json`; the tensors are the same in all of them."""

    version: Version

    @property
    def has_engines(self) -> bool:
        """Whether this version still builds engines; later ones have the PyTorch backend alone."""
        return self.version <= LAST_ENGINES

    @property
    def has_qwen3(self) -> bool:
        """Whether its decoder knows norms on queries and keys under `Qwen3ForCausalLM`."""
        return self.version >= QWEN3_ENGINES

    @property
    def general_keys(self) -> dict[str, object]:
        """Keys of every decoder that only some versions have."""
        keys: dict[str, object] = {}
        if self.version < parse_version("0.16.0"):
            keys["share_embedding_table"] = False  # later versions find out for themselves
        if self.version >= parse_version("0.19.0"):
            keys["runtime_defaults"] = None
        return keys

    @property
    def qwen_keys(self) -> dict[str, object]:
        """Keys of the Qwen family that only some versions have."""
        return {"use_logn_attn": False} if self.version >= parse_version("0.16.0") else {}

    @property
    def quantization_keys(self) -> dict[str, object]:
        """Keys of `quantization`, whose reader refuses those it does not know."""
        return {"clamp_val": None, "use_meta_recipe": False} if self.version >= parse_version("0.14.0") else {}


def format_of(text: str) -> CheckpointFormat:
    """The format of a version from 0.13 on."""
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
    """How a checkpoint is cut, rounded and described. `sm` is the GPU that weight-only kernels are laid out for."""

    tp: int = 1
    dtype: str = "bfloat16"
    quantise: str = "none"
    kv_cache: str = "none"
    sm: int = 90
    version: str = "1.2.1"
    peaks: Mapping[str, float] = field(default_factory=dict)
    """The largest input of each linear, by its name in the checkpoint; fp8 needs them."""

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
            raise InputError("fp8 needs to know how large activations get: give --calibration rows.json, or take int8")
        if self.quantise == "int4" and self.kv_cache == "int8":
            raise InputError("int4 weights do not go with an int8 cache; take --kv-cache fp8 or none")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of all that is not quantised."""
        return DTYPES[self.dtype]

    @property
    def format(self) -> CheckpointFormat:
        """How the version wants it."""
        return format_of(self.version)

    def quantization(self, exclude: list[str] | None = None) -> dict[str, Any]:
        """The `quantization` part of a config; `exclude` are linears that keep their type."""
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
        """The `mapping` part of a config."""
        return {"world_size": self.tp, "tp_size": self.tp, "pp_size": 1, "cp_size": 1}


def _among(option: str, value: object, allowed: Any) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value}; it can be {', '.join(str(one) for one in allowed)}")
