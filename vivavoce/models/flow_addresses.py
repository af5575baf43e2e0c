"""The past of a batch of flow streams by its addresses: voices and windows are read and written where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from vivavoce.models.flow_matching import GUIDANCE_ROWS
from vivavoce.models.flow_state import EstimatorSizes, FlowCache, FlowVoice, Pasts
from vivavoce.nn import kernels
from vivavoce.nn.addressed_past import AddressedPast, KeyValueAddresses, addresses

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
