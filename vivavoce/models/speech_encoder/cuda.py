"""The speech encoder's stream replayed as CUDA graphs; tests hold the codes equal to those of `model.py`.

A graph computes the next few codes of each stream of a batch, from samples to codes. Codes depend on a fixed window of
samples, so streams at any position share a graph, also streams with fewer codes to compute; the host cuts the windows,
and the device state of the batch (convolution contexts, running maximum, keys and values) stays in the graph's buffers
from one replay to the next.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce import kernels
from vivavoce.audio.mel import WHISPER_SPEECH_MAXIMUM, WhisperMel, whisper_normalise_running
from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.model import WhisperLayer
from vivavoce.nn.cuda_graphs import Graphed, bucket_for, is_compiling_ahead
from vivavoce.nn.streaming import Extension, attend_within

Samples = NDArray[np.float32]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = (2, 8, 32)  # codes of one replay
CAPACITIES = (128, 512)  # positions; a whole segment is added as the last one
POSITIONS_PER_PASS = 8192  # of all streams together
REACH = WhisperMel.N_FFT // 2  # samples before and after the centre of a mel frame


@dataclass
class _StreamKV:
    """Keys and values of one stream. A state at its end appends in place; an older state copies first."""

    keys_values: Tensor  # [layer, 2, head, capacity, dim]
    filled: int = 0


@dataclass(frozen=True)
class GraphedTurnState:
    """State of one turn inside its segment."""

    sound: Samples
    """Samples of the segment that later codes need."""
    begin: int = 0
    """The first of them, counted from the start of the segment."""
    codes: int = 0
    """Codes of the segment so far."""
    context: Tensor | None = None
    """Convolution contexts and running maximum, flat; None before the first code of a segment."""
    past: _StreamKV | None = None


class _GraphKey(NamedTuple):
    """The key of a captured graph."""

    streams: int
    capacity: int
    codes: int


class _Part(NamedTuple):
    """The codes of one turn that a pass computes, all of one segment."""

    turn: int
    sound: Samples
    """All samples that the codes depend on."""
    codes: int
    state: GraphedTurnState  # before them; `sound` and `begin` are those after them
    is_kept: bool  # whether the turn's segment goes on after them


class _BufferAttention:
    """Attention to the positions so far in a buffer of fixed capacity, to which the new ones are added first."""

    def __init__(self, pasts: Tensor, positions: Tensor, new: int) -> None:
        self._pasts = pasts  # [layer, 2, stream, head, capacity, dim]
        self._rows = torch.arange(len(positions), device=pasts.device)[:, None]
        self._added = positions[:, None] + torch.arange(new, device=pasts.device)  # [stream, new]
        hidden = torch.arange(pasts.shape[-2], device=pasts.device) > self._added[..., None]  # [stream, new, capacity]
        self._bias = torch.zeros(hidden.shape, dtype=pasts.dtype, device=pasts.device).masked_fill_(hidden, -torch.inf)
        self._bias = self._bias[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Same interface as `Extension.attend`."""
        keys, values = self._pasts[layer]
        keys[self._rows, :, self._added] = key.transpose(1, 2)
        values[self._rows, :, self._added] = value.transpose(1, 2)
        return attend_within(query, keys, values, self._bias)


