"""MOSS-TTS-Nano on a CPU, one sequence at a time, with as little around the products as can be.

The engine is made for many sequences; for one, its pages and tables cost more than a small model's arithmetic. Here a
sequence's past is one block of memory, a row goes through all layers in one call, and codes are drawn in NumPy. Rows
and codes are the engine's.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.cpu_speed import is_bfloat16_fast
from vivavoce.engine.sampling import Generation
from vivavoce.errors import CapacityError
from vivavoce.models.interface import Row
from vivavoce.models.moss_tts_nano.model import TEXT, MossTTSNano, NanoLayer, NanoTransformer
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt
from vivavoce.nn.attention import RotaryTable
from vivavoce.nn.linear import Linear
from vivavoce.nn.modules import scripted
from vivavoce.nn.process_settings import torch_threads
from vivavoce.nn.quantised import SMALLEST_ROW, Int8Linear, int8_product
from vivavoce.tts.frame_model import CallerFrames, Codes, Floats, Frames, SequenceDraw, spare_cores
from vivavoce.tts.interface import SpeechSettings

MAX_READY_VOICES = 8
REPEATS = 5
WORTH = 0.9  # of the time before: less gain than this is not worth a core
SMALLEST_SHARED = 512  # hidden size; the products of smaller models are done before a second thread is awake
PRODUCTS = ("c_attn", "c_proj", "fc_in", "fc_out")


class FloatProduct(nn.Module):
    """A `Linear` that TorchScript can read."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return functional.linear(x, self.weight, self.bias)


class Int8Product(nn.Module):
    """An `Int8Linear` that TorchScript can read."""

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        self.packed, self.smallest = linear.packed, SMALLEST_ROW
        self.bias = torch.zeros(()) if linear.bias is None else linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Project rows, each rounded by its own size.  # [row, input] → [row, output]"""
        if x.size(0) == 1:
            return torch.ops.quantized.linear_dynamic(x, self.packed, False)
        size = x.abs().amax(dim=-1, keepdim=True).clamp_min(self.smallest)
        out = torch.ops.quantized.linear_dynamic(x / size, self.packed, False)
        return (out - self.bias).mul_(size).add_(self.bias)


