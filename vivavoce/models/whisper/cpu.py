"""A decoder of few layers on one text at a time, as nothing but products: for small models on a CPU.

There a step costs what calling it costs. So the weights are at hand, keys and values are written where they stay, going
back to an earlier place of a text is a matter of its length, and TorchScript runs the layers without Python.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import onednn_is_slow_here
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import WhisperDecoder, WhisperDecoderLayer, WindowMemory
from vivavoce.nn.linear import column_major, column_major_for_one_row, gelu, joined_weight
from vivavoce.nn.modules import scripted
from vivavoce.nn.quantised import CPU_COLUMN_BLOCK, CPU_ROW_BLOCK
from vivavoce.nn.quantised_weight import quantise


@dataclass
class CpuText:
    """A text as far as it was read: queries, keys and values of its places, by layer."""

    memory: WindowMemory
    past: Tensor  # [layer, place, 3 × d_model]
    length: int = 0


class CpuDraftDecoder(NamedTuple):
    """How far a decoder guesses."""

    most: int
    """Tokens at most."""
    sureness: float
    """The chance of all guesses to be right, below which there is none more."""
    leaves: int
    """Beginning times that are told apart: the first guess is as sure as they are together."""
    least: float
    """The chance of such a time."""
    times: int
    """The first id that is a time."""
    end: int
    """The id that ends a text, which is not guessed."""


def packed_projection(layer: WhisperDecoderLayer) -> tuple[Tensor, Tensor]:
    """Query, key and value projection of a layer's text as one matrix, and its bias."""
    return joined_weight((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))


class LayerParts(nn.Module):
    """The products and norms of a decoder's layer, with its `packed_projection`."""

    def __init__(self, layer: WhisperDecoderLayer, packed: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        text, window = layer.self_attn, layer.encoder_attn
        self.packed_weight, self.packed_bias = packed
        self.text_out, self.query, self.window_out = text.out_proj, window.q_proj, window.out_proj
        self.inner, self.outer = layer.fc1, layer.fc2
        self.text_norm, self.window_norm = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
        self.last_norm = layer.final_layer_norm
        self.heads, self.by_parts = text.heads, onednn_is_slow_here()


class CpuLinear(nn.Module):
    """A linear layer as one call, for rows that are a matrix."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """# [row, input] → [row, output]"""
        return functional.linear(x, self.weight, self.bias)

    def first(self, x: Tensor, bias: Tensor) -> Tensor:
        """Only so many outputs as there are numbers to be added to them.  # [row, input], [output] → [row, output]"""
        return functional.linear(x, self.weight.narrow(0, 0, bias.size(0))) + bias


class RoundedProduct(nn.Module):
    """The same with weights in int8: a guess need not be exact, and all it reads then stays in the nearest memory."""

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
        """Only so many outputs as there are numbers to be added to them.  # [row, input], [output] → [row, output]"""
        outputs = bias.size(0)
        whole = (outputs + self.block - 1) // self.block * self.block
        weight, scale = self.weight.narrow(0, 0, whole), self.scale.narrow(0, 0, whole)
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), weight, scale).narrow(1, 0, outputs) + bias


