"""What a flow stream remembers, as values: the caches of a pass, a voice computed once, the state of one reply."""

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
    """What a stream must know of what stands before the flow."""

    @property
    def ratio(self) -> int:
        """Mel frames per code."""
        ...

    @property
    def lookahead(self) -> int:
        """How many codes a chunk must see beyond its end."""
        ...

    @property
    def dim(self) -> int:
        """Width of attention and of the convolutions whose inputs are kept."""
        ...

    @property
    def heads(self) -> int:
        """Of attention."""
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
        """Past inputs that the look-ahead's and the upsampling's convolution need."""
        ...


class EstimatorSizes(Protocol):
    """What a stream must know of an estimator."""

    @property
    def heads(self) -> int:
        """Of attention."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        ...

    @property
    def attention_layers(self) -> int:
        """How many layers keep keys and values."""
        ...

    @property
    def context(self) -> int:
        """How many past inputs each causal convolution needs."""
        ...

    @property
    def context_channels(self) -> list[int]:
        """Input channels of each causal convolution, in forward order."""
        ...


@dataclass
class FlowCache:
    """Keys, values and convolution contexts of a batch of streams after a pass.

    Windows hold the newest positions last. Their number of slots is fixed under a left window; with all left context
    it grows with each pass. Axes of 2 are keys and values, then the guided and the unguided row.
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
        """One stream to which nothing has come yet: windows without slots, silent contexts."""
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
        """How many past codes the windows hold."""
        return self.code_windows.shape[SLOT_AXIS]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it by name."""
        return {name: getattr(self, name) for name in self.WINDOW_AXES | self.CONTEXT_AXES}

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copy(self) -> "FlowCache":
        """The same cache in its own memory."""
        tensors = {name: getattr(self, name).clone() for name in self.WINDOW_AXES | self.CONTEXT_AXES}
        return replace(self, **tensors)

    def continued(self, code_slots: int) -> "FlowCache":
        """A cache of its own memory with the same contexts and empty windows: what follows forgets the windows."""
        contexts = {name: getattr(self, name).clone() for name in self.CONTEXT_AXES}
        return replace(self.resized(code_slots), **contexts)

    def resized(self, code_slots: int) -> "FlowCache":
        """New, empty windows of this many slots; the contexts are the same tensors."""
        windows = {}
        for name in self.WINDOW_AXES:
            shape = list(getattr(self, name).shape)
            shape[SLOT_AXIS] = self._slots(name, code_slots)
            windows[name] = getattr(self, name).new_zeros(shape)
        return replace(self, **windows)

    def unwritten(self) -> "FlowCache":
        """Memory for the cache after this one, as large and not yet written."""
        tensors: dict[str, Any] = {
            name: torch.empty_like(getattr(self, name)) for name in self.WINDOW_AXES | self.CONTEXT_AXES
        }
        return replace(self, **tensors)

    def contiguous(self) -> "FlowCache":
        """The same cache, each window in one piece."""
        return replace(self, **{name: getattr(self, name).contiguous() for name in self.WINDOW_AXES})

    def stream(self, index: int, code_slots: int) -> "FlowCache":
        """A view of one stream, its windows cut to their newest slots."""
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
        """One batch from several; shorter windows get empty slots on the left."""
        if len(caches) == 1:
            return caches[0]
        most = max(cache.code_slots for cache in caches)
        stacked: dict[str, Any] = {}
        for name, axis in (cls.WINDOW_AXES | cls.CONTEXT_AXES).items():
            tensors = [getattr(cache, name) for cache in caches]
            if name in cls.WINDOW_AXES:
                slots = caches[0]._slots(name, most)
                tensors = [functional.pad(tensor, (0, 0, slots - tensor.shape[SLOT_AXIS], 0)) for tensor in tensors]
            stacked[name] = torch.cat(tensors, dim=axis)
        return replace(caches[0], **stacked)

    def _slots(self, name: str, code_slots: int) -> int:
        return code_slots if name == "code_windows" else code_slots * self.ratio


@dataclass
class Pasts:
    """The pasts that one pass reads: encoder at code rate, encoder at mel rate, estimator at each Euler step."""

    codes: Past
    frames: Past
    mel_at: Callable[[int], Past]


@dataclass(frozen=True)
class FlowPass:
    """What one pass over a batch of streams is given."""

    codes: Tensor  # [stream, time (+ look-ahead)]
    speaker: Tensor  # [stream, band]
    prompt_mel: Tensor  # [stream, frame, band]: the prompt's mel where a frame lies in the prompt, else zero
    span: KeySpan
    pasts: Pasts
    chunk: int | None
    """Codes that attend to one another; None: all see all."""
    left_chunks: int | None = None
    """How many chunks before its own a code sees; None: all."""

    def bias(self, ratio: int, dtype: torch.dtype) -> Tensor | None:
        """Who may look at whom, at `ratio` positions a code.  # [stream, 1, time, key]"""
        if self.chunk is None:
            return None
        return attention_bias(visible(self.span.scaled(ratio), self.chunk * ratio, self.left_chunks), dtype)


@dataclass
class VoicePrompt:
    """A recording of the voice to speak with."""

    codes: Tensor  # [code]
    mel: Tensor  # [frame, band]
    speaker: Tensor  # x-vector [dim]


