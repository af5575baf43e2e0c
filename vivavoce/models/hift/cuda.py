"""HiFT on CUDA graphs: batches are padded to the next bucket, and hops that recur are replayed.

Tests hold the sound equal to that of the eager streams.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.models.flow.cuda import BUCKETS, bucket_of
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTState, split_states, stack_states
from vivavoce.models.hift.stream import HiFTState, HiFTStream, HopShape, select_rows, stack_stream_states
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.vocoder import SourceStart

MAX_SHAPES = 64  # captured shapes; every hop size is one
MAX_CAUSAL_SHAPES = 48
FIXED = ("mel", "f0_contexts", "source", "contexts", "spectrum")


class GraphedVocoder(HiFTStream):
    """`HiFTStream` on CUDA graphs. Last hops of replies are replayed only after `recording_shapes`."""

    def __init__(self, stream: HiFTStream) -> None:
        super().__init__(stream.hift, stream.delay_frames, graphs=True)
        self.eager = stream
        self.buckets: Sequence[int] = BUCKETS
        self.checks_mels = True
        """Whether to check mels for NaN, which synchronises with the flow; otherwise the caller checks the sound."""
        self.shapes: set[HopShape] = set()
        """Shapes of the hops captured during warm-up; other hops are cut or padded to these."""
        self._is_recording = False

    def with_own_graphs(self) -> "GraphedVocoder":
        """The same vocoder with its own graphs; states can move between the two."""
        vocoder = GraphedVocoder(self.eager)
        assert self._replay is not None
        assert vocoder._replay is not None
        vocoder._replay.blank, vocoder.checks_mels = self._replay.blank, self.checks_mels
        return vocoder

    def pause_before_parts(self, before_part: Callable[[], None]) -> None:
        """Call this before each hop that is captured from now on; a hop is one part."""
        assert self._replay is not None
        self._replay.pause_before_parts(before_part)

    def _check_mels(self, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
        if self.checks_mels:
            super()._check_mels(mels, final)

    @contextmanager
    def recording_shapes(self) -> Iterator[None]:
        """Record the shapes of the hops in this context; later hops are composed of these."""
        self.shapes, self._is_recording = set(), True
        try:
            yield
        finally:
            self._is_recording = False

    def step_batch(
        self, states: Sequence[HiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[HiFTState]]:
        """Step several streams, in as many captured hops as needed."""
        if self._is_recording or not self.shapes:
            return super().step_batch(states, mels, final)
        streams = list(zip(states, mels, final, strict=True))
        if not any(last or self._next_hop(state, mel.shape[-1], last) != mel.shape[-1] for state, mel, last in streams):
            return super().step_batch(states, mels, final)
        new_states, unread = list(states), list(mels)
        sounds = [[state.f0.new_empty(state.f0.shape[0], 0)] for state in states]
        frames = [state.mel.shape[-1] - state.f0.shape[1] + mel.shape[-1] for state, mel, _ in streams]
        for index, (state, mel, is_last) in enumerate(streams):
            if is_last and frames[index]:
                unread[index] = self._extend_end(state, mel)
        while pending := [index for index, mel in enumerate(unread) if mel.shape[-1]]:
            hops = [self._next_hop(new_states[index], unread[index].shape[-1], final[index]) for index in pending]
            pieces = [_pad_or_cut(unread[index], hop) for index, hop in zip(pending, hops, strict=True)]
            rendered, advanced = super().step_batch(
                [new_states[index] for index in pending], pieces, [False] * len(pending)
            )
            for index, hop, sound, state in zip(pending, hops, rendered, advanced, strict=True):
                sounds[index].append(sound)
                new_states[index], unread[index] = state, unread[index][..., hop:]
        for index, is_last in enumerate(final):
            if is_last:
                new_states[index] = self._reset(new_states[index])
        ends = [count * self.hift.config.hop if last else None for count, last in zip(frames, final, strict=True)]
        return [torch.cat(parts, dim=1)[:, :end] for parts, end in zip(sounds, ends, strict=True)], new_states

    def _extend_end(self, state: HiFTState, mel: Tensor) -> Tensor:
        """The last mel of a reply with its last frame repeated `delay_frames` times."""
        last = mel[..., -1:] if mel.shape[-1] else state.mel[..., -1:]
        return torch.cat([mel, last.to(mel).expand(-1, -1, self.delay_frames)], dim=-1)

    def _next_hop(self, state: HiFTState, frames: int, is_last: bool) -> int:
        """Frames of the next captured hop; at the end of a reply it may exceed the available frames."""
        held, start = state.mel.shape[-1], state.start
        key = (state.f0.shape[1], start.cycles is None, start.seed is not None)
        hops = sorted(
            shape.frames - held for shape in self.shapes if (shape.emit.start, shape.is_first, shape.has_noise) == key
        )
        if is_last:
            return next((hop for hop in hops if hop >= frames), hops[-1] if hops else frames)
        return max((hop for hop in hops if hop <= frames), default=frames)

    def _recurs(self, shape: HopShape) -> bool:
        waits = shape.frames - shape.emit.stop == self.delay_frames
        return waits and shape.extrapolated == self.reach.right - self.delay_frames

    def _advance(self, state: HiFTState, shape: HopShape) -> tuple[Tensor, HiFTState]:
        rows = state.mel.shape[0]
        if rows > self.buckets[-1] or not self._recurs(shape):
            return self.eager._advance(state, shape)
        if self._is_recording:
            self.shapes.add(shape)
        bucket = bucket_of(rows, self.buckets)
        if not self._may_capture((shape, bucket)):
            return self.eager._advance(state, shape)
        missing = bucket - rows
        sound, new_state = super()._advance(
            stack_stream_states([state, *[select_rows(state, slice(1))] * missing]), shape
        )
        return sound[:rows], select_rows(new_state, slice(rows))

    def _may_capture(self, key: tuple[HopShape, int]) -> bool:
        assert self._replay is not None
        if self.shapes:
            return key[0] in self.shapes
        return key in self._replay or self._replay.captured < MAX_SHAPES


def _pad_or_cut(mel: Tensor, frames: int) -> Tensor:
    """The first `frames` frames, padded by repeating the last one."""
    missing = max(0, frames - mel.shape[-1])
    return torch.cat([mel, mel[..., -1:].expand(-1, -1, missing)], dim=-1) if missing else mel[..., :frames]


class CausalHiFTHop(NamedTuple):
    """The key of a captured hop."""

    streams: int
    known: int  # frames before it, counted to `look_right + 1`
    frames: int
    has_noise: bool


class GraphedCausalHiFT:
    """`CausalHiFT` on CUDA graphs: replays first hops, and all hops after five frames."""

    def __init__(self, hift: CausalHiFT) -> None:
        self.hift, self._blank = hift, hift.initial_state()
        self._graphs = Graphed(self._graph_body)

    @property
    def delay_frames(self) -> int:
        """Mel frames of delay."""
        return self.hift.delay_frames

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> CausalHiFTState:
        """The state before the first frame; its zero tensors are shared, since steps do not write in place."""
        if batch > 1:
            return self.hift.initial_state(seed, batch)
        return replace(self._blank, start=self.hift.m_source.start(1, seed))

    def step(self, state: CausalHiFTState, mel: Tensor, final: bool = False) -> tuple[Tensor, CausalHiFTState]:
        """As `CausalHiFT.step`.  # [batch, mel, frame] → [batch, sample]"""
        (sound,), (new_state,) = self.step_batch([state], [mel], [final])
        return sound, new_state

    def step_batch(
        self, states: Sequence[CausalHiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[CausalHiFTState]]:
        """Step several streams; those of equal shape run as one batch."""
        return self.hift.step_groups(states, mels, final, self._advance)

    def _advance(self, state: CausalHiFTState, mel: Tensor, final: bool) -> tuple[Tensor, CausalHiFTState]:
        hop = self._next_hop(state, mel, final)
        if hop is None:
            return self.hift.advance(state, mel, final)
        rows = mel.shape[0]
        missing = hop.streams - rows
        filled = stack_states([state, *split_states(state, [1] * rows)[:1] * missing])
        mel = torch.cat([mel, *[mel[:1]] * missing])
        sound, *tensors = self._graphs(hop, [mel, *_tensors(filled)])
        frames = min(hop.known + hop.frames, self.hift.config.look_right + 1)
        new_state = _state(filled, tensors, has_phase=True, frames=frames)
        return sound[:rows], split_states(new_state, [rows, missing])[0]

    def _next_hop(self, state: CausalHiFTState, mel: Tensor, final: bool) -> CausalHiFTHop | None:
        """The graph key of such a hop; None: run it eagerly."""
        rows, frames, lookahead = mel.shape[0], mel.shape[-1], self.hift.config.look_right
        recurs = state.frames > lookahead or (state.frames == 0 and frames > lookahead)
        if final or not recurs or rows > BUCKETS[-1]:
            return None
        hop = CausalHiFTHop(bucket_of(rows), state.frames, frames, state.start.seed is not None)
        return hop if hop in self._graphs or self._graphs.captured < MAX_CAUSAL_SHAPES else None

    def _graph_body(self, hop: CausalHiFTHop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mel, *held = tensors
        blank = self.initial_state(0 if hop.has_noise else None)
        state = _state(blank, held, has_phase=hop.known > 0, frames=hop.known)
        sound, new_state = self.hift.advance(state, mel, False)
        return sound, *_tensors(new_state)


def _tensors(state: CausalHiFTState) -> list[Tensor]:
    start = [tensor for tensor in (state.start.frame, state.start.cycles, state.start.seed) if tensor is not None]
    return [*(getattr(state, name) for name in FIXED), *state.excitations, *start]


def _state(like: CausalHiFTState, tensors: Sequence[Tensor], has_phase: bool, frames: int) -> CausalHiFTState:
    """A state from its tensors, structured as `like`."""
    fixed, rest = dict(zip(FIXED, tensors, strict=False)), list(tensors[len(FIXED) :])
    stages = len(like.excitations)
    excitations, (frame, *optional) = tuple(rest[:stages]), rest[stages:]
    cycles = optional[0] if has_phase else None
    start = SourceStart(cycles, frame, optional[-1] if like.start.seed is not None else None)
    return replace(like, frames=frames, start=start, excitations=excitations, **fixed)
