"""MOSS-TTS-Nano on a CPU, one sequence at a time, with as little around the products as can be.

The engine is made for many sequences; for one, its pages and tables cost more than a small model's arithmetic. Here a
sequence's past is one block of memory, a row goes through a layer in a dozen calls, and codes are drawn in NumPy. Rows
and codes are the engine's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.engine.sampling import Generation
from vivavoce.errors import CapacityError
from vivavoce.models.interface import Row
from vivavoce.models.moss_tts_nano import TEXT, Layer, MossTTSNano, Transformer
from vivavoce.nn.int8_linear import Int8Linear, int8_product
from vivavoce.nn.linear import Linear
from vivavoce.speech.cpu_draw import SequenceDraw

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NanoPast:
    """Keys and values of a sequence's first rows. A value: going on from it copies it."""

    keys_values: Tensor  # [layer, key or value, head, row, head_dim]
    rows: int


class FlatLayer:
    """A layer's functions, found once: looking them up in modules costs as much as a small product."""

    def __init__(self, layer: Layer) -> None:
        self.norm_1, self.norm_2 = _norm(layer.ln_1), _norm(layer.ln_2)
        self.c_attn, self.c_proj = _projection(layer.attn.c_attn), _projection(layer.attn.c_proj)
        self.fc_in, self.fc_out = _projection(layer.mlp.fc_in), _projection(layer.mlp.fc_out)

    def __call__(self, x: Tensor, keys_values: Tensor, place: int, turns: Tensor, mask: Tensor | None) -> Tensor:
        """`Layer` over a past that is one block.  # x [row, hidden], keys_values [2, head, row, head_dim]"""
        rows, end = x.shape[0], place + x.shape[0]
        _, heads, _, size = keys_values.shape
        packed = self.c_attn(self.norm_1(x)).view(rows, 3, heads, size).permute(1, 2, 0, 3)
        pairs = torch.view_as_complex(packed[:2].unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns).flatten(-2)
        keys_values[0, :, place:end] = turned[1]
        keys_values[1, :, place:end] = packed[2]
        seen = keys_values[:, None, :, :end]
        mixed = functional.scaled_dot_product_attention(turned[None, 0], seen[0], seen[1], attn_mask=mask)
        x = x + self.c_proj(mixed[0].transpose(0, 1).reshape(rows, -1))
        return x + self.fc_out(functional.gelu(self.fc_in(self.norm_2(x)), approximate="tanh"))


class FlatTransformer:
    """Layers and a last norm over one block of keys and values."""

    def __init__(self, transformer: Transformer, model: MossTTSNano) -> None:
        self.layers = [FlatLayer(layer) for layer in transformer.h if isinstance(layer, Layer)]
        self.norm = _norm(transformer.ln_f)
        self.turns = torch.complex(model.rotary.cos, model.rotary.sin)  # [position, head_dim / 2]
        self.size = (model.config.num_heads, model.config.head_dim)

    def empty(self, rows: int) -> Tensor:
        """Room for the keys and values of so many rows."""
        heads, head_dim = self.size
        return torch.zeros(len(self.layers), 2, heads, rows, head_dim)

    def __call__(self, x: Tensor, keys_values: Tensor, place: int) -> Tensor:
        """New rows through all layers, behind `place` older ones.  # [row, hidden]"""
        rows = x.shape[0]
        turns, mask = self.turns[place : place + rows], None
        if rows > 1:
            mask = torch.arange(place + rows) <= place + torch.arange(rows)[:, None]
        for layer, past in zip(self.layers, keys_values, strict=True):
            x = layer(x, past, place, turns, mask)
        return self.norm(x)


