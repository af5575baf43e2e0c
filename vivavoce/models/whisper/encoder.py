"""Faster encoders: in TorchScript for CPUs, as bfloat16 (`to_bf16`) or float32 (`optimise_encoder`); as CUDA graphs
(`WindowEncoder`); and a whole Whisper in int8 (`to_int8`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import has_int8_products, is_onednn_slow
from vivavoce.errors import InputError
from vivavoce.models.whisper.alignment import PieceGuesser
from vivavoce.models.whisper.layer import WhisperAttention, WhisperLayer
from vivavoce.models.whisper.model import CrossAttention, Whisper, WhisperDecoder, WhisperEncoder
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.linear import (
    ColumnMajorLinear,
    ColumnMajorLinearAdd,
    ColumnMajorLinearGelu,
    ConvAsProduct,
    MkldnnLinear,
    MkldnnLinearAdd,
    MkldnnLinearGelu,
    TableProduct,
    become_views,
    column_major,
    joined_weight,
)
from vivavoce.nn.modules import scripted
from vivavoce.nn.quantised import INT8_SMALL_BATCH, MANY_ROWS, Int8Linear, int8_product

Product = Callable[[Tensor, Tensor | None], nn.Module]


class Products(NamedTuple):
    """The linear layers of an implementation: plain, followed by a GELU, followed by a residual add."""

    plain: Product
    gelu: Product
    sum: Product


BF16 = Products(MkldnnLinear, MkldnnLinearGelu, MkldnnLinearAdd)
FLOAT32 = Products(ColumnMajorLinear, ColumnMajorLinearGelu, ColumnMajorLinearAdd)


class OptimisedEncoderLayer(nn.Module):
    """`WhisperLayer.forward` over whole windows."""

    def __init__(self, layer: WhisperLayer, products: Products) -> None:
        super().__init__()
        attention = layer.self_attn
        self.packed = products.plain(*joined_weight(_query_key_value(layer)))
        self.out = products.sum(attention.out_proj.weight, attention.out_proj.bias)
        self.inner = products.gelu(layer.fc1.weight, layer.fc1.bias)
        self.outer = products.sum(layer.fc2.weight, layer.fc2.bias)
        self.norm, self.last_norm = layer.self_attn_layer_norm, layer.final_layer_norm
        self.heads = attention.heads

    def forward(self, x: Tensor) -> Tensor:
        """# [window, position, d_model] → the same"""
        windows, positions = x.size(0), x.size(1)
        parts = self.packed(self.norm(x)).view(windows, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = self.out(mixed.transpose(1, 2).reshape(x.size()), x)
        out: Tensor = self.outer(self.inner(self.last_norm(x)), x)
        return out


class OptimisedEncoder(nn.Module):
    """`WhisperEncoder.forward`; the last norm stays in the type it was loaded in."""

    def __init__(self, encoder: WhisperEncoder, products: Products) -> None:
        super().__init__()
        self.conv1, self.conv2 = (ConvAsProduct(conv, products.gelu) for conv in (encoder.conv1, encoder.conv2))
        self.positions = encoder.embed_positions.weight.detach()
        self.layers = nn.ModuleList(OptimisedEncoderLayer(layer, products) for layer in _layers(encoder))
        self.norm = encoder.layer_norm

    def forward(self, mel: Tensor) -> Tensor:
        """# [window, mel, frame] → [window, frame / 2, d_model]"""
        x = self.conv2(self.conv1(mel.to(self.positions.dtype).transpose(1, 2)))
        x = x + self.positions[: x.size(1)]
        for layer in self.layers:
            x = layer(x)
        states: Tensor = self.norm(x.to(self.norm.weight.dtype))
        return states


class Bf16CrossKV(MkldnnLinear):
    """Cross-attention keys and values by one product in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """# [.., input] → [.., output], of the type that comes in"""
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


def to_bf16(model: Whisper) -> None:
    """Install an encoder in bfloat16, and bfloat16 keys and values for the decoder.

    A quantised encoder has products of its own and is left alone.
    """
    encoder = model.encoder
    if not has_plain_products(encoder):
        return
    width = encoder.layer_norm.weight.dtype
    encoder.to(torch.bfloat16)
    encoder.layer_norm.to(width)
    _install_fast_encoder(model, BF16)
    use_bf16_cross_kv(model.decoder)


def optimise_encoder(model: Whisper) -> None:
    """Install a float32 encoder in TorchScript for CPUs, with weights in the layout its products read fastest."""
    encoder = model.encoder
    if not has_plain_products(encoder):
        return
    for layer in _layers(encoder):
        for part in (layer.self_attn.out_proj, layer.fc1, layer.fc2):
            part.weight.data = column_major(part.weight.detach())
    fast = _install_fast_encoder(model, FLOAT32)
    for layer, mine in zip(_layers(encoder), fast.layers, strict=True):
        packed = mine.get_submodule("packed")
        assert isinstance(packed, ColumnMajorLinear)
        become_views(_query_key_value(layer), packed.weight)
    join_cross_kv(model.decoder)
    if is_onednn_slow() and model.decoder.fast_lm_head is None:
        model.decoder.fast_lm_head = TableProduct(model.decoder.embed_tokens.weight)


def is_bf16(model: Whisper) -> bool:
    """Whether the encoder is that of `to_bf16`."""
    return model.encoder.conv1.weight.dtype == torch.bfloat16 and model.encoder.fast is not None


def use_bf16_cross_kv(decoder: WhisperDecoder) -> None:
    """Compute cross-attention keys and values of all layers by one product in bfloat16."""
    decoder.fast_cross_kv = Bf16CrossKV(*joined_weight(_cross_kv_projections(decoder)))


def join_cross_kv(decoder: WhisperDecoder) -> None:
    """Compute cross-attention keys and values of all layers by one product in the decoder's type."""
    parts = _cross_kv_projections(decoder)
    if not all(isinstance(part, nn.Linear) for part in parts):
        return
    weight, bias = joined_weight(parts)
    become_views(parts, weight)
    decoder.fast_cross_kv = ColumnMajorLinear(weight, bias)


def pieces_to_bf16(guesser: PieceGuesser) -> None:
    """Run a `PieceGuesser` that was loaded in bfloat16 in TorchScript."""
    layers = [layer for layer in guesser.layers if isinstance(layer, WhisperLayer)]
    guesser.layers = nn.ModuleList(scripted(OptimisedEncoderLayer(layer, BF16)) for layer in layers)


def _install_fast_encoder(model: Whisper, products: Products) -> OptimisedEncoder:
    encoder = model.encoder
    fast = OptimisedEncoder(encoder, products)
    encoder.fast = scripted(fast)
    with torch.inference_mode():
        for _ in range(3):  # what TorchScript does in its first calls takes as long as ten of them
            encoder.fast(torch.zeros(1, model.config.num_mel_bins, min(100, model.config.window_frames)))
    return fast


def _layers(encoder: WhisperEncoder) -> list[WhisperLayer]:
    return [layer for layer in encoder.layers if isinstance(layer, WhisperLayer)]


def has_plain_products(encoder: WhisperEncoder) -> bool:
    """Whether none of its layers is quantised."""
    return all(isinstance(layer.fc1, nn.Linear) for layer in _layers(encoder))


def _query_key_value(layer: WhisperLayer) -> Sequence[nn.Linear]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _cross_kv_projections(decoder: WhisperDecoder) -> Sequence[nn.Linear]:
    return [part for layer in decoder.stack for part in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)]


