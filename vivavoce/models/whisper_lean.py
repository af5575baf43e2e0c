"""A decoder of few layers on one text at a time, as nothing but products: for small models on a CPU.

There a step costs what calling it costs. So the weights are at hand, keys and values are written where they stay, going
back to an earlier place of a text is a matter of its length, and TorchScript runs the layers without Python.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper import WhisperDecoder, WhisperDecoderLayer, WindowMemory


@dataclass
class LeanText:
    """A text as far as it was read: queries, keys and values of its places, by layer."""

    memory: WindowMemory
    past: Tensor  # [layer, place, 3 × d_model]
    length: int = 0


def laid_out(weight: Tensor) -> Tensor:
    """The same matrix, on a CPU column by column: so a few rows are multiplied by it in two thirds of the time."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


class LeanLayer(nn.Module):
    """A layer of a decoder over a past that is one block of memory."""

    def __init__(self, layer: WhisperDecoderLayer) -> None:
        super().__init__()
        text, window = layer.self_attn, layer.encoder_attn
        parts = (text.q_proj, text.k_proj, text.v_proj)
        nothing = torch.zeros_like(text.q_proj.bias)
        bias = [nothing if part.bias is None else part.bias.detach() for part in parts]
        self.packed_weight = laid_out(torch.cat([part.weight.detach() for part in parts]))
        self.packed_bias = torch.cat(bias)
        self.text_out, self.query, self.window_out = text.out_proj, window.q_proj, window.out_proj
        self.inner, self.outer = layer.fc1, layer.fc2
        self.text_norm, self.window_norm = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
        self.last_norm = layer.final_layer_norm
        self.heads = text.heads

    def forward(self, x: Tensor, past: Tensor, first: int, seen: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        """The next places behind `first` older ones.  # x [place, d_model], keys [1, head, position, head_dim]"""
        rows, width = x.size(0), x.size(1)
        end = first + rows
        past.narrow(0, first, rows).copy_(functional.linear(self.text_norm(x), self.packed_weight, self.packed_bias))
        parts = past.narrow(0, 0, end).view(1, end, 3, self.heads, -1).transpose(1, 3)  # [1, head, part, place, dim]
        query = parts.select(2, 0).narrow(2, first, rows)
        mixed = functional.scaled_dot_product_attention(query, parts.select(2, 1), parts.select(2, 2), attn_mask=seen)
        x = x + self.text_out(mixed.transpose(1, 2).reshape(rows, width))
        query = self.query(self.window_norm(x)).view(1, rows, self.heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.window_out(mixed.transpose(1, 2).reshape(rows, width))
        return x + self.outer(functional.gelu(self.inner(self.last_norm(x))))


class LeanStack(nn.Module):
    """Tokens through all layers."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LeanLayer(layer) for layer in decoder.stack)
        self.tokens, self.places = decoder.embed_tokens.weight.detach(), decoder.embed_positions.weight.detach()
        self.norm = decoder.layer_norm

    def forward(self, ids: Tensor, past: Tensor, first: int, keys: Tensor, values: Tensor) -> Tensor:
        """The state behind the last of the next tokens.  # [place], keys [layer, 1, head, position, dim] → [d_model]"""
        rows = ids.size(0)
        x = self.tokens.index_select(0, ids) + self.places.narrow(0, first, rows)
        seen: Tensor | None = None
        if rows > 1:
            seen = torch.ones(rows, first + rows, dtype=torch.bool, device=x.device).tril(first)
        for index, layer in enumerate(self.layers):
            x = layer(x, past.select(0, index), first, seen, keys.select(0, index), values.select(0, index))
        return self.norm(x[-1])


class LeanDecoder:
    """Reads tokens and gives the state behind the last of them: what `WhisperDecoder.step` gives."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        self.config = decoder.config
        self._stack: Any = LeanStack(decoder)
        if all(type(part) is nn.Linear for layer in decoder.stack for part in (layer.fc1, layer.self_attn.out_proj)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # what is to replace it needs a C++ compiler
                self._stack = torch.jit.script(self._stack)

    def begin(self, memory: WindowMemory) -> LeanText:
        """A text of one window, not a token of which is read."""
        size = (self.config.decoder_layers, self.config.max_target_positions, 3 * self.config.d_model)
        return LeanText(memory, memory.keys.new_empty(size))

    def read(self, text: LeanText, tokens: list[int]) -> Tensor:
        """The state behind the last of the next tokens.  # [d_model]"""
        first = text.length
        text.length += len(tokens)
        ids = torch.tensor(tokens, device=text.past.device)
        state: Tensor = self._stack(ids, text.past, first, text.memory.keys, text.memory.values)
        return state
