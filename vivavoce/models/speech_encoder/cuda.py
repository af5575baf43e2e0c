"""The speech encoder's steps replayed as CUDA graphs; tests hold the codes equal to those of `model.py`.

A step is one code of each stream. A graph serves a bucket of streams and a capacity of past positions: past keys and
values are copied to the graph's input buffer, new ones are appended to the cache of each stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.cuda_graphs import Graphed, bucket_for
from vivavoce.nn.streaming import Extension, attend_within

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
CAPACITIES = (128, 512)  # positions; a whole segment is added as the last one
POSITIONS_PER_PASS = 8192  # of all streams together


@dataclass
class _StreamKV:
    """Keys and values of one stream. A state at its end appends in place; an older state copies first."""

    keys_values: Tensor  # [layer, 2, head, capacity, dim]
    filled: int = 0


@dataclass(frozen=True)
class GraphedEncoderState:
    """State of one stream inside its segment."""

    position: int  # positions encoded so far
    conv1: Tensor
    conv2: Tensor
    past: _StreamKV


class _GraphKey(NamedTuple):
    """The key of a captured graph."""

    streams: int
    capacity: int


class _GraphAttention:
    """Attention to past positions in a buffer of fixed capacity and to new ones, whose keys and values go to `new`."""

    def __init__(self, pasts: Tensor, positions: Tensor, new: int) -> None:
        self._pasts = pasts  # [layer, 2, stream, head, capacity, dim]
        self.new: list[Tensor] = []  # per layer [2, stream, head, new, dim]
        capacity = pasts.shape[-2]
        past = torch.arange(capacity, device=pasts.device) >= positions[:, None]
        hidden_past = past[:, None, None, :].expand(-1, 1, new, -1)
        hidden_new = (
            torch.ones(new, new, dtype=torch.bool, device=pasts.device).triu(1).expand(len(positions), 1, -1, -1)
        )
        hidden = torch.cat([hidden_past, hidden_new], dim=-1)
        self._bias = torch.zeros(hidden.shape, dtype=pasts.dtype, device=pasts.device).masked_fill_(hidden, -torch.inf)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Same interface as `Extension.attend`."""
        self.new.append(torch.stack([key, value]))
        keys, values = torch.cat([self._pasts[layer], self.new[-1]], dim=-2)
        return attend_within(query, keys, values, self._bias)


