"""The speech encoder's steps replayed as CUDA graphs: the same codes, a fraction of the wait.

A step is one code of each stream. Its graph serves so many streams whose pasts have room for so many positions; pasts
are copied to where the graph reads them, what is new comes back and is written behind each stream's own past.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.layer import WhisperLayer
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.streaming import Extension, attend_within

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
CAPACITIES = (128, 512)  # positions; the last of all is a segment
POSITIONS_A_PASS = 8192  # of all streams together


@dataclass
class _Past:
    """Keys and values of one stream. States that go on from its end write into it; others copy it first."""

    keys_values: Tensor  # [layer, 2, head, capacity, dim]
    filled: int = 0


@dataclass(frozen=True)
class GraphedEncoderState:
    """Where one stream stands inside its segment."""

    position: int  # positions passed
    conv1: Tensor
    conv2: Tensor
    past: _Past


class _Step(NamedTuple):
    """What must be equal for two steps to replay the same graph."""

    streams: int
    capacity: int


class _Looking:
    """Attention of a step's layers to pasts of a fixed capacity and to what is new, which is kept for the caller."""

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
        """As `Extension.attend`."""
        self.new.append(torch.stack([key, value]))
        keys, values = torch.cat([self._pasts[layer], self.new[-1]], dim=-2)
        return attend_within(query, keys, values, self._bias)