class GraphedSpeechStream:
    """CUDA-graph implementation of `SpeechStream` on the weights of a `SpeechEncoder`."""

    def __init__(self, encoder: SpeechEncoder) -> None:
        self.encoder, self.config = encoder, encoder.config
        self.device = encoder.conv1.weight.device
        self.mel = WhisperMel(self.config.num_mel_bins).to(self.device)
        self.samples_per_code = self.config.frames_per_code * WhisperMel.HOP
        self.segment_samples = self.config.segment_frames * WhisperMel.HOP
        # A code needs samples before its first, those of the frame centred on it, and after its last.
        self._after = REACH - WhisperMel.HOP
        self._margin = REACH + self._after
        self._layers = cast(Sequence[WhisperLayer], tensor_core_layers(encoder.layers))
        # Longer than a segment: in a replay, streams with fewer codes write keys and values beyond their end.
        whole = self.config.max_source_positions + STEPS[-1] * self._positions_per_code
        self._capacities = (*[each for each in CAPACITIES if each < whole], whole)
        self._graphs = Graphed(self._graph_body)
        self._contexts = [
            (conv.in_channels, conv.context) for conv in (encoder.conv1, encoder.conv2)
        ]  # sizes of the convolution contexts
        weight = encoder.conv1.weight
        positions = max(POSITIONS_PER_PASS, whole)
        self._past_buffer = weight.new_zeros(positions * len(self._layers) * 2 * self.config.d_model)
        self._context = weight.new_zeros(BUCKETS[-1], sum(map(math.prod, self._contexts)) + 1, dtype=torch.float32)
        self._positions = torch.zeros(BUCKETS[-1], dtype=torch.int64, device=self.device)
        self._new_context = self._context.new_zeros(self._context.shape[1])
        self._new_context[-1] = WHISPER_SPEECH_MAXIMUM

    def initial_state(self) -> GraphedTurnState:
        """The state before the first sample of a turn."""
        return GraphedTurnState(np.zeros(0, np.float32))

    def step(self, state: GraphedTurnState, samples: Tensor) -> tuple[Tensor, GraphedTurnState]:
        """Codes completed by these samples.  # [time] → [code]"""
        (codes,), (new_states,) = self.step_batch([state], [samples])
        return codes, new_states

    def finish(self, state: GraphedTurnState) -> tuple[Tensor, GraphedTurnState]:
        """The last codes of the turn, its end padded with silence to a whole code.  # [code]"""
        (codes,), (new_states,) = self.step_batch([state], [torch.zeros(0)], [True])
        return codes, new_states

    def step_batch(
        self, states: Sequence[GraphedTurnState], samples: Sequence[Tensor], final: Sequence[bool] | None = None
    ) -> tuple[list[Tensor], list[GraphedTurnState]]:
        """`step` for several turns of any length; `final` marks those that end with these samples."""
        waiting = [_checked(piece) for piece in samples]
        ends = [False] * len(waiting) if final is None else final
        after, codes = list(states), [[] for _ in states]  # type: tuple[list[GraphedTurnState], list[list[Tensor]]]
        turns = list(range(len(waiting)))
        while turns:
            parts = []
            for turn in turns:
                room = self.segment_samples - after[turn].begin - len(after[turn].sound)
                piece, waiting[turn] = waiting[turn][:room], waiting[turn][room:]
                parts.append(self._part(turn, after[turn], piece, ends[turn] and not len(waiting[turn])))
            for part, new, state in self._encode(parts):
                codes[part.turn].append(new)
                after[part.turn] = state
            turns = [turn for turn in turns if len(waiting[turn])]
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return [torch.cat([nothing, *each]) for each in codes], after

    @torch.inference_mode()
    def warm_up(self, max_streams: int) -> None:
        """Capture the steps of up to `max_streams` streams ahead of use."""
        for streams in [bucket for bucket in reversed(BUCKETS) if bucket <= max_streams]:
            for capacity in [each for each in self._capacities if streams <= self._max_streams(each)]:
                for codes in STEPS:
                    self._capture(_GraphKey(streams, capacity, codes))

    @property
    def _positions_per_code(self) -> int:
        return self.config.pooling_kernel_size

    def _part(self, turn: int, state: GraphedTurnState, piece: Samples, is_last: bool) -> _Part:
        """The codes that these samples of the same segment complete."""
        sound = np.concatenate([state.sound, piece])
        total = state.begin + len(sound)
        if is_last:
            missing = -total % self.samples_per_code
            sound, total = np.pad(sound, (0, missing)), total + missing
        is_over = bool(total) and (is_last or total == self.segment_samples)
        ready = (total if is_over else max(0, total - self._after)) // self.samples_per_code
        count = ready - state.codes
        if count <= 0:
            return _Part(turn, sound[:0], 0, replace(state, sound=sound), is_kept=not is_over)
        padded = sound if state.begin or state.codes else np.concatenate([sound[REACH:0:-1], sound])
        if is_over:
            padded = np.concatenate([padded, padded[-2 : -2 - self._after : -1]])
        padded = padded[: count * self.samples_per_code + self._margin]
        begin = ready * self.samples_per_code - REACH
        left = sound[begin - state.begin :].copy()
        return _Part(turn, padded, count, replace(state, sound=left, begin=begin), is_kept=not is_over)

    def _encode(self, parts: Sequence[_Part]) -> list[tuple[_Part, Tensor, GraphedTurnState]]:
        """The codes of each part and its state after them. Parts without codes come back as they are."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        done = [(part, nothing, self._after_part(part)) for part in parts if not part.codes]
        by_capacity: dict[int, list[_Part]] = {}
        for part in parts:
            if part.codes:
                end = (part.state.codes + part.codes + STEPS[-1]) * self._positions_per_code
                by_capacity.setdefault(bucket_for(self._capacities, end), []).append(part)
        for capacity, members in by_capacity.items():
            max_streams = self._max_streams(capacity)
            for first in range(0, len(members), max_streams):
                done += self._run_graph(members[first : first + max_streams], capacity)
        return done

    def _run_graph(self, parts: Sequence[_Part], capacity: int) -> list[tuple[_Part, Tensor, GraphedTurnState]]:
        """The codes of parts whose keys and values fit this capacity, all parts in each replay."""
        streams, max_codes, done = bucket_for(BUCKETS, len(parts)), max(part.codes for part in parts), 0
        for step in STEPS:
            self._capture(_GraphKey(streams, capacity, step))
        self._load(streams, capacity, [part.state for part in parts])
        codes: list[Tensor] = []
        while done < max_codes:
            key = _GraphKey(streams, capacity, next((step for step in STEPS if step >= max_codes - done), STEPS[-1]))
            windows = np.zeros((streams, key.codes * self.samples_per_code + self._margin), np.float32)
            counts = np.zeros(streams, np.int64)
            for row, part in enumerate(parts):
                counts[row] = np.clip(part.codes - done, 0, key.codes)
                window = part.sound[done * self.samples_per_code :][: windows.shape[1]]
                windows[row, : len(window)] = window
            inputs = [torch.from_numpy(each).to(self.device, non_blocking=True) for each in (windows, counts)]
            codes += self._graphs(key, inputs)
            done += key.codes
        together = torch.cat(codes, dim=1)  # [stream, code]
        states = self._store(streams, capacity, parts)
        return [(part, together[row, : part.codes], states[row]) for row, part in enumerate(parts)]

    def _load(self, streams: int, capacity: int, states: Sequence[GraphedTurnState]) -> None:
        """Copy the device state of a batch to the buffers of the graphs."""
        count, rows = len(states), self._pasts(streams, capacity).unbind(2)
        contexts = [self._new_context if state.context is None else state.context for state in states]
        self._context[:count].copy_(torch.stack(contexts))
        positions = [state.codes * self._positions_per_code for state in states]
        positions += [0] * (streams - count)
        self._positions[:streams].copy_(torch.tensor(positions), non_blocking=True)
        pasts = [(rows[row], state.past.keys_values) for row, state in enumerate(states) if state.past is not None]
        if pasts:
            into = [row if row.shape == past.shape else row[..., : past.shape[-2], :] for row, past in pasts]
            torch._foreach_copy_(into, [past for _, past in pasts])

    def _store(self, streams: int, capacity: int, parts: Sequence[_Part]) -> list[GraphedTurnState]:
        """The states of a batch after its codes; keys and values of segments that are over are not kept."""
        contexts = self._context[: len(parts)].clone().unbind(0)
        rows, states, into, kept = self._pasts(streams, capacity).unbind(2), [], [], []
        for row, part in enumerate(parts):
            if not part.is_kept:
                states.append(self._after_part(part))
                continue
            codes = part.state.codes + part.codes
            past = self._past_after(capacity, part.state)
            past.filled = codes * self._positions_per_code
            into.append(past.keys_values)
            kept.append(rows[row])
            states.append(replace(part.state, codes=codes, context=contexts[row], past=past))
        if into:
            torch._foreach_copy_(into, kept)
        return states

    def _after_part(self, part: _Part) -> GraphedTurnState:
        return part.state if part.is_kept else self.initial_state()

    def _past_after(self, capacity: int, state: GraphedTurnState) -> _StreamKV:
        """The cache to which the next positions are written: the stream's, if it ends where the state does."""
        past = state.past
        is_at_end = past is not None and past.filled == state.codes * self._positions_per_code
        if past is not None and is_at_end and past.keys_values.shape[-2] == capacity:
            return past
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, attention.heads, capacity, attention.head_dim)
        return _StreamKV(self._past_buffer.new_empty(shape))

    def _max_streams(self, capacity: int) -> int:
        """Max streams of one pass at this capacity."""
        return max(bucket for bucket in BUCKETS if bucket == 1 or bucket * capacity <= POSITIONS_PER_PASS)

    def _pasts(self, streams: int, capacity: int) -> Tensor:
        """The keys and values of a batch, shared by all graphs.  # [layer, 2, stream, head, capacity, dim]

        Values beyond the positions of a stream are masked and finite, so they have no effect.
        """
        attention = self._layers[0].self_attn
        shape = (len(self._layers), 2, streams, attention.heads, capacity, attention.head_dim)
        return self._past_buffer[: math.prod(shape)].view(shape)

    def _capture(self, key: _GraphKey) -> None:
        """Capture a graph if there is none yet, before `_load`: a capture runs the step, which changes the states."""
        if self.device.type == "cuda" and key not in self._graphs:
            self._positions.zero_()
            windows = torch.zeros(key.streams, key.codes * self.samples_per_code + self._margin, device=self.device)
            self._graphs(key, [windows, torch.zeros(key.streams, dtype=torch.int64, device=self.device)])
            if is_compiling_ahead():  # no kernel has run, and what was stored may not be finite
                self._past_buffer.zero_()
                self._context.zero_()

    def _graph_body(self, key: _GraphKey, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The captured computation: the next codes of every stream; `counts` of them are meant and change its state."""
        (windows, counts), encoder = tensors, self.encoder
        context, positions = self._context[: key.streams], self._positions[: key.streams]
        first, second, peak = context.split([*map(math.prod, self._contexts), 1], dim=1)
        frames = self.mel.log_mel_frames(windows)
        mel, _ = whisper_normalise_running(frames, peak[:, 0])
        dtype = encoder.conv1.weight.dtype
        conv1, conv2 = (
            part.view(-1, *size).to(dtype) for part, size in zip((first, second), self._contexts, strict=True)
        )
        conv1 = torch.cat([conv1, mel.to(dtype)], dim=-1)
        conv2 = torch.cat([conv2, functional.gelu(nn.Conv1d.forward(encoder.conv1, conv1))], dim=-1)
        x = functional.gelu(nn.Conv1d.forward(encoder.conv2, conv2)).transpose(1, 2)
        added = positions[:, None] + torch.arange(x.shape[1], device=x.device)
        added = added.clamp(max=self.config.max_source_positions - 1)
        x = x + functional.embedding(added, encoder.embed_positions.weight)
        attention = _BufferAttention(self._pasts(key.streams, key.capacity), positions, x.shape[1])
        for index, layer in enumerate(self._layers):
            x = layer.step_in_stack(cast(Extension, attention), index, x)
        passed = counts * self.config.frames_per_code  # frames of the codes that are meant
        peaks = torch.cat([peak, frames.amax(dim=-2)], dim=-1).cummax(dim=-1).values
        after = [_columns(conv1, passed, self._contexts[0][1]), _columns(conv2, passed, self._contexts[1][1])]
        contexts = [each.flatten(1).float() for each in after]
        context.copy_(torch.cat([*contexts, peaks.gather(1, passed[:, None])], dim=1))
        positions.add_(counts * self._positions_per_code)
        return (encoder.nearest(encoder._pool(x)),)


def _columns(x: Tensor, begin: Tensor, count: int) -> Tensor:
    """Some columns of each row, from its own first one on.  # [row, channel, column] → [row, channel, count]"""
    index = begin[:, None, None] + torch.arange(count, device=x.device)
    return x.gather(-1, index.expand(-1, x.shape[1], -1))


class TensorCoreLinear(nn.Linear):
    """A float32 linear layer that multiplies few rows on tensor cores, where its kernel takes them."""

    def forward(self, x: Tensor) -> Tensor:  # [.., input] → [.., output]
        """The product, with the accuracy of float32."""
        if kernels.usable(x) and kernels.takes_float32(x, self.weight):
            return kernels.float32_linear(x, self.weight, self.bias)
        return super().forward(x)


def tensor_core_layers(layers: nn.ModuleList) -> nn.ModuleList:
    """A copy of these layers on the same parameters, its linear layers `TensorCoreLinear`."""
    parameters = {id(tensor): tensor for tensor in layers.parameters()}
    copied = copy.deepcopy(layers, parameters)  # parameters are not copied
    for module in copied.modules():
        if type(module) is nn.Linear:
            module.__class__ = TensorCoreLinear
    return copied


def _checked(samples: Tensor) -> Samples:
    if samples.ndim != 1 or not samples.is_floating_point():
        raise InputError(f"a turn takes float samples [time], not {samples.dtype} {list(samples.shape)}")
    array: Samples = samples.detach().cpu().float().numpy()
    if not np.isfinite(array).all():
        raise InputError("the sound has NaN or infinite samples")
    return array
