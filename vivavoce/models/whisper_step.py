"""A step of single rows through Whisper's decoder on a GPU.

A layer's weights are read in ten microseconds, so what counts is how little stands between one reading and the next: a
few rows take eight launches a layer, each of which reads ahead; more are multiplied by the libraries.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper import WhisperDecoder, WhisperDecoderLayer
from vivavoce.nn import kernels
from vivavoce.nn.paged import RowBatch

Look = Callable[[Tensor, int], Tensor]
"""Queries of rows and a layer to what their windows' memory answers.  # [row, head, head_dim] → the same"""


def is_single(x: Tensor, batch: RowBatch) -> bool:
    """Whether rows can be taken through the layers here."""
    return kernels.usable(x) and batch.singles == x.shape[0]


def single_rows_step(
    decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]], x: Tensor, batch: RowBatch, look: Look
) -> Tensor:
    """The states of rows behind all layers and the last norm.  # [row, d_model]"""
    weights = (weight for index, layer in enumerate(decoder.stack) for weight in _weights(layer, packed[index]))
    step = _few if kernels.takes(weights, x.shape[0]) else _many
    return step(decoder, packed, x.contiguous(), batch, look)


def _few(
    decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]], x: Tensor, batch: RowBatch, look: Look
) -> Tensor:
    for index, layer in enumerate(decoder.stack):
        text, window = layer.self_attn, layer.encoder_attn
        heads = (text.heads, text.head_dim)
        _, text_out, asked, window_out, inner_weight, outer_weight = _weights(layer, packed[index])
        after = packed[index + 1][0] if index + 1 < len(packed) else None
        norm, pages = _norm(layer.self_attn_layer_norm), kernels.Pages(batch, index)
        query = kernels.row_linear(x, *packed[index], norm=norm, pages=pages, following=text_out)
        mixed = kernels.page_attention(query.unflatten(-1, heads), index, batch).flatten(-2)
        x = kernels.row_linear(mixed, text_out, text.out_proj.bias, residual=x, following=asked)
        norm = _norm(layer.encoder_attn_layer_norm)
        query = kernels.row_linear(x, asked, window.q_proj.bias, norm=norm, following=window_out)
        mixed = look(query.unflatten(-1, heads), index).flatten(-2)
        x = kernels.row_linear(mixed, window_out, window.out_proj.bias, residual=x, following=inner_weight)
        norm = _norm(layer.final_layer_norm)
        inner = kernels.row_linear(x, inner_weight, layer.fc1.bias, norm=norm, gelu=True, following=outer_weight)
        x = kernels.row_linear(inner, outer_weight, layer.fc2.bias, residual=x, following=after)
    return kernels.add_layer_norm(x, None, _norm(decoder.layer_norm))[1]


def _many(
    decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]], x: Tensor, batch: RowBatch, look: Look
) -> Tensor:
    added: Tensor | None = None
    for index, layer in enumerate(decoder.stack):
        text, window = layer.self_attn, layer.encoder_attn
        heads = (text.heads, text.head_dim)
        x, normed = kernels.add_layer_norm(x, added, _norm(layer.self_attn_layer_norm))
        made = functional.linear(normed, *packed[index])
        kernels.store_rows(made, index, batch)
        mixed = kernels.page_attention(made.unflatten(-1, (3, *heads))[:, 0], index, batch).flatten(-2)
        x, normed = kernels.add_layer_norm(x, text.out_proj(mixed), _norm(layer.encoder_attn_layer_norm))
        mixed = look(window.q_proj(normed).unflatten(-1, heads), index).flatten(-2)
        x, normed = kernels.add_layer_norm(x, window.out_proj(mixed), _norm(layer.final_layer_norm))
        added = layer.fc2(functional.gelu(layer.fc1(normed)))
    return kernels.add_layer_norm(x, added, _norm(decoder.layer_norm))[1]


def _weights(layer: WhisperDecoderLayer, packed: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The matrices of a layer, in the order in which they are multiplied."""
    window = layer.encoder_attn
    linears = layer.self_attn.out_proj, window.q_proj, window.out_proj, layer.fc1, layer.fc2
    return packed[0], *(linear.weight for linear in linears)


def _norm(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps
