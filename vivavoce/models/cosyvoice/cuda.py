"""CosyVoice's hops replayed as CUDA graphs: the same values, a fraction of the wait.

Batches are filled up to the next bucket, so that few graphs serve all. The last hop of a reply, whose length is any,
runs as it is in the vocoder, and within whole chunks in the flow.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivavoce.models.flow.cuda import BUCKETS, GraphedFlow, bucket_of
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.hift.causal import CausalHiFT, CausalHiFTState, split, stacked
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.cuda import GraphedVocoder
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.vocoder import SourceStart

PREFIX_STEP = 125  # codes: voices of up to five seconds share their graphs, and longer ones theirs
MOST_SHAPES = 48  # hops of odd sizes have a shape each
FIXED = ("mel", "f0_contexts", "source", "contexts", "spectrum")


def graphed(speech: FlowSpeech) -> FlowSpeech:
    """The same flow and vocoder, replayed."""
    flow, vocoder = GraphedFlow(speech.flow, PREFIX_STEP), speech.vocoder
    if isinstance(vocoder, CausalHiFT):
        return FlowSpeech(flow, GraphedCausalHiFT(vocoder))
    assert isinstance(vocoder, HiFTStream)
    return FlowSpeech(flow, GraphedVocoder(vocoder))


def warm_up(speech: FlowSpeech, voice: FlowVoice, batches: Sequence[int], left_chunks: int | None) -> None:
    """Capture the first hops and those that recur, so that no listener waits for it."""
    config, first = speech.flow.config, speech.flow.first_hop(voice)
    for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
        states = [speech.start(voice, left_chunks, seed) for seed in range(streams)]
        for size in (first + config.lookahead, config.chunk, config.chunk, 2 * config.chunk):
            codes = [torch.zeros(size, dtype=torch.int64)] * streams
            _, states = speech.step_batch(states, codes, [False] * streams)


class CausalHiFTHop(NamedTuple):
    """What must be equal for two hops to replay the same graph."""

    streams: int
    known: int  # frames before it, as far as they are counted
    frames: int
    noisy: bool


class GraphedCausalHiFT:
    """A causal vocoder that replays hops which come again: first ones, and all once five frames have come."""

    def __init__(self, hift: CausalHiFT) -> None:
        self.hift, self._blank = hift, hift.initial_state()
        self._graphs = Graphed(self._replayed)

    @property
    def delay_frames(self) -> int:
        """Mel frames that a stream holds back."""
        return self.hift.delay_frames

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> CausalHiFTState:
        """The state before the first frame; what is silent in it is shared, for nothing is written in place."""
        if batch > 1:
            return self.hift.initial_state(seed, batch)
        return replace(self._blank, start=self.hift.m_source.start(1, seed))

    def step_batch(
        self, states: Sequence[CausalHiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[CausalHiFTState]]:
        """The next hop of several streams; those of equal shape run together."""
        return self.hift.step_groups(states, mels, final, self._advance)

    def _advance(self, state: CausalHiFTState, mel: Tensor, final: bool) -> tuple[Tensor, CausalHiFTState]:
        hop = self._hop(state, mel, final)
        if hop is None:
            return self.hift.advance(state, mel, final)
        rows = mel.shape[0]
        missing = hop.streams - rows
        filled = stacked([state, *split(state, [1] * rows)[:1] * missing])
        mel = torch.cat([mel, *[mel[:1]] * missing])
        sound, *tensors = self._graphs(hop, [mel, *_tensors(filled)])
        frames = min(hop.known + hop.frames, self.hift.config.look_right + 1)
        after = _state(filled, tensors, has_phase=True, frames=frames)
        return sound[:rows], split(after, [rows, missing])[0]

    def _hop(self, state: CausalHiFTState, mel: Tensor, final: bool) -> CausalHiFTHop | None:
        """The graph for such a hop, if there is one or may be."""
        rows, frames, ahead = mel.shape[0], mel.shape[-1], self.hift.config.look_right
        recurs = state.frames > ahead or (state.frames == 0 and frames > ahead)
        if final or not recurs or rows > BUCKETS[-1]:
            return None
        hop = CausalHiFTHop(bucket_of(rows), state.frames, frames, state.start.seed is not None)
        return hop if hop in self._graphs or self._graphs.captured < MOST_SHAPES else None

    def _replayed(self, hop: CausalHiFTHop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mel, *held = tensors
        blank = self.initial_state(0 if hop.noisy else None)
        state = _state(blank, held, has_phase=hop.known > 0, frames=hop.known)
        sound, after = self.hift.advance(state, mel, False)
        return sound, *_tensors(after)


def _tensors(state: CausalHiFTState) -> list[Tensor]:
    start = [tensor for tensor in (state.start.frame, state.start.cycles, state.start.seed) if tensor is not None]
    return [*(getattr(state, name) for name in FIXED), *state.excitations, *start]


def _state(like: CausalHiFTState, tensors: Sequence[Tensor], has_phase: bool, frames: int) -> CausalHiFTState:
    """The state whose tensors these are; `like` says how many there are of each kind."""
    fixed, rest = dict(zip(FIXED, tensors, strict=False)), list(tensors[len(FIXED) :])
    stages = len(like.excitations)
    excitations, (frame, *optional) = tuple(rest[:stages]), rest[stages:]
    cycles = optional[0] if has_phase else None
    start = SourceStart(cycles, frame, optional[-1] if like.start.seed is not None else None)
    return replace(like, frames=frames, start=start, excitations=excitations, **fixed)
