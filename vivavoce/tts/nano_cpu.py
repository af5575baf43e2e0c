"""MOSS-TTS-Nano on a CPU, one sequence at a time, with little overhead around the matrix products.

For a single sequence of a small model, the engine's pages and tables cost more than the arithmetic. Here the keys and
values of a sequence are one block of memory, all layers are one TorchScript call, and codes are sampled in NumPy. The
generated codes equal the engine's.
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

from vivavoce.cpu_speed import MIN_THREADED_WIDTH, is_bfloat16_fast
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
from vivavoce.tts.chunked_decoding import spare_cores
from vivavoce.tts.frame_model import CallerFrames, Codes, Frames
from vivavoce.tts.frame_sampling import Floats, SequenceSampler
from vivavoce.tts.interface import SpeechSettings

MAX_READY_VOICES = 8
REPEATS = 5
MIN_GAIN = 0.9  # a larger thread count must take at most this share of the time
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

    def forward(self, x: Tensor, past: Tensor, position: int, rotations: Tensor, mask: Tensor | None) -> Tensor:
        """Rows after `position` older ones.  # x [row, hidden], past [row, 2 · hidden], rotations [row, 1, pair]"""
        rows, hidden = x.size(0), x.size(1)
        packed = self.c_attn(self.norm_1(x))
        pairs = torch.view_as_complex(packed.view(rows, 3 * self.heads, -1, 2))
        pairs.narrow(1, 0, 2 * self.heads).mul_(rotations)
        past.narrow(0, position, rows).copy_(packed.narrow(1, hidden, 2 * hidden))
        seen = past.narrow(0, 0, position + rows).view(1, position + rows, 2, self.heads, -1)
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
        self.rotations = torch.complex(rotary.cos, rotary.sin)[:, None]  # [position, 1, head_dim / 2]

    def forward(self, x: Tensor, past: Tensor, position: int) -> Tensor:
        """New rows, whose keys and values join the past.  # x [row, hidden], past [layer, row, 2 · hidden]"""
        rows, end = x.size(0), position + x.size(0)
        rotations = self.rotations.narrow(0, position, rows)
        mask: Tensor | None = None
        if rows > 1:
            mask = torch.arange(end) <= position + torch.arange(rows)[:, None]
        for index, layer in enumerate(self.layers):
            x = layer(x, past.select(0, index), position, rotations, mask)
        return self.norm(x)


def compile_transformer(flat: Any) -> Any:
    """The transformer in TorchScript; unchanged if it has layers that TorchScript cannot read."""
    if not isinstance(flat, FlatNanoTransformer) or not all(map(_is_readable, flat.layers)):
        return flat
    return scripted(flat)


def _is_readable(layer: nn.Module) -> bool:
    return all(isinstance(layer.get_submodule(name), FloatProduct | Int8Product) for name in PRODUCTS)


def _product(linear: nn.Module) -> nn.Module:
    if type(linear) is Int8Linear:
        return Int8Product(linear)
    return FloatProduct(linear) if type(linear) is Linear else linear


SMALLEST_ROUNDED = 512  # hidden size from which a step is bound by memory rather than by calls
TRIAL, TRIAL_RUNS = Generation(max_new_rows=2, min_new_rows=2), 2  # TorchScript settles in its first calls


@dataclass(frozen=True)
class NanoPast:
    """Keys and values of a sequence's first rows. Immutable: continuing from it copies it."""

    keys_values: Tensor  # [layer, row, 2 · hidden]: a row's keys and values side by side
    rows: int


