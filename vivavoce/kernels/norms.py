"""Fused norms, rotary embedding and activations: with residual add, linear, GELU, Mish, SwiGLU, and the page write."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import (
    LINE_BYTES,
    begin_small,
    chained,
    dependent,
    fetch_near,
    launch_next,
    wait_for_previous,
)
from vivavoce.kernels.tiles import CHAINED_ROWS, product_blocks
from vivavoce.nn.paged_kv import RowBatch

MANY_NORM_VALUES = 2048  # of a program with several rows


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    total = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if ADD:
        # Added in the stored dtype, as in the reference, so that both round the residual stream equally.
        total = total + tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        tl.store(total_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (wide * scale).to(weight.dtype) * weight
    tl.store(normed_ptr + row + column, normed, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed sum of `x` and the residual, and the sum. Reference: `vivavoce.nn.linear.rms_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_rms_norm[(x.numel() // size,)](
        x, residual, weight, normed, total, size, eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
        **dependent(x.device),
    )  # fmt: skip
    return normed, total


@triton.jit
def _add_layer_norm(
    x_ptr, added_ptr, scale_ptr, shift_ptr, sum_ptr, out_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        launch_next()
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    index = tl.program_id(0).to(tl.int64) * WIDTH + column
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        wait_for_previous()
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    if ADD:
        x += tl.load(added_ptr + index, mask=inside, other=0.0)
        tl.store(sum_ptr + index, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=0) / WIDTH
    centred = tl.where(inside, wide - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    tl.store(out_ptr + index, (centred * rate * scale + shift).to(out_ptr.dtype.element_ty), mask=inside)


def add_layer_norm(x: Tensor, added: Tensor | None, norm: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor]:
    """`x + added` and its norm. Reference: the sum, and `functional.layer_norm`.  # [row, width] twice"""
    rows, width = x.shape
    scale, shift, eps = norm
    normed = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    _add_layer_norm[(rows,)](
        x, x if added is None else added, scale, shift, total, normed, eps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=added is not None, num_warps=4, **dependent(x.device),
    )  # fmt: skip
    return total, normed


