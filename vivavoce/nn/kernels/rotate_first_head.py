"""Queries and keys of the first head turned by their positions, where they lie."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_first_head(
    query_ptr, key_ptr, cos_ptr, sin_ptr, time,
    query_row, query_time, key_row, key_time, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, moment = (place // time).to(tl.int64), place % time
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_ptr + place.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + place.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    element = query_ptr.dtype.element_ty
    even = query_ptr + row * query_row + moment * query_time + 2 * pair
    first = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(even, (first * cos - second * sin).to(element), mask=inside)
    tl.store(even + 1, (second * cos + first * sin).to(element), mask=inside)
    even = key_ptr + row * key_row + moment * key_time + 2 * pair
    first = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(even, (first * cos - second * sin).to(element), mask=inside)
    tl.store(even + 1, (second * cos + first * sin).to(element), mask=inside)


def rotate_first_head(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs of head 0, in place. Twin: the plain half of `vivavoce.models.cosyvoice3_dit.RotatedPast.attend`.

    # query and keys [row, head, time, dim] with elements of a head side by side, cos and sin [row, time, dim / 2]
    """
    rows, _, time, dim = query.shape
    half = dim // 2
    _rotate_first_head[(rows * time,)](
        query, keys, cos, sin, time, query.stride(0), query.stride(2), keys.stride(0), keys.stride(2),
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
