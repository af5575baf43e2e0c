"""State of a flow stream: KV windows and convolution contexts, the precomputed voice, the state of one reply.

The second half gives the Triton kernels the same state by device addresses, which a CUDA graph can read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce import kernels
from vivavoce.models.flow.estimator import GUIDANCE_ROWS
from vivavoce.nn.attention import KeySpan, attention_bias, visible
from vivavoce.nn.streaming import AddressedPast, KeyValueAddresses, Past, addresses

SLOT_AXIS = -2


class EncoderSizes(Protocol):
    """Sizes of the encoder that a stream needs."""

    @property
    def ratio(self) -> int:
        """Mel frames per code."""
        ...

    @property
    def lookahead(self) -> int:
        """Codes that a chunk needs beyond its end."""
        ...

    @property
    def dim(self) -> int:
        """Width of attention and of the convolutions with cached inputs."""
        ...

    @property
    def heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def code_layers(self) -> int:
        """Attention layers at code rate."""
        ...

    @property
    def frame_layers(self) -> int:
        """Attention layers at mel rate."""
        ...

    @property
    def contexts(self) -> tuple[int, ...]:
        """Cached inputs of the look-ahead convolution and of the upsampling convolution."""
        ...


class EstimatorSizes(Protocol):
    """Sizes of an estimator that a stream needs."""

    @property
    def heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        ...

    @property
    def attention_layers(self) -> int:
        """Attention layers, each with cached keys and values."""
        ...

    @property
    def context(self) -> int:
        """Cached inputs of each causal convolution."""
        ...

    @property
    def context_channels(self) -> list[int]:
        """Input channels of each causal convolution, in forward order."""
        ...


@dataclass(frozen=True)
class FlowCache:
    """Keys, values and convolution contexts of a batch of streams after a pass.

    The newest positions are last in a window. Its number of slots is fixed under a left window; without one it grows
    with each pass. Axes of 2 are keys and values, then the guided and the unguided row.
    """

    ratio: int  # frames per code
    code_windows: Tensor  # [layer, 2, stream, 1, head, code, dim]
    frame_windows: Tensor  # [layer, 2, stream, 1, head, frame, dim]
    mel_windows: Tensor  # [step, layer, 2, stream, 2, head, frame, dim]
    lookahead_context: Tensor  # [stream, code, channel]
    upsample_context: Tensor  # [stream, frame, channel]
    mel_contexts: Tensor  # [step, stream, 2, frame, channels of all convolutions]

    WINDOW_AXES: ClassVar[dict[str, int]] = {"code_windows": 2, "frame_windows": 2, "mel_windows": 3}
    CONTEXT_AXES: ClassVar[dict[str, int]] = {"lookahead_context": 0, "upsample_context": 0, "mel_contexts": 1}

    @classmethod
    def blank(cls, encoder: EncoderSizes, estimator: EstimatorSizes, steps: int, like: Tensor) -> "FlowCache":
        """The cache of one new stream: windows without slots, zero contexts."""
        head = (encoder.heads, 0, encoder.dim // encoder.heads)
        mel_head = (estimator.heads, 0, estimator.head_dim)
        lookahead, upsampler = encoder.contexts
        return cls(
            ratio=encoder.ratio,
            code_windows=like.new_zeros(encoder.code_layers, 2, 1, 1, *head),
            frame_windows=like.new_zeros(encoder.frame_layers, 2, 1, 1, *head),
            mel_windows=like.new_zeros(steps, estimator.attention_layers, 2, 1, GUIDANCE_ROWS, *mel_head),
            lookahead_context=like.new_zeros(1, lookahead, encoder.dim),
            upsample_context=like.new_zeros(1, upsampler, encoder.dim),
            mel_contexts=like.new_zeros(steps, 1, GUIDANCE_ROWS, estimator.context, sum(estimator.context_channels)),
        )

    @property
    def code_slots(self) -> int:
        """Past codes in the windows."""
        return self.code_windows.shape[SLOT_AXIS]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in self.WINDOW_AXES | self.CONTEXT_AXES}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self) -> "FlowCache":
        """A deep copy."""
        tensors = {name: getattr(self, name).clone() for name in self.WINDOW_AXES | self.CONTEXT_AXES}
        return replace(self, **tensors)

    def with_empty_windows(self, code_slots: int) -> "FlowCache":
        """A copy with the same contexts and zeroed windows of this many slots."""
        contexts = {name: getattr(self, name).clone() for name in self.CONTEXT_AXES}
        return replace(self.resize_windows(code_slots), **contexts)

    def resize_windows(self, code_slots: int) -> "FlowCache":
        """New zeroed windows of this many slots; the contexts are shared."""
        windows = {}
        for name in self.WINDOW_AXES:
            shape = list(getattr(self, name).shape)
            shape[SLOT_AXIS] = self._slots(name, code_slots)
            windows[name] = getattr(self, name).new_zeros(shape)
        return replace(self, **windows)

    def empty_like_this(self) -> "FlowCache":
        """Uninitialised memory for the next cache, of equal shape."""
        tensors: dict[str, Any] = {
            name: torch.empty_like(getattr(self, name)) for name in self.WINDOW_AXES | self.CONTEXT_AXES
        }
        return replace(self, **tensors)

    def contiguous(self) -> "FlowCache":
        """The same cache with contiguous windows."""
        return replace(self, **{name: getattr(self, name).contiguous() for name in self.WINDOW_AXES})

    def stream(self, index: int, code_slots: int) -> "FlowCache":
        """A view of one stream with its newest slots."""
        views = {
            name: getattr(self, name).narrow(axis, index, 1)
            for name, axis in (self.WINDOW_AXES | self.CONTEXT_AXES).items()
        }
        for name in self.WINDOW_AXES:
            slots = self._slots(name, code_slots)
            views[name] = views[name].narrow(SLOT_AXIS, views[name].shape[SLOT_AXIS] - slots, slots)
        return replace(self, **views)

    @classmethod
    def stack(cls, caches: Sequence["FlowCache"]) -> "FlowCache":
        """A batch of several caches; shorter windows are padded on the left."""
        if len(caches) == 1:
            return caches[0]
        max_slots = max(cache.code_slots for cache in caches)
        stacked: dict[str, Any] = {}
        for name, axis in (cls.WINDOW_AXES | cls.CONTEXT_AXES).items():
            tensors = [getattr(cache, name) for cache in caches]
            if name in cls.WINDOW_AXES:
                slots = caches[0]._slots(name, max_slots)
                tensors = [functional.pad(tensor, (0, 0, slots - tensor.shape[SLOT_AXIS], 0)) for tensor in tensors]
            stacked[name] = torch.cat(tensors, dim=axis)
        return replace(caches[0], **stacked)

    def _slots(self, name: str, code_slots: int) -> int:
        return code_slots if name == "code_windows" else code_slots * self.ratio


@dataclass(frozen=True)
class Pasts:
    """Pasts of one pass: encoder at code rate, encoder at mel rate, estimator at each Euler step."""

    codes: Past
    frames: Past
    mel_at: Callable[[int], Past]


@dataclass(frozen=True)
class FlowPass:
    """Inputs of one pass over a batch of streams."""

    codes: Tensor  # [stream, time (+ look-ahead)]
    speaker: Tensor  # [stream, band]
    prompt_mel: Tensor  # [stream, frame, band]: the prompt's mel where a frame lies in the prompt, else zero
    span: KeySpan
    pasts: Pasts
    chunk: int | None
    """Codes that attend to one another; None: no mask."""
    left_chunks: int | None = None
    """Previous chunks that a code attends to; None: all."""

    def bias(self, ratio: int, dtype: torch.dtype) -> Tensor | None:
        """The attention mask at `ratio` positions per code.  # [stream, 1, time, key]"""
        if self.chunk is None:
            return None
        return attention_bias(visible(self.span.scaled(ratio), self.chunk * ratio, self.left_chunks), dtype)


