"""Kernels of streaming state (`nn.streaming.AddressedPast`): chunk attention to a stream's past, causal convolution.

Chunk attention reads prefix, window and new keys in place, by address, so that one captured graph serves any streams.
The keys of a row and head are split among programs (split-KV). Each program also copies the keys that the next window
keeps, and the last one to finish merges the partial results. What a position sees is a bias, or a range of slots.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin, begin_small, chained
from vivavoce.kernels.tiles import product_blocks

PROGRAMS_WANTED = 256  # two per multiprocessor of an H200
MAX_SPLITS = 4  # with 8, merging takes longer than it saves
BLOCK_KEYS = 32  # 64 and 128 are no faster on an H200
MAX_CHUNK_FRAMES = 128
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _joined(
    part_ptr, peak_ptr, weight_ptr, first, splits, moment, column, TIME: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    peak = tl.full([TIME], float("-inf"), tl.float32)
    for split in range(splits):
        peak = tl.maximum(peak, tl.load(peak_ptr + (first + split) * TIME + moment))
    weight = tl.zeros([TIME], tl.float32)
    total = tl.zeros([TIME, DIM], tl.float32)
    for split in range(splits):
        index = (first + split) * TIME + moment
        factor = tl.exp2(tl.load(peak_ptr + index) - peak)  # an empty split has peak −inf, so factor 0
        weight += factor * tl.load(weight_ptr + index)
        total += factor[:, None] * tl.load(part_ptr + index[:, None] * DIM + column[None, :])
    return total, weight


@triton.jit
def _taken(
    query, keys, values, key, inside, bias_ptr, moment, time, first_seen, end_seen, peak, weight, total, scale,
    BIASED: tl.constexpr, RANGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax in base 2: the running maximum, weight and sum with one more block of keys and values."""
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    seen = inside[None, :]
    if BIASED:
        there = seen & (moment[:, None] < time)
        scores += tl.load(bias_ptr + key[None, :], mask=there, other=0.0).to(tl.float32) * LOG2_E
    if RANGED:
        seen &= (key[None, :] >= first_seen[:, None]) & (key[None, :] < end_seen[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen so far
    shrink = tl.exp2(peak - level)
    prob = tl.exp2(scores - level[:, None])
    total = tl.dot(prob.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION)
    return new_peak, weight * shrink + tl.sum(prob, axis=1), total


@triton.jit
def _keep_window(
    window, following, new, window_kv, new_kv, new_time, prefix_slots, before_new, time, start, end,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a program's share of the next window.

    Not in the loops of the products: where a pipelined load has another use beside a product, Triton lets a later load
    overwrite the shared memory that the product is still reading.
    """
    column = tl.arange(0, BLOCK_DIM)
    for first in tl.range(tl.maximum(start, prefix_slots + time), end, BLOCK, num_stages=1):
        key = first + tl.arange(0, BLOCK)
        inside = (key < end)[:, None] & (column[None, :] < DIM)
        is_new = (key >= before_new)[:, None]
        old_at = tl.multiple_of(window + (key - prefix_slots) * DIM, ALIGNED)[:, None] + column[None, :]
        new_at = tl.multiple_of(new + (key - before_new) * new_time, ALIGNED)[:, None] + column[None, :]
        keys = tl.load(tl.where(is_new, new_at, old_at), mask=inside, other=0.0)
        values = tl.load(tl.where(is_new, new_at + new_kv, old_at + window_kv), mask=inside, other=0.0)
        target = tl.multiple_of(following + (key - prefix_slots - time) * DIM, ALIGNED)[:, None] + column[None, :]
        tl.store(target, keys, mask=inside)
        tl.store(target + window_kv, values, mask=inside)


# Arguments that vary from hop to hop are not specialised, so that few kernels are compiled.
@triton.jit(do_not_specialize=["layer", "time", "slots", "prefix_slots", "share", "splits", "inner_rows"])
def _attend(  # noqa: PLR0915
    query_ptr, new_ptr, bias_ptr, first_seen_ptr, end_seen_ptr, prefixes_ptr, lengths_ptr, windows_ptr, next_ptr,
    out_ptr, part_ptr, peak_ptr, weight_ptr, arrived_ptr,
    layer, time, slots, prefix_slots, share, splits, inner_rows, scale,
    query_row, query_head, query_time, new_kv, new_row, new_head, new_time, bias_row, bias_head, bias_time,
    window_layer, window_kv,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_TIME: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, BIASED: tl.constexpr, RANGED: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    stream, inner = row // inner_rows, row % inner_rows
    element = query_ptr.dtype.element_ty
    length = tl.load(lengths_ptr + stream)
    address = tl.load(windows_ptr + stream)
    window = tl.multiple_of(address, ALIGNED).to(tl.pointer_type(element))
    following = tl.multiple_of(tl.load(next_ptr + stream), ALIGNED).to(tl.pointer_type(element))
    into_window = layer.to(tl.int64) * window_layer + (inner * HEADS + head) * slots * DIM
    window, following = window + into_window, following + into_window
    prefix = tl.multiple_of(tl.load(prefixes_ptr + stream), ALIGNED).to(tl.pointer_type(element))
    prefix += ((layer * 2 * inner_rows + inner) * HEADS + head) * length * DIM
    prefix_kv = inner_rows * HEADS * length * DIM
    new = new_ptr + row.to(tl.int64) * new_row + head * new_head
    has_window = address != 0

    moment = tl.arange(0, BLOCK_TIME)
    column = tl.arange(0, BLOCK_DIM)
    offsets = tl.arange(0, BLOCK)
    real = (moment[:, None] < time) & (column[None, :] < DIM)
    query = tl.load(
        query_ptr + row.to(tl.int64) * query_row + head * query_head + moment[:, None] * query_time + column[None, :],
        mask=real, other=0.0,
    )  # fmt: skip
    bias_at = bias_ptr + row.to(tl.int64) * bias_row + head * bias_head + moment[:, None] * bias_time
    peak = tl.full([BLOCK_TIME], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_TIME], tl.float32)
    total = tl.zeros([BLOCK_TIME, BLOCK_DIM], tl.float32)
    before_new = prefix_slots + slots
    first_seen = tl.zeros([BLOCK_TIME], tl.int32)
    end_seen = tl.zeros([BLOCK_TIME], tl.int32)
    if RANGED:
        first_seen = prefix_slots + tl.load(first_seen_ptr + stream * time + moment, mask=moment < time, other=0)
        end_seen = prefix_slots + tl.load(end_seen_ptr + stream * time + moment, mask=moment < time, other=slots)
    start = split * share
    end = tl.minimum(start + share, before_new + time)

    # One loop each for prefix, window and new keys: addresses are then simple enough to be pipelined.
    stop = tl.minimum(end, prefix_slots)
    held = tl.minimum(length, stop)
    visible = held if RANGED else stop  # a bias hides the slots after the prefix itself
    for first in range(start, visible, BLOCK):
        key = first + offsets
        there = (key < held)[:, None] & (column[None, :] < DIM)
        index = tl.multiple_of(prefix + key * DIM, ALIGNED)
        keys = tl.load(index[:, None] + column[None, :], mask=there, other=0.0)
        values = tl.load(tl.multiple_of(index + prefix_kv, ALIGNED)[:, None] + column[None, :], mask=there, other=0.0)
        peak, weight, total = _taken(
            query, keys, values, key, key < visible, bias_at, moment, time, first_seen, end_seen, peak, weight, total,
            scale, BIASED, False, PRECISION,
        )  # fmt: skip

    stop = tl.minimum(end, before_new)
    for first in range(tl.maximum(start, prefix_slots), stop, BLOCK):
        key = first + offsets
        inside = key < stop
        there = (inside & has_window)[:, None] & (column[None, :] < DIM)
        index = tl.multiple_of(window + (key - prefix_slots) * DIM, ALIGNED)
        keys = tl.load(index[:, None] + column[None, :], mask=there, other=0.0)
        values = tl.load(tl.multiple_of(index + window_kv, ALIGNED)[:, None] + column[None, :], mask=there, other=0.0)
        peak, weight, total = _taken(
            query, keys, values, key, inside, bias_at, moment, time, first_seen, end_seen, peak, weight, total,
            scale, BIASED, RANGED, PRECISION,
        )  # fmt: skip

    for first in range(tl.maximum(start, before_new), end, BLOCK):
        key = first + offsets
        inside = key < end
        there = inside[:, None] & (column[None, :] < DIM)
        index = tl.multiple_of(new + (key - before_new) * new_time, ALIGNED)
        keys = tl.load(index[:, None] + column[None, :], mask=there, other=0.0)
        values = tl.load(tl.multiple_of(index + new_kv, ALIGNED)[:, None] + column[None, :], mask=there, other=0.0)
        peak, weight, total = _taken(
            query, keys, values, key, inside, bias_at, moment, time, first_seen, end_seen, peak, weight, total,
            scale, BIASED, RANGED, PRECISION,
        )  # fmt: skip

    if has_window:
        _keep_window(
            window, following, new, window_kv, new_kv, new_time, prefix_slots, before_new, time, start, end, DIM,
            BLOCK_DIM, BLOCK, ALIGNED,
        )  # fmt: skip

    # [row, time, head, dim]: the heads of a frame are contiguous for the output projection
    out = out_ptr + ((row * time + moment[:, None]) * HEADS + head) * DIM + column[None, :]
    part = (row * HEADS + head) * splits
    last = splits == 1
    if splits > 1:
        mine = (part + split) * BLOCK_TIME + moment
        tl.store(part_ptr + mine[:, None] * BLOCK_DIM + column[None, :], total)
        tl.store(peak_ptr + mine, peak)
        tl.store(weight_ptr + mine, weight)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + row * HEADS + head, 1) == splits - 1
    if last:
        if splits > 1:
            tl.store(arrived_ptr + row * HEADS + head, 0)
            total, weight = _joined(part_ptr, peak_ptr, weight_ptr, part, splits, moment, column, BLOCK_TIME, BLOCK_DIM)
        tl.store(out, (total / weight[:, None]).to(element), mask=real)


def chunk_attention(
    query: Tensor,  # [row, head, time, dim]
    new: Tensor,  # [2, row, head, time, dim]
    bias: Tensor | None,  # [row, 1 or head, time, key]
    prefixes: Tensor,  # int64 [stream]: address of a contiguous [layer, 2, row of the stream, head, length, dim]
    lengths: Tensor,  # int64 [stream]
    windows: Tensor,  # int64 [stream]: address of a [layer, 2, row of the stream, head, slot, dim], 0 for none
    next_windows: Tensor,  # int64 [stream]: likewise, where the next ones go
    window_strides: tuple[int, int],  # of layer, and of keys to values
    slots: int,
    prefix_slots: int,  # columns of the bias for prefixes; those beyond a stream's length must be −inf
    layer: int,
    arrived: Tensor,  # int32 [row × head], zero before and after
    seen: tuple[Tensor, Tensor] | None = None,  # int32 [stream, time]: first and end of the slots each position sees
) -> Tensor:
    """Attention to prefix, window and new keys; writes the next windows. Reference: `nn.streaming.StreamPast.attend`.

    With `seen`, which counts slots of window and new keys, the whole prefix is visible and `bias` is not read.
    # → [row, head, time, dim]
    """
    rows, heads, time, dim = query.shape
    keys = prefix_slots + slots + time
    block_time = max(16, triton.next_power_of_2(time))
    block_dim = max(16, triton.next_power_of_2(dim))
    block, splits = BLOCK_KEYS, _splits(rows * heads, keys)
    share = triton.cdiv(triton.cdiv(keys, splits), block) * block
    out = torch.empty(rows, time, heads, dim, dtype=query.dtype, device=query.device)
    shape = (rows * heads * splits if splits > 1 else 0, block_time)
    parts = torch.empty(*shape, block_dim, dtype=torch.float32, device=query.device)
    peaks = torch.empty(shape, dtype=torch.float32, device=query.device)
    weights = torch.empty_like(peaks)
    bias_strides = (0, 0, 0)
    if seen is not None:
        bias = None
    if bias is not None:
        bias_strides = (bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0, bias.stride(2))
    _attend[(rows, heads, splits)](
        query, new, query if bias is None else bias, *(seen or (lengths, lengths)), prefixes, lengths,
        windows, next_windows, out, parts, peaks, weights, arrived,
        layer, time, slots, prefix_slots, share, splits, rows // windows.shape[0], dim**-0.5 * LOG2_E.value,
        *query.stride()[:3], *new.stride()[:4], *bias_strides, *window_strides,
        HEADS=heads, DIM=dim, BLOCK_DIM=block_dim, BLOCK_TIME=block_time, BLOCK=block,
        ALIGNED=math.gcd(16, dim * query.element_size()), BIASED=bias is not None,
        RANGED=seen is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
        **chained(query.device, rows * time),
    )  # fmt: skip
    return out.transpose(1, 2)


def _splits(programs: int, keys: int) -> int:
    """Splits of the keys that bring the number of programs near what the GPU runs concurrently."""
    wanted = max(1, min(PROGRAMS_WANTED // programs, triton.cdiv(keys, BLOCK_KEYS), MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)


@triton.jit(do_not_specialize=["rows", "time"])
def _stream_conv(
    x_ptr, context_ptr, next_ptr, weight_ptr, bias_ptr, out_ptr, rows, time,
    context_row, context_time, next_row, next_time, weight_output, weight_channel, weight_tap,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    CONTEXT: tl.constexpr = TAPS - 1
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_IN - 1) // BLOCK_IN
    index = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real, real_output = index < rows * time, output < OUTPUTS
    row, moment = (index // time).to(tl.int64), index % time
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for block in range(TAPS * BLOCKS):
        tap = block // BLOCKS
        channel = (block % BLOCKS) * BLOCK_IN + tl.arange(0, BLOCK_IN)
        inside = channel < CHANNELS
        source = moment + tap - CONTEXT
        old = context_ptr + row * context_row + (source + CONTEXT) * context_time
        line = tl.where(source >= 0, x_ptr + (row * time + source) * CHANNELS, old)
        x = tl.load(line[:, None] + channel[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + tap * weight_tap + output[:, None] * weight_output + channel[None, :] * weight_channel,
            mask=real_output[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + index[:, None].to(tl.int64) * OUTPUTS + output[None, :],
        total.to(out_ptr.dtype.element_ty), mask=real[:, None] & real_output[None, :],
    )  # fmt: skip
    if tl.program_id(1) == 0:
        kept = moment - (time - CONTEXT)
        for block in range(BLOCKS):
            channel = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
            exists = (real & (kept >= 0))[:, None] & (channel < CHANNELS)[None, :]
            x = tl.load(x_ptr + index[:, None].to(tl.int64) * CHANNELS + channel[None, :], mask=exists, other=0.0)
            tl.store(next_ptr + (row * next_row + kept * next_time)[:, None] + channel[None, :], x, mask=exists)


def stream_conv(x: Tensor, context: Tensor, next_context: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal convolution of the next frames; writes the next context. Reference: `nn.streaming.product_over_taps`.

    Fastest where the channels of the weight are contiguous.
    # x [row, time ≥ context, channel], contexts [row, context, channel] in different memory
    """
    x = x.contiguous()
    rows, time, channels = x.shape
    outputs, _, taps = weight.shape
    out = torch.empty(rows, time, outputs, dtype=x.dtype, device=x.device)
    block_rows, block_out, block_in, warps = product_blocks(x, rows * time)
    _stream_conv[(triton.cdiv(rows * time, block_rows), triton.cdiv(outputs, block_out))](
        x, context, next_context, weight, x if bias is None else bias, out, rows, time,
        *context.stride()[:2], *next_context.stride()[:2], *weight.stride(),
        CHANNELS=channels, OUTPUTS=outputs, TAPS=taps, BIAS=bias is not None, BLOCK_ROWS=block_rows,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=3, **chained(x.device, rows * time),
    )  # fmt: skip
    return out
