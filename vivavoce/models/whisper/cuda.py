"""Whisper's decoder over the engine's pages without Python between its products: for CPUs.

There a pass of a small model costs what calling its parts costs, whether it checks one token or a draft of ten. So
everything that all layers share (where rows are written and read, what each sees) is found once, and TorchScript runs
the layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.models.whisper.cpu import LayerParts
from vivavoce.models.whisper.model import WhisperDecoder, WhisperDecoderLayer
from vivavoce.nn.linear import gelu
from vivavoce.nn.modules import scripted
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch


class PagedRows(NamedTuple):
    """The rows of a step, piece by piece: a piece is of one text, a run of neighbouring rows of one window."""

    written: Tensor  # [row]: where each is kept, in all pages end to end
    read: list[Tensor]  # [context] a piece: where what it may see is kept
    seen: list[Tensor | None]  # [row, context] a piece, to be added; None: all of it
    counts: list[int]
    """Rows of each piece."""
    windows: list[int]
    positions: list[int]
    """Of each run: its window, how many positions that has, and how many rows the run."""
    runs: list[int]


def paged_rows(batch: RowBatch, runs: Sequence[tuple[int, int]], positions: Sequence[int], like: Tensor) -> PagedRows:
    """What the layers must know of a step: runs are a window and a number of rows each, positions those of a window."""
    pages, rows = batch.addresses
    size = batch.cache.page_size
    in_page = torch.arange(size)
    read, seen = [], []
    for piece in batch.pieces:
        held = batch.page_table[piece.slot, : -(-piece.context // size)].long()
        read.append((held[:, None] * size + in_page).view(-1)[: piece.context])
        seen.append(_unseen(piece, like))
    windows = [window for window, _ in runs]
    return PagedRows(
        pages * size + rows,
        read,
        seen,
        [piece.length for piece in batch.pieces],
        windows,
        [positions[window] for window in windows],
        [count for _, count in runs],
    )


def _unseen(piece: CachePiece, like: Tensor) -> Tensor | None:
    """−inf where a row may not look, where there is such a place.  # [row, context]"""
    if piece.length == 1:
        return None
    hidden = like.new_full((piece.length, piece.context), -torch.inf)
    if piece.visible is not None:
        return hidden.masked_fill_(piece.visible, 0.0)
    return hidden.triu_(piece.position + 1)


class PagedLayer(LayerParts):
    """A decoder's layer over pages."""

    def forward(
        self, x: Tensor, rows: PagedRows, keys: Tensor, values: Tensor, window_keys: Tensor, window_values: Tensor
    ) -> Tensor:
        """# x [row, d_model], keys [place, head, dim], window_keys [window, head, position, dim] → [row, d_model]"""
        x = x + self.text_out(self._look_at_text(self.text_norm(x), rows, keys, values))
        x = x + self.window_out(self._look_at_windows(self.window_norm(x), rows, window_keys, window_values))
        return x + self.outer(gelu(self.inner(self.last_norm(x)), self.by_parts))

    def _look_at_text(self, x: Tensor, rows: PagedRows, keys: Tensor, values: Tensor) -> Tensor:
        made = functional.linear(x, self.packed_weight, self.packed_bias).view(x.size(0), 3, self.heads, -1)
        keys.index_copy_(0, rows.written, made.select(1, 1))
        values.index_copy_(0, rows.written, made.select(1, 2))
        query = made.select(1, 0).transpose(0, 1).unsqueeze(0)  # [1, head, row, dim]
        mixed: list[Tensor] = []
        begin = 0
        for index, count in enumerate(rows.counts):
            place = rows.read[index]
            key = keys.index_select(0, place).transpose(0, 1).unsqueeze(0)
            value = values.index_select(0, place).transpose(0, 1).unsqueeze(0)
            mine = query.narrow(2, begin, count)
            mixed.append(functional.scaled_dot_product_attention(mine, key, value, attn_mask=rows.seen[index]))
            begin += count
        return self._joined(mixed, x)

    def _look_at_windows(self, x: Tensor, rows: PagedRows, keys: Tensor, values: Tensor) -> Tensor:
        query = self.query(x).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed: list[Tensor] = []
        begin = 0
        for index, count in enumerate(rows.runs):
            window, positions = rows.windows[index], rows.positions[index]
            key = keys.narrow(0, window, 1).narrow(2, 0, positions)
            value = values.narrow(0, window, 1).narrow(2, 0, positions)
            mixed.append(functional.scaled_dot_product_attention(query.narrow(2, begin, count), key, value))
            begin += count
        return self._joined(mixed, x)

    def _joined(self, mixed: list[Tensor], x: Tensor) -> Tensor:
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
        return whole.transpose(1, 2).reshape(x.size(0), x.size(1))


class PagedStack(nn.Module):
    """Tokens through all layers."""

    def __init__(self, decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PagedLayer(layer, one) for layer, one in zip(decoder.stack, packed, strict=True))
        self.tokens, self.places = decoder.embed_tokens.weight.detach(), decoder.embed_positions.weight.detach()
        self.norm = decoder.layer_norm

    def forward(
        self,
        ids: Tensor,
        places: Tensor,
        rows: PagedRows,
        keys: Tensor,
        values: Tensor,
        window_keys: Tensor,
        window_values: Tensor,
    ) -> Tensor:
        """# [row] twice; keys [layer, place, head, dim]; window_keys [layer, window, head, …] → [row, d_model]"""
        x = self.tokens.index_select(0, ids) + self.places.index_select(0, places)
        for index, layer in enumerate(self.layers):
            past_keys, past_values = keys.select(0, index), values.select(0, index)
            x = layer(x, rows, past_keys, past_values, window_keys.select(0, index), window_values.select(0, index))
        return self.norm(x)


def paged_stack(decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """`PagedStack` without Python."""
    return scripted(PagedStack(decoder, packed))


def end_to_end(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Keys and values with their pages end to end.  # each [layer, place, head, dim]"""
    return cache.keys.flatten(1, 2), cache.values.flatten(1, 2)


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