@triton.jit
def _modulated_norm(
    x_ptr, gate_ptr, added_ptr, scale_ptr, shift_ptr, total_ptr, normed_ptr, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x += gate * tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=0) / size
    centred = tl.where(inside, x - mean, 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rate * (1.0 + scale) + shift
    tl.store(normed_ptr + row + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def modulated_norm(
    x: Tensor, gated: tuple[Tensor, Tensor] | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`x + gate · added`, and its norm. Reference: the PyTorch path of `vivavoce.nn.linear.modulated_norm`."""
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if gated is None else torch.empty_like(x)
    gate, added = gated or (x, x)  # without a gate they are not read
    block = triton.next_power_of_2(size)
    _modulated_norm[(x.numel() // size,)](
        x, gate, added.contiguous(), scale, shift, total, normed, size, eps,
        ADD=gated is not None, BLOCK=block, num_warps=min(max(block // 256, 1), 8),
    )  # fmt: skip
    return total, normed


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(
    x_ptr, scale_ptr, shift_ptr, added_ptr, out_ptr, rows, size, eps,
    MISH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < size
    real = (row < rows)[:, None] & inside[None, :]
    index = row[:, None] * size + column[None, :]
    x = tl.load(x_ptr + index, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / size
    centred = tl.where(real, x - mean[:, None], 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=1) / size + eps)
    scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = centred * rate[:, None] * scale[None, :] + shift[None, :]
    if MISH:
        # tanh(ln(1 + e^x)) is n / (n + 2) for n = e^x (e^x + 2), and 1 in float32 long before e^x overflows
        power = tl.exp(tl.minimum(y, 20.0))
        ratio = power * (power + 2.0)
        y = y * ratio / (ratio + 2.0)
    if ADD:
        y += tl.load(added_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=real)


def layer_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, mish: bool = False, added: Tensor | None = None
) -> Tensor:
    """`layer_norm(x)`, or `mish(layer_norm(x))`, plus `added`. Reference: the PyTorch paths in `vivavoce.nn.linear`."""
    x = x.contiguous()
    size = x.shape[-1]
    rows, block = x.numel() // size, triton.next_power_of_2(size)
    out = torch.empty_like(x)
    block_rows, warps = (1, block // 256) if rows <= CHAINED_ROWS else (MANY_NORM_VALUES // block, 4)
    _layer_norm[(triton.cdiv(rows, max(block_rows, 1)),)](
        x, scale, shift, x if added is None else added.contiguous(), out, rows, size, eps,
        MISH=mish, ADD=added is not None, BLOCK_ROWS=max(block_rows, 1), BLOCK=block,
        num_warps=min(max(warps, 1), 8), **chained(x.device, rows),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_linear(
    x_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, rows, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, PRECISION: tl.constexpr, LINE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real_row, real_output = row < rows, output < OUTPUTS
    if DEPENDENT:
        launch_next()
        if WIDTH == INPUTS and INPUTS % LINE == 0:
            fetch_near(weight_ptr + tl.where(real_output, output, 0)[:, None] * INPUTS, INPUTS, LINE)
        wait_for_previous()
    x_row = x_ptr + row[:, None].to(tl.int64) * INPUTS
    if NORM:
        everywhere = tl.arange(0, WIDTH)
        exists = real_row[:, None] & (everywhere[None, :] < INPUTS)
        whole = tl.load(x_row + everywhere[None, :], mask=exists, other=0.0).to(tl.float32)
        mean = tl.sum(whole, axis=1) / INPUTS
        centred = tl.where(exists, whole - mean[:, None], 0.0)
        rate = tl.rsqrt(tl.sum(centred * centred, axis=1) / INPUTS + eps)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for first in range(0, INPUTS, BLOCK_IN):
        column = first + tl.arange(0, BLOCK_IN)
        inside = column < INPUTS
        x = tl.load(x_row + column[None, :], mask=real_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(
            weight_ptr + output[:, None] * INPUTS + column[None, :],
            mask=real_output[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        if NORM:
            scale = tl.load(scale_ptr + column, mask=inside, other=0.0).to(tl.float32)
            shift = tl.load(shift_ptr + column, mask=inside, other=0.0).to(tl.float32)
            x = ((x.to(tl.float32) - mean[:, None]) * rate[:, None] * scale + shift).to(weight.dtype)
        total += tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)
    if GELU:
        total = 0.5 * total * (1 + tl.erf(total * 0.7071067811865476))
    index = row[:, None].to(tl.int64) * OUTPUTS + output[None, :]
    real = real_row[:, None] & real_output[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + index, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=real)


def norm_linear(
    x: Tensor,  # [.., inputs]
    weight: Tensor,  # [outputs, inputs]
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    gelu: bool,
    residual: Tensor | None,  # [.., outputs]
) -> Tensor:
    """`gelu(linear(norm(x))) + residual`. Reference: the PyTorch path of `vivavoce.nn.linear.norm_linear`."""
    x, weight = x.contiguous(), weight.contiguous()
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    scale, shift, eps = norm or (x, x, 0.0)
    block_rows, block_out, block_in, warps = product_blocks(x, rows)
    _norm_linear[(triton.cdiv(rows, block_rows), triton.cdiv(outputs, block_out))](
        x, scale, shift, weight, x if bias is None else bias, x if residual is None else residual.contiguous(), out,
        rows, eps,
        INPUTS=inputs, OUTPUTS=outputs, WIDTH=triton.next_power_of_2(inputs), NORM=norm is not None,
        BIAS=bias is not None, GELU=gelu, RESIDUAL=residual is not None, BLOCK_ROWS=block_rows, BLOCK_OUT=block_out,
        BLOCK_IN=block_in, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LINE=LINE_BYTES // weight.element_size(), num_warps=warps, num_stages=3, **chained(x.device, rows),
    )  # fmt: skip
    return out


@triton.jit
def _silu_multiply(both_ptr, out_ptr, inner, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    begin_small(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(both_ptr + row * 2 * inner + column, mask=inside, other=0.0)
    up = tl.load(both_ptr + row * 2 * inner + inner + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * inner + column, silu * up, mask=inside)


def silu_multiply(both: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last dimension. Reference: the PyTorch path of `GatedFeedForward`."""
    both = both.contiguous()
    inner = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], inner, dtype=both.dtype, device=both.device)
    block = 1024
    _silu_multiply[(both.numel() // (2 * inner), triton.cdiv(inner, block))](
        both, out, inner, BLOCK=block, num_warps=4, **dependent(both.device)
    )
    return out


BLOCK = 1024


@triton.jit(do_not_specialize=["time"])
def _snake(x_ptr, alpha_ptr, out_ptr, channels, time, row_stride, channel_stride, never_zero, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row, channel = program // channels, program % channels
    moment = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = moment < time
    alpha = tl.load(alpha_ptr + channel).to(tl.float32)
    source = x_ptr + row.to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride + moment
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    wave = tl.sin(x * alpha)
    y = x + wave * wave / (alpha + never_zero)
    tl.store(out_ptr + program.to(tl.int64) * time + moment, y.to(out_ptr.dtype.element_ty), mask=inside)


def snake(x: Tensor, alpha: Tensor, never_zero: float) -> Tensor:
    """`x + sin²(αx) / (α + never_zero)`. Reference: the PyTorch path of `vivavoce.nn.vocoder.Snake`.

    # [batch, channel, time] with contiguous time; [channel] → contiguous [batch, channel, time]
    """
    batch, channels, time = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (batch * channels, triton.cdiv(time, BLOCK))
    _snake[grid](x, alpha, out, channels, time, x.stride(0), x.stride(1), never_zero, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _keep(low, high, heads_ptr, scale_ptr, cell, column, HALF: tl.constexpr, FP8: tl.constexpr):
    """Write the halves of a head to the cache, in float8 if FP8. Reference: `vivavoce.nn.paged_kv.to_fp8`."""
    if FP8:
        low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0))
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + cell, scale)
        low, high = low / scale, high / scale
    target = heads_ptr + cell * 2 * HALF
    tl.store(target + column, low.to(heads_ptr.dtype.element_ty))
    tl.store(target + HALF + column, high.to(heads_ptr.dtype.element_ty))


@triton.jit
def _norm_rotate_store(
    packed_ptr, queries_ptr, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, slots_ptr, positions_ptr, page_table_ptr, table_width, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # queries first, then keys, then values
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row).to(tl.int64)  # written before the first kernel of the step: no need to wait
    slot = tl.load(slots_ptr + row).to(tl.int64)
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE).to(tl.int64)
    cache_row = (page * PAGE + position % PAGE) * KV_HEADS
    begin_small(DEPENDENT)

    source = packed_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(source + column)
    second = tl.load(source + HALF + column)

    if head >= HEADS + KV_HEADS:
        cell = cache_row + head - HEADS - KV_HEADS
        _keep(first, second, values_ptr, value_scale_ptr, cell, column, HALF, FP8)
    else:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORMED:
            weight_ptr = q_weight_ptr if head < HEADS else k_weight_ptr
            mean = (tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / DIM
            scale = tl.rsqrt(mean + eps)
            low_weight, high_weight = tl.load(weight_ptr + column), tl.load(weight_ptr + HALF + column)
            low = ((low * scale).to(first.dtype) * low_weight).to(tl.float32)
            high = ((high * scale).to(first.dtype) * high_weight).to(tl.float32)
        cos = tl.load(cos_ptr + position * HALF + column)
        sin = tl.load(sin_ptr + position * HALF + column)
        low, high = (low * cos - high * sin).to(first.dtype), (high * cos + low * sin).to(first.dtype)
        if head < HEADS:
            target = queries_ptr + (row * HEADS + head) * DIM
            tl.store(target + column, low)
            tl.store(target + HALF + column, high)
        else:
            cell = cache_row + head - HEADS
            _keep(low, high, keys_ptr, key_scale_ptr, cell, column, HALF, FP8)


def norm_rotate_store(
    packed: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    batch: RowBatch,
    kv_heads: int,
) -> Tensor:
    """The rotated queries; writes keys and values to the cache. Reference: PyTorch path of `PagedAttention._store`."""
    rows, all_heads, dim = packed.shape
    heads = all_heads - 2 * kv_heads
    q_weight, k_weight, eps = norms or (packed, packed, 0.0)  # without norms they are not read
    queries = torch.empty(rows, heads, dim, dtype=packed.dtype, device=packed.device)
    keys, values, key_scales, value_scales = batch.cache.of_layer(layer)
    _norm_rotate_store[(rows, all_heads)](
        packed, queries, keys, values, key_scales, value_scales, q_weight, k_weight, cos, sin,
        batch.slots, batch.positions, batch.page_table, batch.page_table.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=batch.cache.page_size, NORMED=norms is not None,
        FP8=batch.cache.is_fp8, num_warps=1, **dependent(packed.device),
    )  # fmt: skip
    return queries


@triton.jit
def _rotate_first_head(
    query_ptr, key_ptr, cos_ptr, sin_ptr, time,
    query_row, query_time, key_row, key_time, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row, moment = (index // time).to(tl.int64), index % time
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_ptr + index.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + index.to(tl.int64) * HALF + pair, mask=inside, other=0.0)
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
    """Rotate pairs of head 0, in place. Reference: PyTorch path of `vivavoce.models.cosyvoice.dit.RotatedPast.attend`.

    # query and keys [row, head, time, dim] with contiguous elements of a head, cos and sin [row, time, dim / 2]
    """
    rows, _, time, dim = query.shape
    half = dim // 2
    _rotate_first_head[(rows * time,)](
        query, keys, cos, sin, time, query.stride(0), query.stride(2), keys.stride(0), keys.stride(2),
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
