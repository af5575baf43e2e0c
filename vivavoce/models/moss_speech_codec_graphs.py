"""MOSS-Speech's codec with the hops of its decoder replayed as CUDA graphs: the same values, a fraction of the wait.

A batch is filled up to the next bucket, and prefixes to the next step in length, so that few graphs serve all batches.
The streams' windows stay where they are: a graph is given their addresses. Whatever has no graph runs as in the codec
itself: hops of many chunks, of many streams, or without a left window, and the vocoder's last hop of a reply.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.flow import FlowDecoder
from vivavoce.models.flow_addresses import WINDOWS, FlowAddresses, addressable, addressed_pasts
from vivavoce.models.flow_state import FlowCache, FlowState, FlowVoice
from vivavoce.models.hift_stream import HiFTState, HiFTStream, _rows, _Shape, _stacked
from vivavoce.models.moss_speech_codec import MossSpeechCodec, SpokenState
from vivavoce.nn.chunk_mask import Span
from vivavoce.nn.conv import CausalConv1d
from vivavoce.nn.graphed import Graphed

BUCKETS = (1, 2, 4, 8, 16, 32)
LEFT_CHUNKS = 8
MOST_CHUNKS = 4  # decoded in one hop
PREFIX_STEP = 25  # codes
MOST_VOCODER_SHAPES = 64  # hops of odd sizes have a shape each
NUMBERS = 3 + 3 * len(WINDOWS)  # before the codes of a stream: start, end, sink; addresses of voice, past and next


class Hop(NamedTuple):
    """What must be equal for two hops to replay the same graph."""

    streams: int
    time: int  # codes
    prefix_slots: int  # codes
    left_chunks: int


class GraphedFlow(FlowDecoder):
    """A flow decoder, on the weights of another, that replays its hops."""

    def __init__(self, decoder: FlowDecoder) -> None:
        nn.Module.__init__(self)
        self.config = decoder.config
        self.input_embedding = decoder.input_embedding
        self.spk_embed_affine_layer = decoder.spk_embed_affine_layer
        self.encoder = decoder.encoder
        self.encoder_proj = decoder.encoder_proj
        self.decoder = decoder.decoder
        for module in decoder.modules():
            if isinstance(module, CausalConv1d):
                module.weight.data = _channels_side_by_side(module.weight.data)
        config = decoder.config
        like = decoder.spk_embed_affine_layer.weight
        self._blank = FlowCache.blank(config.encoder, config.estimator, config.euler_steps, like)
        self._graphs = Graphed(self._replayed)

    def capture(self, streams: int, time: int, prefix_codes: int, left_chunks: int) -> None:
        """Make the graph of such hops, if there is none yet."""
        hop = Hop(_bucket(streams), time, _stepped(prefix_codes), left_chunks)
        if hop in self._graphs or not self._blank.mel_windows.is_cuda:
            return
        # Addresses of 0 stand for no past at all, so the runs before the capture touch nobody's.
        packed = torch.zeros(hop.streams, NUMBERS + time + self.config.lookahead, dtype=torch.int64)
        blank = FlowCache.stack([self._blank] * hop.streams)
        speaker = blank.mel_contexts.new_zeros(hop.streams, self.config.mel_bands)
        prompt_mel = speaker.new_zeros(hop.streams, time * self.config.ratio, self.config.mel_bands)
        self._graphs.capture(hop, [packed.to(self.device), speaker, prompt_mel, *_contexts(blank)])

    def _step_together(self, states: Sequence[FlowState], final: bool) -> list[tuple[Tensor, FlowState]]:
        hop = self._hop(states, final)
        if hop is None:
            return super()._step_together(states, final)
        self.capture(*hop)
        caches = [state.cache.contiguous() for state in states if state.cache is not None]
        after = [cache.unwritten() for cache in caches]
        mels, *contexts = self._graphs(hop, self._given(states, caches, after, hop, final))
        results = []
        for index, (state, cache) in enumerate(zip(states, after, strict=True)):
            names = FlowCache.CONTEXT_AXES.items()
            own: dict[str, Any] = {
                name: each.narrow(axis, index, 1) for (name, axis), each in zip(names, contexts, strict=True)
            }
            until = self._decodable(state, final)
            heard = max(state.position, len(state.voice.codes))
            frames = slice(*((code - state.position) * self.config.ratio for code in (heard, until)))
            moved = self._advanced(state, until, replace(cache, **own), 0)
            results.append((mels[index, frames].T.contiguous(), moved))
        return results

    def _hop(self, states: Sequence[FlowState], final: bool) -> Hop | None:
        """The graph that serves such states, if one can; the last codes of a reply are filled up to whole chunks."""
        left_chunks, cache, chunk = states[0].left_chunks, states[0].cache, self.config.chunk
        time = -(-(self._decodable(states[0], final) - states[0].position) // chunk) * chunk
        if left_chunks is None or cache is None or time > MOST_CHUNKS * chunk or len(states) > BUCKETS[-1]:
            return None
        voices = {id(state.voice): state.voice for state in states}
        if not addressable(list(voices.values()), cache.contiguous(), time * self.config.ratio):
            return None
        return Hop(_bucket(len(states)), time, _stepped(max(state.voice.sink for state in states)), left_chunks)

    def _given(
        self,
        states: Sequence[FlowState],
        caches: Sequence[FlowCache],
        after: Sequence[FlowCache],
        hop: Hop,
        final: bool,
    ) -> list[Tensor]:
        """The tensors of a hop; streams that fill the bucket look like the first one, but keep no window."""
        config, length = self.config, hop.time + self.config.lookahead
        packed = []
        prompt_mel = self._blank.mel_contexts.new_zeros(hop.streams, hop.time * config.ratio, config.mel_bands)
        for row, (state, *pasts) in enumerate(zip(states, caches, after, strict=True)):
            start = state.position
            codes = state.codes[start - state.first :][:length].tolist()
            places = [getattr(cache, name).data_ptr() for cache in (state.voice.cache, *pasts) for name in WINDOWS]
            end = start + (len(codes) if final else length)
            packed.append([start, end, state.voice.sink, *places, *codes, *[0] * (length - len(codes))])
            rest = state.voice.mel[start * config.ratio :][: hop.time * config.ratio]
            if len(rest):
                prompt_mel[row, : len(rest)] = rest
        missing = hop.streams - len(states)
        filler = list(packed[0])
        filler[NUMBERS - 2 * len(WINDOWS) : NUMBERS] = [0] * (2 * len(WINDOWS))
        numbers = torch.tensor(packed + [filler] * missing, pin_memory=self.device.type == "cuda")
        speakers = [state.voice.speaker for state in states]
        contexts = [
            torch.cat([getattr(cache, name) for cache in [*caches, *[caches[0]] * missing]], dim=axis)
            for name, axis in FlowCache.CONTEXT_AXES.items()
        ]
        numbers = numbers.to(self.device, non_blocking=True)
        return [numbers, torch.stack([*speakers, *[speakers[0]] * missing]), prompt_mel, *contexts]

    def _replayed(self, hop: Hop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The mel and the next contexts: what the graph holds."""
        packed, speaker, prompt_mel, *contexts = tensors
        starts, ends, sinks, *places = packed[:, :NUMBERS].T.contiguous()
        prefixes, windows, next_windows = torch.stack(places).unflatten(0, (3, len(WINDOWS)))
        slots = hop.left_chunks * self.config.chunk
        past = FlowAddresses(sinks, prefixes, windows, next_windows, hop.prefix_slots, slots)
        given: dict[str, Any] = dict(zip(FlowCache.CONTEXT_AXES, contexts, strict=True))
        before = replace(self._blank, **given)
        after = before.unwritten()
        pasts = addressed_pasts(self.config.estimator, past, before, after)
        span = Span(starts, hop.time, sinks, hop.prefix_slots, slots, ends)
        mel = self.decode(packed[:, NUMBERS:], speaker, prompt_mel, span, pasts, True, hop.left_chunks)
        return mel, *_contexts(after)