class CpuDecoderLayer(nn.Module):
    """A layer of a decoder over a past that is one block of memory."""

    def __init__(self, layer: WhisperDecoderLayer, product: type[CpuLinear] | type[RoundedProduct]) -> None:
        super().__init__()
        parts = LayerParts(layer, packed_projection(layer))
        self.packed = product(column_major_for_one_row(parts.packed_weight), parts.packed_bias)
        self.text_out, self.query, self.window_out, self.inner, self.outer = (
            CpuLinear(column_major_for_one_row(part.weight), part.bias)
            for part in (parts.text_out, parts.query, parts.window_out, parts.inner, parts.outer)
        )
        self.text_norm, self.window_norm, self.last_norm = parts.text_norm, parts.window_norm, parts.last_norm
        self.heads, self.by_parts = parts.heads, parts.by_parts

    def forward(
        self, x: Tensor, past: Tensor, first: int, seen: Tensor | None, keys: Tensor, values: Tensor, wanted: int
    ) -> Tensor:
        """The next places behind `first` older ones; of them the states of all that are wanted, or of the last alone.

        # x [place, d_model], keys [1, head, position, head_dim] → [wanted, d_model]
        """
        rows, width = x.size(0), x.size(1)
        end = first + rows
        past.narrow(0, first, rows).copy_(self.packed(self.text_norm(x)))
        parts = past.narrow(0, 0, end).view(1, end, 3, self.heads, -1).transpose(1, 3)  # [1, head, part, place, dim]
        if wanted < rows:
            x, seen, rows = x.narrow(0, rows - 1, 1), None, 1
        query = parts.select(2, 0).narrow(2, end - rows, rows)
        mixed = functional.scaled_dot_product_attention(query, parts.select(2, 1), parts.select(2, 2), attn_mask=seen)
        x = self.text_out(mixed.transpose(1, 2).reshape(rows, width)).add_(x)
        query = self.query(self.window_norm(x)).view(1, rows, self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = self.window_out(mixed.transpose(1, 2).reshape(rows, width)).add_(x)
        inner = self.inner(self.last_norm(x))
        # The other form of GELU is a guess's own, where it costs less than the model's.
        inner = gelu(inner, True) if self.by_parts else functional.gelu(inner, approximate="tanh")
        return self.outer(inner).add_(x)


class CpuDecoderStack(nn.Module):
    """Tokens through all layers."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool) -> None:
        super().__init__()
        # The two largest: with all in int8, which takes longer to multiply, nothing more is gained.
        product = RoundedProduct if rounded else CpuLinear
        self.layers = nn.ModuleList(CpuDecoderLayer(layer, product) for layer in decoder.stack)
        self.tokens, self.places = decoder.embed_tokens.weight.detach(), decoder.embed_positions.weight.detach()
        self.spelling = product(self.tokens, self.tokens.new_zeros(len(self.tokens)))
        self.norm = decoder.layer_norm

    def forward(self, ids: Tensor, past: Tensor, first: int, keys: Tensor, values: Tensor) -> Tensor:
        """The state behind the last next token.  # [place], keys [layer, 1, head, position, dim] → [1, d_model]"""
        rows = ids.size(0)
        x = self.tokens.index_select(0, ids) + self.places.narrow(0, first, rows)
        seen: Tensor | None = None
        if rows > 1:
            seen = torch.ones(rows, first + rows, dtype=torch.bool, device=x.device).tril(first)
        for index, layer in enumerate(self.layers):
            wanted = 1 if index == len(self.layers) - 1 else rows  # the last layer's states but one are for nobody
            x = layer(x, past.select(0, index), first, seen, keys.select(0, index), values.select(0, index), wanted)
        return self.norm(x)

    @torch.jit.export
    def guess(
        self,
        ids: Tensor,
        past: Tensor,
        first: int,
        keys: Tensor,
        values: Tensor,
        barred_first: Tensor,
        barred: Tensor,
        how: CpuDraftDecoder,
    ) -> tuple[list[int], int, Tensor, Tensor]:
        """The likeliest tokens behind the next ones, one after another: see `CpuTextDecoder.guess`."""
        chain: list[int] = []
        unsure, begins = torch.empty(0), torch.empty(0)
        sureness, barring = 1.0, barred_first
        while len(chain) < how.most:
            hidden = self.forward(ids, past, first, keys, values)
            first += ids.size(0)
            chances = self.spelling.first(hidden, barring).softmax(-1).select(0, 0)
            best, place = chances.max(0)
            chance, token = float(best), int(place)
            if len(chain) == 0 and token >= how.times:
                begins = chances
                likely = chances.topk(how.leaves)[0]
                chance = float(likely[likely > how.least].sum())
            sureness *= chance
            if sureness < how.sureness or token == how.end:
                unsure = chances
                break
            chain.append(token)
            ids, barring = place.unsqueeze(0), barred
        return chain, first, unsure, begins


class CpuDraftHeads(nn.Module):
    """Medusa heads and the spelling of what they guess, of one text: what `WhisperHeads` and the vocabulary give."""

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
        self, hidden: Tensor | None, newest: int, keys: Tensor, values: Tensor, barred: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the places ahead, and their chances; without a state, of a text that has none yet.

        # [d_model], keys [1, head, position, head_dim] → [place, width] twice
        """
        x = (self.start if hidden is None else hidden) + self.ahead + self.newest(self.tokens[newest])
        query = self.query(self.look_norm(x)).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size(0), -1))
        x = x + self.outer(functional.gelu(self.inner(self.last_norm(x))))
        x = x + functional.silu(torch.baddbmm(self.bias, x[:, None], self.weight)[:, 0])
        spelling = self.tokens.narrow(0, 0, barred.size(0))
        chances, ids = (functional.linear(x, spelling).float() + barred).softmax(-1).topk(width)
        return ids, chances


def cpu_heads(heads: WhisperHeads, decoder: WhisperDecoder) -> Any:
    """`CpuDraftHeads` without Python."""
    return scripted(CpuDraftHeads(heads, decoder))


class CpuTextDecoder:
    """Reads tokens and guesses those behind them: the likeliest by what `WhisperDecoder.step` gives, or nearly so."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool = False) -> None:
        self.config = decoder.config
        self._stack: Any = scripted(
            CpuDecoderStack(decoder, rounded and decoder.config.d_model % CPU_COLUMN_BLOCK == 0)
        )
        self._settle()

    def _settle(self) -> None:
        """Guess something, so that nobody waits for what TorchScript does in its first calls."""
        config, heads = self.config, self.config.decoder_attention_heads
        weight = self._stack.tokens
        nothing = weight.new_zeros(config.decoder_layers, 1, heads, 2, config.d_model // heads)
        barred = torch.zeros(config.vocab_size, device=weight.device)
        how = CpuDraftDecoder(2, 0.0, 1, 0.0, config.vocab_size, -1)
        with torch.inference_mode():
            for tokens in ([0, 0], [0], [0]):
                self.guess(self.begin(WindowMemory(nothing, nothing)), tokens, barred, barred, how)

    def begin(self, memory: WindowMemory) -> CpuText:
        """A text of one window, not a token of which is read."""
        size = (self.config.decoder_layers, self.config.max_target_positions, 3 * self.config.d_model)
        return CpuText(memory, memory.keys.new_empty(size))

    def guess(
        self, text: CpuText, tokens: list[int], barred_first: Tensor, barred: Tensor, how: CpuDraftDecoder
    ) -> tuple[list[int], Tensor, Tensor]:
        """Greedy guesses behind the next tokens, all of which are read but the last guess.

        Then the chances of what would follow, where they were too low to go on (empty where they were not), and those
        of the first guess, where it is a time. What is barred is added to the logits of the first guess and the others;
        ids behind its end are not looked at.
        """
        ids = torch.tensor(tokens, device=text.past.device)
        memory = text.memory
        chain, text.length, unsure, begins = self._stack.guess(
            ids, text.past, text.length, memory.keys, memory.values, barred_first, barred, how
        )
        return chain, unsure, begins
