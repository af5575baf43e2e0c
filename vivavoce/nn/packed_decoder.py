"""Steps of one row through a decoder whose weights are packed: all layers in one call of `vivavoce.kernels.cpu`.

With a single row the products take a few milliseconds, and PyTorch's calls between them as long again.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vivavoce.kernels import cpu
from vivavoce.nn.block_linear import BlockLinear
from vivavoce.nn.linear import RMSNorm
from vivavoce.nn.paged_kv import RowBatch

if TYPE_CHECKING:
    from vivavoce.nn.decoder import DecoderLayer, DecoderTrunk

LINEARS = 4  # of a layer
VECTOR_SIZE = 8  # sizes of vectors are multiples of it


class PackedDecoderStep:
    """The layers of a `DecoderTrunk`, where all of them are packed; it has the addresses of their weights."""

    def __init__(self) -> None:
        self._decoder: cpu.CompiledDecoder | None = None
        self._is_packed: bool | None = None  # not known yet

    def __reduce__(self) -> tuple[type["PackedDecoderStep"], tuple[()]]:
        return PackedDecoderStep, ()  # a copy has other addresses

    def takes(self, trunk: "DecoderTrunk", x: Tensor, batch: RowBatch) -> bool:
        """Whether a step is one of these: a single new row of a sequence, float32 on a CPU."""
        if x.shape[0] != 1 or x.device.type != "cpu" or x.dtype != torch.float32 or len(batch.pieces) != 1:
            return False
        if batch.pieces[0].visible is not None or batch.cache_positions is not None:
            return False
        is_plain = batch.cache.keys.dtype == torch.float32 and batch.page_table.dtype == torch.int32
        if self._is_packed is None:
            self._is_packed = _is_trunk_packed(trunk)
        return is_plain and self._is_packed and cpu.is_available()

    def forget(self) -> None:
        """The weights are moved."""
        self._decoder = self._is_packed = None

    def __call__(self, trunk: "DecoderTrunk", x: Tensor, batch: RowBatch) -> Tensor:
        """States of the row before the last norm; its keys and values are stored.  # [1, hidden]"""
        library = cpu.library()
        assert library is not None
        decoder = self._decoder = self._decoder or _described(trunk)
        piece, cache = batch.pieces[0], batch.cache
        pages = batch.page_table[piece.slot]
        place = cpu.Cache(
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            pages.data_ptr(),
            cache.page_size,
            cache.keys.stride(1),
            cache.keys.stride(0),
            piece.position,
        )
        out = x.clone()
        scratch = torch.empty(library.decoder_step_scratch(decoder, piece.context))
        products = torch.empty(library.block_linear_scratch(max(decoder.hidden, decoder.inner), 1), dtype=torch.uint8)
        addresses = out.data_ptr(), scratch.data_ptr(), products.data_ptr()
        library.decoder_step(decoder, place, *addresses, torch.get_num_threads())
        return out


def _layers(trunk: "DecoderTrunk") -> "list[DecoderLayer]":
    return list(trunk.layers)  # type: ignore[arg-type]


def _is_trunk_packed(trunk: "DecoderTrunk") -> bool:
    layers = _layers(trunk)
    sizes = trunk.norm.weight.numel(), layers[0].self_attn.head_dim
    has_even_sizes = all(size % VECTOR_SIZE == 0 for size in sizes) and trunk.rotary.cos.dtype == torch.float32
    return has_even_sizes and all(map(_is_packed, layers))


def _described(trunk: "DecoderTrunk") -> cpu.CompiledDecoder:
    layers = _layers(trunk)
    attention, down = layers[0].self_attn, _linears(layers[0])[-1]
    return cpu.CompiledDecoder(
        (cpu.Layer * len(layers))(*map(_layer, layers)),
        trunk.rotary.cos.data_ptr(),
        trunk.rotary.sin.data_ptr(),
        len(layers),
        trunk.norm.weight.numel(),
        down.inputs,
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
        layers[0].input_layernorm.eps,
    )


def _linears(layer: "DecoderLayer") -> list[BlockLinear]:
    """The packed ones of a layer's four."""
    attention, mlp = layer.self_attn, layer.mlp
    found: list[nn.Module] = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return [each for each in found if isinstance(each, BlockLinear)]


def _is_packed(layer: "DecoderLayer") -> bool:
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return len(_linears(layer)) == LINEARS and all(norm.weight.dtype == torch.float32 for norm in norms)


def _layer(layer: "DecoderLayer") -> cpu.Layer:
    linears = [cpu.Matrices(each.entries, len(each.entries)) for each in _linears(layer)]
    norms = layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm
    return cpu.Layer(*(_address(norm) for norm in norms), *linears)


def _address(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
