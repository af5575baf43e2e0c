"""MOSS-Speech's codec with the hops of its decoder replayed as CUDA graphs: the same values, a fraction of the wait.

`flow_graphs.py` does so for the flow. A vocoder's batch is filled up to the next bucket too; the last hop of a reply
runs as in the codec itself.
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from vivavoce.audio.sound import Sound
from vivavoce.errors import InputError
from vivavoce.models.flow_graphs import BUCKETS, GraphedFlow, bucket_of
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.hift_stream import HiFTState, HiFTStream, _rows, _Shape, _stacked
from vivavoce.models.moss_speech_codec import EAR_RATE, MossSpeechCodec, SpokenState
from vivavoce.models.speech_encoder import SpeechEncoder
from vivavoce.models.speech_encoder_graphs import GraphedSpeechEncoder
from vivavoce.models.speech_encoder_stream import SpeechStream

LEFT_CHUNKS = 8
MOST_VOCODER_SHAPES = 64  # hops of odd sizes have a shape each


class GraphedVocoder(HiFTStream):
    """A vocoder stream that replays every hop but the last of a reply."""

    def __init__(self, stream: HiFTStream) -> None:
        super().__init__(stream.hift, stream.delay_frames, graphs=True)
        self.eager = stream
        self.buckets: Sequence[int] = BUCKETS

    def _recurs(self, shape: _Shape) -> bool:
        waits = shape.frames - shape.emit.stop == self.delay_frames
        return waits and shape.guessed == self.reach.right - self.delay_frames

    def _advance(self, state: HiFTState, shape: _Shape) -> tuple[Tensor, HiFTState]:
        rows = state.mel.shape[0]
        if rows > self.buckets[-1] or not self._recurs(shape):
            return self.eager._advance(state, shape)
        bucket = bucket_of(rows, self.buckets)
        if not self._has_room((shape, bucket)):
            return self.eager._advance(state, shape)
        missing = bucket - rows
        sound, after = super()._advance(_stacked([state, *[_rows(state, slice(1))] * missing]), shape)
        return sound[:rows], _rows(after, slice(rows))

    def _has_room(self, key: tuple[_Shape, int]) -> bool:
        assert self._replay is not None
        return key in self._replay or self._replay.captured < MOST_VOCODER_SHAPES


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
        codec.vocoder = GraphedVocoder(self.vocoder.eager)
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
        longer = [size for size in sizes if size != config.chunk for _ in range(2)]
        pieces = [config.chunk + config.lookahead, *[config.chunk] * 3, *longer]
        left_chunks = LEFT_CHUNKS if left_chunks is None else left_chunks
        if max(batches) > BUCKETS[-1]:
            raise InputError(f"batches go up to {BUCKETS[-1]}; {max(batches)} was asked for")
        flow = cast(GraphedFlow, self.flow)
        first = (len(voice.codes) + config.chunk) // config.chunk * config.chunk - voice.sink
        flow.buckets = self.vocoder.buckets = sorted(batches)
        flow.times = sorted({first, config.chunk, *sizes})
        for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
            states = [self.start(voice, left_chunks, seed) for seed in range(streams)]
            for size in pieces:
                codes, before = [torch.zeros(size, dtype=torch.int64)] * streams, states
                sounds, states = self.step_batch(before, codes, [False] * streams)
                torch.cat(sounds).cpu()  # until it is done
                self.give_back(before, states)
