"""Hops of a flow decoder replayed as CUDA graphs: the same values, a fraction of the wait.

A batch is filled up to the next bucket, and prefixes to the next step in length, so that few graphs serve all batches.
The streams' windows stay where they are: a graph is given their addresses. Whatever has no graph runs as in the decoder
itself: hops of many frames, of many streams, or without a left window.
"""

from collections.abc import Sequence
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
from vivavoce.nn.cuda_graphs import Graphed
from vivavoce.nn.vocoder import CausalConv1d

BUCKETS = (1, 2, 4, 8, 16, 32)
MOST_CHUNKS = 4  # decoded in one hop
PREFIX_STEP = 25  # codes
NUMBERS = 3 + 3 * len(WINDOWS)  # before the codes of a stream: start, end, sink; addresses of voice, past and next


class FlowHop(NamedTuple):
    """What must be equal for two hops to replay the same graph."""

    streams: int
    time: int  # codes
    prefix_slots: int  # codes
    left_chunks: int


class SpareWindows:
    """Windows that no reply needs any more, for others to write: hundreds of megabytes that need not be asked for."""

    def __init__(self) -> None:
        self._spare: dict[int, list[FlowCache]] = {}  # by slots

    @property
    def nbytes(self) -> int:
        """Memory that waits here for a reply."""
        return sum(cache.nbytes for caches in self._spare.values() for cache in list(caches))

    def take(self, code_slots: int) -> FlowCache | None:
        """A cache whose windows nobody looks at, its contexts anybody's; None where there is none."""
        try:
            return self._spare[code_slots].pop()
        except (KeyError, IndexError):
            return None

    def give(self, cache: FlowCache, after: FlowCache) -> None:
        """The windows of a state that was used up, unless the one after it has the same; the device is done."""
        pairs = [(getattr(cache, name), getattr(after, name)) for name in WINDOWS]
        if all(_is_whole(old) and old.data_ptr() != new.data_ptr() for old, new in pairs):
            self._spare.setdefault(cache.code_slots, []).append(cache)


