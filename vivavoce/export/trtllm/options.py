"""What the user may choose of a TensorRT-LLM checkpoint, and which choices go together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vivavoce.errors import InputError
from vivavoce.export.trtllm.versions import CheckpointFormat, format_of

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
