"""Weights of few bits widened in registers, by bits rather than by conversions, which run at a quarter the rate."""

import triton
import triton.language as tl

# Four bytes at a time. A byte's lower seven bits are those of a bfloat16 in 128…255, of which 128 or 256 is taken.
INT8 = tl.constexpr(
    """{ .reg .b32 pair, above, below, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 pair, $2, 0, 0x4140;
    lop3.b32 above, pair, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 below, pair, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, below, minus, above;
    prmt.b32 pair, $2, 0, 0x4342;
    lop3.b32 above, pair, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 below, pair, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, below, minus, above; }"""
)
# A byte, its sign turned over, is the last of a float32 in 2²³…2²³ + 255.
INT8_TO_FLOAT32 = tl.constexpr(
    """{ .reg .b32 turned, raised; .reg .f32 zero;
    mov.b32 raised, 0x4b000000;
    mov.b32 zero, 0xcb000080;
    xor.b32 turned, $4, 0x80808080;
    { .reg .b32 t; .reg .f32 f; prmt.b32 t, turned, raised, 0x7540; mov.b32 f, t; add.f32 $0, f, zero; }
    { .reg .b32 t; .reg .f32 f; prmt.b32 t, turned, raised, 0x7541; mov.b32 f, t; add.f32 $1, f, zero; }
    { .reg .b32 t; .reg .f32 f; prmt.b32 t, turned, raised, 0x7542; mov.b32 f, t; add.f32 $2, f, zero; }
    { .reg .b32 t; .reg .f32 f; prmt.b32 t, turned, raised, 0x7543; mov.b32 f, t; add.f32 $3, f, zero; } }"""
)
# Exponent and mantissa moved to where bfloat16 has them give the number times 2⁻¹²⁰, subnormal ones too.
FLOAT8 = tl.constexpr(
    """{ .reg .b32 pair, low, factor, zero;
    mov.b32 factor, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 pair, $2, 0, 0x1404;
    shr.u32 low, pair, 4;
    and.b32 low, low, 0x07f007f0;
    lop3.b32 low, pair, 0x80008000, low, 0xea;
    fma.rn.bf16x2 $0, low, factor, zero;
    prmt.b32 pair, $2, 0, 0x3424;
    shr.u32 low, pair, 4;
    and.b32 low, low, 0x07f007f0;
    lop3.b32 low, pair, 0x80008000, low, 0xea;
    fma.rn.bf16x2 $1, low, factor, zero; }"""
)
# Codes 0…15 as 128…143.
NIBBLES = tl.constexpr(
    """{ .reg .b32 pair;
    prmt.b32 pair, $4, 0, 0x4140;
    lop3.b32 $0, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $2, pair, 0x000f000f, 0x43004300, 0xea;
    prmt.b32 pair, $4, 0, 0x4342;
    lop3.b32 $1, pair, 0x000f000f, 0x43004300, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 $3, pair, 0x000f000f, 0x43004300, 0xea; }"""
)


@triton.jit
def widened(weight, dtype: tl.constexpr, FAST: tl.constexpr):
    """int8 or float8 numbers in another type."""
    if FAST and dtype == tl.bfloat16:
        if weight.dtype == tl.int8:
            return tl.inline_asm_elementwise(INT8, "=r,=r,r", [weight], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif weight.dtype == tl.float8e4nv:
            bits = weight.to(tl.int8, bitcast=True)
            return tl.inline_asm_elementwise(FLOAT8, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            return weight.to(dtype)
    else:
        return weight.to(dtype)


@triton.jit
def as_float32(weight, FAST: tl.constexpr):
    """Numbers of any kind in float32."""
    if FAST and weight.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            INT8_TO_FLOAT32, "=f,=f,=f,=f,r", [weight], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return weight.to(tl.float32)


@triton.jit
def widened_nibbles(both, dtype: tl.constexpr, FAST: tl.constexpr):
    """The codes in lower and upper halves of bytes, 128 added to each."""
    if FAST and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = ((both & 15) + 128).to(dtype), ((both >> 4) + 128).to(dtype)
    return low, high