class GraphedVocoder(HiFTStream):
    """A vocoder stream that replays every hop but the last of a reply."""

    def __init__(self, stream: HiFTStream) -> None:
        super().__init__(stream.hift, stream.delay_frames, graphs=True)
        self._eager = stream

    def _recurs(self, shape: _Shape) -> bool:
        waits = shape.frames - shape.emit.stop == self.delay_frames
        return waits and shape.guessed == self.reach.right - self.delay_frames

    def _advance(self, state: HiFTState, shape: _Shape) -> tuple[Tensor, HiFTState]:
        rows = state.mel.shape[0]
        if rows > BUCKETS[-1] or not self._recurs(shape) or not self._has_room((shape, _bucket(rows))):
            return self._eager._advance(state, shape)
        missing = _bucket(rows) - rows
        sound, after = super()._advance(_stacked([state, *[_rows(state, slice(1))] * missing]), shape)
        return sound[:rows], _rows(after, slice(rows))

    def _has_room(self, key: tuple[_Shape, int]) -> bool:
        assert self._replay is not None
        return key in self._replay or self._replay.captured < MOST_VOCODER_SHAPES


class GraphedCodec(MossSpeechCodec):
    """The codec on CUDA; its steps give what the codec's give. Replies look back over a left window."""

    def __init__(self, codec: MossSpeechCodec) -> None:
        self.ear, self.speaker, self.mel = codec.ear, codec.speaker, codec.mel
        self.named, self.ready = codec.named, {}
        self.flow: GraphedFlow = GraphedFlow(codec.flow)
        self.vocoder: GraphedVocoder = GraphedVocoder(codec.vocoder)

    def start(self, voice: FlowVoice, left_chunks: int | None = LEFT_CHUNKS, seed: int = 0) -> SpokenState:
        """A reply about to begin."""
        return super().start(voice, left_chunks, seed)

    def warm_up(
        self,
        voice: FlowVoice,
        batches: Sequence[int] = BUCKETS,
        pieces: Sequence[int] | None = None,
        left_chunks: int = LEFT_CHUNKS,
    ) -> None:
        """Capture the hops of replies that come in these pieces of codes, so that no conversation waits for it."""
        config = self.flow.config
        pieces = pieces or [config.chunk + config.lookahead, *[config.chunk] * 3]
        if max(batches) > BUCKETS[-1]:
            raise InputError(f"batches go up to {BUCKETS[-1]}; {max(batches)} was asked for")
        for streams in sorted(batches, reverse=True):  # the largest first: the smaller ones reuse its memory
            states = [self.start(voice, left_chunks, seed) for seed in range(streams)]
            for size in pieces:
                codes = [torch.zeros(size, dtype=torch.int64)] * streams
                _, states = self.step_batch(states, codes, [False] * streams)


def _bucket(streams: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= streams)


def _stepped(codes: int) -> int:
    return -(-codes // PREFIX_STEP) * PREFIX_STEP


def _channels_side_by_side(weight: Tensor) -> Tensor:
    """The same weight, laid out as the streaming convolution reads it.  # [output, channel, tap]"""
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _contexts(cache: FlowCache) -> list[Tensor]:
    return [getattr(cache, name) for name in FlowCache.CONTEXT_AXES]