class NanoCpuDecoder:
    """Prefills prompts and generates frames; the weights may be shared with an engine, and may be int8."""

    def __init__(self, model: MossTTSNano) -> None:
        self.model = model
        has_int8 = any(isinstance(module, Int8Linear) for module in model.local_transformer.modules())
        self.is_int8 = has_int8 and model.config.hidden_size >= SMALLEST_ROUNDED
        heads = model.config.num_heads
        self.transformer: Any = FlatNanoTransformer(model.transformer, model.rotary, heads).eval()
        self.local_transformer: Any = FlatNanoTransformer(model.local_transformer, model.rotary, heads).eval()
        vectors, tables = model.transformer.wte.weight, model.audio_embeddings.weight
        self._slot = vectors[model.config.audio_assistant_slot_token_id]
        self._stop_embeddings = torch.stack([self._slot, vectors[model.config.audio_end_token_id]])
        self._codes, self._all_codes = list(tables), tables.flatten(0, 1)
        self._first_of_table = torch.arange(model.codebooks) * model.config.audio_vocab_size
        self._heads = [Int8Linear.of_weight(table).packed for table in self._codes] if self.is_int8 else []

    def compile(self) -> None:
        """Compile the steps to TorchScript: it takes a fifth of a second, and a frame takes a tenth less."""
        before = self.transformer
        self.transformer, self.local_transformer = (
            compile_transformer(self.transformer),
            compile_transformer(self.local_transformer),
        )
        if self.transformer is before:
            return
        past = self.prefill([(0,) * self.model.channels] * 2)
        for _ in range(TRIAL_RUNS):
            deque(self.generate(past, [(0,) * self.model.channels], TRIAL), maxlen=0)

    def new_kv_buffer(self, rows: int) -> Tensor:
        """Memory for the keys and values of a sequence.  # [layer, row, 2 · hidden]"""
        # In bfloat16 attention takes a third of the time, and is still more precise than int8 weights.
        dtype = torch.bfloat16 if self.is_int8 and is_bfloat16_fast() else torch.float32
        return torch.empty(self.model.config.num_layers, rows, 2 * self.model.config.hidden_size, dtype=dtype)

    def new_frame_buffer(self) -> Tensor:
        """Memory for the keys and values of one frame's codes.  # [layer, position, 2 · hidden]"""
        config = self.model.config
        return torch.empty(config.local_transformer_layers, self.model.channels, 2 * config.hidden_size)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> NanoPast:
        """Process the rows of a prompt, from which any number of sequences may continue."""
        kv_buffer = self.new_kv_buffer(len(rows))
        self.transformer(self.model.embed(torch.tensor(rows)), kv_buffer, 0)
        return NanoPast(kv_buffer, len(rows))

    def generate(
        self, past: NanoPast, rows: Sequence[Row], generation: Generation
    ) -> Generator[tuple[int, ...], None, None]:
        """Generate the frames that follow a past and further rows."""
        start = past.rows + len(rows)
        if start + generation.max_new_rows > self.model.context_limit:
            raise CapacityError(
                f"a prompt of {start} rows and {generation.max_new_rows} new ones are more than the "
                f"{self.model.context_limit} of this model; shorten the text or the reference"
            )
        kv_buffer, frame_buffer = self.new_kv_buffer(start + generation.max_new_rows), self.new_frame_buffer()
        kv_buffer[:, : past.rows] = past.keys_values
        samplings = generation.per_channel(self.model.channels)
        sampler = SequenceSampler(samplings, generation.seed, self.model.config.audio_vocab_size)
        hidden = self.advance(self.model.embed(torch.tensor(rows)), kv_buffer, past.rows)
        for position in range(start, start + generation.max_new_rows):
            sampler.start_row(position)
            codes = self.sample_frame(
                hidden, frame_buffer, sampler, may_stop=sampler.generated >= generation.min_new_rows
            )
            if codes is None:
                return
            yield codes
            hidden = self.advance(self.embed_frame(codes), kv_buffer, position)

    @torch.inference_mode()
    def advance(self, vectors: Tensor, kv_buffer: Tensor, position: int) -> Tensor:
        """Process new rows; returns the hidden state of the last one.  # [row, hidden] → [1, hidden]"""
        last: Tensor = self.transformer(vectors, kv_buffer, position)[-1:]
        return last

    @torch.inference_mode()
    def embed_frame(self, codes: tuple[int, ...]) -> Tensor:
        """`MossTTSNano.embed` of one frame's row.  # [1, hidden]"""
        ids = self._first_of_table + torch.tensor(codes)
        return self._all_codes.index_select(0, ids).sum(dim=0, keepdim=True).add_(self._slot)

    @torch.inference_mode()
    def sample_frame(
        self, hidden: Tensor, kv_buffer: Tensor, sampler: SequenceSampler, may_stop: bool
    ) -> tuple[int, ...] | None:
        """Sample the codes of the next frame; None at the end of speech.  # hidden [1, hidden]"""
        states = self.local_transformer(torch.cat([hidden, self._slot[None]]), kv_buffer, 0)
        stops, state = (self._stop_embeddings @ states[0]).numpy(), states[1:]
        if not may_stop:
            stops[1] = -np.inf
        if sampler.choose(TEXT, stops) == 1:
            return None
        codes = [sampler.sample(TEXT + 1, self._logits(0, state))]
        for codebook in range(1, self.model.codebooks):
            last = codes[-1]
            state = self.local_transformer(self._codes[codebook - 1][last : last + 1], kv_buffer, codebook + 1)
            codes.append(sampler.sample(TEXT + 1 + codebook, self._logits(codebook, state)))
        return tuple(codes)

    def _logits(self, codebook: int, state: Tensor) -> Floats:
        if self.is_int8:
            return int8_product(state, self._heads[codebook], False)[0].numpy()
        return (self._codes[codebook] @ state[0]).numpy()


class CpuFrameGenerator:
    """Generates each text on the thread that reads its frames."""

    parallel_parts = 1

    def __init__(self, model: MossTTSNano, prompt: MossTTSNanoPrompt) -> None:
        self.prompt = prompt
        self.decoder = NanoCpuDecoder(model)
        self._voices: OrderedDict[Codes, NanoPast] = OrderedDict()
        self._lock = threading.Lock()

    def frames(self, reference: Codes, text: str, generation: Generation, spoken: Codes = ()) -> Frames:
        """The frames of a text in a voice; `spoken` are given frames of its beginning."""
        rows = self.prompt.speech(text) + self.prompt.spoken(spoken)
        with self._lock:
            if reference not in self._voices:
                self._voices[reference] = self.decoder.prefill(self.prompt.before_text(reference))
            self._voices.move_to_end(reference)
            past = self._voices[reference]
            if len(self._voices) > MAX_READY_VOICES:
                self._voices.popitem(last=False)
        return CallerFrames(self.decoder.generate(past, rows, generation))

    def warm_up(self) -> None:
        """Compile the steps."""
        self.decoder.compile()


def fastest_threads(generator: CpuFrameGenerator) -> int:
    """The thread count with which torch generates fastest, with one core left for the codec.

    If OMP_NUM_THREADS is set, the current count.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    config = generator.decoder.model.config
    max_threads = max(1, spare_cores()) if config.hidden_size >= MIN_THREADED_WIDTH else 1
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
    """Double the threads while a step becomes clearly faster."""
    best, fastest, count = 1, float("inf"), 1
    while count <= max_threads:
        with torch_threads.held(count):
            seconds = _median_seconds(step, clock)
        if seconds > fastest * MIN_GAIN:
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
