"""A transformer of MOSS-TTS-Nano for one sequence on a CPU, all layers in one call.

A step of a small model is some hundred short operations, and Python between them takes as long as they do. TorchScript
runs the same code without it, and without Python's lock: whoever decodes sound beside is not in the way.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.moss_tts_nano import NanoLayer, NanoTransformer
from vivavoce.nn.int8_linear import SMALLEST_ROW, Int8Linear
from vivavoce.nn.linear import Linear
from vivavoce.nn.rope import RotaryTable
from vivavoce.nn.scripted import scripted

PRODUCTS = ("c_attn", "c_proj", "fc_in", "fc_out")


class FloatProduct(nn.Module):
    """A `Linear` that TorchScript can read."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x, self.weight, self.bias)


class Int8Product(nn.Module):
    """An `Int8Linear` that TorchScript can read."""

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        self.packed, self.smallest = linear.packed, SMALLEST_ROW
        self.bias = torch.zeros(()) if linear.bias is None else linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Project rows, each rounded by its own size.  # [row, input] → [row, output]"""
        if x.size(0) == 1:
            return torch.ops.quantized.linear_dynamic(x, self.packed, False)
        size = x.abs().amax(dim=-1, keepdim=True).clamp_min(self.smallest)
        out = torch.ops.quantized.linear_dynamic(x / size, self.packed, False)
        return (out - self.bias).mul_(size).add_(self.bias)


class FlatNanoLayer(nn.Module):
    """`NanoLayer` over a past that is one block of memory."""

    def __init__(self, layer: NanoLayer, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = layer.ln_1, layer.ln_2
        self.c_attn, self.c_proj = _product(layer.attn.c_attn), _product(layer.attn.c_proj)
        self.fc_in, self.fc_out = _product(layer.mlp.fc_in), _product(layer.mlp.fc_out)

    def forward(self, x: Tensor, past: Tensor, place: int, turns: Tensor, mask: Tensor | None) -> Tensor:
        """New rows behind `place` older ones.  # x [row, hidden], past [row, 2 · hidden], turns [row, 1, pair]"""
        rows, hidden = x.size(0), x.size(1)
        packed = self.c_attn(self.norm_1(x))
        pairs = torch.view_as_complex(packed.view(rows, 3 * self.heads, -1, 2))
        pairs.narrow(1, 0, 2 * self.heads).mul_(turns)
        past.narrow(0, place, rows).copy_(packed.narrow(1, hidden, 2 * hidden))
        seen = past.narrow(0, 0, place + rows).view(1, place + rows, 2, self.heads, -1)
        keys, values = seen.select(2, 0).transpose(1, 2), seen.select(2, 1).transpose(1, 2)
        queries = packed.narrow(1, 0, hidden).view(1, rows, self.heads, -1).transpose(1, 2).to(past.dtype)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = self.c_proj(mixed.transpose(1, 2).reshape(rows, hidden).to(x.dtype)).add_(x)
        return self.fc_out(functional.gelu(self.fc_in(self.norm_2(x)), approximate="tanh")).add_(x)


class FlatNanoTransformer(nn.Module):
    """Layers and a last norm over one block of keys and values."""

    def __init__(self, transformer: NanoTransformer, rotary: RotaryTable, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FlatNanoLayer(cast(NanoLayer, layer), heads) for layer in transformer.h)
        self.norm = transformer.ln_f
        self.turns = torch.complex(rotary.cos, rotary.sin)[:, None]  # [position, 1, head_dim / 2]

    def forward(self, x: Tensor, past: Tensor, place: int) -> Tensor:
        """New rows, whose keys and values join the past.  # x [row, hidden], past [layer, row, 2 · hidden]"""
        rows, end = x.size(0), place + x.size(0)
        turns = self.turns.narrow(0, place, rows)
        mask: Tensor | None = None
        if rows > 1:
            mask = torch.arange(end) <= place + torch.arange(rows)[:, None]
        for index, layer in enumerate(self.layers):
            x = layer(x, past.select(0, index), place, turns, mask)
        return self.norm(x)


def compiled(flat: Any) -> Any:
    """The same without Python, where TorchScript can read all its products."""
    if not isinstance(flat, FlatNanoTransformer) or not all(map(_is_readable, flat.layers)):
        return flat
    return scripted(flat)


def _is_readable(layer: nn.Module) -> bool:
    return all(isinstance(layer.get_submodule(name), FloatProduct | Int8Product) for name in PRODUCTS)


def _product(linear: nn.Module) -> nn.Module:
    if type(linear) is Int8Linear:
        return Int8Product(linear)
    return FloatProduct(linear) if type(linear) is Linear else linear