class GraphedFlow(StreamingFlow):
    """A flow decoder, on the weights of another, that replays its hops."""

    def __init__(self, flow: StreamingFlow, prefix_step: int = PREFIX_STEP, spare: SpareWindows | None = None) -> None:
        """Voices whose lengths lie within the same `prefix_step` codes share their graphs."""
        super().__init__(flow.config, flow.input_embedding, flow.spk_embed_affine_layer)
        self.flow, self._prefix_step = flow, prefix_step
        self.buckets: Sequence[int] = BUCKETS
        self.times: Sequence[int] = ()
        """Hops of so many codes have their graphs: others are cut into these, the last one of a reply is filled up."""
        self.longest_prefix = 0
        """Codes of a voice whose hops have their graphs: voices that are shorter take those too."""
        self.spare = spare or SpareWindows()
        for module in flow.modules():
            # Once only: graphs that were captured read the weight where it lies.
            if isinstance(module, CausalConv1d) and module.weight.stride(1) != 1:
                module.weight.data = _channels_side_by_side(module.weight.data, module.groups)
        config, like = flow.config, flow.spk_embed_affine_layer.weight
        self._blank = FlowCache.blank(config.encoder, config.estimator, config.euler_steps, like)
        self._graphs = Graphed(self._replayed)

    def beside(self) -> "GraphedFlow":
        """The same flow with graphs of its own; windows go from one to the other."""
        flow = GraphedFlow(self.flow, self._prefix_step, self.spare)
        flow._graphs.blank = self._graphs.blank
        return flow

    def start(self, voice: FlowVoice, left_chunks: int | None = None, recompute: bool = False) -> FlowState:
        """As the decoder's; in inference mode, in the windows of another reply where there are any."""
        slots = 0 if left_chunks is None else left_chunks * self.config.chunk
        is_served = torch.is_inference_mode_enabled() and slots > 0 and not recompute
        spare = self.spare.take(slots) if is_served else None
        if spare is None:
            return super().start(voice, left_chunks, recompute)
        contexts = {name: getattr(voice.cache, name).clone() for name in FlowCache.CONTEXT_AXES}
        windows = {name: getattr(spare, name).zero_() for name in WINDOWS}
        tail = voice.codes[voice.sink :]
        return FlowState(voice, left_chunks, replace(spare, **windows, **contexts), tail, voice.sink, voice.sink)

    def decode(self, given: FlowPass) -> Tensor:
        """The decoder's own pass."""
        return self.flow.decode(given)

    @torch.no_grad()
    def step_batch(
        self, states: Sequence[FlowState], codes: Sequence[Tensor], final: bool | Sequence[bool] = False
    ) -> tuple[list[Tensor], list[FlowState]]:
        """As the decoder's, in as many hops of those that have their graphs as it takes."""
        finals = [final] * len(states) if isinstance(final, bool) else list(final)
        cut = [self._cut(*given) for given in zip(states, codes, finals, strict=True)]
        mels, after = super().step_batch(
            states,
            [pieces[0] for pieces in cut],
            [last and len(some) == 1 for last, some in zip(finals, cut, strict=True)],
        )
        for number in range(1, max(map(len, cut), default=1)):
            some = [index for index, pieces in enumerate(cut) if number < len(pieces)]
            lasts = [finals[index] and number == len(cut[index]) - 1 for index in some]
            made, moved = super().step_batch(
                [after[index] for index in some], [cut[index][number] for index in some], lasts
            )
            for index, mel, state in zip(some, made, moved, strict=True):
                mels[index], after[index] = torch.cat([mels[index], mel], dim=1), state
        return mels, after

    def _cut(self, state: FlowState, codes: Tensor, final: bool) -> list[Tensor]:
        """The codes in pieces, each of which completes as many as have a graph."""
        known, lookahead, chunk = state.first + len(state.codes), self.config.lookahead, self.config.chunk
        all_known, position, ends = known + len(codes), state.position, []
        until = all_known if final else max(position, (all_known - lookahead) // chunk * chunk)
        is_replayed = self.times and state.cache is not None and state.left_chunks is not None
        while is_replayed and (due := until - position) > 0:
            if due <= self.times[-1] if final else due in self.times:
                break
            hop = max((time for time in self.times if time <= due - (lookahead if final else 0)), default=due)
            position += hop
            if position >= until:
                break
            ends.append(position + lookahead - known)
        return list(codes.tensor_split(ends))

    def capture(self, streams: int, time: int, prefix_codes: int, left_chunks: int) -> None:
        """Make the graph of such hops, if there is none yet."""
        hop = FlowHop(bucket_of(streams, self.buckets), time, self._stepped(prefix_codes), left_chunks)
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
        caches = [_in_one_piece(state.cache) for state in states if state.cache is not None]
        after = [self.spare.take(cache.code_slots) or cache.unwritten() for cache in caches]
        mels, *contexts = self._graphs(hop, self._given(states, caches, after, hop, final))
        # Views of all streams by one call each: a call for every stream takes the host longer than the device computes.
        own = [each.split(1, axis) for each, axis in zip(contexts, FlowCache.CONTEXT_AXES.values(), strict=True)]
        mels = mels.transpose(1, 2).contiguous()
        results = []
        for index, (state, cache) in enumerate(zip(states, after, strict=True)):
            held: dict[str, Any] = {name: each[index] for name, each in zip(FlowCache.CONTEXT_AXES, own, strict=True)}
            until = self._decodable(state, final)
            heard = max(state.position, len(state.voice.codes))
            frames = slice(*((code - state.position) * self.config.ratio for code in (heard, until)))
            left = state.codes[until - state.first :]
            moved = replace(state, position=until, cache=replace(cache, **held), codes=left, first=until)
            results.append((mels[index, :, frames], moved))
        return results

    def _hop(self, states: Sequence[FlowState], final: bool) -> FlowHop | None:
        """The graph that serves such states, if one can; the last codes of a reply are filled up to whole chunks."""
        left_chunks, cache, chunk = states[0].left_chunks, states[0].cache, self.config.chunk
        time = -(-(self._decodable(states[0], final) - states[0].position) // chunk) * chunk
        time = next((each for each in self.times if each >= time), time) if final else time
        if left_chunks is None or cache is None or time > MOST_CHUNKS * chunk or len(states) > self.buckets[-1]:
            return None
        voices = {id(state.voice): state.voice for state in states}
        if not addressable(list(voices.values()), _in_one_piece(cache), time * self.config.ratio):
            return None
        streams, sink = bucket_of(len(states), self.buckets), max(state.voice.sink for state in states)
        return FlowHop(streams, time, self._stepped(max(sink, self.longest_prefix)), left_chunks)

    def _stepped(self, codes: int) -> int:
        return -(-codes // self._prefix_step) * self._prefix_step

    def _given(
        self,
        states: Sequence[FlowState],
        caches: Sequence[FlowCache],
        after: Sequence[FlowCache],
        hop: FlowHop,
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

    def _replayed(self, hop: FlowHop, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
        span = KeySpan(starts, hop.time, sinks, hop.prefix_slots, slots, ends)
        codes, chunk = packed[:, NUMBERS:], self.config.chunk
        mel = self.decode(FlowPass(codes, speaker, prompt_mel, span, pasts, chunk, hop.left_chunks))
        return mel, *_contexts(after)


def _in_one_piece(cache: FlowCache) -> FlowCache:
    return cache if all(getattr(cache, name).is_contiguous() for name in WINDOWS) else cache.contiguous()


def _is_whole(window: Tensor) -> bool:
    """Whether it lies in memory of its own, in one piece."""
    return window.is_contiguous() and window.untyped_storage().nbytes() == window.nbytes


def bucket_of(streams: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The batch that serves so many streams."""
    return next(bucket for bucket in buckets if bucket >= streams)


def _channels_side_by_side(weight: Tensor, groups: int) -> Tensor:
    """The same weight, laid out as the streaming convolution reads it.  # [output, channel, tap]"""
    if groups > 1:
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _contexts(cache: FlowCache) -> list[Tensor]:
    return [getattr(cache, name) for name in FlowCache.CONTEXT_AXES]
