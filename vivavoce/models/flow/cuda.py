"""Hops of a flow decoder replayed as CUDA graphs; tests hold the mel equal to that of the plain decoder.

Batches are padded to the next bucket and prefixes to a multiple of `prefix_step`, so that few graphs serve all batches.
The streams' windows stay in place: a graph reads their addresses. Hops of many frames, of many streams, or without a
left window run eagerly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vivavoce.models.flow.state import (
    WINDOWS,
    FlowAddresses,
    FlowCache,
    FlowPass,
    FlowState,
    FlowVoice,
    addressable,
    addressed_pasts,
)
from vivavoce.models.flow.stream import StreamingFlow
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.cuda_graphs import Graphed, bucket_for
from vivavoce.nn.streaming import Past
from vivavoce.nn.vocoder import CausalConv1d

BUCKETS = (1, 2, 4, 8, 16, 32)
MAX_CHUNKS = 4  # of one captured hop
PREFIX_STEP = 25  # codes
STEPS_PER_PART = 2  # Euler steps of a part of a hop: 16 ms for 32 replies and 20 codes on an H200
NUMBERS = 3 + 3 * len(WINDOWS)  # per stream, before its codes: start, end, sink; addresses of voice, past and next


class FlowHop(NamedTuple):
    """The key of a captured hop."""

    streams: int
    time: int  # codes
    prefix_slots: int  # codes
    left_chunks: int


class WindowPool:
    """Released windows for reuse by other replies: saves allocating hundreds of megabytes."""

    def __init__(self) -> None:
        self._caches: dict[int, list[FlowCache]] = {}  # by slots

    @property
    def nbytes(self) -> int:
        """Bytes held in the pool."""
        return sum(cache.nbytes for caches in self._caches.values() for cache in list(caches))

    def acquire(self, code_slots: int) -> FlowCache | None:
        """A cache with arbitrary contents; None if the pool has none of this size."""
        try:
            return self._caches[code_slots].pop()
        except (KeyError, IndexError):
            return None

    def release(self, cache: FlowCache, next_cache: FlowCache) -> None:
        """Return the windows of a used state, unless the next state shares them.

        The device must have finished reading them.
        """
        pairs = [(getattr(cache, name), getattr(next_cache, name)) for name in WINDOWS]
        if all(_owns_storage(old) and old.data_ptr() != new.data_ptr() for old, new in pairs):
            self._caches.setdefault(cache.code_slots, []).append(cache)


class GraphedFlow(StreamingFlow):
    """CUDA-graph implementation of a flow decoder on its weights."""

    def __init__(self, flow: StreamingFlow, prefix_step: int = PREFIX_STEP, pool: WindowPool | None = None) -> None:
        """Voices with equal length, rounded up to `prefix_step` codes, share graphs."""
        super().__init__(flow.config, flow.input_embedding, flow.spk_embed_affine_layer)
        self.flow, self._prefix_step = flow, prefix_step
        self.buckets: Sequence[int] = BUCKETS
        self.hop_sizes: Sequence[int] = ()
        """Captured hop sizes in codes: other hops are cut into these, the last one of a reply is padded."""
        self.max_prefix = 0
        """Prefix length of the captured hops in codes; shorter voices use the same graphs."""
        self.pool = pool or WindowPool()
        for module in flow.modules():
            # Only once: captured graphs hold the weight's address.
            if isinstance(module, CausalConv1d) and module.weight.stride(1) != 1:
                module.weight.data = _channels_last_weight(module.weight.data, module.groups)
        config, like = flow.config, flow.spk_embed_affine_layer.weight
        self._blank = FlowCache.blank(config.encoder, config.estimator, config.euler_steps, like)
        self._graphs = Graphed(self._graph_body)

    def with_own_graphs(self) -> "GraphedFlow":
        """The same flow with its own graphs and a shared window pool."""
        flow = GraphedFlow(self.flow, self._prefix_step, self.pool)
        flow._graphs.blank = self._graphs.blank
        return flow

    def pause_before_parts(self, before_part: Callable[[], None]) -> None:
        """Capture hops in parts of a few Euler steps from now on, and call this before each part."""
        self._graphs.pause_before_parts(before_part)

    def start(self, voice: FlowVoice, left_chunks: int | None = None, recompute: bool = False) -> FlowState:
        """As in the base class; in inference mode it reuses windows of the pool."""
        slots = 0 if left_chunks is None else left_chunks * self.config.chunk
        can_reuse = torch.is_inference_mode_enabled() and slots > 0 and not recompute
        reused = self.pool.acquire(slots) if can_reuse else None
        if reused is None:
            return super().start(voice, left_chunks, recompute)
        contexts = {name: getattr(voice.cache, name).clone() for name in FlowCache.CONTEXT_AXES}
        windows = {name: getattr(reused, name).zero_() for name in WINDOWS}
        tail = voice.codes[voice.sink :]
        return FlowState(voice, left_chunks, replace(reused, **windows, **contexts), tail, voice.sink, voice.sink)

    def decode(self, flow_pass: FlowPass) -> Tensor:
        """One pass of the wrapped decoder."""
        return self.flow.decode(flow_pass)

    @torch.no_grad()
    def step_batch(
        self, states: Sequence[FlowState], codes: Sequence[Tensor], final: bool | Sequence[bool] = False
    ) -> tuple[list[Tensor], list[FlowState]]:
        """As in the base class, in as many captured hops as needed."""
        finals = [final] * len(states) if isinstance(final, bool) else list(final)
        pieces_by_stream = [self._split_into_hops(*stream) for stream in zip(states, codes, finals, strict=True)]
        mels, new_states = super().step_batch(
            states,
            [pieces[0] for pieces in pieces_by_stream],
            [last and len(members) == 1 for last, members in zip(finals, pieces_by_stream, strict=True)],
        )
        for number in range(1, max(map(len, pieces_by_stream), default=1)):
            members = [index for index, pieces in enumerate(pieces_by_stream) if number < len(pieces)]
            lasts = [finals[index] and number == len(pieces_by_stream[index]) - 1 for index in members]
            new_mels, advanced = super().step_batch(
                [new_states[index] for index in members], [pieces_by_stream[index][number] for index in members], lasts
            )
            for index, mel, state in zip(members, new_mels, advanced, strict=True):
                mels[index], new_states[index] = torch.cat([mels[index], mel], dim=1), state
        return mels, new_states

    def _split_into_hops(self, state: FlowState, codes: Tensor, final: bool) -> list[Tensor]:
        """The codes in pieces, each of which completes a captured hop."""
        known, lookahead, chunk = state.first + len(state.codes), self.config.lookahead, self.config.chunk
        all_known, position, ends = known + len(codes), state.position, []
        until = all_known if final else max(position, (all_known - lookahead) // chunk * chunk)
        is_replayed = self.hop_sizes and state.cache is not None and state.left_chunks is not None
        while is_replayed and (remaining := until - position) > 0:
            if remaining <= self.hop_sizes[-1] if final else remaining in self.hop_sizes:
                break
            hop = max(
                (time for time in self.hop_sizes if time <= remaining - (lookahead if final else 0)), default=remaining
            )
            position += hop
            if position >= until:
                break
            ends.append(position + lookahead - known)
        return list(codes.tensor_split(ends))

    def capture(self, streams: int, time: int, prefix_codes: int, left_chunks: int) -> None:
        """Capture the graph of such hops unless there is one."""
        hop = FlowHop(bucket_of(streams, self.buckets), time, self._round_up_prefix(prefix_codes), left_chunks)
        if hop in self._graphs or not self._blank.mel_windows.is_cuda:
            return
        # Address 0 means no past, so that the warm-up runs before the capture write to no stream's windows.
        packed = torch.zeros(hop.streams, NUMBERS + time + self.config.lookahead, dtype=torch.int64)
        blank = FlowCache.stack([self._blank] * hop.streams)
        speaker = blank.mel_contexts.new_zeros(hop.streams, self.config.mel_bands)
        prompt_mel = speaker.new_zeros(hop.streams, time * self.config.ratio, self.config.mel_bands)
        self._graphs.capture(hop, [packed.to(self.device), speaker, prompt_mel, *_contexts(blank)])

    def _step_group(self, states: Sequence[FlowState], final: bool) -> list[tuple[Tensor, FlowState]]:
        hop = self._hop(states, final)
        if hop is None:
            return super()._step_group(states, final)
        self.capture(*hop)
        caches = [_contiguous(state.cache) for state in states if state.cache is not None]
        next_caches = [self.pool.acquire(cache.code_slots) or cache.empty_like_this() for cache in caches]
        mels, *contexts = self._graphs(hop, self._graph_inputs(states, caches, next_caches, hop, final))
        # One split for all streams: calls per stream would take the host longer than the device computes.
        by_stream = [each.split(1, axis) for each, axis in zip(contexts, FlowCache.CONTEXT_AXES.values(), strict=True)]
        mels = mels.transpose(1, 2).contiguous()
        results = []
        for index, (state, cache) in enumerate(zip(states, next_caches, strict=True)):
            contexts_of_stream: dict[str, Any] = {
                name: each[index] for name, each in zip(FlowCache.CONTEXT_AXES, by_stream, strict=True)
            }
            until = self._decodable_end(state, final)
            first_new = max(state.position, len(state.voice.codes))
            frames = slice(*((code - state.position) * self.config.ratio for code in (first_new, until)))
            left = state.codes[until - state.first :]
            advanced = replace(
                state, position=until, cache=replace(cache, **contexts_of_stream), codes=left, first=until
            )
            results.append((mels[index, :, frames], advanced))
        return results

    def _hop(self, states: Sequence[FlowState], final: bool) -> FlowHop | None:
        """The graph key of such states, or None; the last codes of a reply are padded to whole chunks."""
        left_chunks, cache, chunk = states[0].left_chunks, states[0].cache, self.config.chunk
        time = -(-(self._decodable_end(states[0], final) - states[0].position) // chunk) * chunk
        time = next((each for each in self.hop_sizes if each >= time), time) if final else time
        if left_chunks is None or cache is None or time > MAX_CHUNKS * chunk or len(states) > self.buckets[-1]:
            return None
        voices = {id(state.voice): state.voice for state in states}
        if not addressable(list(voices.values()), _contiguous(cache), time * self.config.ratio):
            return None
        streams, sink = bucket_of(len(states), self.buckets), max(state.voice.sink for state in states)
        return FlowHop(streams, time, self._round_up_prefix(max(sink, self.max_prefix)), left_chunks)

    def _round_up_prefix(self, codes: int) -> int:
        return -(-codes // self._prefix_step) * self._prefix_step

    def _graph_inputs(
        self,
        states: Sequence[FlowState],
        caches: Sequence[FlowCache],
        next_caches: Sequence[FlowCache],
        hop: FlowHop,
        final: bool,
    ) -> list[Tensor]:
        """Input tensors of a hop; padding streams copy the first one, without windows."""
        config, length = self.config, hop.time + self.config.lookahead
        packed = []
        prompt_mel = self._blank.mel_contexts.new_zeros(hop.streams, hop.time * config.ratio, config.mel_bands)
        for row, (state, *pasts) in enumerate(zip(states, caches, next_caches, strict=True)):
            start = state.position
            codes = state.codes[start - state.first :][:length].tolist()
            addresses = [getattr(cache, name).data_ptr() for cache in (state.voice.cache, *pasts) for name in WINDOWS]
            end = start + (len(codes) if final else length)
            packed.append([start, end, state.voice.sink, *addresses, *codes, *[0] * (length - len(codes))])
            if start * config.ratio < len(state.voice.mel):
                rest = state.voice.mel[start * config.ratio :][: hop.time * config.ratio]
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

    def _graph_body(self, hop: FlowHop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The captured computation: mel and next contexts."""
        packed, speaker, prompt_mel, *contexts = tensors
        starts, ends, sinks, *addresses = packed[:, :NUMBERS].T.contiguous()
        prefixes, windows, next_windows = torch.stack(addresses).unflatten(0, (3, len(WINDOWS)))
        slots = hop.left_chunks * self.config.chunk
        past = FlowAddresses(sinks, prefixes, windows, next_windows, hop.prefix_slots, slots)
        named: dict[str, Any] = dict(zip(FlowCache.CONTEXT_AXES, contexts, strict=True))
        cache = replace(self._blank, **named)
        next_cache = cache.empty_like_this()
        span = KeySpan(starts, hop.time, sinks, hop.prefix_slots, slots, ends)
        seen = self.seen_frames(span, hop.left_chunks)
        pasts = addressed_pasts(self.config.estimator, past, cache, next_cache, seen)
        codes, chunk = packed[:, NUMBERS:], self.config.chunk
        pasts = replace(pasts, mel_at=self._cutting(pasts.mel_at))
        mel = self.decode(FlowPass(codes, speaker, prompt_mel, span, pasts, chunk, hop.left_chunks))
        return mel, *_contexts(next_cache)

    def _cutting(self, mel_at: Callable[[int], Past]) -> Callable[[int], Past]:
        """`mel_at`, which the decoder calls once for each Euler step, with a cut of the graph every few steps."""

        def mel_past(step: int) -> Past:
            if step and step % STEPS_PER_PART == 0:
                self._graphs.cut()
            return mel_at(step)

        return mel_past


def _contiguous(cache: FlowCache) -> FlowCache:
    return cache if all(getattr(cache, name).is_contiguous() for name in WINDOWS) else cache.contiguous()


def _owns_storage(window: Tensor) -> bool:
    """Whether a tensor is contiguous and the only one in its storage."""
    return window.is_contiguous() and window.untyped_storage().nbytes() == window.nbytes


def bucket_of(streams: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket for this many streams."""
    return bucket_for(buckets, streams)


def _channels_last_weight(weight: Tensor, groups: int) -> Tensor:
    """The weight in the memory layout of the streaming convolution.  # [output, channel, tap]"""
    if groups > 1:
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _contexts(cache: FlowCache) -> list[Tensor]:
    return [getattr(cache, name) for name in FlowCache.CONTEXT_AXES]
