"""Whisper's decoder in TorchScript, for CPUs: over the engine's pages, and for drafts of one text at a time.

A pass of a small model on a CPU costs what calling its parts from Python costs. So everything that all layers share
(where rows are stored and read, what each may see) is computed once a pass, and TorchScript runs the layers. Medusa
heads are here for the same reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import is_onednn_slow
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import WhisperDecoder, WhisperDecoderLayer, WindowMemory
from vivavoce.nn.linear import column_major, column_major_for_one_row, gelu, joined_weight
from vivavoce.nn.modules import scripted
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch
from vivavoce.nn.quantised import CPU_COLUMN_BLOCK, CPU_ROW_BLOCK
from vivavoce.nn.quantised_weight import quantise


class StepRows(NamedTuple):
    """The rows of a pass. A piece is consecutive rows of one text, a run is neighbouring rows of one window.

    Where the pieces count fewer rows than there are, they are the last ones, whose states alone are wanted.
    """

    written: Tensor  # [row]: where keys and values of each are stored
    read: list[Tensor]  # [context] per piece: where what it may see is stored
    bias: list[Tensor | None]  # [row, context] per piece: −inf where a row may not look; None: it sees all
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
    """Keys and values with their pages end to end.  # each [layer, place, head, head_dim]"""
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


class Int8DraftLinear(nn.Module):
    """`CpuLinear` with int8 weights: a draft need not be exact, and its weights then stay in the nearest cache."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        missing = -weight.shape[0] % CPU_ROW_BLOCK
        rounded = quantise(functional.pad(weight.detach().contiguous(), (0, 0, 0, missing)), "int8")
        assert rounded.scale is not None
        self.weight, self.scale, self.bias = rounded.data, rounded.scale.to(torch.bfloat16), bias.detach()
        self.block = CPU_ROW_BLOCK

    def forward(self, x: Tensor) -> Tensor:
        """# [row, input] → [row, output]"""
        return self.first(x, self.bias)

    def first(self, x: Tensor, bias: Tensor) -> Tensor:
        """The first outputs, as many as `bias` has.  # [row, input], [output] → [row, output]"""
        outputs = bias.size(0)
        whole = (outputs + self.block - 1) // self.block * self.block
        weight, scale = self.weight.narrow(0, 0, whole), self.scale.narrow(0, 0, whole)
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), weight, scale).narrow(1, 0, outputs) + bias


def packed_projection(layer: WhisperDecoderLayer) -> tuple[Tensor, Tensor]:
    """Query, key and value projection of a layer's self-attention as one matrix, and its bias."""
    return joined_weight((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))


