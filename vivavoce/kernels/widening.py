"""Quantised weights widened in registers, in the order in which tensor cores take them.

Bytes are stored interleaved (`nn.quantised_weight.interleaved`): the four columns of a block of 16 that a thread feeds
to a product are adjacent, so that threads read words instead of pairs of bytes.
"""

import functools

import torch
import triton
import triton.language as tl

# Four bytes at a time: the lower seven bits become those of a bfloat16 in 128…255, from which 128 or 256 is subtracted.
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
# A byte with its sign inverted becomes the lowest byte of a float32 in 2²³…2²³ + 255.
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
# Exponent and mantissa shifted to the bits of a bfloat16 give the number times 2⁻¹²⁰, for subnormals too.
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
    """int8 or float8 numbers converted to another dtype."""
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
    """Numbers of any dtype converted to float32."""
    if FAST and weight.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            INT8_TO_FLOAT32, "=f,=f,=f,=f,r", [weight], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return weight.to(tl.float32)


@triton.jit
def widened_nibbles(both, dtype: tl.constexpr, FAST: tl.constexpr):
    """The int4 codes in the lower and upper halves of bytes, 128 added to each."""
    if FAST and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = ((both & 15) + 128).to(dtype), ((both >> 4) + 128).to(dtype)
    return low, high


@triton.jit
def deinterleaved(weight):
    """Columns in their first order: no movement, only the choice of what each thread reads from shared memory."""
    OUTPUTS: tl.constexpr = weight.shape[0]
    INPUTS: tl.constexpr = weight.shape[1]
    blocks = tl.reshape(weight, [OUTPUTS, INPUTS // 16, 4, 2, 2])
    return tl.reshape(tl.permute(blocks, (0, 1, 3, 2, 4)), [OUTPUTS, INPUTS])


@triton.jit
def interleaved_rows(x):
    """The columns of rows in the order of interleaved weights, likewise.  # [column, row]"""
    INPUTS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [INPUTS // 16, 2, 4, 2, ROWS])
    return tl.reshape(tl.permute(blocks, (0, 2, 1, 3, 4)), [INPUTS, ROWS])


@triton.jit
def matched(weight, x, WARPGROUP: tl.constexpr):
    """Interleaved bytes and rows in one order of columns.

    Products of warp groups take rows only as they lie in shared memory, so the weights are reordered for them; for
    those of warps, whose rows are in registers, the rows.  # [output, column], [column, row]
    """
    if WARPGROUP and weight.shape[0] >= 64 and x.shape[1] >= 16:
        return deinterleaved(weight), x
    else:
        return weight, interleaved_rows(x)


@triton.jit
def matched_halves(both, even, odd, WARPGROUP: tl.constexpr):
    """As `matched`, for bytes of two codes: the even and the odd columns of rows."""
    ordered, even = matched(both, even, WARPGROUP)
    return ordered, even, matched(both, odd, WARPGROUP)[1]


@triton.jit
def scale_and_offset(pair):
    """The float16 halves of 32-bit numbers as float32."""
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def swiglu(gate, up):
    """silu(gate) · up, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def byte_product(weight, x, total, FAST: tl.constexpr, PRECISION: tl.constexpr, WARPGROUP: tl.constexpr):
    """Add the product of interleaved bytes and rows.  # [output, column], [column, row] → [output, row]"""
    weight, x = matched(weight, x, WARPGROUP)
    return tl.dot(widened(weight, x.dtype, FAST), x, total, input_precision=PRECISION)


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether tensor cores multiply for groups of four warps (Hopper and later)."""
    return device.type != "cpu" and torch.cuda.get_device_capability(device) >= (9, 0)
