"""The pre-LN transformer layer of Whisper, with keys and values of a stream kept as a value."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST_CAPACITY = 64


@dataclass
class _KeyValueBuffer:
    keys: Tensor  # [batch, head, capacity, head_dim]
    values: Tensor
    filled: int


@dataclass(frozen=True)
class KeyValueState:
    """Keys and values of the positions a stream has passed.

    States of one stream share memory: a step writes behind the last position. Stepping from an older state (a rewind or
    a fork) copies first, so no state ever changes under its holder.
    """

    buffer: _KeyValueBuffer
    length: int

    @property
    def batch(self) -> int:
        """How many streams this state holds side by side."""
        return self.buffer.keys.shape[0]

    @property
    def keys(self) -> Tensor:
        """All keys so far.  # [batch, head, length, head_dim]"""
        return self.buffer.keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """All values so far.  # [batch, head, length, head_dim]"""
        return self.buffer.values[:, :, : self.length]

    def copy(self) -> "KeyValueState":
        """The same state in memory of its own."""
        return KeyValueState(_KeyValueBuffer(self.keys.clone(), self.values.clone(), self.length), self.length)

    def append(self, keys: Tensor, values: Tensor) -> "KeyValueState":
        """The state with more positions behind it."""
        end = self.length + keys.shape[2]
        buffer = self.buffer
        if buffer.filled != self.length or end > buffer.keys.shape[2]:
            buffer = self._moved(capacity=max(SMALLEST_CAPACITY, 2 * self.length, end))
        buffer.keys[:, :, self.length : end] = keys
        buffer.values[:, :, self.length : end] = values
        buffer.filled = end
        return KeyValueState(buffer, end)

    def _moved(self, capacity: int) -> _KeyValueBuffer:
        batch, heads, _, head_dim = self.buffer.keys.shape
        keys, values = (t.new_empty(batch, heads, capacity, head_dim) for t in (self.keys, self.values))
        keys[:, :, : self.length] = self.keys
        values[:, :, : self.length] = self.values
        return _KeyValueBuffer(keys, values, self.length)


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

    def initial_state(self, batch: int = 1) -> KeyValueState:
        """The state before the first position."""
        empty = self.k_proj.weight.new_empty(batch, self.heads, 0, self.head_dim)
        return KeyValueState(_KeyValueBuffer(empty, empty, 0), 0)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions at once; `mask` is True (or 0.0) where a query may look, [.., query, key]."""
        query, key, value = self._project(x)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self._output(mixed)

    def step(self, states: Sequence[KeyValueState], x: Tensor) -> tuple[Tensor, list[KeyValueState]]:
        """The next positions of streams of different lengths, rows of `x` in the order of `states`."""
        rows = [state.batch for state in states]
        projected = zip(*(torch.split_with_sizes(t, rows) for t in self._project(x)), strict=True)
        after, mixed = [], []
        for state, (query, key, value) in zip(states, projected, strict=True):
            seen = state.append(key, value)
            mask = _sees_past(x.shape[1], state.length, x.device) if x.shape[1] > 1 else None
            mixed.append(functional.scaled_dot_product_attention(query, seen.keys, seen.values, attn_mask=mask))
            after.append(seen)
        return self._output(torch.cat(mixed)), after

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return query, key, value

    def _output(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected


def _sees_past(new: int, past: int, device: torch.device) -> Tensor:
    return torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)  # [query, key]


class WhisperLayer(nn.Module):
    """x + attention(norm(x)), then x + fc2(gelu(fc1(norm(x))))."""

    def __init__(self, d_model: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = WhisperAttention(d_model, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn)
        self.fc2 = nn.Linear(ffn, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def initial_state(self, batch: int = 1) -> KeyValueState:
        """The state before the first position."""
        return self.self_attn.initial_state(batch)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """All positions at once.  # [batch, time, d_model] → the same; give `mask` or `causal`, not both"""
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask, causal)
        return self._feed_forward(x)

    def step(self, state: KeyValueState, x: Tensor) -> tuple[Tensor, KeyValueState]:
        """The next positions of a causal stream.  # [batch, time, d_model]"""
        y, (after,) = self.step_batch([state], x)
        return y, after

    def step_batch(self, states: Sequence[KeyValueState], x: Tensor) -> tuple[Tensor, list[KeyValueState]]:
        """The next positions of several causal streams of different lengths; rows of `x` follow `states`."""
        attended, after = self.self_attn.step(states, self.self_attn_layer_norm(x))
        return self._feed_forward(x + attended), after

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return out
