"""MOSS-TTS-Nano on a CPU, one sequence at a time, with as little around the products as can be.

The engine is made for many sequences; for one, its pages and tables cost more than a small model's arithmetic. Here a
sequence's past is one block of memory, a row goes through a layer in a dozen calls, and codes are drawn in NumPy. Rows
and codes are the engine's.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.device import bfloat16_is_fast_here
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

    keys_values: Tensor  # [layer, row, keys and values]
    rows: int


class Views(NamedTuple):
    """What a step writes and sees of each layer's past."""

    slots: Sequence[Tensor]  # [new, keys and values]
    keys: Sequence[Tensor]  # [1, head, row, head_dim]
    values: Sequence[Tensor]


class Room:
    """Memory for the keys and values of a sequence, a row's side by side. Views that will come again are kept."""

    KEPT_UP_TO = 64  # rows

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.keys_values = torch.empty(layers, rows, 2 * heads * head_dim, dtype=dtype)
        self.heads, self.is_small = heads, rows <= self.KEPT_UP_TO
        self._kept: dict[tuple[int, int], Views] = {}

    def views(self, place: int, end: int) -> Views:
        """For new rows from `place` to `end`."""
        if (place, end) in self._kept:
            return self._kept[place, end]
        seen = self.keys_values[:, :end].unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)[:, :, None]
        keys, values = seen.unbind(0)
        made = Views(self.keys_values[:, place:end].unbind(0), keys.unbind(0), values.unbind(0))
        if self.is_small:
            self._kept[place, end] = made
        return made


class FlatLayer:
    """A layer's functions, found once: looking them up in modules costs as much as a small product."""

    def __init__(self, layer: Layer, heads: int) -> None:
        self.heads = heads
        self.norm_1, self.norm_2 = _norm(layer.ln_1), _norm(layer.ln_2)
        self.c_attn, self.c_proj = _projection(layer.attn.c_attn), _projection(layer.attn.c_proj)
        self.fc_in, self.fc_out = _projection(layer.mlp.fc_in), _projection(layer.mlp.fc_out)

    def __call__(
        self, x: Tensor, slot: Tensor, keys: Tensor, values: Tensor, turns: Tensor, mask: Tensor | None
    ) -> Tensor:
        """`Layer` over a past that is one block.  # x [row, hidden], turns [row, 3 · hidden / 2]"""
        rows, hidden = x.shape
        packed = self.c_attn(self.norm_1(x))
        torch.view_as_complex(packed.view(rows, -1, 2)).mul_(turns)  # queries and keys turn, values times 1 stay
        slot.copy_(packed[:, hidden:])
        queries = packed[:, :hidden].view(1, rows, self.heads, -1).transpose(1, 2).to(keys.dtype)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = self.c_proj(mixed.transpose(1, 2).reshape(rows, hidden).float()).add_(x)
        return self.fc_out(functional.gelu(self.fc_in(self.norm_2(x)), approximate="tanh")).add_(x)


