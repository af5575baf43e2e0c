"""Whisper's decoder as a model of the engine (`models.interface.GenerativeModel`): texts of many windows in one batch.

A row is a token and the number of its window. Keys and values of texts are in the engine's pages; those of windows are
in a `WindowStore`, written once after encoding and read by every text, beam or draft of the window.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import Draw, Row
from vivavoce.models.whisper.config import WhisperConfig, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.cpu import flat_pages, packed_projection, paged_decoder, paged_rows
from vivavoce.models.whisper.cuda import CrossAttend, is_single, single_rows_step
from vivavoce.models.whisper.decoding import FORBIDDEN, Text, TimestampRules
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import PackedProjection, WhisperDecoder, WindowMemory
from vivavoce.nn.attention import attend
from vivavoce.nn.linear import become_views, column_major
from vivavoce.nn.paged_kv import KVShape, RowBatch

TOKEN, WINDOW = 0, 1
MAX_STEP_ROWS = 1024  # rows for which the cross-attention kernel has counters
MAX_WINDOWS = 2047
PADDING_WINDOW = 0  # the window of padding rows
# The mode of a text: its window channel in the lower bits; above them, what timestamp rules need to know of its tokens.
WINDOW_BITS = 12
LAST_IS_TIME, BEFORE_IS_TIME, BEGUN = 1 << 12, 1 << 13, 1 << 14
LATEST_SHIFT = 15


class Decoding(Protocol):
    """The parts of a Whisper that decoding needs; a draft has no encoder."""

    @property
    def config(self) -> WhisperConfig: ...

    @property
    def decoder(self) -> WhisperDecoder: ...


class WindowStore:
    """Keys and values of encoded windows in numbered slots, which are released when their texts are done."""

    def __init__(self, model: Decoding, windows: int) -> None:
        if not 1 <= windows <= MAX_WINDOWS:
            raise InputError(f"a store holds 1…{MAX_WINDOWS} windows, not {windows}")
        config, like = model.config, model.decoder.embed_tokens.weight
        heads = config.decoder_attention_heads
        size = (config.decoder_layers, windows + 1, heads, config.max_source_positions, config.d_model // heads)
        self.windows = windows
        self.keys = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.ones(windows + 1, dtype=torch.int32, device=like.device)
        self.arrived = torch.zeros(MAX_STEP_ROWS * heads, dtype=torch.int32, device=like.device)
        self.positions = [1] * (windows + 1)
        self._free = list(range(windows, PADDING_WINDOW, -1))
        self._lock = threading.Lock()  # windows are encoded on other threads than those that step
        self._starts: dict[int, Tensor] = {}

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @torch.inference_mode()
    def hold(self, memory: WindowMemory, numbers: Sequence[int] | None = None) -> list[int]:
        """Store windows in free slots, or in the slots `numbers`; returns the slot numbers that rows refer to."""
        with self._lock:
            if memory.windows > self.free:
                free = f"{self.free} of {self.windows} slots are free"
                raise CapacityError(f"{memory.windows} windows do not fit: {free}")
            numbers = list(numbers or self._free[: -memory.windows - 1 : -1])
            for number in numbers:
                self._free.remove(number)
        for index, number in enumerate(numbers):
            positions = memory.keys.shape[3]
            self.keys[:, number, :, :positions] = memory.keys[:, index]
            self.values[:, number, :, :positions] = memory.values[:, index]
            self.positions[number] = positions
            self.lengths[number] = positions
        return numbers

    def release(self, window: int) -> None:
        """Free a window's slot; none of its texts may be decoded any further."""
        with self._lock:
            if window in self._free or not 1 <= window <= self.windows:
                raise InputError(f"window {window} is not held")
            self._starts.pop(window, None)
            self._free.append(window)

    def save_start_states(self, hidden: Tensor, starts: Tensor, windows: Tensor) -> None:
        """Store the states of `<|startoftranscript|>`, by window.  # [row, d_model], [row] bool, [row]"""
        for row in starts.nonzero()[:, 0].tolist():
            self._starts[int(windows[row])] = hidden[row].clone()

    def start(self, window: int) -> Tensor | None:
        """The stored state of `<|startoftranscript|>`, if there is one.  # [d_model]"""
        return self._starts.get(window)

    def memory(self, window: int) -> WindowMemory:
        """A window, as a view."""
        index = (slice(None), slice(window, window + 1), slice(None), slice(self.positions[window]))
        return WindowMemory(self.keys[index], self.values[index])

    def read(self, layer: int, window: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a window for one layer.  # each [head, position, head_dim]"""
        positions = self.positions[window]
        return self.keys[layer, window, :, :positions], self.values[layer, window, :, :positions]


class WhisperWriter:
    """The decoder behind the engine's interface; the logit rules of transcripts apply to every sampled token."""

    channels = 2

    def __init__(self, model: Decoding, tokens: WhisperTokens, settings: WhisperSettings, windows: int = 8) -> None:
        config = model.config
        self.model, self.tokens = model, tokens
        self.store = WindowStore(model, windows)
        self.vocabularies: tuple[int, ...] = (config.vocab_size, 2 * (windows + 1))
        self.context_limit = config.max_target_positions
        heads = config.decoder_attention_heads
        self.kv_shape = KVShape(config.decoder_layers, heads, config.d_model // heads)
        self.rules = TimestampRules(tokens, settings.latest_start)
        device = model.decoder.embed_tokens.weight.device
        self._ids = torch.arange(config.vocab_size, device=device)
        self.never = self._mask(settings.suppressed)
        self._not_first = self._mask(settings.suppressed_at_start)
        self._not_plain = self._ids >= tokens.notimestamps
        later = self._not_plain | self.never
        self._not_untimed = (later, later | self._not_first)  # without timestamps: in a started text, at its start
        self._barred = self.never.to(torch.int8) + 2 * self._not_first.to(torch.int8)
        self._known_ids = {
            "TIMES": tokens.timestamps,
            "END": tokens.endoftext,
            "NO_TIMES": tokens.notimestamps,
            "LATEST_START": config.vocab_size if self.rules.latest_start is None else self.rules.latest_start,
            "LAST_IS_TIME": LAST_IS_TIME,
            "BEFORE_IS_TIME": BEFORE_IS_TIME,
            "BEGUN": BEGUN,
            "LATEST_SHIFT": LATEST_SHIFT,
        }
        self.packed = pack_projections(model.decoder)

    def prompt(self, window: int, prompt: Sequence[int], timestamps: bool) -> list[Row]:
        """The prompt rows of a text of a stored window."""
        return [(token, 2 * window + timestamps) for token in prompt]

    @cached_property
    def paged(self) -> Any:
        """The layers in TorchScript; None on other devices than CPUs and for quantised layers."""
        on_cpu = self._ids.device.type == "cpu"
        return paged_decoder(self.model.decoder, self.packed) if on_cpu and self.packed else None

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Hidden states of the last layer.  # [row, 2] → [row, d_model]"""
        windows = rows[:, WINDOW] // 2
        if self.paged is not None and not batch.cache.is_fp8:
            hidden = self._forward_paged(rows[:, TOKEN], windows, batch)
        else:
            hidden = self._forward_layers(rows[:, TOKEN], windows, batch)
        if rows.shape[0] > 1 and not kernels.usable(hidden):
            self.store.save_start_states(hidden, rows[:, TOKEN] == self.tokens.startoftranscript, windows)
        return hidden

    def _forward_paged(self, ids: Tensor, windows: Tensor, batch: RowBatch) -> Tensor:
        store = self.store
        rows = paged_rows(batch, runs_of(windows), store.positions, store.keys)
        memory = (store.keys, store.values)
        hidden: Tensor = self.paged(ids, batch.positions.long(), rows, rows, *flat_pages(batch.cache), *memory)
        return hidden

    def _forward_layers(self, ids: Tensor, windows: Tensor, batch: RowBatch) -> Tensor:
        decoder = self.model.decoder
        x = decoder.embed_tokens(ids) + decoder.embed_positions(batch.positions.long())
        cross_attend = self.cross_attention(windows)
        if self.packed and is_single(x, batch):
            return single_rows_step(decoder, self.packed, x, batch, cross_attend)
        if not kernels.usable(x):
            batch = with_additive_masks(batch, x)
        return decoder.run(x, PagedTexts(batch, cross_attend))

    def cross_attention(self, windows: Tensor) -> CrossAttend:
        """Cross-attention of rows to these windows.  # [row]"""
        if kernels.usable(windows):
            store, numbers = self.store, windows.int()
            return lambda query, index: kernels.window_attention(
                query, store.keys[index], store.values[index], numbers, store.lengths, store.arrived
            )
        runs = runs_of(windows)
        return lambda query, index: self._mixed(query, index, runs)

    def _mixed(self, query: Tensor, index: int, runs: list[tuple[int, int]]) -> Tensor:
        """Cross-attention, one call for each run of rows of one window.  # [row, head, head_dim]"""
        mixed, begin = [], 0
        for window, count in runs:
            keys, values = self.store.read(index, window)
            queries = query[begin : begin + count].transpose(0, 1)
            result = functional.scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
            mixed.append(result.transpose(0, 1))
            begin += count
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """Sample the next token of each text under the rules.  # [sequence, 2]"""
        logits = self.logits(hidden)
        modes = draw.modes.long()
        timed = kernels.usable(logits) or bool((modes & 1).any())
        token = draw.sample(TOKEN, self.ruled(logits, modes, timed))
        return torch.stack([token, modes & ((1 << WINDOW_BITS) - 1)], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits before any rule.  # [row, d_model] → [row, vocabulary] float32"""
        weight = self.model.decoder.embed_tokens.weight
        if self.packed and kernels.usable(hidden) and kernels.takes([weight], hidden.shape[0]):
            return kernels.row_linear(hidden.contiguous(), weight, None, dtype=torch.float32)
        return self.model.decoder.logits(hidden)

    def ruled(self, logits: Tensor, modes: Tensor, timed: bool = True) -> Tensor:
        """Logits under the rules, by the mode of each text.  # [sequence, vocabulary], [sequence]

        `timed` is False where no text has timestamps.
        """
        if kernels.usable(logits):
            return kernels.transcript_rules(logits, modes, self._barred, self._known_ids)
        started = (modes & BEGUN != 0)[:, None]
        if not timed:
            return logits.masked_fill(torch.where(started, *self._not_untimed), FORBIDDEN)
        times = (modes & 1 != 0)[:, None]
        last, previous = modes & LAST_IS_TIME != 0, modes & BEFORE_IS_TIME != 0
        latest = (modes >> LATEST_SHIFT) + self.tokens.timestamps - 1
        later = self.rules.forbidden_after(self._ids, last, previous, latest)
        by_times = torch.where(started, later, self.rules.forbidden_first(self._ids))
        forbidden = torch.where(times, by_times, self._not_plain) | self.never | (~started & self._not_first)
        logits = logits.masked_fill(forbidden, FORBIDDEN)
        return torch.where(times, self.rules.preferred(logits), logits)

    @torch.inference_mode()
    def score(
        self,
        window: int,
        prompt: Sequence[int],
        written: Sequence[int],
        timestamps: bool,
        ended: bool,
        started: bool = False,
        states: Tensor | None = None,
    ) -> Text:
        """Log-probability and no-speech probability of a finished text of a window.

        `states` are the hidden states its tokens were sampled from; without them, one pass computes them.
        # states [token, d_model]
        """
        decoder, start = self.model.decoder, self.store.start(window)
        chosen = [*written, self.tokens.endoftext] if ended else list(written)
        if states is None or start is None:
            ids = torch.tensor([*prompt, *written], device=self._ids.device)
            hidden = decoder(ids[None], self.store.memory(window))[0]
            start = hidden[list(prompt).index(self.tokens.startoftranscript)]
            states = hidden[len(prompt) - 1 :]
        modes = [self.start_mode((0, 2 * window + timestamps)) | (BEGUN if started else 0)]
        for token in chosen[:-1]:
            modes.append(self.next_mode(modes[-1], (token, 2 * window + timestamps)))
        device, logprob = states.device, 0.0
        logits = decoder.logits(torch.cat([start[None], states[: len(chosen)]]))
        if chosen:
            ruled = self.ruled(logits[1:], torch.tensor(modes, device=device), timestamps).log_softmax(-1)
            logprob = float(ruled.gather(1, torch.tensor(chosen, device=device)[:, None]).sum())
        silence = float(logits[0].softmax(-1)[self.tokens.nospeech])
        return Text(list(written), logprob, ended, silence)

    def start_mode(self, last: Row) -> int:
        """The mode of an empty text: its window channel, which also says whether it has timestamps."""
        return last[WINDOW]

    def next_mode(self, mode: int, row: Row) -> int:
        """The mode after a row: whether the last two tokens are timestamps, and the latest timestamp."""
        is_time = self.tokens.is_timestamp(row[TOKEN])
        latest = row[TOKEN] - self.tokens.timestamps + 1 if is_time else mode >> LATEST_SHIFT
        previous = BEFORE_IS_TIME if not mode & BEGUN or mode & LAST_IS_TIME else 0
        return row[WINDOW] | (LAST_IS_TIME if is_time else 0) | previous | BEGUN | (latest << LATEST_SHIFT)

    def next_modes(self, modes: Tensor, rows: Tensor) -> Tensor:
        """`next_mode` of many texts, without leaving the device.  # [sequence], [sequence, 2] → [sequence]"""
        token = rows[:, TOKEN]
        is_time = token >= self.tokens.timestamps
        latest = torch.where(is_time, token - (self.tokens.timestamps - 1), modes >> LATEST_SHIFT)
        is_within = (modes & (BEGUN | LAST_IS_TIME)) == BEGUN
        flags = BEGUN | (is_time * LAST_IS_TIME) | (~is_within * BEFORE_IS_TIME)
        return rows[:, WINDOW] | flags | (latest << LATEST_SHIFT)

    def ends(self, row: Row) -> bool:
        """Whether the row's token is `<|endoftext|>`."""
        return row[TOKEN] == self.tokens.endoftext

    def _mask(self, ids: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        mask[list(ids)] = True
        return mask


class PagedTexts:
    """Attention of the rows of an engine step: prompts, single tokens, drafts.  # queries [row, head, head_dim]"""

    def __init__(self, batch: RowBatch, cross_attend: CrossAttend) -> None:
        self.batch, self.cross_attend = batch, cross_attend

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values to the pages, and attend to each row's text."""
        self.batch.write(layer, key, value)
        return attend(query, layer, self.batch)

    def to_window(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the window of each row."""
        return self.cross_attend(query, layer)


def runs_of(windows: Tensor) -> list[tuple[int, int]]:
    """(window, number of rows) of each run of neighbouring rows of one window.  # [row]"""
    return [(window, len(list(run))) for window, run in groupby(windows.tolist())]


def with_additive_masks(batch: RowBatch, like: Tensor) -> RowBatch:
    """The rows with their masks as additive biases, computed once for all layers."""
    pieces = []
    for piece in batch.pieces:
        seen = piece.visible
        if seen is None and piece.length > 1 and piece.position > 0:
            seen = torch.ones(piece.length, piece.context, dtype=torch.bool, device=like.device).tril(piece.position)
        unseen = None if seen is None else like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        pieces.append(replace(piece, visible=unseen))
    return replace(batch, pieces=tuple(pieces))


def pack_projections(decoder: WhisperDecoder) -> list[tuple[Tensor, Tensor]]:
    """Join the query, key and value projections of every layer into one matrix, of which they become views.

    Empty where projections are not plain linear layers.
    """
    packed = []
    for layer in decoder.stack:
        parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        if any(type(part) is not nn.Linear for part in [*parts, layer.fc1, layer.fc2]):
            return []
        weight, bias = packed_projection(layer)
        become_views(parts, weight)
        layer.self_attn.packed = PackedProjection(weight, bias)
        window = layer.encoder_attn
        for part in (layer.self_attn.out_proj, window.q_proj, window.out_proj, layer.fc1, layer.fc2):
            part.weight.data = column_major(part.weight.detach())
        packed.append((weight, bias))
    return packed


class WindowHeads:
    """Medusa heads over the windows of a writer: states of the next positions from hidden states and newest rows."""

    def __init__(self, heads: WhisperHeads, writer: WhisperWriter) -> None:
        self.heads, self.writer = heads, writer
        self._layer = len(writer.model.decoder.stack) - 1

    def __call__(self, hidden: Tensor, newest: Tensor) -> Tensor:
        """# [sequence, d_model], [sequence, 2] → [sequence, next position, d_model]"""
        windows = (newest[:, WINDOW] // 2).repeat_interleave(self.heads.places)
        embedded = self.writer.model.decoder.embed_tokens(newest[:, TOKEN])
        attend = self.writer.cross_attention(windows)

        def cross_attend(query: Tensor) -> Tensor:
            return attend(query.flatten(0, 1), self._layer).view_as(query)

        return self.heads(hidden, embedded, cross_attend)
