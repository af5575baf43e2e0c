"""Self-attention with relative positions as in Transformer-XL: a score has a content and a distance term.

The distance term of query i and key j depends on i − j alone, so keys may be kept from earlier passes of a stream.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivavoce.nn.linear import PackedLinear
from vivavoce.nn.past import Past

LONGEST_WAVE = 10_000.0


def distance_encoding(distances: Tensor, dim: int) -> Tensor:
    """Sinusoids of signed distances, sine and cosine interleaved, in float32.  # [..] → [.., dim]"""
    rates = torch.exp(torch.arange(0, dim, 2, device=distances.device) * (-math.log(LONGEST_WAVE) / dim))
    angles = distances.float()[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def segment_distances(offsets: Tensor, queries: int, keys: int) -> Tensor:
    """Every distance between a run of queries and a run of keys, longest first.  # [stream] → [stream, q + k − 1]

    `offsets` is the position of the first query less that of the first key.
    """
    return offsets[:, None] + queries - 1 - torch.arange(queries + keys - 1, device=offsets.device)


def relative_shift(scores: Tensor) -> Tensor:
    """Scores by distance, longest first → scores by key: row q starts `queries − 1 − q` columns in.

    # [.., queries, queries + keys − 1] → [.., queries, keys]
    """
    scores = scores.contiguous()
    queries, distances = scores.shape[-2:]
    return scores.as_strided(
        (*scores.shape[:-1], distances - queries + 1),
        (*scores.stride()[:-2], distances - 1, 1),
        scores.storage_offset() + queries - 1,
    )


class RelativeAttention(nn.Module):
    """Multi-head attention over a past, with learned biases for content (u) and distance (v)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.packed = PackedLinear(dim, {"linear_q": dim, "linear_k": dim, "linear_v": dim}, bias=True)
        self.linear_out = nn.Linear(dim, dim)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(heads, dim // heads))
        self.pos_bias_v = nn.Parameter(torch.zeros(heads, dim // heads))

    def forward(self, x: Tensor, encodings: Sequence[Tensor], bias: Tensor | None, past: Past) -> Tensor:
        """Attend to the past and to x; `encodings` are the distances to each run of keys, in the order of the keys.

        # x [row, time, dim], encodings [row or 1, time + keys of the run − 1, dim], bias [row, 1, time, key]
        """
        query_key_value = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query = query_key_value[0]
        to_distance = query + self.pos_bias_v[:, None]
        runs = [self.linear_pos(encoding).unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1) for encoding in encodings]
        scores = torch.cat([relative_shift(to_distance @ run) for run in runs], dim=-1)
        scores = scores / math.sqrt(query.shape[-1])
        mask = scores if bias is None else scores + bias
        y = past.attend(query + self.pos_bias_u[:, None], query_key_value[1:], mask)
        out: Tensor = self.linear_out(y.transpose(1, 2).flatten(2))
        return out