@dataclass
class VoicePrompt:
    """A recording of the voice that a reply imitates: its codes, mel and speaker vector."""

    codes: Tensor  # [code]
    mel: Tensor  # [frame, band]
    speaker: Tensor  # x-vector [dim]


@dataclass(frozen=True)
class FlowVoice:
    """A voice prompt with its cache, computed once per voice and shared by sessions.

    The first `sink` codes of the prompt are in `cache`: the whole chunks whose look-ahead lies inside the prompt. Every
    reply attends to them; the few codes after them are decoded with the reply and lie in its window.
    """

    codes: Tensor  # on the CPU [code]
    mel: Tensor  # [frame, band]
    speaker: Tensor  # [band]
    sink: int
    cache: FlowCache


@dataclass(frozen=True)
class FlowState:
    """State of a reply. A step reuses its memory: make a `copy()` to step from it again."""

    voice: FlowVoice
    left_chunks: int | None
    cache: FlowCache | None  # None: the window is recomputed from its codes at each step
    codes: Tensor  # from absolute index `first` on, prompt included; on the CPU
    first: int
    position: int  # absolute index of the first code not decoded yet
    finished: bool = False

    def copy(self) -> "FlowState":
        """A deep copy that shares the voice."""
        return replace(self, cache=None if self.cache is None else self.cache.copy())

    def fork(self) -> "FlowState":
        """A copy of the tensors that steps write in place, so that stepping it leaves this state valid."""
        if self.cache is None or self.left_chunks is not None:
            return self.copy()
        contexts = {name: getattr(self.cache, name).clone() for name in FlowCache.CONTEXT_AXES}
        return replace(self, cache=replace(self.cache, **contexts))


