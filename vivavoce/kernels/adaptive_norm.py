"""Adaptive instance norm with a Snake behind it, over channels-last rows of different lengths.

`add_moments` reads a tensor once and keeps the mean and the squared deviations of every stretch of its time;
`norm_affine` merges them to the statistics of a row, and `scaled_snake` applies norm and activation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 64  # positions whose moments are computed together
MERGED = 32  # stretches that are merged together
CHANNELS = 64  # of one program that merges


@triton.jit(do_not_specialize=["time", "rate", "extra"])
def _add_moments(
    x_ptr, added_ptr, bias_ptr, lengths_ptr, sum_ptr, moments_ptr, time, rate, extra,
    WIDTH: tl.constexpr, STRETCH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    stretch, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32) * rate + extra
    channel, moment = tl.arange(0, WIDTH), stretch * STRETCH + tl.arange(0, STRETCH)
    index = (row.to(tl.int64) * time + moment)[:, None] * WIDTH + channel[None, :]
    inside = (moment < length)[:, None]
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added_ptr + index, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + channel)[None, :]
        rounded = tl.where(inside, x, 0.0).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + index, rounded, mask=(moment < time)[:, None])
        x = rounded.to(tl.float32)
    count = tl.minimum(tl.maximum(length - stretch * STRETCH, 0), STRETCH)
    mean = tl.sum(x, axis=0) / tl.maximum(count, 1)
    centred = tl.where(inside, x - mean[None, :], 0.0)
    target = moments_ptr + (row.to(tl.int64) * tl.num_programs(0) + stretch) * 2 * WIDTH + channel
    tl.store(target, mean)
    tl.store(target + WIDTH, tl.sum(centred * centred, axis=0))


def add_moments(
    x: Tensor, added: tuple[Tensor, Tensor] | None, lengths: Tensor, rate: int, extra: int
) -> tuple[Tensor, Tensor]:
    """`x`, or its sum with a tensor and a bias, zero behind the end of a row; and moments of its stretches.

    # [batch, time, channel], ([batch, time, channel], [channel]), [batch] → [batch, time, channel],
    [batch, stretch, 2, channel]
    A row has `lengths · rate + extra` positions. Without a summand `x` is returned as it is. Channels: a power of 2.
    """
    batch, time, width = x.shape
    stretches = triton.cdiv(time, STRETCH)
    moments = torch.empty(batch, stretches, 2, width, dtype=torch.float32, device=x.device)
    total = x if added is None else torch.empty_like(x)
    summand, bias = added or (x, x)
    _add_moments[(stretches, batch)](
        x, summand, bias, lengths, total, moments, time, rate, extra,
        WIDTH=width, STRETCH=STRETCH, ADD=added is not None, num_warps=8,
    )  # fmt: skip
    return total, moments


@triton.jit(do_not_specialize=["stretches", "rate", "extra"])
def _norm_affine(
    moments_ptr, lengths_ptr, gains_ptr, earlier_ptr, weight_ptr, statistics_ptr, affine_ptr,
    stretches, rate, extra, gain_stride, statistics_stride, statistics_width, eps,
    WIDTH: tl.constexpr, STRETCH: tl.constexpr, MERGED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < WIDTH
    features = tl.load(lengths_ptr + row).to(tl.int32)
    length = features * rate + extra
    source = moments_ptr + row * stretches * 2 * WIDTH + channel
    mean = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, stretches, MERGED):
        stretch = first + tl.arange(0, MERGED)
        count = tl.minimum(tl.maximum(length - stretch * STRETCH, 0), STRETCH).to(tl.float32)
        known = (stretch < stretches)[:, None] & inside[None, :]
        means = tl.load(source[None, :] + stretch[:, None] * 2 * WIDTH, mask=known, other=0.0)
        mean += tl.sum(means * count[:, None], axis=0)
    mean /= length
    squares = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, stretches, MERGED):
        stretch = first + tl.arange(0, MERGED)
        count = tl.minimum(tl.maximum(length - stretch * STRETCH, 0), STRETCH).to(tl.float32)
        known = (stretch < stretches)[:, None] & inside[None, :]
        place = source[None, :] + stretch[:, None] * 2 * WIDTH
        away = tl.load(place, mask=known, other=0.0) - mean[None, :]
        inner = tl.load(place + WIDTH, mask=known, other=0.0)
        squares += tl.sum(tl.where(known, inner + away * away * count[:, None], 0.0), axis=0)
    variance = squares / length
    earlier = earlier_ptr + row * statistics_stride + channel
    weight = tl.load(weight_ptr + row)
    share = weight / (weight + features)
    away = tl.load(earlier, mask=inside, other=0.0) - mean
    spread = tl.load(earlier + statistics_width, mask=inside, other=0.0)
    mean += share * away
    variance = variance * (1.0 - share) + spread * share + share * (1.0 - share) * away * away
    kept = statistics_ptr + row * statistics_stride + channel
    tl.store(kept, mean, mask=inside)
    tl.store(kept + statistics_width, variance, mask=inside)
    gain = tl.load(gains_ptr + row * gain_stride + channel, mask=inside, other=0.0)
    bias = tl.load(gains_ptr + row * gain_stride + WIDTH + channel, mask=inside, other=0.0)
    scale = (1.0 + gain) * tl.rsqrt(variance + eps)
    target = affine_ptr + row * 2 * WIDTH + channel
    tl.store(target, scale, mask=inside)
    tl.store(target + WIDTH, bias - mean * scale, mask=inside)


def norm_affine(
    moments: Tensor, lengths: Tensor, rate: int, extra: int, gains: Tensor, earlier: Tensor, weight: Tensor,
    statistics: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """The factor and summand of an adaptive norm.  # [batch, 2, channel]

    `gains` [batch, 2 · channel] are the style's; `earlier` and `statistics` [batch, 2, channel] are views of the means
    and variances of all norms: those of `weight` features before, and the merged ones, which are written.
    """
    batch, stretches, _, width = moments.shape
    affine = torch.empty(batch, 2, width, dtype=torch.float32, device=moments.device)
    _norm_affine[(batch, triton.cdiv(width, CHANNELS))](
        moments, lengths, gains, earlier, weight, statistics, affine,
        stretches, rate, extra, gains.stride(0), statistics.stride(0), statistics.stride(1), eps,
        WIDTH=width, STRETCH=STRETCH, MERGED=MERGED, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    return affine


@triton.jit(do_not_specialize=["time", "rate", "extra"])
def _scaled_snake(
    x_ptr, affine_ptr, alpha_ptr, lengths_ptr, out_ptr, time, rate, extra, WIDTH: tl.constexpr, STRETCH: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row).to(tl.int32) * rate + extra
    channel, moment = tl.arange(0, WIDTH), tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    index = (row * time + moment)[:, None] * WIDTH + channel[None, :]
    inside = (moment < length)[:, None]
    scale = tl.load(affine_ptr + row * 2 * WIDTH + channel)[None, :]
    shift = tl.load(affine_ptr + row * 2 * WIDTH + WIDTH + channel)[None, :]
    alpha = tl.load(alpha_ptr + channel)[None, :]
    y = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32) * scale + shift
    half_turns = alpha * y * 0.3183098862
    half_turns -= tl.floor(half_turns + 0.5)
    square = half_turns * half_turns
    # The series of sin(πx) on [-1/2, 1/2]; the library's sine has a slow path for numbers that do not occur here.
    series = 0.0821458866 - 0.0073704309 * square
    series = 2.5501640399 + (series * square - 0.5992645293) * square
    sine = half_turns * (3.1415926536 + (series * square - 5.1677127800) * square)
    y = tl.where(inside, y + sine * sine / alpha, 0.0)
    tl.store(out_ptr + index, y.to(out_ptr.dtype.element_ty), mask=(moment < time)[:, None])


def scaled_snake(x: Tensor, affine: Tensor, alpha: Tensor, lengths: Tensor, rate: int, extra: int) -> Tensor:
    """snake(x · scale + shift), zero behind the end of a row.  # [batch, time, channel]"""
    batch, time, width = x.shape
    out = torch.empty_like(x)
    _scaled_snake[(triton.cdiv(time, STRETCH // 2), batch)](
        x, affine, alpha, lengths, out, time, rate, extra, WIDTH=width, STRETCH=STRETCH // 2, num_warps=8
    )
    return out
