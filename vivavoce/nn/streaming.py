"""Streaming state of causal layers: keys and values of attention, last inputs of convolutions.

A network written against `Past` is one implementation for both uses: offline it runs over a `Silence`, in a stream over
a `StreamPast` (copied) or an `AddressedPast` (in place, by kernels). State is read in the order of the forward pass, so
that layers need no index. `StreamCache` is the growing key-value cache of streams that are stepped together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce import kernels
from vivavoce.nn.vocoder import CausalConv1d


class Past(Protocol):
    """The past of a batch, for the layers of one forward pass."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention of the next layer, over the past and the new keys.

        # query [row, head, time, dim], keys_values [2, row, head, time, dim], bias [row, 1 or head, time, key]
        """
        ...

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The next convolution, with its last inputs as context.  # [row, time, channel]"""
        ...


class Silence:
    """An empty past: the whole signal is given."""

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to the given keys."""
        keys, values = keys_values
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution with zeros as context."""
        return product_over_taps(conv, functional.pad(x, (0, 0, conv.context, 0)))


class StreamPast:
    """The past of a batch of streams: a prefix per stream, shared by reference, then a window, then the new keys.

    A stream has one or more rows in the batch (two under classifier-free guidance). Windows and contexts are updated in
    place: after the pass they are the past of the next one.
    """

    def __init__(
        self,
        prefixes: Sequence[
            Tensor
        ],  # one for all streams, or one each: [layer, 2, row of the stream, head, prefix, dim]
        windows: Tensor,  # [layer, 2, stream, row of the stream, head, slot, dim], newest last
        contexts: Sequence[Tensor],  # per convolution: [row, context, channel]
        next_windows: Tensor | None = None,  # for the next windows if they grow; None: in place
    ) -> None:
        self._prefixes = prefixes
        self._prefix_slots = max(prefix.shape[-2] for prefix in prefixes)
        self._windows = windows
        self._next_windows = windows if next_windows is None else next_windows
        self._layers = iter(range(windows.shape[0]))
        self._contexts = iter(contexts)

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to prefix, window and new keys; the window is updated."""
        layer = next(self._layers)
        new = keys_values.unflatten(1, self._windows.shape[2:4])
        joined = torch.cat([self._prefix(layer), self._windows[layer], new], dim=-2)
        next_window = self._next_windows[layer]
        next_window.copy_(joined[..., joined.shape[-2] - next_window.shape[-2] :, :])
        keys, values = joined.flatten(1, 2)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution with its context, which is updated."""
        context = next(self._contexts)
        joined = torch.cat([context, x], dim=1)
        context.copy_(joined[:, joined.shape[1] - conv.context :])
        return product_over_taps(conv, joined)

    def _prefix(self, layer: int) -> Tensor:  # [2, stream, row of the stream, head, prefix, dim]
        if len(self._prefixes) == 1:
            return self._prefixes[0][layer].unsqueeze(1).expand(-1, self._windows.shape[2], -1, -1, -1, -1)
        padded = [
            functional.pad(prefix[layer], (0, 0, 0, self._prefix_slots - prefix.shape[-2])) for prefix in self._prefixes
        ]
        return torch.stack(padded, dim=1)


def product_over_taps(conv: CausalConv1d, joined: Tensor) -> Tensor:
    """A dense convolution as one matrix product.  # [row, context + time, channel] → [row, time, channel]

    Attention and norms have channels last, convolution kernels do not: they would transpose input, weight and output in
    each of the hundreds of calls of a step, at more cost than the convolution itself.
    """
    if conv.stride != (1,) or conv.dilation != (1,):
        raise ValueError(f"{conv} is not a plain convolution")
    if conv.groups != 1 and joined.is_cuda:
        return _product_of_groups(conv, joined)
    if conv.groups != 1:
        grouped = functional.conv1d(joined.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups)
        return grouped.transpose(1, 2)
    taps = joined.unfold(1, conv.kernel_size[0], 1)  # [row, time, channel, tap]
    return functional.linear(taps.flatten(2), conv.weight.flatten(1), conv.bias)


def _product_of_groups(conv: CausalConv1d, joined: Tensor) -> Tensor:
    """A batched product over groups, in one launch. cuDNN convolves one group after another.

    # [row, context + time, channel] → [row, time, channel]
    """
    taps = joined.unfold(1, conv.kernel_size[0], 1).unflatten(2, (conv.groups, -1))  # [row, time, group, channel, tap]
    inputs = taps.permute(2, 0, 1, 4, 3).flatten(1, 2).flatten(2)  # [group, row × time, tap × channel]
    weight = conv.weight.unflatten(0, (conv.groups, -1)).transpose(2, 3).flatten(2)  # [group, output, tap × channel]
    product = inputs @ weight.mT
    if conv.bias is not None:
        product = product + conv.bias.view(conv.groups, 1, -1)
    return product.unflatten(1, (joined.shape[0], -1)).permute(1, 2, 0, 3).flatten(2)


