"""Decoders of the Llama family (Qwen2, Qwen3) for TensorRT-LLM: tensor-parallel sharding, tensor files and config."""

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.errors import CheckpointError, InputError
from vivavoce.export.trtllm.options import (
    FP8_PEAK,
    INT8_PEAK,
    TrtLlmOptions,
    WeightLayout,
    check_arrangeable,
    round_per_channel,
    round_to_fp8,
)
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.nn.decoder import TrunkSizes


@dataclass(frozen=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int
    tp: int

    def outputs(self, weight: Tensor) -> Tensor:
        """An equal share of the outputs, of a matrix or a bias.  # [out, …] → [out / tp, …]"""
        return weight.chunk(self.tp)[self.rank]

    def inputs(self, weight: Tensor) -> Tensor:
        """An equal share of the inputs.  # [out, in] → [out, in / tp]"""
        return weight.chunk(self.tp, dim=1)[self.rank]

    def key_heads(self, weight: Tensor, heads: int) -> Tensor:
        """A share of the key or value heads; with fewer heads than ranks, heads are repeated.

        # [heads · head_dim, …] → [max(1, heads / tp) · head_dim, …]
        """
        if heads >= self.tp:
            return self.outputs(weight)
        return weight.chunk(heads)[self.rank * heads // self.tp]

    def vocabulary(self, head: Tensor) -> Tensor:
        """A share of an LM head's rows, zero-padded to a multiple of the ranks.  # [id, hidden]"""
        missing = -head.shape[0] % self.tp
        return self.outputs(functional.pad(head, (0, 0, 0, missing)) if missing else head)


def check_divisible(tp: int, heads: int, key_heads: int, inner: int) -> None:
    """Raise if a model cannot be sharded this way."""
    for count, what in ((heads, "attention heads"), (inner, "feed-forward channels")):
        if count % tp:
            fits = ", ".join(str(n) for n in (1, 2, 4, 8) if not (heads % n or inner % n))
            raise InputError(f"{count} {what} cannot be divided among {tp} ranks; --tp can be {fits}")
    if key_heads % tp and tp % key_heads:
        raise InputError(
            f"{key_heads} key heads can neither be divided nor repeated among {tp} ranks; take a smaller --tp"
        )


NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
}


@dataclass(frozen=True)
class Stored:
    """A tensor as the file's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenTensor:
    """Tensors that are computed together (codes and scales), and a function that computes them when written."""

    stored: tuple[Stored, ...]
    make: Callable[[], Sequence[Tensor]]


def write_tensor_file(file: Path, parts: Sequence[WrittenTensor]) -> int:
    """Write tensors in order; returns the file size."""
    header = _header(stored for part in parts for stored in part.stored)
    with file.open("wb") as opened:
        opened.write(header)
        for part in parts:
            for stored, tensor in zip(part.stored, part.make(), strict=True):
                if tuple(tensor.shape) != stored.shape or tensor.dtype != stored.dtype:
                    raise AssertionError(f"{stored} was made as {tuple(tensor.shape)} {tensor.dtype}")
                opened.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())
        return opened.tell()


def _header(tensors: Iterable[Stored]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for stored in tensors:
        if stored.name in described or offset % stored.dtype.itemsize:
            raise AssertionError(f"{stored} is duplicate or would be at the unaligned offset {offset}")
        end = offset + stored.nbytes
        described[stored.name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


Cut = Callable[[Tensor], Tensor]
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class TensorPart:
    """A published tensor, read on demand, and this rank's share of it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    whole: Callable[[], Tensor]


class RankPlan:
    """Tensors of a rank in file order; nothing is read while planning."""

    def __init__(self, source: Checkpoint, shard: Shard, options: TrtLlmOptions) -> None:
        self.source, self.shard, self.options = source, shard, options
        self.parts: list[WrittenTensor] = []

    def part(self, name: str, cut: Cut = lambda tensor: tensor) -> TensorPart:
        """A tensor of the source; `cut` selects this rank's share."""
        if name not in self.source.shapes:
            raise CheckpointError(f"{self.source.source} lacks {name}; download the model again")
        shape = cut(torch.empty(self.source.shapes[name], device="meta")).shape
        return TensorPart(tuple(shape), lambda: cut(self._read(name)), lambda: self._read(name))

    def _read(self, name: str) -> Tensor:
        tensor = self.source.tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{name} of {self.source.source} is already quantised; export the float model")
        return tensor

    def zeros(self, like: TensorPart) -> TensorPart:
        """Zeros in place of a missing bias."""
        return TensorPart(like.shape, lambda: torch.zeros(like.shape), lambda: torch.zeros(like.shape))

    def plain(self, name: str, *parts: TensorPart, view: Cut = lambda tensor: tensor) -> None:
        """The concatenated parts in the model's dtype."""
        meta = view(torch.cat([torch.empty(part.shape, device="meta") for part in parts]))
        dtype = self.options.torch_dtype
        self._add(
            [Stored(name, tuple(meta.shape), dtype)],
            lambda: [view(torch.cat([part.read().to(dtype) for part in parts]))],
        )

    def ones(self, name: str, size: int) -> None:
        """A norm with unit weight."""
        self._add(
            [Stored(name, (size,), self.options.torch_dtype)],
            lambda: [torch.ones(size, dtype=self.options.torch_dtype)],
        )

    def linear(self, name: str, weights: Sequence[TensorPart], biases: Sequence[TensorPart] = ()) -> None:
        """A projection with concatenated outputs, in the chosen precision."""
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
        """The scale of a quantised KV cache, if one is asked for."""
        kind = self.options.kv_cache
        if kind == "none":
            return
        peak = self.options.peaks.get(f"{attention}.kv")
        if peak is None and kind == "int8":
            raise InputError("an int8 cache needs calibrated ranges: give --calibration rows.json")
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
            raise InputError(f"the calibration has no range for {name}; calibrate with the model that is exported")
        activation = self.options.peaks[name] / FP8_PEAK

        def make() -> list[Tensor]:
            peak = max(
                float(part.whole().abs().max()) for part in weights
            )  # over all ranks, so that their scales agree
            rounded = round_to_fp8(torch.cat([part.read() for part in weights]), peak)
            return [rounded, torch.tensor([peak / FP8_PEAK]), torch.tensor([activation])]

        scales = [Stored(f"{name}.{kind}_scaling_factor", (1,), torch.float32) for kind in ("weights", "activation")]
        self._add([Stored(f"{name}.weight", shape, torch.float8_e4m3fn), *scales], make)

    def _add(self, stored: Sequence[Stored], make: Callable[[], Sequence[Tensor]]) -> None:
        self.parts.append(WrittenTensor(tuple(stored), make))


def plan_layer(plan: RankPlan, ours: str, theirs: str, sizes: TrunkSizes) -> None:
    """One layer; `ours` and `theirs` are its prefixes.

    Note: their `fc` is the gate (followed by SiLU) and their `gate` is our `up` projection.
    """
    shard, attention = plan.shard, f"{ours}.self_attn"
    cuts = {
        "q_proj": shard.outputs,
        "k_proj": lambda weight: shard.key_heads(weight, sizes.num_key_value_heads),
        "v_proj": lambda weight: shard.key_heads(weight, sizes.num_key_value_heads),
    }
    plan.plain(f"{theirs}.input_layernorm.weight", plan.part(f"{ours}.input_layernorm.weight"))
    plan.linear(
        f"{theirs}.attention.qkv",
        [plan.part(f"{attention}.{name}.weight", cut) for name, cut in cuts.items()],
        [plan.part(f"{attention}.{name}.bias", cut) for name, cut in cuts.items() if sizes.attention_bias],
    )
    plan.linear(f"{theirs}.attention.dense", [plan.part(f"{attention}.o_proj.weight", shard.inputs)])
    if sizes.qk_norm:
        plan.plain(f"{theirs}.attention.q_layernorm.weight", plan.part(f"{attention}.q_norm.weight"))
        plan.plain(f"{theirs}.attention.k_layernorm.weight", plan.part(f"{attention}.k_norm.weight"))
    plan.key_value_scale(f"{theirs}.attention")
    plan.plain(f"{theirs}.post_layernorm.weight", plan.part(f"{ours}.post_attention_layernorm.weight"))
    plan.linear(f"{theirs}.mlp.fc", [plan.part(f"{ours}.mlp.gate_proj.weight", shard.outputs)])
    plan.linear(f"{theirs}.mlp.gate", [plan.part(f"{ours}.mlp.up_proj.weight", shard.outputs)])
    plan.linear(f"{theirs}.mlp.proj", [plan.part(f"{ours}.mlp.down_proj.weight", shard.inputs)])


def calibrated_names(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """Linears of a checkpoint that share the input of each of a layer's modules."""
    return {
        f"{ours}.self_attn.qkv_proj": (f"{theirs}.attention.qkv",),
        f"{ours}.self_attn.o_proj": (f"{theirs}.attention.dense",),
        f"{ours}.mlp.gate_up_proj": (f"{theirs}.mlp.fc", f"{theirs}.mlp.gate"),
        f"{ours}.mlp.down_proj": (f"{theirs}.mlp.proj",),
    }


def qwen_config(
    sizes: TrunkSizes, options: TrtLlmOptions, qwen_type: str, exclude: list[str] | None = None
) -> dict[str, Any]:
    """`config.json` of a Qwen2 or Qwen3 decoder."""
    return {
        "architecture": {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[qwen_type],
        "dtype": options.dtype,
        "logits_dtype": "float32",
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_size": sizes.head_dim,
        "hidden_act": "silu",
        "intermediate_size": sizes.intermediate_size,
        "norm_epsilon": sizes.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": sizes.head_dim,
        "rotary_base": sizes.rope_theta,
        "rotary_scaling": None,
        "qk_layernorm": sizes.qk_norm,
        "attn_bias": sizes.attention_bias,
        "mlp_bias": False,
        "qwen_type": qwen_type,
        "seq_length": sizes.max_position_embeddings,
        "disable_weight_only_quant_plugin": False,
        "moe": {"num_experts": 0, "top_k": 0, "normalization_mode": 0},
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "num_labels": 1,
        "tie_word_embeddings": False,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": options.mapping(),
        "quantization": options.quantization(exclude),
        **options.format.general_keys,
        **options.format.qwen_keys,
    }