class FlatTransformer:
    """Layers and a last norm over one block of keys and values, which are kept in `dtype`."""

    def __init__(
        self,
        transformer: Transformer,
        model: MossTTSNano,
        known_positions: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heads, self.head_dim = model.config.num_heads, model.config.head_dim
        self.layers = [FlatLayer(layer, self.heads) for layer in transformer.h if isinstance(layer, Layer)]
        self.norm, self.dtype = _norm(transformer.ln_f), dtype
        self._base = torch.complex(model.rotary.cos, model.rotary.sin)  # [position, head_dim / 2]
        self._known = self._turned(0, known_positions)

    def room(self, rows: int) -> Room:
        """Room for the keys and values of so many rows."""
        return Room(len(self.layers), rows, self.heads, self.head_dim, self.dtype)

    def __call__(self, x: Tensor, room: Room, place: int) -> Tensor:
        """New rows through all layers, behind `place` older ones.  # [row, hidden]"""
        rows, end = x.shape[0], place + x.shape[0]
        views = room.views(place, end)
        turns = self._known[place:end] if end <= len(self._known) else self._turned(place, end)
        mask = None if rows == 1 else torch.arange(end) <= place + torch.arange(rows)[:, None]
        for layer, slot, keys, values in zip(self.layers, *views, strict=True):
            x = layer(x, slot, keys, values, turns, mask)
        return self.norm(x)

    def _turned(self, place: int, end: int) -> Tensor:
        """How queries, keys and values of some positions are turned, in one row each."""
        turns = self._base[place:end].repeat(1, 2 * self.heads)
        return torch.cat([turns, torch.ones_like(turns[:, : turns.shape[1] // 2])], dim=1)


class CpuDecoder:
    """Reads prompts and speaks; the weights may be shared with an engine, and int8."""

    def __init__(self, model: MossTTSNano) -> None:
        self.model = model
        is_int8 = any(isinstance(module, Int8Linear) for module in model.local_transformer.modules())
        # A third of the time of looking back, and finer than the weights are.
        kept = torch.bfloat16 if is_int8 and bfloat16_is_fast_here() else torch.float32
        self.whole = FlatTransformer(model.transformer, model, dtype=kept)
        self.local = FlatTransformer(model.local_transformer, model, known_positions=model.channels)
        vectors = model.transformer.wte.weight
        self._slot = vectors[model.config.audio_assistant_slot_token_id]
        self._ways = torch.stack([self._slot, vectors[model.config.audio_end_token_id]])
        self._codes = list(model.audio_embeddings.weight)
        self._heads = [_int8(Int8Linear.of_weight(table)) if is_int8 else _plain(table) for table in self._codes]

    @torch.inference_mode()
    def read(self, rows: Sequence[Row]) -> NanoPast:
        """The past after these rows, to be gone on from many times."""
        room = self.whole.room(len(rows))
        self.whole(self.model.embed(torch.tensor(rows)), room, 0)
        return NanoPast(room.keys_values, len(rows))

    def speak(
        self, past: NanoPast, rows: Sequence[Row], generation: Generation
    ) -> Generator[tuple[int, ...], None, None]:
        """The frames that follow a past and more rows, as they are made."""
        start = past.rows + len(rows)
        if start + generation.max_new_rows > self.model.context_limit:
            raise CapacityError(
                f"{start} rows and {generation.max_new_rows} to be made are more than the "
                f"{self.model.context_limit} this model reads; shorten the text or the reference"
            )
        room, frame_room = self.whole.room(start + generation.max_new_rows), self.local.room(self.model.channels)
        room.keys_values[:, : past.rows] = past.keys_values
        samplings = generation.per_channel(self.model.channels)
        draw = SequenceDraw(samplings, generation.seed, self.model.config.audio_vocab_size)
        hidden = self._after(torch.tensor(rows), room, past.rows)
        for place in range(start, start + generation.max_new_rows):
            draw.start_row(place)
            codes = self._frame(hidden, frame_room, draw, may_stop=draw.generated >= generation.min_new_rows)
            if codes is None:
                return
            yield codes
            hidden = self._after(self._row(codes), room, place)

    @torch.inference_mode()
    def _after(self, rows: Tensor, room: Room, place: int) -> Tensor:
        """The state of the last of some new rows.  # [row, channel] → [1, hidden]"""
        return self.whole(self.model.embed(rows), room, place)[-1:]

    def _row(self, codes: tuple[int, ...]) -> Tensor:
        config = self.model.config
        unused = [config.audio_pad_token_id] * (config.n_vq - len(codes))
        return torch.tensor([[config.audio_assistant_slot_token_id, *codes, *unused]])

    @torch.inference_mode()
    def _frame(self, hidden: Tensor, room: Room, draw: SequenceDraw, may_stop: bool) -> tuple[int, ...] | None:
        """The codes of the next frame; None where speech ends.  # hidden [1, hidden]"""
        states = self.local(torch.cat([hidden, self._slot[None]]), room, 0)
        stops, state = (self._ways @ states[0]).numpy(), states[1:]
        if not may_stop:
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
    if type(linear) is Int8Linear:
        return _int8(linear)
    return _plain(linear.weight, linear.bias) if isinstance(linear, Linear) else linear


def _int8(linear: Int8Linear) -> Function:
    packed = linear.packed
    return lambda x: int8_product(x, packed, False)


def _plain(weight: Tensor, bias: Tensor | None = None) -> Function:
    return lambda x: functional.linear(x, weight, bias)
