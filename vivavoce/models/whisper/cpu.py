"""Whisper on CPUs: encoder and decoder in TorchScript (float32 or bfloat16), and a whole model in int8.

The arithmetic is that of `model.py`, and tests hold the results equal (bfloat16 and int8 within a tolerance). What
changes: query, key and value projections are one product, weights lie in the layout that CPU products read fastest,
and indices and masks that all decoder layers share are computed once per pass, because calling the parts of a small
model from Python costs as much as running them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import has_int8_products, is_onednn_slow
from vivavoce.errors import InputError
from vivavoce.models.whisper.model import (
    CrossAttention,
    Whisper,
    WhisperAttention,
    WhisperDecoder,
    WhisperDecoderLayer,
    WhisperEncoder,
    WhisperLayer,
)
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
    column_major_for_one_row,
    gelu,
    joined_weight,
)
from vivavoce.nn.modules import scripted
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch
from vivavoce.nn.quantised import INT8_SMALL_BATCH, MANY_ROWS, Int8Linear, int8_product


class StepRows(NamedTuple):
    """The rows of a pass. A piece is consecutive rows of one text, a run is neighbouring rows of one window.

    If the pieces have fewer rows than the pass, they are its last ones, and states are computed for those alone.
    """

    written: Tensor  # [row]: cache slots that the keys and values of each row are written to
    read: list[Tensor]  # [context] per piece: cache slots of its context
    bias: list[Tensor | None]  # [row, context] per piece: −inf where a row may not attend; None: it attends to all
    counts: list[int]  # rows per piece
    windows: list[int]  # per run
    positions: list[int]  # encoder positions of the window, per run
    runs: list[int]  # rows per run


def paged_rows(batch: RowBatch, runs: Sequence[tuple[int, int]], positions: Sequence[int], like: Tensor) -> StepRows:
    """The rows of an engine step; `runs` are (window, rows), `positions` the lengths of all windows."""
    pages, rows = batch.addresses
    size = batch.cache.page_size
    in_page = torch.arange(size)
    read, bias = [], []
    for piece in batch.pieces:
        held = batch.page_table[piece.slot, : -(-piece.context // size)].long()
        read.append((held[:, None] * size + in_page).view(-1)[: piece.context])
        bias.append(_bias(piece, like))
    windows = [window for window, _ in runs]
    return StepRows(
        pages * size + rows,
        read,
        bias,
        [piece.length for piece in batch.pieces],
        windows,
        [positions[window] for window in windows],
        [count for _, count in runs],
    )


def _bias(piece: CachePiece, like: Tensor) -> Tensor | None:
    if piece.length == 1:
        return None
    hidden = like.new_full((piece.length, piece.context), -torch.inf)
    if piece.visible is not None:
        return hidden.masked_fill_(piece.visible, 0.0)
    return hidden.triu_(piece.position + 1)


def flat_pages(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Keys and values with their pages end to end.  # each [layer, slot, head, head_dim]"""
    return cache.keys.flatten(1, 2), cache.values.flatten(1, 2)


class CpuLinear(nn.Module):
    """A linear layer over the rows of a matrix."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """# [row, input] → [row, output]"""
        return functional.linear(x, self.weight, self.bias)

    def first(self, x: Tensor, bias: Tensor) -> Tensor:
        """The first outputs, as many as `bias` has.  # [row, input], [output] → [row, output]"""
        return functional.linear(x, self.weight.narrow(0, 0, bias.size(0))) + bias


def packed_projection(layer: WhisperLayer) -> tuple[Tensor, Tensor]:
    """Query, key and value projection of a layer's self-attention as one matrix, and its bias."""
    return joined_weight(_query_key_value(layer))