MAX_FUSED_CONTEXT = 3  # of the fused convolution; longer ones are rare, and large enough for the plain product


@dataclass(frozen=True)
class KeyValueAddresses:
    """Addresses of the keys and values of all layers, per stream."""

    prefixes: Tensor  # int64 [stream]: of [layer, 2, row of the stream, head, length, dim]
    lengths: Tensor  # int64 [stream]
    windows: Tensor  # int64 [stream]: of [layer, 2, row of the stream, head, slot, dim]; 0: no window
    next_windows: Tensor  # int64 [stream]: likewise
    window_strides: tuple[int, int]  # of layer, and of keys to values
    prefix_slots: int  # of the longest prefix, or more
    slots: int


class AddressedPast:
    """A `StreamPast` that kernels read by address. The next state is written to other memory."""

    def __init__(
        self,
        addresses: KeyValueAddresses,
        layers: Iterator[int],
        contexts: Sequence[Tensor],  # per convolution: [row, context, channel]
        next_contexts: Sequence[Tensor],
        arrived: Tensor,  # int32 [row × head], zero
        seen: tuple[Tensor, Tensor] | None = None,  # of `visible_slots`; None: `attend` is given a bias
    ) -> None:
        self._addresses = addresses
        self._seen = seen
        self._layers = layers
        self._contexts = iter(zip(contexts, next_contexts, strict=True))
        self._arrived = arrived

    def attend(self, query: Tensor, keys_values: Tensor, bias: Tensor | None) -> Tensor:
        """Attention to prefix, window and new keys; the next window is written."""
        past = self._addresses
        return kernels.chunk_attention(
            query,
            keys_values,
            bias,
            past.prefixes,
            past.lengths,
            past.windows,
            past.next_windows,
            past.window_strides,
            past.slots,
            past.prefix_slots,
            next(self._layers),
            self._arrived,
            self._seen,
        )

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        """The convolution with its context; the next context is written."""
        context, next_context = next(self._contexts)
        if conv.groups == 1 and conv.context <= min(MAX_FUSED_CONTEXT, x.shape[1]):
            return kernels.stream_conv(x, context, next_context, conv.weight, conv.bias)
        joined = torch.cat([context, x], dim=1)
        next_context.copy_(joined[:, joined.shape[1] - conv.context :])
        return product_over_taps(conv, joined)


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of tensors, as a tensor on their device, without a synchronisation.  # int64 [tensor]"""
    device = tensors[0].device
    return torch.stack([torch.full((), each.data_ptr(), dtype=torch.int64, device=device) for each in tensors])


MIN_CAPACITY = 64


@dataclass
class _Buffer:
    keys: list[Tensor]  # per layer: [row, head, capacity, head_dim]
    values: list[Tensor]
    filled: list[int]  # positions held for each row

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


@dataclass(frozen=True)
class StreamCache:
    """Keys and values of all layers for `batch` streams of equal length. It is an immutable value.

    Caches that are stepped together share one buffer, and a step writes after their last positions. A step from an
    older cache (after a rewind or a fork) copies it first, so that a returned cache never changes.
    """

    buffer: _Buffer
    first: int  # row
    batch: int
    length: int
    window: int | None = None
    """Positions that a position sees, itself included; None: all."""
    dropped: int = 0
    """First positions that are no longer held."""

    @staticmethod
    def empty(
        layers: int, heads: int, head_dim: int, batch: int, like: Tensor, window: int | None = None
    ) -> "StreamCache":
        """An empty cache, on the device and in the dtype of `like`."""
        nothing = [like.new_empty(batch, heads, 0, head_dim) for _ in range(layers)]
        return StreamCache(_Buffer(nothing, nothing, [0] * batch), first=0, batch=batch, length=0, window=window)

    @property
    def held(self) -> int:
        """Positions in the buffer."""
        return self.length - self.dropped

    @property
    def needed(self) -> int:
        """Held positions that the next one sees."""
        return self.held if self.window is None else min(self.held, self.window - 1)

    def picked(self, rows: Sequence[int]) -> "StreamCache":
        """A cache whose row i is row `rows[i]` of this one."""
        copied = self.copy()
        index = torch.as_tensor(rows, device=copied.buffer.keys[0].device)
        keys, values = [k[index] for k in copied.buffer.keys], [v[index] for v in copied.buffer.values]
        return replace(copied, buffer=_Buffer(keys, values, [copied.held] * len(rows)), batch=len(rows))

    def copy(self) -> "StreamCache":
        """A copy with its own buffer."""
        buffer = _gather([self], max(1, self.needed))
        return replace(self, buffer=buffer, first=0, dropped=self.length - self.needed)