class GraphedSpeechEncoder:
    """CUDA-graph implementation of `SpeechEncoder.step_batch` on its weights."""

    def __init__(self, encoder: SpeechEncoder) -> None:
        self.encoder, self.config, self.conv1 = encoder, encoder.config, encoder.conv1
        self._layers = cast(Sequence[WhisperLayer], encoder.layers)
        self._capacities = (*[each for each in CAPACITIES if each < self._max_positions], self._max_positions)
        self._graphs = Graphed(self._graph_body)
        positions = max(POSITIONS_PER_PASS, self._max_positions)
        self._past_buffer = self.conv1.weight.new_zeros(positions * len(self._layers) * 2 * self.config.d_model)

    def __call__(self, mel: Tensor) -> Tensor:
        """Codes of whole sounds, by the plain encoder.  # [batch, mel, frame] → [batch, code]"""
        codes: Tensor = self.encoder(mel)
        return codes

    def initial_state(self, batch: int = 1) -> GraphedEncoderState:
        """The state of one stream before the first frame of a segment."""
        return GraphedEncoderState(
            0, self.encoder.conv1.initial_state(batch), self.encoder.conv2.initial_state(batch), self._new_kv(0)
        )

    def step(self, state: GraphedEncoderState, mel: Tensor) -> tuple[Tensor, GraphedEncoderState]:
        """Codes of the next frames, a multiple of 8.  # [1, mel, frame] → [1, frame / 8]"""
        codes, (new_states,) = self.step_batch([state], mel)
        return codes, new_states

    def step_batch(
        self, states: Sequence[GraphedEncoderState], mel: Tensor
    ) -> tuple[Tensor, list[GraphedEncoderState]]:
        """Codes of the next frames of streams at any positions.  # [stream, mel, frame] → [stream, code]"""
        new_states, codes = list(states), []
        for piece in mel.to(self.conv1.weight.dtype).split(self.config.frames_per_code, dim=-1):
            new, new_states = self._step(new_states, piece)
            codes.append(new)
        return torch.cat(codes, dim=1), new_states

    @torch.inference_mode()
    def warm_up(self, max_streams: int) -> None:
        """Capture the steps of up to `max_streams` streams ahead of use."""
        frames = self.config.frames_per_code
        for streams in [bucket for bucket in reversed(BUCKETS) if bucket <= max_streams]:
            for capacity in [each for each in self._capacities if streams <= self._max_streams(each)]:
                position = capacity - self._positions_per_code
                states = [
                    replace(self.initial_state(), position=position, past=self._new_kv(position))
                    for _ in range(streams)
                ]
                self.step_batch(states, self.conv1.weight.new_zeros(streams, self.config.num_mel_bins, frames))

    @property
    def _max_positions(self) -> int:
        return self.config.max_source_positions

    @property
    def _positions_per_code(self) -> int:
        return self.config.pooling_kernel_size

    def _step(self, states: list[GraphedEncoderState], mel: Tensor) -> tuple[Tensor, list[GraphedEncoderState]]:
        states = [self.initial_state() if state.position == self._max_positions else state for state in states]
        by_capacity: dict[int, list[int]] = {}
        for index, state in enumerate(states):
            by_capacity.setdefault(bucket_for(self._capacities, state.position), []).append(index)
        codes = torch.empty(len(states), 1, dtype=torch.int64, device=mel.device)
        for capacity, members in by_capacity.items():
            max_streams = self._max_streams(capacity)
            for first in range(0, len(members), max_streams):
                batch = members[first : first + max_streams]
                rows = torch.tensor(batch, device=mel.device)
                new, new_states = self._run_graph([states[index] for index in batch], mel[rows], capacity)
                codes[rows] = new
                for index, state in zip(batch, new_states, strict=True):
                    states[index] = state
        return codes, states

    def _run_graph(
        self, states: list[GraphedEncoderState], mel: Tensor, capacity: int
    ) -> tuple[Tensor, list[GraphedEncoderState]]:
        count = len(states)
        step = _GraphKey(bucket_for(BUCKETS, count), capacity)
        missing = step.streams - count
        positions = torch.tensor([*[state.position for state in states], *[0] * missing])
        contexts = [torch.cat([getattr(state, name) for state in states]) for name in ("conv1", "conv2")]
        filled = [functional.pad(each, (0, 0, 0, 0, 0, missing)) for each in (mel, *contexts)]
        pasts = self._pasts(step)
        for row, state in enumerate(states):
            pasts[:, :, row, :, : state.position] = state.past.keys_values[..., : state.position, :]
        codes, conv1, conv2, new = self._graphs(step, [*filled, positions.to(mel.device, non_blocking=True)])
        new_states = [
            GraphedEncoderState(
                state.position + self._positions_per_code,
                conv1[row : row + 1],
                conv2[row : row + 1],
                self._append_kv(state, new[:, :, row]),
            )
            for row, state in enumerate(states)
        ]
        return codes[:count], new_states

    def _max_streams(self, capacity: int) -> int:
        """Max streams of one pass at this capacity."""
        return max(bucket for bucket in BUCKETS if bucket == 1 or bucket * capacity <= POSITIONS_PER_PASS)

    def _pasts(self, step: _GraphKey) -> Tensor:
        """The input buffer of a graph, shared by all graphs.  # [layer, 2, stream, head, capacity, dim]

        Values of earlier steps beyond a past are masked and finite, so they have no effect.
        """
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, step.streams, attention.heads, step.capacity, attention.head_dim)
        return self._past_buffer[: math.prod(shape)].view(shape)

    def _append_kv(self, state: GraphedEncoderState, new: Tensor) -> _StreamKV:
        """A stream's past with new keys and values appended.  # [layer, 2, head, new, dim]"""
        past, end = state.past, state.position + new.shape[-2]
        if past.filled != state.position or end > past.keys_values.shape[-2]:
            grown = self._new_kv(end)
            grown.keys_values[..., : state.position, :] = past.keys_values[..., : state.position, :]
            past = grown
        past.keys_values[..., state.position : end, :] = new
        past.filled = end
        return past

    def _new_kv(self, positions: int) -> _StreamKV:
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, attention.heads, bucket_for(self._capacities, positions), attention.head_dim)
        return _StreamKV(self.conv1.weight.new_zeros(shape))

    def _graph_body(self, step: _GraphKey, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The captured computation: codes, next convolution contexts, new keys and values."""
        mel, conv1, conv2, positions = tensors
        encoder = self.encoder
        x, conv1 = encoder.conv1.step(conv1, mel)
        x, conv2 = encoder.conv2.step(conv2, functional.gelu(x))
        x = functional.gelu(x).transpose(1, 2)
        positions_of_rows = positions[:, None] + torch.arange(x.shape[1], device=x.device)
        x = x + functional.embedding(
            positions_of_rows.clamp(max=self._max_positions - 1), encoder.embed_positions.weight
        )
        attention = _GraphAttention(self._pasts(step), positions, x.shape[1])
        for index, layer in enumerate(self._layers):
            x = layer.step_in_stack(cast(Extension, attention), index, x)
        return encoder.nearest(encoder._pool(x)), conv1, conv2, torch.stack(attention.new)