class CpuDecoder:
    """Reads prompts and speaks; the weights may be shared with an engine, and int8."""

    def __init__(self, model: MossTTSNano) -> None:
        self.model = model
        self.whole = FlatTransformer(model.transformer, model)
        self.local = FlatTransformer(model.local_transformer, model)
        vectors = model.transformer.wte.weight
        self._slot = vectors[model.config.audio_assistant_slot_token_id]
        self._ways = torch.stack([self._slot, vectors[model.config.audio_end_token_id]])
        self._codes = list(model.audio_embeddings.weight)
        is_int8 = any(isinstance(module, Int8Linear) for module in model.local_transformer.modules())
        self._heads = [_int8(Int8Linear.of_weight(table)) if is_int8 else _plain(table) for table in self._codes]

    @torch.inference_mode()
    def read(self, rows: Sequence[Row]) -> NanoPast:
        """The past after these rows, to be gone on from many times."""
        keys_values = self.whole.empty(len(rows))
        self.whole(self.model.embed(torch.tensor(rows)), keys_values, 0)
        return NanoPast(keys_values, len(rows))

    def speak(self, past: NanoPast, rows: Sequence[Row], generation: Generation) -> Iterator[tuple[int, ...]]:
        """The frames that follow a past and more rows, as they are made."""
        start = past.rows + len(rows)
        if start + generation.max_new_rows > self.model.context_limit:
            raise CapacityError(
                f"{start} rows and {generation.max_new_rows} to be made are more than the "
                f"{self.model.context_limit} this model reads; shorten the text or the reference"
            )
        keys_values, room = self.whole.empty(start + generation.max_new_rows), self.local.empty(self.model.channels)
        keys_values[:, :, :, : past.rows] = past.keys_values
        draw = SequenceDraw(generation, self.model.channels, self.model.config.audio_vocab_size)
        hidden = self._after(torch.tensor(rows), keys_values, past.rows)
        for place in range(start, start + generation.max_new_rows):
            draw.start_row(place)
            codes = self._frame(hidden, room, draw)
            if codes is None:
                return
            yield codes
            hidden = self._after(self._row(codes), keys_values, place)

    @torch.inference_mode()
    def _after(self, rows: Tensor, keys_values: Tensor, place: int) -> Tensor:
        """The state of the last of some new rows.  # [row, channel] → [1, hidden]"""
        return self.whole(self.model.embed(rows), keys_values, place)[-1:]

    def _row(self, codes: tuple[int, ...]) -> Tensor:
        config = self.model.config
        unused = [config.audio_pad_token_id] * (config.n_vq - len(codes))
        return torch.tensor([[config.audio_assistant_slot_token_id, *codes, *unused]])

    @torch.inference_mode()
    def _frame(self, hidden: Tensor, room: Tensor, draw: SequenceDraw) -> tuple[int, ...] | None:
        """The codes of the next frame; None where speech ends.  # hidden [1, hidden]"""
        states = self.local(torch.cat([hidden, self._slot[None]]), room, 0)
        stops, state = (self._ways @ states[0]).numpy(), states[1:]
        if draw.generated < draw.generation.min_new_rows:
            stops[1] = -np.inf
        if draw.choose(TEXT, stops) == 1:
            return None
        codes = [draw.sample(TEXT + 1, self._heads[0](state)[0].numpy())]
        for codebook in range(1, self.model.codebooks):
            last = codes[-1]
            state = self.local(self._codes[codebook - 1][last : last + 1], room, codebook + 1)
            codes.append(draw.sample(TEXT + 1 + codebook, self._heads[codebook](state)[0].numpy()))
        return tuple(codes)


def _norm(norm: nn.LayerNorm) -> Function:
    shape, weight, bias, eps = list(norm.normalized_shape), norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _projection(linear: nn.Module) -> Function:
    if isinstance(linear, Int8Linear):
        return _int8(linear)
    assert isinstance(linear, Linear)
    return _plain(linear.weight, linear.bias)


def _int8(linear: Int8Linear) -> Function:
    packed = linear.packed
    return lambda x: int8_product(x, packed, False)


def _plain(weight: Tensor, bias: Tensor | None = None) -> Function:
    return lambda x: functional.linear(x, weight, bias)
