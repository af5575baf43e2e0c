"""Whisper in every published size, and Breeze-ASR-25: encoder, decoder, and one forward pass for all its readable uses.

log-mel at 100 Hz → two convolutions (the second halves the rate) → sinusoidal positions → encoder layers; then a text
decoder whose layers attend to the text so far (self-attention) and to the window's states (cross-attention).
The keys and values of the window are computed once (`WindowMemory`) and shared by every row that reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CapacityError, InputError
from vivavoce.models.checkpoint import load_weights, save_weights
from vivavoce.models.whisper.config import CONV_STRIDE, WhisperConfig, open_whisper
from vivavoce.models.whisper.layer import WhisperAttention, WhisperLayer
from vivavoce.nn.attention import sinusoids
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.streaming import Extension, StreamCache, extend


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
    """Texts that are decoded in step: the self-attention cache of each and the memory of its window.

    Rows are ordered by window: with three rows per window, rows 0…2 are of window 0.
    """

    past: StreamCache
    memory: WindowMemory

    @property
    def length(self) -> int:
        """Tokens of each text so far."""
        return self.past.length


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
    """Where the queries of decoder layers look. The rest of a layer is the same for whole texts, for texts that are
    continued, and for rows over the engine's pages.
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
    """Attention of the next tokens of texts to what a `StreamCache` holds of them."""

    def __init__(self, streams: Extension, memory: WindowMemory) -> None:
        super().__init__(memory)
        self.streams = streams

    def to_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention to all tokens so far."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return self.streams.attend(layer, query, key, value).transpose(1, 2)


class AlignmentWeights(WholeTexts):
    """Attention of whole texts, one per window, that records how (layer, head) pairs weigh the window's positions."""

    def __init__(self, memory: WindowMemory, heads: Sequence[tuple[int, int]], positions: int | None = None) -> None:
        super().__init__(memory)
        self.heads, self.positions = heads, positions
        self._by_layer: dict[int, Tensor] = {}

    def to_window(self, layer: int, query: Tensor) -> Tensor:
        """Attend, and record the weights over the first `positions`, or all of them."""
        if any(layer == wanted for wanted, _ in self.heads):
            keys = self.memory.keys[layer][:, :, : self.positions]
            scores = query.transpose(1, 2) * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
            self._by_layer[layer] = scores.float().softmax(-1)
        return super().to_window(layer, query)

    @property
    def layers(self) -> int:
        """How many layers have to be run for all pairs."""
        return 1 + max(layer for layer, _ in self.heads)

    @property
    def weights(self) -> Tensor:
        """# [row, pair, token, position]"""
        return torch.stack([self._by_layer[layer][:, head] for layer, head in self.heads], dim=1)


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
        x = functional.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
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
        """The layers with their type."""
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

    def attention(
        self, tokens: Tensor, memory: WindowMemory, heads: Sequence[tuple[int, int]], positions: int | None = None
    ) -> Tensor:
        """Cross-attention weights of (layer, head) pairs over the first positions of their windows, or all of them.

        # [row, token] → [row, pair, token, position]
        """
        weights = AlignmentWeights(memory, heads, positions)
        self.run(self.embed(tokens), weights, weights.layers)
        return weights.weights


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