@dataclass(frozen=True)
class FlowVoice:
    """A voice prompt with all that can be computed of it before a reply: once per voice, shared by its sessions.

    `sink` first codes of the prompt are in `cache`: the whole chunks whose look-ahead lies inside the prompt. They stay
    visible to every reply; the few codes after them are decoded with the reply and lie in its window.
    """

    codes: Tensor  # on the CPU [code]
    mel: Tensor  # [frame, band]
    speaker: Tensor  # [band]
    sink: int
    cache: FlowCache


@dataclass
class FlowState:
    """A reply between two steps. A step uses it up: keep a `copy()` to come back to it."""

    voice: FlowVoice
    left_chunks: int | None
    cache: FlowCache | None  # None: the window is recomputed from its codes at each step
    codes: Tensor  # from absolute index `first` on, prompt included; on the CPU
    first: int
    position: int  # absolute index of the first code not decoded yet
    finished: bool = False

    def copy(self) -> "FlowState":
        """The same state in its own memory; the voice is shared."""
        return replace(self, cache=None if self.cache is None else self.cache.copy())

    def spared(self) -> "FlowState":
        """A state whose step leaves this one as it is: a copy of what steps write in place."""
        if self.cache is None or self.left_chunks is not None:
            return self.copy()
        contexts = {name: getattr(self.cache, name).clone() for name in FlowCache.CONTEXT_AXES}
        return replace(self, cache=replace(self.cache, **contexts))


WINDOWS = tuple(FlowCache.WINDOW_AXES)  # at code rate, at mel rate in the encoder, and in the estimator


@dataclass(frozen=True)
class FlowAddresses:
    """Per stream, where the windows of its voice and its own begin, in the order of `WINDOWS`."""

    sinks: Tensor  # int64 [stream]: codes of the voice
    prefixes: Tensor  # int64 [3, stream]
    windows: Tensor  # int64 [3, stream]
    next_windows: Tensor  # int64 [3, stream]
    prefix_slots: int  # codes
    slots: int  # codes
    side_by_side: int = 1  # streams in the tensors that hold the windows

    @classmethod
    def of(cls, voices: Sequence[FlowVoice], cache: FlowCache, after: FlowCache) -> "FlowAddresses":
        """The addresses of voices, of a batch's cache, and of where the next one goes."""
        unique = {id(voice): voice for voice in voices}
        order = [list(unique).index(id(voice)) for voice in voices]
        prefixes = [addresses([getattr(voice.cache, name) for voice in unique.values()]) for name in WINDOWS]
        lengths = [torch.full((), voice.sink, device=prefixes[0].device) for voice in unique.values()]
        of_unique = torch.stack([*prefixes, torch.stack(lengths)])
        of_streams = torch.cat([of_unique[:, place : place + 1] for place in order], dim=1)
        most = max(voice.sink for voice in voices)
        windows = _window_addresses(cache), _window_addresses(after)
        return cls(of_streams[3], of_streams[:3], *windows, most, cache.code_slots, side_by_side=len(voices))


def _window_addresses(cache: FlowCache) -> Tensor:
    streams = range(cache.mel_contexts.shape[cache.CONTEXT_AXES["mel_contexts"]])
    return torch.stack(
        [
            addresses([getattr(cache, name).select(axis, stream) for stream in streams])
            for name, axis in cache.WINDOW_AXES.items()
        ]
    )


def addressable(voices: Sequence[FlowVoice], cache: FlowCache, frames: int) -> bool:
    """Whether the kernels can read and write this past where it lies."""
    if not kernels.usable(cache.mel_windows) or frames > kernels.LONGEST_CHUNK:
        return False
    held = [cache, *(voice.cache for voice in voices)]
    return all(getattr(each, name).is_contiguous() for each in held for name in WINDOWS)


def addressed_pasts(
    estimator: EstimatorSizes, past: FlowAddresses, contexts: FlowCache, next_contexts: FlowCache
) -> Pasts:
    """What a pass reads. The caches give the contexts and the sizes of a head; their windows are not looked at."""
    streams, ratio = past.sinks.shape[0], contexts.ratio
    runs = []
    for place, name in enumerate(WINDOWS):
        windows = getattr(contexts, name)
        rows, heads, _, dim = windows.shape[-4:]
        scale = 1 if name == "code_windows" else ratio
        kv_stride = past.side_by_side * rows * heads * past.slots * scale * dim
        runs.append(
            KeyValueAddresses(
                past.prefixes[place],
                past.sinks * scale,
                past.windows[place],
                past.next_windows[place],
                (2 * kv_stride, kv_stride),
                past.prefix_slots * scale,
                past.slots * scale,
            )
        )
    heads = max(estimator.heads, contexts.code_windows.shape[-3])
    arrived = torch.zeros(streams * GUIDANCE_ROWS * heads, dtype=torch.int32, device=past.sinks.device)
    mel_layers, channels = count(), estimator.context_channels  # layers go on from Euler step to Euler step

    def mel_at(step: int) -> AddressedPast:
        both = [each.mel_contexts[step] for each in (contexts, next_contexts)]
        before, after = (each.view(-1, *each.shape[-2:]).split(channels, dim=-1) for each in both)
        return AddressedPast(runs[2], mel_layers, before, after, arrived)

    return Pasts(
        AddressedPast(runs[0], count(), [contexts.lookahead_context], [next_contexts.lookahead_context], arrived),
        AddressedPast(runs[1], count(), [contexts.upsample_context], [next_contexts.upsample_context], arrived),
        mel_at,
    )