MAX_GRAPHED_WINDOWS = 2
MAX_GRAPHED_LENGTHS = 32  # of trimmed windows that are captured

Size = tuple[int, int]
"""Windows, and the frames of each."""


class WindowEncoder:
    """The encoder, by CUDA graphs on a GPU.  # [window, mel, frame] → [window, frame / 2, d_model]"""

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder = encoder
        self._graphed = Graphed[Size](self._encode)
        self._seen: set[Size] = set()

    def __call__(self, mel: Tensor) -> Tensor:
        mel = mel.to(self.encoder.conv1.weight.dtype)
        size = (mel.shape[0], mel.shape[2])
        if mel.is_cuda and mel.shape[0] <= MAX_GRAPHED_WINDOWS and self._is_captured(size):
            return self._graphed(size, [mel])[0]
        states: Tensor = self.encoder(mel)
        return states

    def _is_captured(self, size: Size) -> bool:
        """Whether windows of a size have a graph or get one: full windows at once, others when they come again."""
        if size[1] == self.encoder.config.window_frames or size in self._graphed:
            return True
        comes_again = size in self._seen
        self._seen.add(size)
        return comes_again and self._graphed.captured < MAX_GRAPHED_LENGTHS

    def _encode(self, size: Size, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.encoder(tensors[0]),)


class AfterNorm(Int8Linear):
    """An `Int8Linear` behind a norm, with one scale for all rows of a call."""

    def forward(self, x: Tensor) -> Tensor:
        """# [.., input] → [.., output]"""
        return int8_product(x.float(), self.packed, False).to(x.dtype)


def to_int8(model: Whisper) -> Whisper:
    """Replace all products by int8 ones, in place; convolutions, norms and positions stay as they are."""
    if not has_int8_products():
        raise InputError("int8 products need a CPU with VNNI, which this one lacks; take auto or float32")
    for half, kernels in ((model.encoder, MANY_ROWS), (model.decoder, INT8_SMALL_BATCH)):
        for module in list(half.modules()):
            if isinstance(module, WhisperLayer):
                first = AfterNorm.of_weight(module.fc1.weight, module.fc1.bias, kernels)
                setattr(module, "fc1", first)  # noqa: B010 - another type
            if isinstance(module, WhisperAttention) and not isinstance(module, CrossAttention):
                module.packed = _packed(module, kernels)
        _round_below(half, kernels)
    model.decoder.fast_lm_head = AfterNorm.of_weight(model.decoder.embed_tokens.weight)
    return model


def _packed(attention: WhisperAttention, kernels: str) -> Int8Linear:
    """Query, key and value projections as one."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    zeros = torch.zeros_like(attention.q_proj.bias)
    biases: list[Tensor] = [zeros if part.bias is None else part.bias for part in parts]
    return AfterNorm.of_weight(torch.cat([part.weight for part in parts]), torch.cat(biases), kernels)


def _round_below(module: nn.Module, kernels: str) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear.of_weight(child.weight, child.bias, kernels))
        else:
            _round_below(child, kernels)
