"""Chunk-causal attention with a fixed prefix and a left window: who may look at whom, offline and in a stream."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

EMPTY = -1
BIAS_ALIGNMENT = 16  # fused attention kernels want the rows of a bias to start at multiples of this


@dataclass(frozen=True)
class KeySpan:
    """The positions of one pass: `time` new ones per stream from `starts`, behind a window, behind a prefix.

    `sinks` says how many first positions of each stream stay visible for ever. In a stream the prefix slots hold them;
    offline there are no prefix slots and no window, and everything is new. New positions from `ends` on only fill up.
    """

    starts: Tensor  # [stream]
    time: int
    sinks: Tensor  # [stream]
    prefix_slots: int = 0
    window_slots: int = 0
    ends: Tensor | None = None  # [stream]; None: nothing fills up

    def scaled(self, ratio: int) -> "KeySpan":
        """The same pass where every position has become `ratio` positions."""
        return replace(
            self,
            starts=self.starts * ratio,
            time=self.time * ratio,
            sinks=self.sinks * ratio,
            prefix_slots=self.prefix_slots * ratio,
            window_slots=self.window_slots * ratio,
            ends=None if self.ends is None else self.ends * ratio,
        )

    def query_positions(self) -> Tensor:
        """Absolute position of each new element.  # [stream, time]"""
        return self.starts[:, None] + torch.arange(self.time, device=self.starts.device)

    def key_positions(self) -> Tensor:
        """Absolute position of each key slot, EMPTY where a slot holds nothing.  # [stream, prefix + window + time]"""
        sinks = self.sinks[:, None]
        prefix = torch.arange(self.prefix_slots, device=sinks.device).expand(len(sinks), -1)
        window = self.starts[:, None] + torch.arange(-self.window_slots, 0, device=sinks.device)
        prefix = torch.where(prefix < sinks, prefix, EMPTY)
        window = torch.where(window >= sinks, window, EMPTY)
        return torch.cat([prefix, window, self.query_positions()], dim=1)


def visible(span: KeySpan, chunk: int, left_chunks: int | None) -> Tensor:
    """Which key each new position may look at.  # bool [stream, time, key]

    A position sees its own chunk to the end, `left_chunks` chunks before it (None: all), and the sinks. Chunks are
    counted from position 0, so a mask does not depend on how a stream was cut.
    """
    queries = span.query_positions()[:, :, None]
    keys = span.key_positions()[:, None, :]
    query_chunks = queries.div(chunk, rounding_mode="floor")
    key_chunks = keys.div(chunk, rounding_mode="floor")
    seen = (key_chunks <= query_chunks) & (keys != EMPTY)
    if span.ends is not None:
        seen &= keys < span.ends[:, None, None]
    if left_chunks is not None:
        seen &= (key_chunks >= query_chunks - left_chunks) | (keys < span.sinks[:, None, None])
    return seen


def attention_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to attention scores for a mask: 0 or −inf.  # [stream, 1, time, key]"""
    streams, time, keys = seen.shape
    aligned = -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = torch.zeros(streams, 1, time, aligned, dtype=dtype, device=seen.device)[..., :keys]
    return bias.masked_fill_(~seen[:, None], float("-inf"))
