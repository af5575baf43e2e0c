"""TensorRT-LLM's checkpoints read their way, in plain torch: what an engine would compute of the files we write.

Written from the documented layout and not from our exporter: fused QKV rows, `fc` through SiLU times `gate`, padded
vocabularies, ranks that hold shares of the heads (the same key head where there are too few), sums over ranks after
`dense` and `proj`, int8 and int4 codes in kernel order.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional


def plain_codes(stored: Tensor, outputs: int, bits: int, sm: int) -> Tensor:
    """Signed codes [out, in] of a weight-only tensor [in, out · bits / 8], each fetched from its computed place."""
    inputs = stored.shape[0]
    data = stored.reshape(-1).view(torch.uint8).to(torch.int64)
    elements = data if bits == 8 else torch.stack([data & 15, data >> 4], dim=1).reshape(-1)
    row = torch.arange(inputs).expand(outputs, inputs)
    column = torch.arange(outputs)[:, None].expand(outputs, inputs)
    block = 16 if bits == 8 else 32
    within = row % block
    # A warp's lane takes two neighbours of every run of eight: the pair p of run r stands at p · runs + r.
    runs, run, pair = block // 8, within // 8, within % 8 // 2
    place = row // block * block + (pair * runs + run) * 2 + within % 2
    if sm == 90:
        linear = column * inputs + place
    else:
        together = 16 // bits
        tile, inside = place // 64, place % 64
        group = (column // together * (inputs // 64) + tile) * together + column % together
        linear = group * 64 + inside
    dealt = {8: [0, 2, 1, 3], 4: [0, 4, 1, 5, 2, 6, 3, 7]}[bits]  # where each of a group went
    size = len(dealt)
    linear = linear // size * size + torch.tensor(dealt)[linear % size]
    return elements[linear] - (1 << (bits - 1))


@dataclass
class Rank:
    """One rank's tensors."""

    tensors: dict[str, Tensor]
    config: dict
    sm: int = 90
    used: set[str] = field(default_factory=set)

    def get(self, name: str) -> Tensor:
        self.used.add(name)
        return self.tensors[name].float()

    def linear(self, name: str, x: Tensor, with_bias: bool = False) -> Tensor:
        y = x @ self.weight(name).T
        return y + self.get(f"{name}.bias") if with_bias else y

    def weight(self, name: str) -> Tensor:
        """[out, in], whatever it is stored as."""
        stored = self.tensors[f"{name}.weight"]
        self.used.add(f"{name}.weight")
        if stored.dtype == torch.int8:
            scale = self.get(f"{name}.per_channel_scale")
            bits = 8 * stored.shape[1] // len(scale)
            return plain_codes(stored, len(scale), bits, self.sm) * scale[:, None]
        if stored.dtype == torch.float8_e4m3fn:
            self.get(f"{name}.activation_scaling_factor")
            return stored.float() * self.get(f"{name}.weights_scaling_factor")
        return stored.float()


