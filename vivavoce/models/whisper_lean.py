"""A decoder of few layers on one text at a time, as nothing but products: for small models on a CPU.

There a step costs what calling it costs. So the weights are at hand, keys and values are written where they stay, and
going back to an earlier place of a text is a matter of its length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.whisper import WhisperDecoder, WhisperDecoderLayer, WindowMemory

Product = tuple[Tensor, Tensor]  # weight and bias


@dataclass
class LeanText:
    """A text as far as it was read: queries, keys and values of its places, by layer."""

    memory: WindowMemory
    past: Tensor  # [layer, place, 3 × d_model]
    length: int = 0


def laid_out(weight: Tensor) -> Tensor:
    """The same matrix, on a CPU column by column: so a few rows are multiplied by it in two thirds of the time."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight


class LeanLayer:
    """What a layer multiplies with."""

    def __init__(self, layer: WhisperDecoderLayer) -> None:
        text, window = layer.self_attn, layer.encoder_attn
        parts = (text.q_proj, text.k_proj, text.v_proj)
        nothing = torch.zeros_like(text.q_proj.bias)
        bias = [nothing if part.bias is None else part.bias.detach() for part in parts]
        self.packed: Product = (laid_out(torch.cat([part.weight.detach() for part in parts])), torch.cat(bias))
        self.text_out: Product = (text.out_proj.weight, text.out_proj.bias)
        self.query: Product = (window.q_proj.weight, window.q_proj.bias)
        self.window_out: Product = (window.out_proj.weight, window.out_proj.bias)
        self.inner: Product = (layer.fc1.weight, layer.fc1.bias)
        self.outer: Product = (layer.fc2.weight, layer.fc2.bias)
        self.norms = [
            (norm.weight, norm.bias, norm.eps)
            for norm in (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        ]
        self.heads, self.head_dim = text.heads, text.head_dim


class LeanDecoder:
    """Reads tokens and gives the state behind the last of them: what `WhisperDecoder.step` gives."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        self.decoder = decoder
        self.layers = [LeanLayer(layer) for layer in decoder.stack]
        self.width = decoder.config.d_model

    def begin(self, memory: WindowMemory) -> LeanText:
        """A text of one window, not a token of which is read."""
        size = (len(self.layers), self.decoder.config.max_target_positions, 3 * self.width)
        return LeanText(memory, memory.keys.new_empty(size))

    def read(self, text: LeanText, tokens: list[int]) -> Tensor:
        """The state behind the last of the next tokens.  # [d_model]"""
        first, end = text.length, text.length + len(tokens)
        decoder, device = self.decoder, text.past.device
        x = decoder.embed_tokens.weight[torch.tensor(tokens, device=device)] + decoder.embed_positions.weight[first:end]
        seen = None
        if len(tokens) > 1:
            seen = torch.ones(len(tokens), end, dtype=torch.bool, device=device).tril(first)
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, x, text.past[index], (first, end), seen, text.memory, index)
        text.length = end
        norm = decoder.layer_norm
        return functional.layer_norm(x[-1], (self.width,), norm.weight, norm.bias, norm.eps)

    def _layer(
        self,
        layer: LeanLayer,
        x: Tensor,
        past: Tensor,
        places: tuple[int, int],
        seen: Tensor | None,
        memory: WindowMemory,
        index: int,
    ) -> Tensor:
        first, end = places
        heads = (layer.heads, layer.head_dim)
        past[first:end] = functional.linear(self._normed(layer, 0, x), *layer.packed)
        query, key, value = past[:end].view(1, end, 3, *heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query[:, :, first:], key, value, attn_mask=seen)
        x = x + functional.linear(mixed.transpose(1, 2).reshape(x.shape), *layer.text_out)
        query = functional.linear(self._normed(layer, 1, x), *layer.query).view(1, -1, *heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, memory.keys[index], memory.values[index])
        x = x + functional.linear(mixed.transpose(1, 2).reshape(x.shape), *layer.window_out)
        inner = functional.gelu(functional.linear(self._normed(layer, 2, x), *layer.inner))
        return x + functional.linear(inner, *layer.outer)

    def _normed(self, layer: LeanLayer, place: int, x: Tensor) -> Tensor:
        weight, bias, eps = layer.norms[place]
        return functional.layer_norm(x, (self.width,), weight, bias, eps)
