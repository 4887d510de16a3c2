"""e2m1 weights to bfloat16 or float32, in registers.

The three bits below a nibble's sign are two of exponent and one of mantissa: placed at the bottom of a wider
float's exponent field they are the same number times 2^-126, subnormal 0.5 included, and one multiplication
by the (shifted) group scale makes it right, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes -> the four low nibbles and the four high nibbles, as two pairs of bfloat16 each.
_UNPACK = tl.constexpr(
    """
    {
    .reg .b32 a, b, s, t;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 s, a, 12; and.b32 s, s, 0x80008000; shl.b32 t, a, 6; and.b32 t, t, 0x01C001C0; or.b32 $0, s, t;
    shl.b32 s, b, 12; and.b32 s, s, 0x80008000; shl.b32 t, b, 6; and.b32 t, t, 0x01C001C0; or.b32 $1, s, t;
    shl.b32 s, a, 8; and.b32 s, s, 0x80008000; shl.b32 t, a, 2; and.b32 t, t, 0x01C001C0; or.b32 $2, s, t;
    shl.b32 s, b, 8; and.b32 s, s, 0x80008000; shl.b32 t, b, 2; and.b32 t, t, 0x01C001C0; or.b32 $3, s, t;
    }
    """
)


@triton.jit
def unpack(packed, BF16: tl.constexpr, ASM: tl.constexpr):
    """[R, B] uint8 -> (low, high nibbles), each [R, B] in bfloat16 or float32, times 2^-126."""
    if BF16:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            wide = packed.to(tl.uint16)
            low = (((wide & 8) << 12) | ((wide & 7) << 6)).to(tl.bfloat16, bitcast=True)
            high = (((wide & 128) << 8) | ((wide & 112) << 2)).to(tl.bfloat16, bitcast=True)
    else:
        wide = packed.to(tl.uint32)
        low = (((wide & 8) << 28) | ((wide & 7) << 22)).to(tl.float32, bitcast=True)
        high = (((wide & 128) << 24) | ((wide & 112) << 18)).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def scale_of(exponents, BF16: tl.constexpr):
    """Exponent fields [...] uint8 -> powers of two."""
    if BF16:
        scale = (exponents.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    else:
        scale = (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def scaled(weights, exponents_ptr, rows, ROWS: tl.constexpr, BF16: tl.constexpr):
    """weights [ROWS, 64] of half a tile times their two groups' scales, at ``exponents_ptr + 4 * row``."""
    groups = tl.arange(0, 2)
    scale = scale_of(tl.load(exponents_ptr + rows[:, None] * 4 + groups[None, :]), BF16)
    return tl.reshape(tl.reshape(weights, (ROWS, 2, 32)) * scale[:, :, None], (ROWS, 64))


@triton.jit
def load_tile(blocks_ptr, scales_ptr, rows, ROWS: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """Rows (0..63) of one packed tile -> columns 0..63 and 64..127, each [ROWS, 64], exact."""
    packed = tl.load(blocks_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :])
    low, high = unpack(packed, BF16, ASM)
    return scaled(low, scales_ptr, rows, ROWS, BF16), scaled(high, scales_ptr + 2, rows, ROWS, BF16)