class FlatNanoLayer(nn.Module):
    """`NanoLayer` over a past that is one block of memory."""

    def __init__(self, layer: NanoLayer, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = layer.ln_1, layer.ln_2
        self.c_attn, self.c_proj = _product(layer.attn.c_attn), _product(layer.attn.c_proj)
        self.fc_in, self.fc_out = _product(layer.mlp.fc_in), _product(layer.mlp.fc_out)

    def forward(self, x: Tensor, past: Tensor, place: int, turns: Tensor, mask: Tensor | None) -> Tensor:
        """New rows behind `place` older ones.  # x [row, hidden], past [row, 2 · hidden], turns [row, 1, pair]"""
        rows, hidden = x.size(0), x.size(1)
        packed = self.c_attn(self.norm_1(x))
        pairs = torch.view_as_complex(packed.view(rows, 3 * self.heads, -1, 2))
        pairs.narrow(1, 0, 2 * self.heads).mul_(turns)
        past.narrow(0, place, rows).copy_(packed.narrow(1, hidden, 2 * hidden))
        seen = past.narrow(0, 0, place + rows).view(1, place + rows, 2, self.heads, -1)
        keys, values = seen.select(2, 0).transpose(1, 2), seen.select(2, 1).transpose(1, 2)
        queries = packed.narrow(1, 0, hidden).view(1, rows, self.heads, -1).transpose(1, 2).to(past.dtype)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = self.c_proj(mixed.transpose(1, 2).reshape(rows, hidden).to(x.dtype)).add_(x)
        return self.fc_out(functional.gelu(self.fc_in(self.norm_2(x)), approximate="tanh")).add_(x)


class FlatNanoTransformer(nn.Module):
    """Layers and a last norm over one block of keys and values."""

    def __init__(self, transformer: NanoTransformer, rotary: RotaryTable, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FlatNanoLayer(cast(NanoLayer, layer), heads) for layer in transformer.h)
        self.norm = transformer.ln_f
        self.turns = torch.complex(rotary.cos, rotary.sin)[:, None]  # [position, 1, head_dim / 2]

    def forward(self, x: Tensor, past: Tensor, place: int) -> Tensor:
        """New rows, whose keys and values join the past.  # x [row, hidden], past [layer, row, 2 · hidden]"""
        rows, end = x.size(0), place + x.size(0)
        turns = self.turns.narrow(0, place, rows)
        mask: Tensor | None = None
        if rows > 1:
            mask = torch.arange(end) <= place + torch.arange(rows)[:, None]
        for index, layer in enumerate(self.layers):
            x = layer(x, past.select(0, index), place, turns, mask)
        return self.norm(x)


def compiled(flat: Any) -> Any:
    """The same without Python, where TorchScript can read all its products."""
    if not isinstance(flat, FlatNanoTransformer) or not all(map(_is_readable, flat.layers)):
        return flat
    return scripted(flat)


def _is_readable(layer: nn.Module) -> bool:
    return all(isinstance(layer.get_submodule(name), FloatProduct | Int8Product) for name in PRODUCTS)


def _product(linear: nn.Module) -> nn.Module:
    if type(linear) is Int8Linear:
        return Int8Product(linear)
    return FloatProduct(linear) if type(linear) is Linear else linear


SMALLEST_ROUNDED = 512  # hidden size from which a row waits for memory rather than for calls
TRIAL, TRIAL_RUNS = Generation(max_new_rows=2, min_new_rows=2), 2  # TorchScript settles in its first calls


@dataclass(frozen=True)
class NanoPast:
    """Keys and values of a sequence's first rows. A value: going on from it copies it."""

    keys_values: Tensor  # [layer, row, 2 · hidden]: a row's keys and values side by side
    rows: int


class NanoCpuDecoder:
    """Reads prompts and speaks; the weights may be shared with an engine, and int8."""

    def __init__(self, model: MossTTSNano) -> None:
        self.model = model
        has_int8 = any(isinstance(module, Int8Linear) for module in model.local_transformer.modules())
        self.is_small = has_int8 and model.config.hidden_size >= SMALLEST_ROUNDED
        heads = model.config.num_heads
        self.whole: Any = FlatNanoTransformer(model.transformer, model.rotary, heads).eval()
        self.local: Any = FlatNanoTransformer(model.local_transformer, model.rotary, heads).eval()
        vectors, tables = model.transformer.wte.weight, model.audio_embeddings.weight
        self._slot = vectors[model.config.audio_assistant_slot_token_id]
        self._ways = torch.stack([self._slot, vectors[model.config.audio_end_token_id]])
        self._codes, self._all_codes = list(tables), tables.flatten(0, 1)
        self._first_of_table = torch.arange(model.codebooks) * model.config.audio_vocab_size
        self._heads = [Int8Linear.of_weight(table).packed for table in self._codes] if self.is_small else []

    def compile(self) -> None:
        """Take Python out of the steps: a fifth of a second now, a tenth of every frame later."""
        before = self.whole
        self.whole, self.local = compiled(self.whole), compiled(self.local)
        if self.whole is before:
            return
        past = self.read([(0,) * self.model.channels] * 2)
        for _ in range(TRIAL_RUNS):
            deque(self.speak(past, [(0,) * self.model.channels], TRIAL), maxlen=0)

    def room(self, rows: int) -> Tensor:
        """For the keys and values of a sequence.  # [layer, row, 2 · hidden]"""
        # In bfloat16 looking back takes a third of the time, and it is finer than the weights are.
        kept = torch.bfloat16 if self.is_small and is_bfloat16_fast() else torch.float32
        return torch.empty(self.model.config.num_layers, rows, 2 * self.model.config.hidden_size, dtype=kept)

    def frame_room(self) -> Tensor:
        """For those of one frame's codes.  # [layer, position, 2 · hidden]"""
        config = self.model.config
        return torch.empty(config.local_transformer_layers, self.model.channels, 2 * config.hidden_size)

    @torch.inference_mode()
    def read(self, rows: Sequence[Row]) -> NanoPast:
        """The past after these rows, to be gone on from many times."""
        room = self.room(len(rows))
        self.whole(self.model.embed(torch.tensor(rows)), room, 0)
        return NanoPast(room, len(rows))

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
        room, frame_room = self.room(start + generation.max_new_rows), self.frame_room()
        room[:, : past.rows] = past.keys_values
        samplings = generation.per_channel(self.model.channels)
        draw = SequenceDraw(samplings, generation.seed, self.model.config.audio_vocab_size)
        hidden = self.after(self.model.embed(torch.tensor(rows)), room, past.rows)
        for place in range(start, start + generation.max_new_rows):
            draw.start_row(place)
            codes = self.frame(hidden, frame_room, draw, may_stop=draw.generated >= generation.min_new_rows)
            if codes is None:
                return
            yield codes
            hidden = self.after(self.embedded(codes), room, place)

    @torch.inference_mode()
    def after(self, vectors: Tensor, room: Tensor, place: int) -> Tensor:
        """The state of the last of some new rows.  # [row, hidden] → [1, hidden]"""
        last: Tensor = self.whole(vectors, room, place)[-1:]
        return last

    @torch.inference_mode()
    def embedded(self, codes: tuple[int, ...]) -> Tensor:
        """`MossTTSNano.embed` of one frame's row.  # [1, hidden]"""
        ids = self._first_of_table + torch.tensor(codes)
        return self._all_codes.index_select(0, ids).sum(dim=0, keepdim=True).add_(self._slot)

    @torch.inference_mode()
    def frame(self, hidden: Tensor, room: Tensor, draw: SequenceDraw, may_stop: bool) -> tuple[int, ...] | None:
        """The codes of the next frame; None where speech ends.  # hidden [1, hidden]"""
        states = self.local(torch.cat([hidden, self._slot[None]]), room, 0)
        stops, state = (self._ways @ states[0]).numpy(), states[1:]
        if not may_stop:
            stops[1] = -np.inf
        if draw.choose(TEXT, stops) == 1:
            return None
        codes = [draw.sample(TEXT + 1, self._logits(0, state))]
        for codebook in range(1, self.model.codebooks):
            last = codes[-1]
            state = self.local(self._codes[codebook - 1][last : last + 1], room, codebook + 1)
            codes.append(draw.sample(TEXT + 1 + codebook, self._logits(codebook, state)))
        return tuple(codes)

    def _logits(self, codebook: int, state: Tensor) -> Floats:
        if self.is_small:
            return int8_product(state, self._heads[codebook], False)[0].numpy()
        return (self._codes[codebook] @ state[0]).numpy()


class CpuFrameGenerator:
    """One text at a time, each in the thread that asks for it."""

    parallel_parts = 1

    def __init__(self, model: MossTTSNano, prompt: MossTTSNanoPrompt) -> None:
        self.prompt = prompt
        self.decoder = NanoCpuDecoder(model)
        self._voices: OrderedDict[Codes, NanoPast] = OrderedDict()
        self._lock = threading.Lock()

    def frames(self, reference: Codes, text: str, generation: Generation, said: Codes = ()) -> Frames:
        """The frames of a text in a voice."""
        rows = self.prompt.speech(text) + self.prompt.spoken(said)
        with self._lock:
            if reference not in self._voices:
                self._voices[reference] = self.decoder.read(self.prompt.before_text(reference))
            self._voices.move_to_end(reference)
            past = self._voices[reference]
            if len(self._voices) > MAX_READY_VOICES:
                self._voices.popitem(last=False)
        return CallerFrames(self.decoder.speak(past, rows, generation))

    def warm_up(self) -> None:
        """Take Python out of the steps."""
        self.decoder.compile()


def fastest_threads(generator: CpuFrameGenerator) -> int:
    """How many of torch's threads this model speaks fastest with, one core left to the codec.

    What OMP_NUM_THREADS says, holds.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    config = generator.decoder.model.config
    max_threads = max(1, spare_cores()) if config.hidden_size >= SMALLEST_SHARED else 1
    if max_threads == 1:
        return 1
    usual = SpeechSettings().generation(config.n_vq, 1, 0)
    endless = replace(usual, max_new_rows=100, min_new_rows=101)
    frames = generator.frames((), "a", endless)
    try:
        return best_threads(lambda: next(frames), max_threads)
    finally:
        frames.close()


def best_threads(step: Callable[[], object], max_threads: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """The fewest threads that more of are not clearly faster than."""
    best, fastest, count = 1, float("inf"), 1
    while count <= max_threads:
        with torch_threads.held(count):
            seconds = _median_seconds(step, clock)
        if seconds > fastest * WORTH:
            break
        best, fastest, count = count, seconds, 2 * count
    return best


def _median_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    step()
    times = []
    for _ in range(REPEATS):
        began = clock()
        step()
        times.append(clock() - began)
    return sorted(times)[REPEATS // 2]