class CpuDecoderLayer(nn.Module):
    """`WhisperDecoderLayer.decode` over keys and values that lie in one block of memory.

    Of `drafts`, passes have a single row most of the time and need not be exact.
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
        self.by_tanh = drafts and not self.by_parts  # of one row it takes a third less than the exact GELU

    def forward(
        self, x: Tensor, rows: StepRows, keys: Tensor, values: Tensor, window_keys: Tensor, window_values: Tensor
    ) -> Tensor:
        """# x [row, d_model], keys [place, head, head_dim], window_keys [window, head, position, head_dim]"""
        projected = self.packed(self.text_norm(x)).view(x.size(0), 3, self.heads, -1)
        keys.index_copy_(0, rows.written, projected.select(1, 1))
        values.index_copy_(0, rows.written, projected.select(1, 2))
        wanted = 0
        for count in rows.counts:
            wanted += count
        first = x.size(0) - wanted
        if first > 0:
            x = x.narrow(0, first, wanted)
        query = projected.select(1, 0).narrow(0, first, wanted).transpose(0, 1).unsqueeze(0)  # [1, head, row, dim]
        x = self.text_out(self._attend_text(query, rows, keys, values)).add_(x)
        query = self.query(self.window_norm(x)).view(1, wanted, self.heads, -1).transpose(1, 2)
        x = self.window_out(self._attend_windows(query, rows, window_keys, window_values)).add_(x)
        inner = self.inner(self.last_norm(x))
        inner = functional.gelu(inner, approximate="tanh") if self.by_tanh else gelu(inner, self.by_parts)
        return self.outer(inner).add_(x)

    def _attend_text(self, query: Tensor, rows: StepRows, keys: Tensor, values: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        begin = 0
        for index, count in enumerate(rows.counts):
            place = rows.read[index]
            key = keys.index_select(0, place).transpose(0, 1).unsqueeze(0)
            value = values.index_select(0, place).transpose(0, 1).unsqueeze(0)
            mine = query.narrow(2, begin, count)
            mixed.append(functional.scaled_dot_product_attention(mine, key, value, attn_mask=rows.bias[index]))
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
    """Tokens through all layers and the last norm."""

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
        """Hidden states; `last` are the rows as the last layer takes them.

        # [row] twice; keys [layer, place, head, dim]; window_keys [layer, window, head, position, dim] → [row, d_model]
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


class DraftLimits(NamedTuple):
    """How far a draft goes."""

    max_tokens: int
    min_chance: float
    """The draft ends where the chance that all of it is right falls below this."""
    beginnings: int
    """A first token that is a timestamp counts as likely as this many timestamps together."""
    min_beginning: float
    """The chance from which on a timestamp counts among them."""
    timestamps: int
    """The first id that is a timestamp."""
    end: int
    """The id that ends a text, which is not drafted."""


@dataclass
class CpuDraftText:
    """Keys and values of a text's first tokens; going back to an earlier token is a matter of `length`."""

    memory: WindowMemory
    keys: Tensor  # [layer, place, head, head_dim]
    values: Tensor
    length: int = 0


class CpuDraftLayers(CpuDecoder):
    """A `CpuDecoder` of one text, and the loop that drafts with it."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool) -> None:
        # int8 for the two largest products only: it takes longer to multiply, and nothing more is gained.
        product = Int8DraftLinear if rounded else CpuLinear
        packed = (packed_projection(layer) for layer in decoder.stack)
        super().__init__(
            decoder, [product(column_major_for_one_row(weight), bias) for weight, bias in packed], drafts=True
        )
        self.lm_head = product(self.tokens, self.tokens.new_zeros(len(self.tokens)))
        self.places = torch.arange(len(self.positions), device=self.tokens.device)

    def newest_state(
        self, ids: Tensor, text: tuple[Tensor, Tensor], first: int, window: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The state behind the last of the next tokens.  # [token] → [1, d_model]"""
        count = ids.size(0)
        written, read = self.places.narrow(0, first, count), self.places.narrow(0, 0, first + count)
        positions = [window[0].size(3)]
        none: list[Tensor | None] = [None]
        last = StepRows(written, [read], none, [1], [0], positions, [1])
        rows = last
        if count > 1:
            hidden = torch.full((count, first + count), -torch.inf, dtype=text[0].dtype, device=ids.device)
            bias: list[Tensor | None] = [hidden.triu_(first + 1)]
            rows = StepRows(written, [read], bias, [count], [0], positions, [count])
        return self.forward(ids, written, rows, last, text[0], text[1], window[0], window[1])

    @torch.jit.export
    def draft(
        self,
        ids: Tensor,
        text: tuple[Tensor, Tensor],
        first: int,
        window: tuple[Tensor, Tensor],
        bias_first: Tensor,
        bias_later: Tensor,
        limits: DraftLimits,
    ) -> tuple[list[int], int, Tensor, Tensor]:
        """The likeliest tokens behind the next ones, one after another: see `CpuDraftDecoder.draft`."""
        chain: list[int] = []
        unlikely, beginnings = torch.empty(0), torch.empty(0)
        total, bias = 1.0, bias_first
        while len(chain) < limits.max_tokens:
            hidden = self.newest_state(ids, text, first, window)
            first += ids.size(0)
            chances = self.lm_head.first(hidden, bias).softmax(-1).select(0, 0)
            best, index = chances.max(0)
            chance, token = float(best), int(index)
            if len(chain) == 0 and token >= limits.timestamps:
                beginnings = chances
                likely = chances.topk(limits.beginnings)[0]
                chance = float(likely[likely > limits.min_beginning].sum())
            total *= chance
            if total < limits.min_chance or token == limits.end:
                unlikely = chances
                break
            chain.append(token)
            ids, bias = index.unsqueeze(0), bias_later
        return chain, first, unlikely, beginnings


class CpuDraftDecoder:
    """Drafts the likeliest tokens by what `WhisperDecoder.step` gives, or nearly so."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool = False) -> None:
        self.config = decoder.config
        self._layers: Any = scripted(
            CpuDraftLayers(decoder, rounded and decoder.config.d_model % CPU_COLUMN_BLOCK == 0)
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Draft something: TorchScript optimises in its first calls, which takes as long as many drafts."""
        config, heads = self.config, self.config.decoder_attention_heads
        weight = self._layers.tokens
        empty = weight.new_zeros(config.decoder_layers, 1, heads, 2, config.d_model // heads)
        bias = torch.zeros(config.vocab_size, device=weight.device)
        limits = DraftLimits(2, 0.0, 1, 0.0, config.vocab_size, -1)
        with torch.inference_mode():
            for tokens in ([0, 0], [0], [0]):
                self.draft(self.begin(WindowMemory(empty, empty)), tokens, bias, bias, limits)

    def begin(self, memory: WindowMemory) -> CpuDraftText:
        """An empty text of one window."""
        config, heads = self.config, self.config.decoder_attention_heads
        size = (config.decoder_layers, config.max_target_positions, heads, config.d_model // heads)
        return CpuDraftText(memory, memory.keys.new_empty(size), memory.keys.new_empty(size))

    def draft(
        self, text: CpuDraftText, tokens: list[int], bias_first: Tensor, bias_later: Tensor, limits: DraftLimits
    ) -> tuple[list[int], Tensor, Tensor]:
        """Greedy tokens behind the next `tokens`; all of them are then in `text` but the last drafted one.

        Then the chances of what would follow, where they were too low to go on (else empty), and those of the first
        drafted token, where it is a timestamp. Biases are added to the logits of the first and of later drafted tokens;
        ids behind their ends are not considered.
        """
        ids = torch.tensor(tokens, device=text.keys.device)
        memory = text.memory
        chain, text.length, unlikely, beginnings = self._layers.draft(
            ids, (text.keys, text.values), text.length, (memory.keys, memory.values), bias_first, bias_later, limits
        )
        return chain, unlikely, beginnings


class CpuDraftHeads(nn.Module):
    """`WhisperHeads` and the LM head behind them, for one text."""

    def __init__(self, heads: WhisperHeads, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.newest, self.query, self.out = heads.newest_proj, heads.q_proj, heads.out_proj
        self.look_norm, self.last_norm = heads.look_norm, heads.final_norm
        self.inner, self.outer, self.heads = heads.fc1, heads.fc2, heads.heads
        for part in (self.newest, self.query, self.out, self.inner, self.outer):
            part.weight.data = column_major(part.weight.detach())
        self.start = heads.start.detach()
        self.ahead, self.bias = heads.ahead.weight.detach(), heads.bias.detach()[:, None]
        self.weight = heads.weight.detach().transpose(1, 2).contiguous()
        self.tokens = decoder.embed_tokens.weight.detach()

    def forward(
        self, hidden: Tensor | None, newest: int, keys: Tensor, values: Tensor, bias: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the places ahead, and their chances; `hidden` is None where a text has no state yet.

        # [d_model], keys [1, head, position, head_dim] → [place, width] twice
        """
        x = (self.start if hidden is None else hidden) + self.ahead + self.newest(self.tokens[newest])
        query = self.query(self.look_norm(x)).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size(0), -1))
        x = x + self.outer(functional.gelu(self.inner(self.last_norm(x))))
        x = x + functional.silu(torch.baddbmm(self.bias, x[:, None], self.weight)[:, 0])
        lm_head = self.tokens.narrow(0, 0, bias.size(0))
        chances, ids = (functional.linear(x, lm_head).float() + bias).softmax(-1).topk(width)
        return ids, chances


def cpu_heads(heads: WhisperHeads, decoder: WhisperDecoder) -> Any:
    """`CpuDraftHeads` in TorchScript."""
    return scripted(CpuDraftHeads(heads, decoder))
