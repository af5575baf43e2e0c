"""The draft models of `drafts.py` on CPUs: TorchScript implementations, for one text at a time."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper.cpu import BF16, CpuDecoder, CpuLinear, OptimisedEncoderLayer, StepRows, packed_projection
from vivavoce.models.whisper.drafts import PieceGuesser, WhisperHeads
from vivavoce.models.whisper.model import WhisperDecoder, WhisperLayer, WindowMemory
from vivavoce.nn.linear import column_major, column_major_for_one_row
from vivavoce.nn.modules import scripted
from vivavoce.nn.quantised import CPU_COLUMN_BLOCK, CPU_ROW_BLOCK
from vivavoce.nn.quantised_weight import quantise


def pieces_to_bf16(guesser: PieceGuesser) -> None:
    """Run a `PieceGuesser` that was loaded in bfloat16 in TorchScript."""
    layers = [layer for layer in guesser.layers if isinstance(layer, WhisperLayer)]
    guesser.layers = nn.ModuleList(scripted(OptimisedEncoderLayer(layer, BF16)) for layer in layers)


class Int8DraftLinear(nn.Module):
    """`CpuLinear` with int8 weights, which fit the CPU's caches; drafts need not be exact."""

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


class DraftLimits(NamedTuple):
    """How far a draft goes."""

    max_tokens: int
    min_probability: float
    """The draft ends where the probability that all of its tokens are right falls below this."""
    start_candidates: int
    """If the first token is a timestamp, its probability is the sum over this many of the likeliest timestamps."""
    min_start_probability: float
    """Timestamps less probable than this are not part of that sum."""
    timestamps: int
    """The first id that is a timestamp."""
    end: int
    """The id that ends a text, which is not drafted."""


@dataclass
class CpuDraftText:
    """Self-attention cache of one text; `length` is set back to drop tokens."""

    memory: WindowMemory
    keys: Tensor  # [layer, position, head, head_dim]
    values: Tensor
    length: int = 0


class CpuDraftLayers(CpuDecoder):
    """A `CpuDecoder` of one text, and the loop that drafts with it."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool) -> None:
        # int8 only for the two largest products: for smaller ones it is slower.
        product = Int8DraftLinear if rounded else CpuLinear
        packed = (packed_projection(layer) for layer in decoder.stack)
        super().__init__(
            decoder, [product(column_major_for_one_row(weight), bias) for weight, bias in packed], drafts=True
        )
        self.lm_head = product(self.tokens, self.tokens.new_zeros(len(self.tokens)))
        self.slots = torch.arange(len(self.positions), device=self.tokens.device)

    def newest_state(
        self, ids: Tensor, text: tuple[Tensor, Tensor], first: int, window: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Append tokens at position `first` and return the hidden state of the last one.  # [token] → [1, d_model]"""
        count = ids.size(0)
        written, read = self.slots.narrow(0, first, count), self.slots.narrow(0, 0, first + count)
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
        """The loop of `CpuDraftDecoder.draft`."""
        chain: list[int] = []
        unlikely, at_start = torch.empty(0), torch.empty(0)
        total, bias = 1.0, bias_first
        while len(chain) < limits.max_tokens:
            hidden = self.newest_state(ids, text, first, window)
            first += ids.size(0)
            probabilities = self.lm_head.first(hidden, bias).softmax(-1).select(0, 0)
            best, index = probabilities.max(0)
            probability, token = float(best), int(index)
            if len(chain) == 0 and token >= limits.timestamps:
                at_start = probabilities
                likely = probabilities.topk(limits.start_candidates)[0]
                probability = float(likely[likely > limits.min_start_probability].sum())
            total *= probability
            if total < limits.min_probability or token == limits.end:
                unlikely = probabilities
                break
            chain.append(token)
            ids, bias = index.unsqueeze(0), bias_later
        return chain, first, unlikely, at_start


class CpuDraftDecoder:
    """Greedy drafts by a small decoder, equal to `WhisperDecoder.step` up to rounding (more with `rounded` weights)."""

    def __init__(self, decoder: WhisperDecoder, rounded: bool = False) -> None:
        self.config = decoder.config
        self._layers: Any = scripted(
            CpuDraftLayers(decoder, rounded and decoder.config.d_model % CPU_COLUMN_BLOCK == 0)
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Run a few drafts, because TorchScript optimises in its first calls."""
        config, heads = self.config, self.config.decoder_attention_heads
        weight = self._layers.tokens
        empty = weight.new_zeros(config.decoder_layers, 1, heads, 2, config.d_model // heads)
        bias = torch.zeros(config.vocab_size, device=weight.device)
        limits = DraftLimits(2, 0.0, 1, 0.0, config.vocab_size, -1)
        with torch.inference_mode():
            for tokens in ([0, 0], [0], [0]):
                self.draft(self.begin(WindowMemory(empty, empty)), tokens, bias, bias, limits)

    def begin(self, memory: WindowMemory) -> CpuDraftText:
        """The cache of an empty text of one window."""
        config, heads = self.config, self.config.decoder_attention_heads
        size = (config.decoder_layers, config.max_target_positions, heads, config.d_model // heads)
        return CpuDraftText(memory, memory.keys.new_empty(size), memory.keys.new_empty(size))

    def draft(
        self, text: CpuDraftText, tokens: list[int], bias_first: Tensor, bias_later: Tensor, limits: DraftLimits
    ) -> tuple[list[int], Tensor, Tensor]:
        """Append `tokens` to the text and draft greedily after them; the last drafted token is not in the cache.

        Returns the draft, the probabilities at which it stopped (empty if it reached `max_tokens`), and those of its
        first token if that is a timestamp. Biases are added to the logits of the first and of later drafted tokens;
        ids beyond the end of a bias are excluded.
        """
        ids = torch.tensor(tokens, device=text.keys.device)
        memory = text.memory
        chain, text.length, unlikely, at_start = self._layers.draft(
            ids, (text.keys, text.values), text.length, (memory.keys, memory.values), bias_first, bias_later, limits
        )
        return chain, unlikely, at_start


class CpuDraftHeads(nn.Module):
    """`WhisperHeads` followed by the LM head, for one text."""

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
        """The likeliest tokens of the next positions and their probabilities; `hidden` is None for an empty text.

        # [d_model], keys [1, head, position, head_dim] → [next position, width] twice
        """
        x = (self.start if hidden is None else hidden) + self.ahead + self.newest(self.tokens[newest])
        query = self.query(self.look_norm(x)).view(1, x.size(0), self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size(0), -1))
        x = x + self.outer(functional.gelu(self.inner(self.last_norm(x))))
        x = x + functional.silu(torch.baddbmm(self.bias, x[:, None], self.weight)[:, 0])
        lm_head = self.tokens.narrow(0, 0, bias.size(0))
        probabilities, ids = (functional.linear(x, lm_head).float() + bias).softmax(-1).topk(width)
        return ids, probabilities


def cpu_heads(heads: WhisperHeads, decoder: WhisperDecoder) -> Any:
    """`CpuDraftHeads` in TorchScript."""
    return scripted(CpuDraftHeads(heads, decoder))
