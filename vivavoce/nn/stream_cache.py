"""Keys and values of causal streams that step together, however far each has come, all of them or a window's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_CAPACITY = 64


@dataclass
class _Buffer:
    keys: list[Tensor]  # per layer: [row, head, capacity, head_dim]
    values: list[Tensor]
    filled: list[int]  # positions held of each row

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
    window: int | None = None
    """How many positions, its own among them, a position sees; None: all."""
    dropped: int = 0
    """How many first positions are held no more."""

    @staticmethod
    def empty(
        layers: int, heads: int, head_dim: int, batch: int, like: Tensor, window: int | None = None
    ) -> "StreamCache":
        """The cache before the first position, on the device and of the type of `like`."""
        nothing = [like.new_empty(batch, heads, 0, head_dim) for _ in range(layers)]
        return StreamCache(_Buffer(nothing, nothing, [0] * batch), first=0, batch=batch, length=0, window=window)

    @property
    def held(self) -> int:
        """Positions in the buffer."""
        return self.length - self.dropped

    @property
    def needed(self) -> int:
        """How many of the held positions the next one may see."""
        return self.held if self.window is None else min(self.held, self.window - 1)

    def picked(self, rows: Sequence[int]) -> "StreamCache":
        """Streams in the places of others: row i goes on from what row `rows[i]` remembers."""
        mine = self.copy()
        index = torch.as_tensor(rows, device=mine.buffer.keys[0].device)
        buffer = _Buffer([k[index] for k in mine.buffer.keys], [v[index] for v in mine.buffer.values],
                         [mine.held] * len(rows))  # fmt: skip
        return replace(mine, buffer=buffer, batch=len(rows))

    def copy(self) -> "StreamCache":
        """The same cache in memory of its own."""
        kept = self.needed
        buffer = _gathered([self], max(1, kept))
        return replace(self, buffer=buffer, first=0, dropped=self.length - kept)


@dataclass(frozen=True)
class Extension:
    """Room for the next positions of several streams, side by side in one buffer."""

    buffer: _Buffer
    rows: Tensor  # [row, 1]
    places: Tensor  # [row, new]: where each new position goes
    positions: Tensor  # [row, new]: how far in its stream each new position is
    seen: slice  # of the places: those that any new position may see
    bias: Tensor  # [row, 1, new, seen]: −inf where a new position may not look
    after: list[StreamCache]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values of a layer and look at all there are.  # [row, head, new, head_dim]"""
        keys, values = self.buffer.keys[layer], self.buffer.values[layer]
        keys[self.rows, :, self.places] = key.transpose(1, 2)
        values[self.rows, :, self.places] = value.transpose(1, 2)
        return attend_within(query, keys[:, :, self.seen], values[:, :, self.seen], self.bias)


def attend_within(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention where a bias of −inf hides what a position may not see.  # [row, head, time, head_dim]

    On a GPU in plain products: fused kernels are planned per length there, where every step may have a new one, and
    one stream's few positions would keep no more than a few of its processors busy.
    """
    if query.device.type == "cpu":
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
    scores = query * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
    exact = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores + bias, dim=-1, dtype=exact).to(values.dtype) @ values


def extend(caches: Sequence[StreamCache], new: int) -> Extension:
    """Room for `new` positions behind each cache; `after` are the caches once every layer has attended."""
    buffer = caches[0].buffer
    held = [cache.held for cache in caches]
    if not _side_by_side(caches, buffer) or max(held) + new > buffer.capacity:
        held = [cache.needed for cache in caches]
        buffer = _gathered(caches, capacity=max(SMALLEST_CAPACITY, 2 * max(held), max(held) + new))
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
    places = held[:, None] + torch.arange(-new, 0, device=device)
    first = 0 if window is None else max(0, min(cache.held for cache in after) - new - window + 1)
    seen = slice(first, max(cache.held for cache in after))
    columns = torch.arange(seen.start, seen.stop, device=device)
    hidden = columns > places[:, None, :, None]
    if window is not None:
        hidden |= columns <= places[:, None, :, None] - window
    bias = torch.zeros(hidden.shape, dtype=buffer.keys[0].dtype, device=device).masked_fill_(hidden, -torch.inf)
    rows = torch.arange(len(ends), device=device)[:, None]
    return Extension(buffer, rows, places, places + dropped[:, None], seen, bias, after)


def _side_by_side(caches: Sequence[StreamCache], buffer: _Buffer) -> bool:
    row = 0
    for cache in caches:
        if cache.buffer is not buffer or cache.first != row:
            return False
        row += cache.batch
    ends = [cache.held for cache in caches for _ in range(cache.batch)]
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
        kept = slice(cache.held - cache.needed, cache.held)
        for layer in layers:
            keys[layer][theirs, :, : cache.needed] = cache.buffer.keys[layer][mine, :, kept]
            values[layer][theirs, :, : cache.needed] = cache.buffer.values[layer][mine, :, kept]
        filled += [cache.needed] * cache.batch
    return _Buffer(keys, values, filled)


def _room(caches: Sequence[StreamCache], rows: int, capacity: int) -> Tensor:
    # Zeros, because what is hidden is still multiplied by 0, and chance memory may hold NaN.
    like = caches[0].buffer.keys[0]
    return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