class Reader:
    """A checkpoint folder of one or more ranks."""

    def __init__(self, folder: Path, sm: int = 90) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        count = self.config["mapping"]["world_size"]
        self.ranks = [Rank(load_file(folder / f"rank{r}.safetensors"), self.config, sm) for r in range(count)]

    @cached_property
    def heads(self) -> tuple[int, int, int]:
        """Query heads and key heads of a rank, and channels of a head."""
        tp, config = len(self.ranks), self.config
        keys = config.get("num_key_value_heads", config["num_attention_heads"])
        size = config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]
        return config["num_attention_heads"] // tp, max(1, keys // tp), size

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.ranks[0].get("transformer.vocab_embedding.weight"))

    def decoder_layer(self, index: int, x: Tensor) -> Tensor:
        """A layer of the Qwen family on one sequence.  # [time, hidden]"""
        prefix = f"transformer.layers.{index}"
        normed = self.rms_norm(f"{prefix}.input_layernorm", x)
        x = x + sum(self._rotary_attention(rank, f"{prefix}.attention", normed) for rank in self.ranks)
        normed = self.rms_norm(f"{prefix}.post_layernorm", x)
        return x + sum(self._gated(rank, f"{prefix}.mlp", normed) for rank in self.ranks)

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        weights = [rank.get(f"{name}.weight") for rank in self.ranks]
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        return functional.rms_norm(x, x.shape[-1:], weights[0], self.config["norm_epsilon"])

    def head(self, x: Tensor, ids: int, name: str = "lm_head") -> Tensor:
        """Logits gathered from the ranks, without what pads the vocabulary."""
        gathered = torch.cat([rank.linear(name, x) for rank in self.ranks], dim=-1)
        assert gathered.shape[-1] - ids < len(self.ranks)
        assert (gathered[..., ids:] == 0).all()
        return gathered[..., :ids]

    def _gated(self, rank: Rank, name: str, x: Tensor) -> Tensor:
        inner = functional.silu(rank.linear(f"{name}.fc", x)) * rank.linear(f"{name}.gate", x)
        return rank.linear(f"{name}.proj", inner)

    def _rotary_attention(self, rank: Rank, name: str, x: Tensor) -> Tensor:
        queries, keys, size = self.heads
        packed = rank.linear(f"{name}.qkv", x, with_bias=self.config["attn_bias"])
        query, key, value = packed.unflatten(-1, (-1, size)).split([queries, keys, keys], dim=1)
        if self.config["qk_layernorm"]:
            eps = self.config["norm_epsilon"]
            query = functional.rms_norm(query, (size,), rank.get(f"{name}.q_layernorm.weight"), eps)
            key = functional.rms_norm(key, (size,), rank.get(f"{name}.k_layernorm.weight"), eps)
        query, key = self._rotate(query), self._rotate(key)
        mixed = functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (query, key, value)), is_causal=True, enable_gqa=True
        )
        return rank.linear(f"{name}.dense", mixed[0].transpose(0, 1).flatten(1))

    def _rotate(self, x: Tensor) -> Tensor:
        """`rope_gpt_neox`: the first half of a head against the second."""
        size = x.shape[-1]
        rates = self.config["rotary_base"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(x.shape[0])[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    # Whisper: layer norms with biases, GELU, absolute positions.

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.ranks[0].get(f"{name}.{kind}") for kind in ("weight", "bias"))
        return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    def attention(self, name: str, x: Tensor, states: Tensor | None = None, causal: bool = False) -> Tensor:
        """Self-attention, or attention to an encoder's states.  # [batch, time, hidden]"""
        queries, _, size = self.heads
        total = self.ranks[0].get(f"{name}.dense.bias")
        for rank in self.ranks:
            own = rank.linear(f"{name}.qkv", x, with_bias=True)
            other = own if states is None else rank.linear(f"{name}.qkv", states, with_bias=True)
            width = queries * size
            parts = (own[..., :width], other[..., width : 2 * width], other[..., 2 * width :])
            query, key, value = (part.unflatten(-1, (queries, size)).transpose(1, 2) for part in parts)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
            total = total + rank.linear(f"{name}.dense", mixed.transpose(1, 2).flatten(2))
            rank.get(f"{name}.dense.bias")
        return total

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        total = self.ranks[0].get(f"{name}.proj.bias")
        for rank in self.ranks:
            total = total + rank.linear(f"{name}.proj", functional.gelu(rank.linear(f"{name}.fc", x, with_bias=True)))
        return total

    def whisper_states(self, mel: Tensor) -> Tensor:
        get = self.ranks[0].get
        x = mel[..., None]  # their convolutions are two-dimensional
        x = functional.conv2d(x, get("transformer.conv1.weight"), get("transformer.conv1.bias"), padding=(1, 0))
        x = functional.conv2d(
            functional.gelu(x), get("transformer.conv2.weight"), get("transformer.conv2.bias"), (2, 1), padding=(1, 0)
        )
        x = functional.gelu(x).squeeze(-1).transpose(1, 2)
        x = x + get("transformer.position_embedding.weight")[: x.shape[1]]
        for index in range(self.config["num_hidden_layers"]):
            prefix = f"transformer.layers.{index}"
            x = x + self.attention(f"{prefix}.attention", self.layer_norm(f"{prefix}.attention_layernorm", x))
            x = x + self.feed_forward(f"{prefix}.mlp", self.layer_norm(f"{prefix}.mlp_layernorm", x))
        return self.layer_norm("transformer.ln_f", x)

    def whisper_logits(self, tokens: Tensor, states: Tensor) -> Tensor:
        x = self.embed(tokens) + self.ranks[0].get("transformer.position_embedding.weight")[: tokens.shape[1]]
        for index in range(self.config["num_hidden_layers"]):
            prefix = f"transformer.layers.{index}"
            normed = self.layer_norm(f"{prefix}.self_attention_layernorm", x)
            x = x + self.attention(f"{prefix}.self_attention", normed, causal=True)
            normed = self.layer_norm(f"{prefix}.cross_attention_layernorm", x)
            x = x + self.attention(f"{prefix}.cross_attention", normed, states)
            x = x + self.feed_forward(f"{prefix}.mlp", self.layer_norm(f"{prefix}.mlp_layernorm", x))
        return self.head(self.layer_norm("transformer.ln_f", x), self.config["vocab_size"])
