"""What one rank's file holds: every tensor of a checkpoint, cut, fused, rounded and named as TensorRT-LLM has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm.cutting import Shard
from vivavoce.export.trtllm.options import TrtLlmOptions
from vivavoce.export.trtllm.rounding import (
    FP8_PEAK,
    INT8_PEAK,
    WeightLayout,
    check_arrangeable,
    round_per_channel,
    round_to_fp8,
)
from vivavoce.export.trtllm.tensor_file import Stored, WrittenTensor
from vivavoce.models.checkpoint import Checkpoint

Cut = Callable[[Tensor], Tensor]
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class TensorPart:
    """A published tensor, to be read when it is needed, and the share of it that is this rank's."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    whole: Callable[[], Tensor]


class RankPlan:
    """Tensors in the order they will be written; nothing is read while a plan is made."""

    def __init__(self, source: Checkpoint, shard: Shard, options: TrtLlmOptions) -> None:
        self.source, self.shard, self.options = source, shard, options
        self.parts: list[WrittenTensor] = []

    def part(self, name: str, cut: Cut = lambda tensor: tensor) -> TensorPart:
        """A tensor of the source; `cut` takes this rank's share of it."""
        if name not in self.source.shapes:
            raise CheckpointError(f"{self.source.source} lacks {name}; fetch the model again")
        shape = cut(torch.empty(self.source.shapes[name], device="meta")).shape
        return TensorPart(tuple(shape), lambda: cut(self._read(name)), lambda: self._read(name))

    def _read(self, name: str) -> Tensor:
        tensor = self.source.tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{name} of {self.source.source} is rounded already; export the model it was made of")
        return tensor

    def zeros(self, like: TensorPart) -> TensorPart:
        """What stands for a bias that a model does not have."""
        return TensorPart(like.shape, lambda: torch.zeros(like.shape), lambda: torch.zeros(like.shape))

    def plain(self, name: str, *parts: TensorPart, view: Cut = lambda tensor: tensor) -> None:
        """A tensor in the model's type: the parts one after the other."""
        meta = view(torch.cat([torch.empty(part.shape, device="meta") for part in parts]))
        dtype = self.options.torch_dtype
        self._add(
            [Stored(name, tuple(meta.shape), dtype)],
            lambda: [view(torch.cat([part.read().to(dtype) for part in parts]))],
        )

    def ones(self, name: str, size: int) -> None:
        """A norm that only normalises."""
        self._add(
            [Stored(name, (size,), self.options.torch_dtype)],
            lambda: [torch.ones(size, dtype=self.options.torch_dtype)],
        )

    def linear(self, name: str, weights: Sequence[TensorPart], biases: Sequence[TensorPart] = ()) -> None:
        """A projection whose outputs are the parts' one after the other, in the chosen precision."""
        outputs, inputs = sum(part.shape[0] for part in weights), weights[0].shape[1]
        if self.options.quantise in BITS:
            self._weight_only(name, weights, (inputs, outputs))
        elif self.options.quantise == "fp8":
            self._fp8(name, weights, (outputs, inputs))
        else:
            self.plain(f"{name}.weight", *weights)
        if biases:
            self.plain(f"{name}.bias", *biases)

    def key_value_scale(self, attention: str) -> None:
        """The scale of a rounded cache, where one is asked for."""
        kind = self.options.kv_cache
        if kind == "none":
            return
        peak = self.options.peaks.get(f"{attention}.kv")
        if peak is None and kind == "int8":
            raise InputError("an int8 cache needs to know how large keys and values get: give --calibration rows.json")
        scale = 1.0 if peak is None else peak / (FP8_PEAK if kind == "fp8" else INT8_PEAK)
        stored = Stored(f"{attention}.kv_cache_scaling_factor", (1,), torch.float32)
        self._add([stored], lambda: [torch.tensor([scale])])

    def _weight_only(self, name: str, weights: Sequence[TensorPart], shape: tuple[int, int]) -> None:
        bits, layout, dtype = BITS[self.options.quantise], WeightLayout.of(self.options.sm), self.options.torch_dtype
        check_arrangeable(shape, bits, layout)

        def make() -> list[Tensor]:
            rounded = round_per_channel(torch.cat([part.read() for part in weights]), bits)
            return [layout.arrange(rounded.codes, bits), rounded.scales.to(dtype)]

        inputs, outputs = shape
        weight = Stored(f"{name}.weight", (inputs, outputs * bits // 8), torch.int8)
        self._add([weight, Stored(f"{name}.per_channel_scale", (outputs,), dtype)], make)

    def _fp8(self, name: str, weights: Sequence[TensorPart], shape: tuple[int, int]) -> None:
        if name not in self.options.peaks:
            raise InputError(f"the calibration says nothing of {name}; calibrate with the model that is exported")
        activation = self.options.peaks[name] / FP8_PEAK

        def make() -> list[Tensor]:
            peak = max(float(part.whole().abs().max()) for part in weights)  # of all ranks, so that they agree
            rounded = round_to_fp8(torch.cat([part.read() for part in weights]), peak)
            return [rounded, torch.tensor([peak / FP8_PEAK]), torch.tensor([activation])]

        scales = [Stored(f"{name}.{kind}_scaling_factor", (1,), torch.float32) for kind in ("weights", "activation")]
        self._add([Stored(f"{name}.weight", shape, torch.float8_e4m3fn), *scales], make)

    def _add(self, stored: Sequence[Stored], make: Callable[[], Sequence[Tensor]]) -> None:
        self.parts.append(WrittenTensor(tuple(stored), make))
