"""Keys and values of causal streams that step together, however far each has come."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_CAPACITY = 64


@dataclass
class _Buffer:
    keys: list[Tensor]  # per layer: [row, head, capacity, head_dim]
    values: list[Tensor]
    filled: list[int]  # positions of each row

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


@dataclass(frozen=True)
class StreamCache:
    """What the layers of a network keep of a stream (or of `batch` streams in step).

    Caches that step together come to lie in one buffer, and a step writes behind their last positions. Stepping from an
    older cache (a rewind or a fork) copies first, so no cache ever changes under its holder.
    """

    buffer: _Buffer
    first: int  # row
    batch: int
    length: int

    @staticmethod
    def empty(layers: int, heads: int, head_dim: int, batch: int, like: Tensor) -> "StreamCache":
        """The cache before the first position, on the device and of the type of `like`."""
        nothing = [like.new_empty(batch, heads, 0, head_dim) for _ in range(layers)]
        return StreamCache(_Buffer(nothing, nothing, [0] * batch), first=0, batch=batch, length=0)

    def copy(self) -> "StreamCache":
        """The same cache in memory of its own."""
        return StreamCache(_gathered([self], max(1, self.length)), 0, self.batch, self.length)


@dataclass(frozen=True)
class Extension:
    """Room for the next positions of several streams, side by side in one buffer."""

    buffer: _Buffer
    rows: Tensor  # [row, 1]
    places: Tensor  # [row, new]: where each new position goes
    hidden: Tensor  # [row, 1, new, end]: what a new position may not see
    after: list[StreamCache]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values of a layer and look at all there are.  # [row, head, new, head_dim]

        In plain products: fused attention kernels are planned per length, and here every step has a new one.
        """
        keys, values = self.buffer.keys[layer], self.buffer.values[layer]
        keys[self.rows, :, self.places] = key.transpose(1, 2)
        values[self.rows, :, self.places] = value.transpose(1, 2)
        end = self.hidden.shape[-1]
        scores = query * query.shape[-1] ** -0.5 @ keys[:, :, :end].transpose(-1, -2)
        exact = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores.masked_fill(self.hidden, -torch.inf), dim=-1, dtype=exact)
        return weights.to(values.dtype) @ values[:, :, :end]


def extend(caches: Sequence[StreamCache], new: int) -> Extension:
    """Room for `new` positions behind each cache; `after` are the caches once every layer has attended."""
    end = max(cache.length for cache in caches) + new
    buffer = caches[0].buffer
    if not _side_by_side(caches, buffer) or end > buffer.capacity:
        buffer = _gathered(caches, capacity=max(SMALLEST_CAPACITY, 2 * (end - new), end))
    device = buffer.keys[0].device
    lengths = torch.tensor([cache.length for cache in caches for _ in range(cache.batch)], device=device)
    places = lengths[:, None] + torch.arange(new, device=device)
    hidden = torch.arange(end, device=device) > places[:, None, :, None]
    after, row = [], 0
    for cache in caches:
        after.append(StreamCache(buffer, row, cache.batch, cache.length + new))
        buffer.filled[row : row + cache.batch] = [cache.length + new] * cache.batch
        row += cache.batch
    return Extension(buffer, torch.arange(row, device=device)[:, None], places, hidden, after)


def _side_by_side(caches: Sequence[StreamCache], buffer: _Buffer) -> bool:
    row = 0
    for cache in caches:
        if cache.buffer is not buffer or cache.first != row:
            return False
        row += cache.batch
    ends = [cache.length for cache in caches for _ in range(cache.batch)]
    return ends == buffer.filled


def _gathered(caches: Sequence[StreamCache], capacity: int) -> _Buffer:
    rows = sum(cache.batch for cache in caches)
    layers = range(len(caches[0].buffer.keys))
    keys, values = (
        [_room(caches, rows, capacity) for _ in layers],
        [_room(caches, rows, capacity) for _ in layers],
    )
    filled: list[int] = []
    for cache in caches:
        mine = slice(cache.first, cache.first + cache.batch)
        theirs = slice(len(filled), len(filled) + cache.batch)
        for layer in layers:
            keys[layer][theirs, :, : cache.length] = cache.buffer.keys[layer][mine, :, : cache.length]
            values[layer][theirs, :, : cache.length] = cache.buffer.values[layer][mine, :, : cache.length]
        filled += [cache.length] * cache.batch
    return _Buffer(keys, values, filled)


def _room(caches: Sequence[StreamCache], rows: int, capacity: int) -> Tensor:
    # Zeros, because what is hidden is still multiplied by 0, and chance memory may hold NaN.
    like = caches[0].buffer.keys[0]
    return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
