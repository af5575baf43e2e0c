"""MOSS-Speech's codec with the hops of its decoder replayed as CUDA graphs: the same values, a fraction of the wait.

`flow_graphs.py` does so for the flow. A vocoder's batch is filled up to the next bucket too. Once hops were captured
ahead, all of them are made of those: others are cut, and the end of a reply is as if its last frame went on.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.errors import InputError
from vivavoce.models.flow.cuda import BUCKETS, GraphedFlow, bucket_of
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.hift.stream import HiFTState, HiFTStream, _rows, _Shape, _stacked
from vivavoce.models.moss_speech.codec import EAR_RATE, MossSpeechCodec, SpokenState
from vivavoce.models.speech_encoder.cuda import GraphedSpeechEncoder
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.speech_encoder.stream import SpeechStream

LEFT_CHUNKS = 8
MOST_VOCODER_SHAPES = 64  # hops of odd sizes have a shape each


class GraphedVocoder(HiFTStream):
    """A vocoder stream that replays its hops; until some were captured ahead, all but the last of a reply."""

    def __init__(self, stream: HiFTStream) -> None:
        super().__init__(stream.hift, stream.delay_frames, graphs=True)
        self.eager = stream
        self.buckets: Sequence[int] = BUCKETS
        self.looks = True
        """Whether it looks for numbers that are not finite, for which it waits for the flow; or who reads its sound."""
        self.shapes: set[_Shape] = set()
        """Of the hops that were captured ahead."""
        self._is_learning = False

    def beside(self) -> "GraphedVocoder":
        """The same vocoder with graphs of its own; states go from one to the other."""
        vocoder = GraphedVocoder(self.eager)
        assert self._replay is not None
        assert vocoder._replay is not None
        vocoder._replay.blank, vocoder.looks = self._replay.blank, self.looks
        return vocoder

    def _look_at(self, mels: Sequence[Tensor], final: Sequence[bool]) -> None:
        if self.looks:
            super()._look_at(mels, final)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The hops that are made meanwhile are those that others will be made of."""
        self.shapes, self._is_learning = set(), True
        try:
            yield
        finally:
            self._is_learning = False

    def step_batch(
        self, states: Sequence[HiFTState], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[HiFTState]]:
        """The next hop of several streams, in as many of those that were captured as it takes."""
        if self._is_learning or not self.shapes:
            return super().step_batch(states, mels, final)
        given = list(zip(states, mels, final, strict=True))
        if not any(last or self._hop(state, mel.shape[-1], last) != mel.shape[-1] for state, mel, last in given):
            return super().step_batch(states, mels, final)
        after, left = list(states), list(mels)
        sounds = [[state.f0.new_empty(state.f0.shape[0], 0)] for state in states]
        frames = [state.mel.shape[-1] - state.f0.shape[1] + mel.shape[-1] for state, mel, _ in given]
        for index, (state, mel, is_last) in enumerate(given):
            if is_last and frames[index]:
                left[index] = self._gone_on(state, mel)
        while some := [index for index, mel in enumerate(left) if mel.shape[-1]]:
            hops = [self._hop(after[index], left[index].shape[-1], final[index]) for index in some]
            pieces = [_filled(left[index], hop) for index, hop in zip(some, hops, strict=True)]
            made, moved = super().step_batch([after[index] for index in some], pieces, [False] * len(some))
            for index, hop, sound, state in zip(some, hops, made, moved, strict=True):
                sounds[index].append(sound)
                after[index], left[index] = state, left[index][..., hop:]
        for index, is_last in enumerate(final):
            if is_last:
                after[index] = self._renewed(after[index])
        ends = [count * self.hift.config.hop if last else None for count, last in zip(frames, final, strict=True)]
        return [torch.cat(parts, dim=1)[:, :end] for parts, end in zip(sounds, ends, strict=True)], after

    def _gone_on(self, state: HiFTState, mel: Tensor) -> Tensor:
        """The last mel of a reply, its last frame repeated for as long as the sound waits for frames to come."""
        last = mel[..., -1:] if mel.shape[-1] else state.mel[..., -1:]
        return torch.cat([mel, last.to(mel).expand(-1, -1, self.delay_frames)], dim=-1)

    def _hop(self, state: HiFTState, frames: int, is_last: bool) -> int:
        """How many of these frames to take now; more than there are where the rest is silent anyway."""
        held, start = state.mel.shape[-1], state.start
        alike = (state.f0.shape[1], start.cycles is None, start.seed is not None)
        hops = sorted(
            shape.frames - held for shape in self.shapes if (shape.emit.start, shape.begins, shape.noisy) == alike
        )
        if is_last:
            return next((hop for hop in hops if hop >= frames), hops[-1] if hops else frames)
        return max((hop for hop in hops if hop <= frames), default=frames)

    def _recurs(self, shape: _Shape) -> bool:
        waits = shape.frames - shape.emit.stop == self.delay_frames
        return waits and shape.guessed == self.reach.right - self.delay_frames

    def _advance(self, state: HiFTState, shape: _Shape) -> tuple[Tensor, HiFTState]:
        rows = state.mel.shape[0]
        if rows > self.buckets[-1] or not self._recurs(shape):
            return self.eager._advance(state, shape)
        if self._is_learning:
            self.shapes.add(shape)
        bucket = bucket_of(rows, self.buckets)
        if not self._has_room((shape, bucket)):
            return self.eager._advance(state, shape)
        missing = bucket - rows
        sound, after = super()._advance(_stacked([state, *[_rows(state, slice(1))] * missing]), shape)
        return sound[:rows], _rows(after, slice(rows))

    def _has_room(self, key: tuple[_Shape, int]) -> bool:
        assert self._replay is not None
        if self.shapes:
            return key[0] in self.shapes
        return key in self._replay or self._replay.captured < MOST_VOCODER_SHAPES


def _filled(mel: Tensor, frames: int) -> Tensor:
    """So many of its first frames; where there are fewer, the last one goes on."""
    missing = max(0, frames - mel.shape[-1])
    return torch.cat([mel, mel[..., -1:].expand(-1, -1, missing)], dim=-1) if missing else mel[..., :frames]


class GraphedCodec(MossSpeechCodec):
    """The codec on CUDA; its steps give what the codec's give. Replies look back over a left window."""

    def __init__(self, codec: MossSpeechCodec) -> None:
        self._exact_ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.encoder = GraphedSpeechEncoder(codec.ear.encoder)
        # Another encoder, stepped alike.
        self.ear = SpeechStream(cast(SpeechEncoder, self.encoder), keep_for_exact=False)
        self.named, self.ready = codec.named, {}
        self.flow = GraphedFlow(codec.flow)  # type: ignore[assignment]  # another flow, streamed alike
        self.vocoder: GraphedVocoder = GraphedVocoder(codec.vocoder)

    def encode(self, sound: Sound) -> Tensor:
        """The codes of a whole sound of any rate.  # [code]"""
        return self._exact_ear.encode(self._samples(sound, EAR_RATE))

    def beside(self) -> "GraphedCodec":
        """The same codec with graphs of its own, for another lane of the device; states go from one to the other."""
        codec = copy.copy(self)
        codec.flow = cast(Any, self.flow).beside()
        codec.vocoder = self.vocoder.beside()
        return codec

    def start(self, voice: FlowVoice, left_chunks: int | None = LEFT_CHUNKS, seed: int = 0) -> SpokenState:
        """A reply about to begin."""
        return super().start(voice, left_chunks, seed)

    @property
    def spare_bytes(self) -> int:
        """Memory of windows that were given back."""
        return cast(GraphedFlow, self.flow).spare.nbytes

    def give_back(self, used: Sequence[SpokenState], after: Sequence[SpokenState]) -> None:
        """These states were used up by those after them, and the device is done: others may write where they lie."""
        for old, new in zip(used, after, strict=True):
            if old.flow.cache is not None and new.flow.cache is not None:
                cast(GraphedFlow, self.flow).spare.give(old.flow.cache, new.flow.cache)

    def warm_up(
        self,
        voice: FlowVoice,
        batches: Sequence[int] = BUCKETS,
        sizes: Sequence[int] = (),
        left_chunks: int | None = None,
    ) -> None:
        """Capture first hops, those after them, and hops of these sizes in codes: no conversation waits for it.

        From then on batches are filled up to one of these.
        """
        config = self.flow.config
        begins, longer = config.chunk + config.lookahead, [size for size in sizes if size != config.chunk]
        # Whoever has to wait for his first sound in a crowd has codes for a longer hop when he gets it.
        replies = [
            [begins, *[config.chunk] * 3, *longer],
            *([begins, size] for size in longer if size <= 2 * config.chunk),
        ]
        left_chunks = LEFT_CHUNKS if left_chunks is None else left_chunks
        if max(batches) > BUCKETS[-1]:
            raise InputError(f"batches go up to {BUCKETS[-1]}; {max(batches)} was asked for")
        flow = cast(GraphedFlow, self.flow)
        first = (len(voice.codes) + config.chunk) // config.chunk * config.chunk - voice.sink
        flow.buckets = self.vocoder.buckets = sorted(batches)
        flow.times, flow.longest_prefix = sorted({first, config.chunk, *sizes}), voice.sink
        with self.vocoder.learning():
            for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
                for pieces in replies:
                    self._try(voice, left_chunks, streams, pieces)

    def _try(self, voice: FlowVoice, left_chunks: int, streams: int, pieces: Sequence[int]) -> None:
        """Replies that are made of such pieces."""
        states = [self.start(voice, left_chunks, seed) for seed in range(streams)]
        for size in pieces:
            codes, before = [torch.zeros(size, dtype=torch.int64)] * streams, states
            sounds, states = self.step_batch(before, codes, [False] * streams)
            torch.cat(sounds).cpu()  # until it is done
            self.give_back(before, states)
