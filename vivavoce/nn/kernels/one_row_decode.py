"""Attention of a step's only row from its packed projections: norms, rotation, page write and split attention at once.

Several rows of one sequence would have to see one another's keys, which only a launch between them can promise; one row
needs none. Whoever has the first share of the context adds the new row and writes it to its page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.nn.kernels.dependent_launch import begin_small, dependent, fetch_near
from vivavoce.nn.kernels.paged_decode import join_splits, softened, splits_for
from vivavoce.nn.paged import RowBatch

LEAST_DIM = 32  # of a head: both halves must fill the tensor cores' smallest product


@triton.jit
def _rotated(low, high, weight_ptr, cos, sin, eps, column, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Halves of heads, normed and rotated.  # [head, half of a head's numbers]"""
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        low = ((low * scale).to(dtype) * tl.load(weight_ptr + column)[None, :]).to(tl.float32)
        high = ((high * scale).to(dtype) * tl.load(weight_ptr + HALF + column)[None, :]).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def _one_row_decode(  # noqa: PLR0915
    packed_ptr, keys_ptr, values_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr, positions_ptr,
    page_table_ptr, table_width, scale, eps, part_ptr, peak_ptr, weight_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, NORMED: tl.constexpr, LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    position = tl.load(positions_ptr).to(tl.int64)
    pages_ptr = page_table_ptr + tl.load(slots_ptr).to(tl.int64) * table_width
    share = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, position)
    half = tl.arange(0, HALF)
    column = tl.arange(0, DIM)
    cos, sin = tl.load(cos_ptr + position * HALF + half)[None, :], tl.load(sin_ptr + position * HALF + half)[None, :]
    if DEPENDENT:
        place = start + tl.arange(0, BLOCK)
        page = tl.load(pages_ptr + place // PAGE, mask=place < end, other=0).to(tl.int64)
        offset = ((page * PAGE + place % PAGE) * KV_HEADS + kv_head) * DIM
        fetch_near(keys_ptr + offset[:, None], DIM, LINE)
        fetch_near(values_ptr + offset[:, None], DIM, LINE)
    begin_small(DEPENDENT)

    group = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + group
    mine = packed_ptr + head[:, None] * DIM + half[None, :]
    kept = group[:, None] < GROUP
    low, high = tl.load(mine, mask=kept, other=0.0), tl.load(mine + HALF, mask=kept, other=0.0)
    q_low, q_high = _rotated(low, high, q_weight_ptr, cos, sin, eps, half, HALF, NORMED)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM], tl.float32)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        page = tl.load(pages_ptr + place // PAGE, mask=inside, other=0).to(tl.int64)
        past = (((page * PAGE + place % PAGE) * KV_HEADS + kv_head) * DIM)[:, None]
        k_low = tl.load(keys_ptr + past + half[None, :], mask=inside[:, None], other=0.0)
        k_high = tl.load(keys_ptr + past + HALF + half[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION) * scale
        chance, shrink, peak = softened(scores, inside, peak)
        values = tl.load(values_ptr + past + column[None, :], mask=inside[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(chance.to(values.dtype), values, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(chance, axis=1)

    if split == 0:
        key = packed_ptr + (KV_HEADS * GROUP + kv_head) * DIM + half[None, :]
        new_low, new_high = tl.load(key), tl.load(key + HALF)
        new_low, new_high = _rotated(new_low, new_high, k_weight_ptr, cos, sin, eps, half, HALF, NORMED)
        value = tl.load(packed_ptr + (KV_HEADS * GROUP + KV_HEADS + kv_head) * DIM + column)
        own_page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
        target = ((own_page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM
        tl.store(keys_ptr + target + half[None, :], new_low)
        tl.store(keys_ptr + target + HALF + half[None, :], new_high)
        tl.store(values_ptr + target + column, value)
        products = q_low.to(tl.float32) * new_low.to(tl.float32) + q_high.to(tl.float32) * new_high.to(tl.float32)
        score = tl.sum(products, axis=1) * scale
        level = tl.maximum(peak, score)
        faded, share_of_new = tl.exp(peak - level), tl.exp(score - level)
        total = total * faded[:, None] + share_of_new[:, None] * value.to(tl.float32)[None, :]
        weight = weight * faded + share_of_new
        peak = level

    place = head * SPLITS + split
    tl.store(part_ptr + place[:, None] * DIM + column[None, :], total, mask=kept)
    tl.store(peak_ptr + place, peak, mask=group < GROUP)
    tl.store(weight_ptr + place, weight, mask=group < GROUP)


def takes_one_row(packed: Tensor, batch: RowBatch, kv_heads: int) -> bool:
    """Whether a step has one row and nothing else, and its heads are of a size for which the kernel is made."""
    rows, _, dim = packed.shape
    is_lone = rows == 1 and batch.singles == 1 and batch.places is None and not batch.cache.is_narrow
    return is_lone and dim >= LEAST_DIM and dim & (dim - 1) == 0 and splits_for(kv_heads) > 1


def one_row_decode(
    packed: Tensor,  # [1, heads + 2 kv heads, dim]
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    batch: RowBatch,
    kv_heads: int,
) -> Tensor:
    """The attention of one row, its keys and values kept. Twin: `PagedAttention` without kernels.  # [1, head, dim]"""
    _, all_heads, dim = packed.shape
    heads, splits = all_heads - 2 * kv_heads, splits_for(kv_heads)
    q_weight, k_weight, eps = norms or (packed, packed, 0.0)  # without norms, nobody reads them
    packed = packed.contiguous()
    out = torch.empty(1, heads, dim, dtype=packed.dtype, device=packed.device)
    parts = torch.empty(heads, splits, dim, dtype=torch.float32, device=packed.device)
    peaks = torch.empty(heads, splits, dtype=torch.float32, device=packed.device)
    weights = torch.empty_like(peaks)
    _one_row_decode[(kv_heads, splits)](
        packed, batch.cache.keys[layer], batch.cache.values[layer], q_weight, k_weight, cos, sin,
        batch.slots, batch.positions, batch.page_table, batch.page_table.shape[1], dim**-0.5, eps,
        parts, peaks, weights,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim, PAGE=batch.cache.page_size, SPLITS=splits, BLOCK=32,
        PRECISION="ieee" if packed.dtype == torch.float32 else "tf32", NORMED=norms is not None,
        LINE=min(dim, 128 // packed.element_size()),
        num_warps=4, num_stages=3, **dependent(packed.device),
    )  # fmt: skip
    join_splits[(heads,)](parts, peaks, weights, out, DIM=dim, SPLITS=splits, num_warps=1, **dependent(packed.device))
    return out