WINDOWS = tuple(FlowCache.WINDOW_AXES)  # at code rate, at mel rate in the encoder, and in the estimator


@dataclass(frozen=True)
class FlowAddresses:
    """Per stream, device addresses of the windows of its voice and of its reply, in the order of `WINDOWS`."""

    sinks: Tensor  # int64 [stream]: codes of the voice
    prefixes: Tensor  # int64 [3, stream]
    windows: Tensor  # int64 [3, stream]
    next_windows: Tensor  # int64 [3, stream]
    prefix_slots: int  # codes
    slots: int  # codes
    side_by_side: int = 1  # streams in the tensors of the windows

    @classmethod
    def of(cls, voices: Sequence[FlowVoice], cache: FlowCache, next_cache: FlowCache) -> "FlowAddresses":
        """Addresses of voices, of a batch's cache and of its next cache."""
        unique = {id(voice): voice for voice in voices}
        order = [list(unique).index(id(voice)) for voice in voices]
        prefixes = [addresses([getattr(voice.cache, name) for voice in unique.values()]) for name in WINDOWS]
        lengths = [torch.full((), voice.sink, device=prefixes[0].device) for voice in unique.values()]
        of_unique = torch.stack([*prefixes, torch.stack(lengths)])
        of_streams = torch.cat([of_unique[:, index : index + 1] for index in order], dim=1)
        max_sink = max(voice.sink for voice in voices)
        windows = _window_addresses(cache), _window_addresses(next_cache)
        return cls(of_streams[3], of_streams[:3], *windows, max_sink, cache.code_slots, side_by_side=len(voices))


def _window_addresses(cache: FlowCache) -> Tensor:
    streams = range(cache.mel_contexts.shape[cache.CONTEXT_AXES["mel_contexts"]])
    return torch.stack(
        [
            addresses([getattr(cache, name).select(axis, stream) for stream in streams])
            for name, axis in cache.WINDOW_AXES.items()
        ]
    )


def addressable(voices: Sequence[FlowVoice], cache: FlowCache, frames: int) -> bool:
    """Whether the kernels can use this past in place."""
    if not kernels.usable(cache.mel_windows) or frames > kernels.MAX_CHUNK_FRAMES:
        return False
    caches = [cache, *(voice.cache for voice in voices)]
    return all(getattr(each, name).is_contiguous() for each in caches for name in WINDOWS)


def addressed_pasts(
    estimator: EstimatorSizes,
    past: FlowAddresses,
    contexts: FlowCache,
    next_contexts: FlowCache,
    seen: tuple[Tensor, Tensor],
) -> Pasts:
    """The pasts of a pass on addresses. The caches supply contexts and head sizes; their windows are not read.

    `seen` are the slots that each frame sees in the estimator, as `visible_slots` returns them.
    """
    streams, ratio = past.sinks.shape[0], contexts.ratio
    layouts = []
    for index, name in enumerate(WINDOWS):
        windows = getattr(contexts, name)
        rows, heads, _, dim = windows.shape[-4:]
        scale = 1 if name == "code_windows" else ratio
        kv_stride = past.side_by_side * rows * heads * past.slots * scale * dim
        layouts.append(
            KeyValueAddresses(
                past.prefixes[index],
                past.sinks * scale,
                past.windows[index],
                past.next_windows[index],
                (2 * kv_stride, kv_stride),
                past.prefix_slots * scale,
                past.slots * scale,
            )
        )
    heads = max(estimator.heads, contexts.code_windows.shape[-3])
    arrived = torch.zeros(streams * GUIDANCE_ROWS * heads, dtype=torch.int32, device=past.sinks.device)
    mel_layers, channels = count(), estimator.context_channels  # counted on across Euler steps

    def mel_at(step: int) -> AddressedPast:
        both = [each.mel_contexts[step] for each in (contexts, next_contexts)]
        old, new = (each.view(-1, *each.shape[-2:]).split(channels, dim=-1) for each in both)
        return AddressedPast(layouts[2], mel_layers, old, new, arrived, seen)

    return Pasts(
        AddressedPast(layouts[0], count(), [contexts.lookahead_context], [next_contexts.lookahead_context], arrived),
        AddressedPast(layouts[1], count(), [contexts.upsample_context], [next_contexts.upsample_context], arrived),
        mel_at,
    )