class GraphedSpeechEncoder:
    """A speech encoder, on the weights of another, for a stream: it steps by replaying."""

    def __init__(self, encoder: SpeechEncoder) -> None:
        self.encoder, self.config, self.conv1 = encoder, encoder.config, encoder.conv1
        self._layers = cast(Sequence[WhisperLayer], encoder.layers)
        self._capacities = (*[each for each in CAPACITIES if each < self._longest], self._longest)
        self._graphs = Graphed(self._replayed)
        positions = max(POSITIONS_A_PASS, self._longest)
        self._desk = self.conv1.weight.new_zeros(positions * len(self._layers) * 2 * self.config.d_model)

    def __call__(self, mel: Tensor) -> Tensor:
        """Codes of whole sounds, as the encoder gives them.  # [batch, mel, frame] → [batch, code]"""
        codes: Tensor = self.encoder(mel)
        return codes

    def initial_state(self, batch: int = 1) -> GraphedEncoderState:
        """The state of one stream before the first frame of a segment."""
        return GraphedEncoderState(
            0, self.encoder.conv1.initial_state(batch), self.encoder.conv2.initial_state(batch), self._room(0)
        )

    def step_batch(
        self, states: Sequence[GraphedEncoderState], mel: Tensor
    ) -> tuple[Tensor, list[GraphedEncoderState]]:
        """Codes of the next frames of streams, wherever they stand.  # [stream, mel, frame] → [stream, code]"""
        after, codes = list(states), []
        for piece in mel.to(self.conv1.weight.dtype).split(self.config.frames_per_code, dim=-1):
            new, after = self._step(after, piece)
            codes.append(new)
        return torch.cat(codes, dim=1), after

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Capture steps of up to so many streams, so that nobody waits for it."""
        frames = self.config.frames_per_code
        for streams in [bucket for bucket in reversed(BUCKETS) if bucket <= most]:
            for capacity in [each for each in self._capacities if streams <= self._most(each)]:
                place = capacity - self._new
                states = [replace(self.initial_state(), position=place, past=self._room(place)) for _ in range(streams)]
                self.step_batch(states, self.conv1.weight.new_zeros(streams, self.config.num_mel_bins, frames))

    @property
    def _longest(self) -> int:
        return self.config.max_source_positions

    @property
    def _new(self) -> int:
        return self.config.pooling_kernel_size

    def _step(self, states: list[GraphedEncoderState], mel: Tensor) -> tuple[Tensor, list[GraphedEncoderState]]:
        states = [self.initial_state() if state.position == self._longest else state for state in states]
        by_capacity: dict[int, list[int]] = {}
        for index, state in enumerate(states):
            by_capacity.setdefault(_least(self._capacities, state.position), []).append(index)
        codes = torch.empty(len(states), 1, dtype=torch.int64, device=mel.device)
        for capacity, members in by_capacity.items():
            most = self._most(capacity)
            for begin in range(0, len(members), most):
                some = members[begin : begin + most]
                rows = torch.tensor(some, device=mel.device)
                new, after = self._pass([states[index] for index in some], mel[rows], capacity)
                codes[rows] = new
                for index, state in zip(some, after, strict=True):
                    states[index] = state
        return codes, states

    def _pass(
        self, states: list[GraphedEncoderState], mel: Tensor, capacity: int
    ) -> tuple[Tensor, list[GraphedEncoderState]]:
        count = len(states)
        step = _Step(_least(BUCKETS, count), capacity)
        missing = step.streams - count
        positions = torch.tensor([*[state.position for state in states], *[0] * missing])
        contexts = [torch.cat([getattr(state, name) for state in states]) for name in ("conv1", "conv2")]
        filled = [functional.pad(each, (0, 0, 0, 0, 0, missing)) for each in (mel, *contexts)]
        pasts = self._pasts(step)
        for row, state in enumerate(states):
            pasts[:, :, row, :, : state.position] = state.past.keys_values[..., : state.position, :]
        codes, conv1, conv2, new = self._graphs(step, [*filled, positions.to(mel.device, non_blocking=True)])
        after = [
            GraphedEncoderState(
                state.position + self._new,
                conv1[row : row + 1],
                conv2[row : row + 1],
                self._written(state, new[:, :, row]),
            )
            for row, state in enumerate(states)
        ]
        return codes[:count], after

    def _most(self, capacity: int) -> int:
        """Streams of one pass."""
        return max(bucket for bucket in BUCKETS if bucket == 1 or bucket * capacity <= POSITIONS_A_PASS)

    def _pasts(self, step: _Step) -> Tensor:
        """Where such steps read pasts, the same memory for all.  # [layer, 2, stream, head, capacity, dim]

        What other steps left behind a past is hidden, and finite, so that it does no harm.
        """
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, step.streams, attention.heads, step.capacity, attention.head_dim)
        return self._desk[: math.prod(shape)].view(shape)

    def _written(self, state: GraphedEncoderState, new: Tensor) -> _Past:
        """The past of a stream with what is new behind it.  # [layer, 2, head, new, dim]"""
        past, end = state.past, state.position + new.shape[-2]
        if past.filled != state.position or end > past.keys_values.shape[-2]:
            room = self._room(end)
            room.keys_values[..., : state.position, :] = past.keys_values[..., : state.position, :]
            past = room
        past.keys_values[..., state.position : end, :] = new
        past.filled = end
        return past

    def _room(self, positions: int) -> _Past:
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, attention.heads, _least(self._capacities, positions), attention.head_dim)
        return _Past(self.conv1.weight.new_zeros(shape))

    def _replayed(self, step: _Step, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Codes, the next contexts, and new keys and values: what the graph holds."""
        mel, conv1, conv2, positions = tensors
        encoder = self.encoder
        x, conv1 = encoder.conv1.step(conv1, mel)
        x, conv2 = encoder.conv2.step(conv2, functional.gelu(x))
        x = functional.gelu(x).transpose(1, 2)
        places = positions[:, None] + torch.arange(x.shape[1], device=x.device)
        x = x + functional.embedding(places.clamp(max=self._longest - 1), encoder.embed_positions.weight)
        looking = _Looking(self._pasts(step), positions, x.shape[1])
        for index, layer in enumerate(self._layers):
            x = layer.step_in_stack(cast(Extension, looking), index, x)
        return encoder.nearest(encoder._pool(x)), conv1, conv2, torch.stack(looking.new)


def _least(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
