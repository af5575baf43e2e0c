"""Whisper in every published size, and Breeze-ASR-25: encoder, decoder and their forward pass.

log-mel at 100 Hz → two convolutions (the second halves the rate) → sinusoidal positions → encoder layers; then a text
decoder whose layers attend to the text so far (self-attention) and to the window's states (cross-attention).
The keys and values of the window are computed once (`WindowMemory`) and shared by every row that reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CapacityError, InputError
from vivavoce.models.checkpoint import load_weights, save_weights
from vivavoce.models.whisper.config import CONV_STRIDE, WhisperConfig
from vivavoce.models.whisper.files import open_whisper
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.streaming import Extension, StreamCache, extend


class PackedProjection(nn.Module):
    """Query, key and value projection as one matrix, of which the published three are views. Not in checkpoints."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """# [.., d_model] → [.., 3 × d_model]"""
        return functional.linear(x, self.weight, self.bias)


class WhisperAttention(nn.Module):
    """Multi-head self-attention with the published names; the key projection has no bias."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.packed: nn.Module | None = None
        """Query, key and value projection as one product: int8, or plain weights that the three are views of."""

    @property
    def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The query, key and value projections."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions in one pass; `mask` is True (or 0.0) where a query may attend, [.., query, key]."""
        query, key, value = self._project(x)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self._output(mixed)

    def step(self, streams: Extension, layer: int, x: Tensor) -> Tensor:
        """The next positions of streams, as layer number `layer` of their caches."""
        return self._output(streams.attend(layer, *self._project(x)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value.  # [.., d_model] → [.., head, head_dim] each"""
        if self.packed is not None:
            query, key, value = self.packed(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
            return query, key, value
        query, key, value = (project(x).unflatten(-1, (self.heads, self.head_dim)) for project in self.projections)
        return query, key, value

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` with time after the heads.  # [batch, time, d_model] → [batch, head, time, head_dim] each"""
        query, key, value = (part.transpose(1, 2) for part in self.project(x))
        return query, key, value

    def _output(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class WhisperLayer(nn.Module):
    """x + attention(norm(x)), then x + fc2(gelu(fc1(norm(x))))."""

    def __init__(self, d_model: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def initial_state(self, batch: int = 1, layers: int = 1) -> StreamCache:
        """The cache of a stack of such layers before the first position."""
        attention = self.self_attn
        return StreamCache.empty(layers, attention.heads, attention.head_dim, batch, attention.k_proj.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions in one pass; pass `mask` or `causal`, not both.  # [batch, time, d_model] → the same"""
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask, causal)
        return self._feed_forward(x)

    def step(self, state: StreamCache, x: Tensor) -> tuple[Tensor, StreamCache]:
        """The next positions of a stream through this single layer.  # [batch, time, d_model]"""
        streams = extend([state], x.shape[1])
        return self.step_in_stack(streams, 0, x), streams.after[0]

    def step_in_stack(self, streams: Extension, layer: int, x: Tensor) -> Tensor:
        """The next positions of streams through this layer, number `layer` of a stack; rows in the streams' order."""
        x = x + self.self_attn.step(streams, layer, self.self_attn_layer_norm(x))
        return self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return out


@dataclass(frozen=True)
class WindowMemory:
    """Cross-attention keys and values of encoded windows.  # each [layer, window, head, position, head_dim]"""

    keys: Tensor
    values: Tensor

    @property
    def windows(self) -> int:
        """The number of windows."""
        return self.keys.shape[1]

    def of(self, windows: Sequence[int]) -> "WindowMemory":
        """Some of the windows, in this order."""
        index = torch.as_tensor(windows, device=self.keys.device)
        return WindowMemory(self.keys[:, index], self.values[:, index])

    def one(self, window: int) -> "WindowMemory":
        """One window, as a view."""
        return WindowMemory(self.keys[:, window : window + 1], self.values[:, window : window + 1])


@dataclass(frozen=True)
class DecoderState:
    """Texts decoded as one batch: the self-attention cache of each and the memory of its window.

    Rows are ordered by window: with three rows per window, rows 0…2 are of window 0.
    """

    past: StreamCache
    memory: WindowMemory

    @property
    def length(self) -> int:
        """Tokens of each text so far."""
        return self.past.length

    def rewound(self, length: int) -> "DecoderState":
        """The state after so many tokens of each text."""
        return replace(self, past=replace(self.past, length=length))


class CrossAttention(WhisperAttention):
    """Attention to the encoder's states, whose keys and values are computed once per window."""

    def cross_kv(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of windows.  # [window, position, d_model] → [window, head, position, head_dim] twice"""
        keys, values = (project(states).unflatten(-1, (self.heads, -1)) for project in (self.k_proj, self.v_proj))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def query(self, x: Tensor) -> Tensor:
        """# [.., d_model] → [.., head, head_dim]"""
        query: Tensor = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return query


class DecoderAttention(Protocol):
    """Self- and cross-attention of decoder layers. All else in a layer is the same for whole texts, for continued
    texts, and for rows over the engine's pages.
    """

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store new keys and values, and attend to the text so far.  # each [.., head, head_dim]"""
        ...

    def to_window(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the encoder's states.  # [.., head, head_dim]"""
        ...


class WholeTexts:
    """Attention of whole texts, one or more rows per window.  # queries [row, time, head, head_dim]"""

    def __init__(self, memory: WindowMemory) -> None:
        self.memory = memory

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention within the texts."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    def to_window(self, layer: int, query: Tensor) -> Tensor:
        """Rows of one window share its keys and values."""
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        by_window = query.reshape(keys.shape[0], -1, *query.shape[2:]).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(by_window, keys, values)
        return mixed.transpose(1, 2).reshape(query.shape)


class ContinuedTexts(WholeTexts):
    """Attention of the next tokens of texts whose previous tokens are in a `StreamCache`."""

    def __init__(self, streams: Extension, memory: WindowMemory) -> None:
        super().__init__(memory)
        self.streams = streams

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention to all tokens so far."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return self.streams.attend(layer, query, key, value).transpose(1, 2)


class WhisperDecoderLayer(WhisperLayer):
    """The encoder's layer with attention to the window between its two halves."""

    def __init__(self, d_model: int, heads: int, ffn: int) -> None:
        super().__init__(d_model, heads, ffn)
        self.encoder_attn = CrossAttention(d_model, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)

    def decode(self, x: Tensor, layer: int, attention: DecoderAttention) -> Tensor:
        """The next tokens of texts through this layer, number `layer` of its stack.  # [.., d_model] → the same"""
        mixed = attention.to_text(layer, *self.self_attn.project(self.self_attn_layer_norm(x)))
        x = x + self.self_attn.out_proj(mixed.flatten(-2))
        mixed = attention.to_window(layer, self.encoder_attn.query(self.encoder_attn_layer_norm(x)))
        x = x + self.encoder_attn.out_proj(mixed.flatten(-2))
        return self._feed_forward(x)


class WhisperEncoder(nn.Module):
    """Log-mel windows to states, one every 20 ms."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=CONV_STRIDE, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, config.d_model)
        self.layers = nn.ModuleList(
            WhisperLayer(config.d_model, config.encoder_attention_heads, config.encoder_ffn_dim)
            for _ in range(config.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.fast: nn.Module | None = None
        """A faster implementation of the whole encoder, if one is installed."""

    def forward(self, mel: Tensor) -> Tensor:
        """States of windows, which may be shorter than 30 s.  # [window, mel, frame] → [window, frame / 2, d_model]"""
        config = self.config
        if mel.ndim != 3 or mel.shape[1] != config.num_mel_bins or not 0 < mel.shape[2] <= config.window_frames:
            wanted = f"[window, {config.num_mel_bins}, 1…{config.window_frames}]"
            raise InputError(f"this Whisper takes mels {wanted}, not {list(mel.shape)}")
        if self.fast is not None:
            states: Tensor = self.fast(mel)
            return states
        return self.finished(self.embedded(mel))

    def embedded(self, mel: Tensor) -> Tensor:
        """What the first layer reads.  # [window, mel, frame] → [window, frame / 2, d_model]"""
        x = functional.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)
        return x + self.embed_positions.weight[: x.shape[1]]

    def finished(self, x: Tensor, first: int = 0) -> Tensor:
        """The states, from what layer number `first` reads."""
        for layer in self.layers[first:]:
            x = layer(x)
        normed: Tensor = self.layer_norm(x.to(self.layer_norm.weight.dtype))
        return normed


class WhisperDecoder(nn.Module):
    """Tokens to the logits of the next ones."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(config.max_target_positions, config.d_model)
        self.layers = nn.ModuleList(
            WhisperDecoderLayer(config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim)
            for _ in range(config.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.fast_lm_head: nn.Module | None = None
        """A faster product with `embed_tokens`, if one is installed."""
        self.fast_cross_kv: nn.Module | None = None
        """One product for the keys and values of all layers, if one is installed."""

    @property
    def stack(self) -> Sequence[WhisperDecoderLayer]:
        """`layers`, typed."""
        return cast(Sequence[WhisperDecoderLayer], self.layers)

    def cross_kv(self, states: Tensor) -> WindowMemory:
        """Cross-attention keys and values of windows, for all layers.  # [window, position, d_model]"""
        if self.fast_cross_kv is not None:
            attention, layers = self.stack[0].encoder_attn, len(self.stack)
            joined: Tensor = self.fast_cross_kv(states)
            by_layer = joined.unflatten(-1, (layers, 2, attention.heads, attention.head_dim)).permute(2, 3, 0, 4, 1, 5)
            return WindowMemory(by_layer[:, 0], by_layer[:, 1])
        pairs = [layer.encoder_attn.cross_kv(states) for layer in self.stack]
        return WindowMemory(torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs]))

    def forward(self, tokens: Tensor, memory: WindowMemory) -> Tensor:
        """Hidden states of whole texts, one or more a window.  # [row, token] → [row, token, d_model]"""
        return self.run(self.embed(tokens), WholeTexts(memory))

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Tokens of texts from position `first` on.  # [row, token] → [row, token, d_model]"""
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded + self.embed_positions.weight[first : first + tokens.shape[1]]

    def run(self, x: Tensor, attention: DecoderAttention, layers: int | None = None) -> Tensor:
        """Embedded tokens through the layers, or the first of them, and the last norm.  # [.., d_model] → the same"""
        for index, layer in enumerate(islice(self.stack, layers)):
            x = layer.decode(x, index, attention)
        hidden: Tensor = self.layer_norm(x)
        return hidden

    def initial_state(self, memory: WindowMemory, rows_per_window: int = 1) -> DecoderState:
        """The state before the first token."""
        rows = memory.windows * rows_per_window
        return DecoderState(self.stack[0].initial_state(rows, layers=len(self.stack)), memory)

    def step(self, state: DecoderState, tokens: Tensor) -> tuple[Tensor, DecoderState]:
        """Hidden states of the next tokens of every text.  # [row, token] → [row, token, d_model]"""
        first, new = state.length, tokens.shape[1]
        if first + new > self.config.max_target_positions:
            raise CapacityError(
                f"{first + new} tokens are more than the {self.config.max_target_positions} positions of this Whisper"
            )
        streams = extend([state.past], new)
        hidden = self.run(self.embed(tokens, first), ContinuedTexts(streams, state.memory))
        return hidden, DecoderState(streams.after[0], state.memory)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next tokens.  # […, d_model] → […, vocabulary] float32"""
        if self.fast_lm_head is not None:
            logits: Tensor = self.fast_lm_head(hidden)
            return logits.float()
        return functional.linear(hidden, self.embed_tokens.weight).float()


class Whisper(nn.Module):
    """Encoder and decoder under their published names."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Whisper":
        """A folder in Hugging Face's layout, or one of OpenAI's files."""
        config, checkpoint = open_whisper(source)
        with checkpoint:
            with allocating(device, dtype):
                model = cls(config)
            load_weights(model, checkpoint, progress=progress)
        return model.requires_grad_(False).eval()

    @classmethod
    def random(
        cls,
        config: WhisperConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> "Whisper":
        """Random weights, for measuring speed and for tests."""
        with allocating(device, dtype):
            model = cls(config)
        fill_randomly(model, seed)
        with torch.no_grad():
            model.encoder.embed_positions.weight.copy_(sinusoids(config.max_source_positions, config.d_model))
        return model.requires_grad_(False).eval()

    def save(self, folder: str | Path, **ids: int) -> None:
        """Write weights and `config.json` in Hugging Face's layout."""
        save_weights(nn.ModuleDict({"model": self}), folder)
        self.config.write(folder, **ids)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        """Logits of whole texts, one a window.  # [window, mel, frame], [window, token] → [window, token, id]"""
        memory = self.decoder.cross_kv(self.encoder(mel))
        return self.decoder.logits(self.decoder(tokens, memory))
