"""Dequantizes e2m1 weights in registers, to bfloat16 or float32, from the layout of ``packing.py``.

The three bits below a nibble's sign are two bits of exponent and one of mantissa. At the low end of a wider
float's exponent field they represent the same number times 2^-126, including the subnormal 0.5. One
multiplication by the (shifted) group scale gives the exact weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A word -> its four parts (``packing.part_of_word``), two bfloat16 each.
UNPACK = """
    shf.l.wrap.b32 a, $4, $4, 12; and.b32 $0, $4, 0x81C081C0; and.b32 $1, a, 0x81C081C0;
    shl.b32 a, $4, 2; shl.b32 b, $4, 6; shf.l.wrap.b32 c, $4, $4, 8;
    lop3.b32 $2, a, b, 0x81C081C0, 0x28; lop3.b32 $3, a, c, 0x81C081C0, 0x28;
"""
_UNPACK = tl.constexpr("{ .reg .b32 a, b, c;" + UNPACK + "}")


@triton.jit
def _part(words, part: tl.constexpr):
    """Return part 0 .. 3 of int32 words, in portable code."""
    w = words.to(tl.uint32, bitcast=True)
    if part == 0:
        bits = w
    elif part == 1:
        bits = (w << 12) | (w >> 20)
    elif part == 2:
        bits = (w << 2) ^ (w << 6)
    else:
        bits = (w << 2) ^ ((w << 8) | (w >> 24))
    return bits & 0x81C081C0


@triton.jit
def _halves(bits, BF16: tl.constexpr):
    """Split [...] uint32 into [..., 2]: the two bfloat16 of each, or the same numbers in float32."""
    if BF16:
        low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.join(low, high)


@triton.jit
def scale_of(exponents, BF16: tl.constexpr):
    """Convert exponent fields [...] uint8 to powers of two."""
    if BF16:
        scale = (exponents.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
    else:
        scale = (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def column_of(place):
    """Convert a position in the contraction to its column: ``packing.fragment_columns`` in every 64."""
    return place // 64 * 64 + place % 8 // 2 * 16 + place % 64 // 16 * 4 + place // 8 % 2 * 2 + place % 2


@triton.jit
def place_of(column):
    """Inverse of ``column_of``."""
    return column // 64 * 64 + column // 4 % 4 * 16 + column // 2 % 2 * 8 + column % 64 // 16 * 2 + column % 2


@triton.jit
def load_tile(
    blocks_ptr,  # int32, at the first row tile and chunk
    scales_ptr,  # uint8, likewise
    tiles_left,  # remaining row tiles; others are not read and decode to zeros
    chunks,  # chunks of the whole matrix: the distance of two row tiles
    TILES: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
):
    """Decode a chunk of TILES row tiles to [16 TILES, 64] exact weights, columns in fragment order.

    A lane's 16 bytes are its part of the A operand of (w)gmma: with TILES warps, no data moves between lanes.
    """
    tiles = tl.arange(0, TILES)
    inside = tiles < tiles_left
    exponents = _load_scales(scales_ptr, tiles, inside, chunks, TILES)
    units = tl.arange(0, TILES * 32)
    tile, lane = units // 32, units % 32
    starts = tile * chunks * 128 + lane * 4
    there = (tile < tiles_left)[:, None]
    if ASM:
        places = blocks_ptr.to(tl.pointer_type(tl.uint8)) + (starts * 4)[:, None] + tl.arange(0, 16)[None, :]
        packed = tl.load(places, mask=there, other=0)
        first, second = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        words = tl.load(blocks_ptr + starts[:, None] + tl.arange(0, 4)[None, :], mask=there, other=0)
        first = tl.permute(
            tl.join(_halves(_part(words, 0), BF16), _halves(_part(words, 1), BF16)), (0, 1, 3, 2)
        )
        second = tl.permute(
            tl.join(_halves(_part(words, 2), BF16), _halves(_part(words, 3), BF16)), (0, 1, 3, 2)
        )
    # first: q = 0, [tile, g, t, j, p, half]
    weights = tl.reshape(tl.join(first, second), (TILES, 8, 4, 4, 2, 2, 2))
    weights *= scale_of(exponents, BF16)[:, :, :, None, :, None, None]
    weights = tl.permute(weights, (0, 4, 1, 3, 6, 2, 5))  # tile, p, g | j, q, t, half
    return tl.reshape(weights, (16 * TILES, 64))


@triton.jit
def _load_scales(scales_ptr, tiles, inside, chunks, TILES: tl.constexpr):
    """-> [TILES, 8 (g), 4 (t), 2 (p)]"""
    lane = tl.arange(0, 32)
    lane = lane // 4 * 4 + lane % 4 // 2 * 2
    places = (tiles * chunks * 32)[:, None, None] + lane[None, :, None] + tl.arange(0, 2)[None, None, :]
    loaded = tl.load(scales_ptr + places, mask=inside[:, None, None], other=0)
    return tl.reshape(loaded, (TILES, 8, 4, 2))
