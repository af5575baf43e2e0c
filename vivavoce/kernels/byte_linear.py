"""A linear layer for one row on 8-bit weights, with the SwiGLU gate fused if there is one.

A program computes a few outputs and loads a whole iteration of their weights before it waits for the row. A thread has
groups of 16 columns and scales each by a power of two, so that 16-bit integers represent them as precisely as 16-bit
floats. They are multiplied with int8 weights by dp4a, with exact sums; with float8 weights as float16, in sums of four.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vivavoce.kernels.dependent_launch import begin, dependent
from vivavoce.kernels.tiles import Tile
from vivavoce.kernels.widening import swiglu
from vivavoce.nn.quantised_weight import QuantisedWeight

GROUP = 16  # contiguous columns of a thread: 16 bytes of weights
WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it leaves the number, rounded to an integer, in the lowest bits
# 16-bit integers in the lower halves of four registers → a register of their lower bytes and one of their upper bytes.
BYTES = tl.constexpr(
    """{ .reg .b32 t, u;
    prmt.b32 t, $2, $3, 0x5140;
    prmt.b32 u, $4, $5, 0x5140;
    prmt.b32 $0, t, u, 0x5410;
    prmt.b32 $1, t, u, 0x7632; }"""
)
INT8_DOT = tl.constexpr(
    """{ .reg .s32 upper, lower;
    dp4a.s32.s32 upper, $1, $9, 0;
    dp4a.s32.u32 lower, $1, $5, 0;
    dp4a.s32.s32 upper, $2, $10, upper;
    dp4a.s32.u32 lower, $2, $6, lower;
    dp4a.s32.s32 upper, $3, $11, upper;
    dp4a.s32.u32 lower, $3, $7, lower;
    dp4a.s32.s32 upper, $4, $12, upper;
    dp4a.s32.u32 lower, $4, $8, lower;
    mad.lo.s32 lower, upper, 256, lower;
    cvt.rn.f32.s32 $0, lower; }"""
)
FLOAT8_DOT = tl.constexpr(
    """{ .reg .b16 a, b; .reg .b32 first, second, even, odd; .reg .f32 c, d, e, f;
    mov.b32 {a, b}, $1;
    cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 second, b;
    mul.rn.f16x2 even, first, $5; mul.rn.f16x2 odd, second, $6;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 second, b;
    fma.rn.f16x2 even, first, $7, even; fma.rn.f16x2 odd, second, $8, odd;
    mov.b32 {a, b}, $3;
    cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 second, b;
    fma.rn.f16x2 even, first, $9, even; fma.rn.f16x2 odd, second, $10, odd;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 second, b;
    fma.rn.f16x2 even, first, $11, even; fma.rn.f16x2 odd, second, $12, odd;
    mov.b32 {a, b}, even;
    cvt.f32.f16 c, a; cvt.f32.f16 d, b;
    mov.b32 {a, b}, odd;
    cvt.f32.f16 e, a; cvt.f32.f16 f, b;
    add.f32 c, c, d; add.f32 e, e, f; add.f32 $0, c, e; }"""
)


@triton.jit
def _quarters(words):
    """The four words of each group.  # [output, 4 · group] → four [output, group]"""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _floats(pair, BFLOAT: tl.constexpr):
    """The two 16-bit numbers of a word as float32."""
    if BFLOAT:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _largest(a, b, c, d):
    """The bits of the largest absolute value of four numbers; NaN is the largest."""
    first = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    second = tl.maximum(c.to(tl.int32, bitcast=True) & 0x7FFFFFFF, d.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.maximum(first, second)


@triton.jit
def _bytes(a, b, c, d, factor, FAST: tl.constexpr):
    """Four numbers rounded to 16-bit integers: a word of their lower bytes, and one of their upper bytes."""
    a = (a * factor + WHOLE).to(tl.int32, bitcast=True)
    b = (b * factor + WHOLE).to(tl.int32, bitcast=True)
    c = (c * factor + WHOLE).to(tl.int32, bitcast=True)
    d = (d * factor + WHOLE).to(tl.int32, bitcast=True)
    if FAST:
        return tl.inline_asm_elementwise(
            BYTES, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        lower = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
        a, b, c, d = a >> 8, b >> 8, c >> 8, d >> 8
        return lower, (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def _halves(a, b, factor, FAST: tl.constexpr):
    """Two numbers as float16 in one word."""
    if FAST:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a * factor, b * factor], dtype=tl.int32, is_pure=True, pack=1
        )
    low = (a * factor).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    high = (b * factor).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@triton.jit
def _slow_int8(weight, lower, upper):
    total = tl.zeros_like(weight + lower)
    for index in tl.static_range(4):
        code = (weight << (24 - 8 * index)) >> 24
        high = (upper << (24 - 8 * index)) >> 24
        total += code * (256 * high + ((lower >> (8 * index)) & 255))
    return total.to(tl.float32)


@triton.jit
def _slow_float8(weight, first, second):
    total = tl.zeros_like((weight + first).to(tl.float32))
    for index in tl.static_range(4):
        byte = weight >> (8 * index)
        code = (((byte & 128) << 24) | ((byte & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        low, high = _floats(first if index < 2 else second, False)
        total += code * (low if index % 2 == 0 else high)
    return total


@triton.jit
def _prepared(first, second, BFLOAT: tl.constexpr, INTEGER: tl.constexpr, FAST: tl.constexpr):
    """The 16 numbers of a group in eight words, in format and order of the weights, and the scale of their products."""
    p0, p1, p2, p3 = _quarters(first)
    p4, p5, p6, p7 = _quarters(second)
    x0, x1 = _floats(p0, BFLOAT)
    x2, x3 = _floats(p1, BFLOAT)
    x4, x5 = _floats(p2, BFLOAT)
    x6, x7 = _floats(p3, BFLOAT)
    x8, x9 = _floats(p4, BFLOAT)
    x10, x11 = _floats(p5, BFLOAT)
    x12, x13 = _floats(p6, BFLOAT)
    x14, x15 = _floats(p7, BFLOAT)
    bits = tl.maximum(
        tl.maximum(_largest(x0, x1, x2, x3), _largest(x4, x5, x6, x7)),
        tl.maximum(_largest(x8, x9, x10, x11), _largest(x12, x13, x14, x15)),
    )
    LARGEST: tl.constexpr = 14 if INTEGER else 0  # the exponent that the largest number is scaled to
    exponent = tl.maximum(bits >> 23, 1 + LARGEST)
    factor = ((254 + LARGEST - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - LARGEST) << 23).to(tl.float32, bitcast=True)
    back = tl.where(bits >= 0x7F800000, float("nan"), back)
    if INTEGER:
        r0, r4 = _bytes(x0, x1, x8, x9, factor, FAST)
        r1, r5 = _bytes(x2, x3, x10, x11, factor, FAST)
        r2, r6 = _bytes(x4, x5, x12, x13, factor, FAST)
        r3, r7 = _bytes(x6, x7, x14, x15, factor, FAST)
    else:
        r0, r1 = _halves(x0, x1, factor, FAST), _halves(x8, x9, factor, FAST)
        r2, r3 = _halves(x2, x3, factor, FAST), _halves(x10, x11, factor, FAST)
        r4, r5 = _halves(x4, x5, factor, FAST), _halves(x12, x13, factor, FAST)
        r6, r7 = _halves(x6, x7, factor, FAST), _halves(x14, x15, factor, FAST)
    return r0, r1, r2, r3, r4, r5, r6, r7, back


@triton.jit
def _product(words, r0, r1, r2, r3, r4, r5, r6, r7, INTEGER: tl.constexpr, FAST: tl.constexpr):
    """The unscaled contribution of each group to each output.  # [output, 4 · group], eight [1, group]"""
    a, b, c, d = _quarters(words)
    if FAST:
        return tl.inline_asm_elementwise(
            INT8_DOT if INTEGER else FLOAT8_DOT, "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [a, b, c, d, r0, r1, r2, r3, r4, r5, r6, r7], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif INTEGER:
        return _slow_int8(a, r0, r4) + _slow_int8(b, r1, r5) + _slow_int8(c, r2, r6) + _slow_int8(d, r3, r7)
    else:
        return _slow_float8(a, r0, r1) + _slow_float8(b, r2, r3) + _slow_float8(c, r4, r5) + _slow_float8(d, r6, r7)


@triton.jit
def _read(ptr, word, LENGTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=word < LENGTH, other=0)


@triton.jit
def _byte_row_linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, INTEGER: tl.constexpr, BFLOAT: tl.constexpr, FAST: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    LENGTH: tl.constexpr = INPUTS // 4  # words of weights in an output
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = output < OUTPUTS
    safe = tl.where(real, output, 0)
    word = tl.arange(0, 4 * GROUPS)[None, :]
    start = weight_ptr + safe[:, None].to(tl.int64) * LENGTH + word
    other = start + OUTPUTS * LENGTH
    x_place = x_ptr + word // 4 * 8 + word % 4  # a thread has eight words of the row for four of weights
    following = _read(start, word, LENGTH, EVEN)  # no kernel writes weights: no need to wait
    following_gated = following
    scale = tl.load(scale_ptr + safe)
    if GATED:
        following_gated = _read(other, word, LENGTH, EVEN)
        gated_scale = tl.load(scale_ptr + OUTPUTS + safe)
    begin(DEPENDENT)
    total = tl.zeros([BLOCK_OUT, GROUPS], tl.float32)
    second = tl.zeros([BLOCK_OUT, GROUPS], tl.float32)
    for index in tl.static_range(ROUNDS):
        weight, gated = following, following_gated
        now = index * GROUPS * 4 + word
        lower = _read(x_place + index * GROUPS * 8, now, LENGTH, EVEN)
        upper = _read(x_place + index * GROUPS * 8 + 4, now, LENGTH, EVEN)
        if index + 1 < ROUNDS:
            ahead = (index + 1) * GROUPS * 4
            following = _read(start + ahead, ahead + word, LENGTH, EVEN)
            if GATED:
                following_gated = _read(other + ahead, ahead + word, LENGTH, EVEN)
        r0, r1, r2, r3, r4, r5, r6, r7, back = _prepared(lower, upper, BFLOAT, INTEGER, FAST)
        total += _product(weight, r0, r1, r2, r3, r4, r5, r6, r7, INTEGER, FAST) * back
        if GATED:
            second += _product(gated, r0, r1, r2, r3, r4, r5, r6, r7, INTEGER, FAST) * back
    result = tl.sum(total, axis=1) * scale
    if BIAS:
        result += tl.load(bias_ptr + safe).to(tl.float32)
    if GATED:
        factor = tl.sum(second, axis=1) * gated_scale
        if BIAS:
            factor += tl.load(bias_ptr + OUTPUTS + safe).to(tl.float32)
        result = swiglu(result, factor)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=real)


def takes_byte_row(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether the kernel supports them: interleaved 8-bit weights and a 16-bit row."""
    return weight.is_interleaved and x.dtype.itemsize == 2


def byte_row_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, tile: Tile, gated: bool = False) -> Tensor:
    """`x @ weight.T + bias`, and the gate. Reference: that of `small_batch_linear`.  # [1, input] → [1, output]"""
    inputs, outputs = x.shape[1], weight.outputs // (2 if gated else 1)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    groups = min(tile.inputs, triton.next_power_of_2(inputs)) // GROUP
    _byte_row_linear[(triton.cdiv(outputs, tile.outputs),)](
        x.view(torch.int32), weight.data.view(torch.int32), weight.scale, x if bias is None else bias, out,
        INPUTS=inputs, OUTPUTS=outputs, INTEGER=weight.scheme == "int8", BFLOAT=x.dtype == torch.bfloat16,
        FAST=x.is_cuda, GATED=gated, BIAS=bias is not None, EVEN=inputs % (groups * GROUP) == 0,
        ROUNDS=triton.cdiv(inputs, groups * GROUP), BLOCK_OUT=tile.outputs, GROUPS=groups,
        num_warps=tile.warps, **dependent(x.device),
    )  # fmt: skip
    return out
