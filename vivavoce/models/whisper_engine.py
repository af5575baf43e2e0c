"""Whisper's decoder as the engine runs it: texts of many windows in flight together, each joined and left at any step.

A row is a token and the window it is written of. The text's keys and values are in the engine's pages; those of windows
lie in a `WindowStore`, written once by whoever encoded them and read by every text, beam or draft of that window.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import Draw, Row
from vivavoce.models.whisper import CrossAttention, Whisper, WhisperDecoderLayer, WindowMemory
from vivavoce.models.whisper_rules import FORBIDDEN, TimestampRules
from vivavoce.models.whisper_settings import WhisperSettings
from vivavoce.models.whisper_tokens import WhisperTokens
from vivavoce.nn import kernels
from vivavoce.nn.attention import attend
from vivavoce.nn.paged import KVShape, PagedCache, RowBatch

TOKEN, WINDOW = 0, 1
PAGE_SIZE = 50  # divides the 1500 positions of a window
MOST_WINDOWS = 2047
NOBODY = 0  # the window of rows that only fill a batch up

# What a text has written, in the bits of its mode above those of its window channel.
WINDOW_BITS = 12
LAST_IS_TIME, BEFORE_IS_TIME, BEGUN = 1 << 12, 1 << 13, 1 << 14
LATEST_SHIFT = 15


class WindowStore:
    """Keys and values of encoded windows, a place for each, given back when its texts are done."""

    def __init__(self, model: Whisper, windows: int) -> None:
        if not 1 <= windows <= MOST_WINDOWS:
            raise InputError(f"a store holds 1…{MOST_WINDOWS} windows, not {windows}")
        config, like = model.config, model.decoder.embed_tokens.weight
        heads = config.decoder_attention_heads
        shape = KVShape(config.decoder_layers, heads, config.d_model // heads)
        self.windows = windows
        self.pages_each = -(-config.max_source_positions // PAGE_SIZE)
        pages = (windows + 1) * self.pages_each
        self.cache = PagedCache.allocate(shape, pages, PAGE_SIZE, like.dtype, like.device)
        table = torch.arange(pages, dtype=torch.int32, device=like.device)
        self.page_table = table.view(windows + 1, self.pages_each)
        self.lengths = torch.ones(windows + 1, dtype=torch.int32, device=like.device)
        self._positions = [1] * (windows + 1)
        self._free = list(range(windows, NOBODY, -1))

    @property
    def free(self) -> int:
        """How many windows more can be held."""
        return len(self._free)

    @torch.inference_mode()
    def hold(self, memory: WindowMemory) -> list[int]:
        """Take in windows; the numbers by which rows name them."""
        if memory.windows > self.free:
            raise CapacityError(f"{memory.windows} windows do not fit: {self.free} of {self.windows} places are free")
        numbers = [self._free.pop() for _ in range(memory.windows)]
        for index, number in enumerate(numbers):
            keys, values = self._places(number, memory.keys.shape[3])
            keys.copy_(memory.keys[:, index].transpose(1, 2))
            values.copy_(memory.values[:, index].transpose(1, 2))
            self._positions[number] = memory.keys.shape[3]
            self.lengths[number] = memory.keys.shape[3]
        return numbers

    def release(self, window: int) -> None:
        """Give a window's place back; no text of it may go on."""
        if window in self._free or not 1 <= window <= self.windows:
            raise InputError(f"window {window} is not held")
        self._free.append(window)

    def memory(self, window: int) -> WindowMemory:
        """What is held of a window, without a copy."""
        keys, values = self._places(window, self._positions[window])
        return WindowMemory(keys.transpose(1, 2)[:, None], values.transpose(1, 2)[:, None])

    def read(self, layer: int, window: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a window for one layer.  # each [head, position, head_dim]"""
        memory = self.memory(window)
        return memory.keys[layer, 0], memory.values[layer, 0]

    def _places(self, window: int, positions: int) -> tuple[Tensor, Tensor]:
        """Where a window's keys and values lie.  # each [layer, position, head, head_dim]"""
        mine = slice(window * self.pages_each, (window + 1) * self.pages_each)
        keys, values = self.cache.keys[:, mine].flatten(1, 2), self.cache.values[:, mine].flatten(1, 2)
        return keys[:, :positions], values[:, :positions]


class WhisperWriter:
    """The decoder behind the engine's interface, with the rules of a transcript applied to every token it draws."""

    channels = 2

    def __init__(self, model: Whisper, tokens: WhisperTokens, settings: WhisperSettings, windows: int = 8) -> None:
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
        self._never = self._mask(settings.suppressed)
        self._not_first = self._mask(settings.suppressed_at_start)
        self._not_plain = self._ids >= tokens.notimestamps

    def prompt(self, window: int, prompt: Sequence[int], timestamps: bool) -> list[Row]:
        """The rows a text of a held window starts from."""
        return [(token, 2 * window + timestamps) for token in prompt]

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Hidden states of the last layer.  # [row, 2] → [row, d_model]"""
        decoder = self.model.decoder
        windows = rows[:, WINDOW] // 2
        x = decoder.embed_tokens(rows[:, TOKEN]) + decoder.embed_positions(batch.positions.long())
        for index, layer in enumerate(decoder.stack):
            x = x + self._attend_text(layer, index, x, batch)
            x = x + self._attend_window(layer, index, x, windows)
            x = layer.feed_forward(x)
        hidden: Tensor = decoder.layer_norm(x)
        return hidden

    def _attend_text(self, layer: WhisperDecoderLayer, index: int, x: Tensor, batch: RowBatch) -> Tensor:
        attention = layer.self_attn
        normed = layer.self_attn_layer_norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (attention.heads, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        batch.write(index, key, value)
        out: Tensor = attention.out_proj(attend(query, index, batch).flatten(-2))
        return out

    def _attend_window(self, layer: WhisperDecoderLayer, index: int, x: Tensor, windows: Tensor) -> Tensor:
        attention: CrossAttention = layer.encoder_attn
        query = attention.q_proj(layer.encoder_attn_layer_norm(x)).unflatten(-1, (attention.heads, attention.head_dim))
        mixed = (
            self._mixed_by_kernel(query, index, windows)
            if kernels.usable(query)
            else self._mixed(query, index, windows)
        )
        out: Tensor = attention.out_proj(mixed.flatten(-2))
        return out

    def _mixed_by_kernel(self, query: Tensor, index: int, windows: Tensor) -> Tensor:
        """Every row is a single one here: no row of a window is hidden from another."""
        last = self.store.lengths[windows] - 1
        rows = RowBatch(self.store.cache, self.store.page_table, windows.int(), last, query.shape[0], ())
        return kernels.paged_decode(query, index, rows)

    def _mixed(self, query: Tensor, index: int, windows: Tensor) -> Tensor:
        """Neighbouring rows of one window together.  # [row, head, head_dim]"""
        mixed, begin = [], 0
        for window, run in groupby(windows.tolist()):
            end = begin + len(list(run))
            keys, values = self.store.read(index, window)
            queries = query[begin:end].transpose(0, 1)
            mixed.append(functional.scaled_dot_product_attention(queries, keys, values).transpose(0, 1))
            begin = end
        return torch.cat(mixed)

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """The next token of each text under the rules; its window stays.  # [sequence, 2]"""
        logits = self.model.decoder.logits(hidden)
        channel = draw.modes.long() & ((1 << WINDOW_BITS) - 1)
        token = draw.sample(TOKEN, self.ruled(logits, draw.modes.long()))
        return torch.stack([token, channel], dim=1)

    def ruled(self, logits: Tensor, modes: Tensor) -> Tensor:
        """Logits under the rules, by what each text has written.  # [sequence, vocabulary], [sequence]"""
        begun = (modes & BEGUN != 0)[:, None]
        times = (modes & 1 != 0)[:, None]
        last, before = modes & LAST_IS_TIME != 0, modes & BEFORE_IS_TIME != 0
        latest = (modes >> LATEST_SHIFT) + self.tokens.timestamps - 1
        after = self.rules.forbidden_after(self._ids, last, before, latest)
        timed = torch.where(begun, after, self.rules.forbidden_first(self._ids))
        forbidden = torch.where(times, timed, self._not_plain) | self._never | (~begun & self._not_first)
        logits = logits.masked_fill(forbidden, FORBIDDEN)
        return torch.where(times, self.rules.preferred(logits), logits)

    def start_mode(self, last: Row) -> int:
        """Nothing is written yet; whether times are wanted stands in the row."""
        return last[WINDOW]

    def next_mode(self, mode: int, row: Row) -> int:
        """What the rules must know of the text after this row."""
        is_time = self.tokens.is_timestamp(row[TOKEN])
        latest = row[TOKEN] - self.tokens.timestamps + 1 if is_time else mode >> LATEST_SHIFT
        before = BEFORE_IS_TIME if not mode & BEGUN or mode & LAST_IS_TIME else 0
        return row[WINDOW] | (LAST_IS_TIME if is_time else 0) | before | BEGUN | (latest << LATEST_SHIFT)

    def ends(self, row: Row) -> bool:
        """`<|endoftext|>`."""
        return row[TOKEN] == self.tokens.endoftext

    def _mask(self, ids: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self._ids), dtype=torch.bool, device=self._ids.device)
        mask[list(ids)] = True
        return mask