@dataclass(frozen=True)
class Extension:
    """Space for the next positions of several streams in one buffer."""

    buffer: _Buffer
    rows: Tensor  # [row, 1]
    indices: Tensor  # [row, new]: of each new position in the buffer
    positions: Tensor  # [row, new]: of each new position in its stream
    seen: slice  # of the buffer: what any new position may attend to
    bias: Tensor  # [row, 1, new, seen]: −inf where a new position may not attend
    after: list[StreamCache]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values of a layer and attend to all.  # [row, head, new, head_dim]"""
        keys, values = self.buffer.keys[layer], self.buffer.values[layer]
        keys[self.rows, :, self.indices] = key.transpose(1, 2)
        values[self.rows, :, self.indices] = value.transpose(1, 2)
        return attend_within(query, keys[:, :, self.seen], values[:, :, self.seen], self.bias)


def attend_within(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention under an additive mask.  # [row, head, time, head_dim]

    On a GPU by plain products: fused kernels are planned for each length, which changes with every step, and the few
    positions of a stream occupy few multiprocessors.
    """
    if query.device.type == "cpu":
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
    scores = query * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
    exact = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores + bias, dim=-1, dtype=exact).to(values.dtype) @ values


def extend(caches: Sequence[StreamCache], new: int) -> Extension:
    """Space for `new` positions after each cache; `after` are the caches once every layer has attended."""
    buffer = caches[0].buffer
    held = [cache.held for cache in caches]
    if not _side_by_side(caches, buffer) or max(held) + new > buffer.capacity:
        held = [cache.needed for cache in caches]
        buffer = _gather(caches, capacity=max(MIN_CAPACITY, 2 * max(held), max(held) + new))
    after, row = [], 0
    for cache, start in zip(caches, held, strict=True):
        dropped = cache.length - start
        after.append(replace(cache, buffer=buffer, first=row, length=cache.length + new, dropped=dropped))
        buffer.filled[row : row + cache.batch] = [start + new] * cache.batch
        row += cache.batch
    return _extension(buffer, after, new)


def _extension(buffer: _Buffer, after: list[StreamCache], new: int) -> Extension:
    device = buffer.keys[0].device
    window = after[0].window
    ends = [(cache.held, cache.dropped) for cache in after for _ in range(cache.batch)]
    held, dropped = torch.tensor(ends, device=device).unbind(1)
    indices = held[:, None] + torch.arange(-new, 0, device=device)
    first = 0 if window is None else max(0, min(cache.held for cache in after) - new - window + 1)
    seen = slice(first, max(cache.held for cache in after))
    columns = torch.arange(seen.start, seen.stop, device=device)
    hidden = columns > indices[:, None, :, None]
    if window is not None:
        hidden |= columns <= indices[:, None, :, None] - window
    bias = torch.zeros(hidden.shape, dtype=buffer.keys[0].dtype, device=device).masked_fill_(hidden, -torch.inf)
    rows = torch.arange(len(ends), device=device)[:, None]
    return Extension(buffer, rows, indices, indices + dropped[:, None], seen, bias, after)


def _side_by_side(caches: Sequence[StreamCache], buffer: _Buffer) -> bool:
    row = 0
    for cache in caches:
        if cache.buffer is not buffer or cache.first != row:
            return False
        row += cache.batch
    ends = [cache.held for cache in caches for _ in range(cache.batch)]
    return ends == buffer.filled


def _gather(caches: Sequence[StreamCache], capacity: int) -> _Buffer:
    rows = sum(cache.batch for cache in caches)
    layers = range(len(caches[0].buffer.keys))
    keys, values = (
        [_zeros(caches, rows, capacity) for _ in layers],
        [_zeros(caches, rows, capacity) for _ in layers],
    )
    filled: list[int] = []
    for cache in caches:
        source = slice(cache.first, cache.first + cache.batch)
        target = slice(len(filled), len(filled) + cache.batch)
        needed = slice(cache.held - cache.needed, cache.held)
        for layer in layers:
            keys[layer][target, :, : cache.needed] = cache.buffer.keys[layer][source, :, needed]
            values[layer][target, :, : cache.needed] = cache.buffer.values[layer][source, :, needed]
        filled += [cache.needed] * cache.batch
    return _Buffer(keys, values, filled)


def _zeros(caches: Sequence[StreamCache], rows: int, capacity: int) -> Tensor:
    # Zeros, because masked values are still multiplied by 0, and uninitialised memory may hold NaN.
    like = caches[0].buffer.keys[0]
    return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