class CpuDecoderLayer(nn.Module):
    """`WhisperDecoderLayer.decode` over keys and values in one block of memory.

    With `drafts`, weights are laid out for passes of a single row, and the GELU may be the tanh approximation.
    """

    def __init__(self, layer: WhisperDecoderLayer, packed: nn.Module, drafts: bool) -> None:
        super().__init__()
        text, window = layer.self_attn, layer.encoder_attn
        self.packed = packed
        self.text_out, self.query, self.window_out, self.inner, self.outer = (
            CpuLinear(column_major_for_one_row(part.weight) if drafts else part.weight, part.bias)
            for part in (text.out_proj, window.q_proj, window.out_proj, layer.fc1, layer.fc2)
        )
        self.text_norm, self.window_norm = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
        self.last_norm = layer.final_layer_norm
        self.heads, self.by_parts = text.heads, is_onednn_slow()
        self.by_tanh = drafts and not self.by_parts  # for one row a third faster than the exact GELU

    def forward(
        self, x: Tensor, rows: StepRows, keys: Tensor, values: Tensor, window_keys: Tensor, window_values: Tensor
    ) -> Tensor:
        """# x [row, d_model], keys [slot, head, head_dim], window_keys [window, head, position, head_dim]"""
        projected = self.packed(self.text_norm(x)).view(x.size(0), 3, self.heads, -1)
        keys.index_copy_(0, rows.written, projected.select(1, 1))
        values.index_copy_(0, rows.written, projected.select(1, 2))
        rows_left = 0
        for count in rows.counts:
            rows_left += count
        first = x.size(0) - rows_left
        if first > 0:
            x = x.narrow(0, first, rows_left)
        query = projected.select(1, 0).narrow(0, first, rows_left).transpose(0, 1).unsqueeze(0)  # [1, head, row, dim]
        x = self.text_out(self._attend_text(query, rows, keys, values)).add_(x)
        query = self.query(self.window_norm(x)).view(1, rows_left, self.heads, -1).transpose(1, 2)
        x = self.window_out(self._attend_windows(query, rows, window_keys, window_values)).add_(x)
        inner = self.inner(self.last_norm(x))
        inner = functional.gelu(inner, approximate="tanh") if self.by_tanh else gelu(inner, self.by_parts)
        return self.outer(inner).add_(x)

    def _attend_text(self, query: Tensor, rows: StepRows, keys: Tensor, values: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        begin = 0
        for index, count in enumerate(rows.counts):
            slots = rows.read[index]
            key = keys.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            value = values.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            part = query.narrow(2, begin, count)
            mixed.append(functional.scaled_dot_product_attention(part, key, value, attn_mask=rows.bias[index]))
            begin += count
        return self._joined(mixed)

    def _attend_windows(self, query: Tensor, rows: StepRows, keys: Tensor, values: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        begin = 0
        for index, count in enumerate(rows.runs):
            window, positions = rows.windows[index], rows.positions[index]
            key = keys.narrow(0, window, 1).narrow(2, 0, positions)
            value = values.narrow(0, window, 1).narrow(2, 0, positions)
            mixed.append(functional.scaled_dot_product_attention(query.narrow(2, begin, count), key, value))
            begin += count
        return self._joined(mixed)

    def _joined(self, mixed: list[Tensor]) -> Tensor:
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
        return whole.transpose(1, 2).reshape(whole.size(2), whole.size(1) * whole.size(3))


class CpuDecoder(nn.Module):
    """`WhisperDecoder.run` with the embedding: tokens through all layers and the last norm."""

    def __init__(self, decoder: WhisperDecoder, packed: Sequence[nn.Module], drafts: bool = False) -> None:
        super().__init__()
        layers = zip(decoder.stack, packed, strict=True)
        self.layers = nn.ModuleList(CpuDecoderLayer(layer, projection, drafts) for layer, projection in layers)
        self.tokens, self.positions = decoder.embed_tokens.weight.detach(), decoder.embed_positions.weight.detach()
        self.norm = decoder.layer_norm

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: StepRows,
        last: StepRows,
        keys: Tensor,
        values: Tensor,
        window_keys: Tensor,
        window_values: Tensor,
    ) -> Tensor:
        """Hidden states; `last` replaces `rows` in the last layer.

        # [row] twice; keys [layer, slot, head, dim]; window_keys [layer, window, head, position, dim] → [row, d_model]
        """
        x = self.tokens.index_select(0, ids) + self.positions.index_select(0, positions)
        for index, layer in enumerate(self.layers):
            of_layer = last if index == len(self.layers) - 1 else rows
            past = keys.select(0, index), values.select(0, index)
            x = layer(x, of_layer, past[0], past[1], window_keys.select(0, index), window_values.select(0, index))
        return self.norm(x)


def paged_decoder(decoder: WhisperDecoder, packed: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """A `CpuDecoder` in TorchScript over an engine's pages; `packed` are the layers' `packed_projection`."""
    return scripted(CpuDecoder(decoder, [CpuLinear(*projection) for projection in packed]))


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
        self.packed = products.plain(*packed_projection(layer))
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
        """# [.., input] → [.., output], of the input's type"""
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


def to_bf16(model: Whisper) -> None:
    """Install an encoder in bfloat16, and bfloat16 keys and values for the decoder.

    A quantised encoder is left as it is.
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
    for layer, fast_layer in zip(_layers(encoder), fast.layers, strict=True):
        packed = fast_layer.get_submodule("packed")
        assert isinstance(packed, ColumnMajorLinear)
        become_views(_query_key_value(layer), packed.weight)
    join_cross_kv(model.decoder)
    if is_onednn_slow() and model.decoder.fast_lm_head is None:
        model.decoder.fast_lm_head = TableProduct(model.decoder.embed_tokens.weight)


def is_bf16(model: Whisper) -> bool:
    """Whether `to_bf16` was applied."""
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


def _install_fast_encoder(model: Whisper, products: Products) -> OptimisedEncoder:
    encoder = model.encoder
    fast = OptimisedEncoder(encoder, products)
    encoder.fast = scripted(fast)
    with torch.inference_mode():
        for _ in range(3):  # TorchScript optimises in its first calls
            encoder.fast(torch.zeros(1, model.config.num_mel_bins, min(100, model.config.window_frames)))
    return fast


def _layers(encoder: WhisperEncoder) -> list[WhisperLayer]:
    return [layer for layer in encoder.layers if isinstance(layer, WhisperLayer)]


def has_plain_products(encoder: WhisperEncoder) -> bool:
    """Whether no layer of the encoder is quantised."""
    return all(isinstance(layer.fc1, nn.Linear) for layer in _layers(encoder))


def _query_key_value(layer: WhisperLayer) -> Sequence[nn.Linear]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _cross_kv_projections(decoder: WhisperDecoder) -> Sequence[nn.Linear]:
    return [part for layer in decoder.stack for part in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)]


class AfterNorm(Int8Linear):
    """An `Int8Linear` whose input is normed, so that one scale serves all rows of a call."""

    def forward(self, x: Tensor) -> Tensor:
        """# [.., input] → [.., output]"""
        return int8_product(x.float(), self.packed, False).to(x.dtype)


def to_int8(model: Whisper) -> Whisper:
    """Replace all linear layers by int8 ones, in place; convolutions, norms and positions keep their type."""
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
