"""Decodes packed weights to the tensor cores' first operand, in registers, for ``hopper_kernel``.

A unit of a step is one row tile (16 rows) per warp by two chunks (128 columns): two words of 16 bytes per
lane, and 64 bytes of scales per tile. Layouts are only renamed here: each value stays in the thread for which
``packing.py`` packed it, and every ``convert_layout`` asserts that it moves nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A packed word -> four registers: a pair of row g, a pair of row g + 8, and the same for the next two
# columns. Values are scaled by 2^-126.
_UNPACK = gl.constexpr(
    """
    {
    .reg .b32 s, t, u;
    and.b32 $0, $4, 0x81C081C0;
    shf.l.wrap.b32 s, $4, $4, 12; and.b32 $1, s, 0x81C081C0;
    shl.b32 s, $4, 2; shl.b32 t, $4, 6; shf.l.wrap.b32 u, $4, $4, 8;
    lop3.b32 $2, s, t, 0x81C081C0, 0x28;
    lop3.b32 $3, s, u, 0x81C081C0, 0x28;
    }
    """
)

# A packed word and the scales of rows g and g + 8 (pairs of bfloat16) -> four e4m3 of row g, four of g + 8.
_UNPACK8 = gl.constexpr(
    """
    {
    .reg .b32 s, t, u, a, b, c, d;
    .reg .b16 l, h;
    .reg .f32 x, y;
    and.b32 a, $2, 0x81C081C0;
    shf.l.wrap.b32 s, $2, $2, 12; and.b32 b, s, 0x81C081C0;
    shl.b32 s, $2, 2; shl.b32 t, $2, 6; shf.l.wrap.b32 u, $2, $2, 8;
    lop3.b32 c, s, t, 0x81C081C0, 0x28;
    lop3.b32 d, s, u, 0x81C081C0, 0x28;
    mul.rn.bf16x2 a, a, $3; mul.rn.bf16x2 c, c, $3;
    mul.rn.bf16x2 b, b, $5; mul.rn.bf16x2 d, d, $5;
    shl.b32 s, a, 16; and.b32 t, a, 0xFFFF0000; mov.b32 x, s; mov.b32 y, t;
    cvt.rn.satfinite.e4m3x2.f32 l, y, x;
    shl.b32 s, c, 16; and.b32 t, c, 0xFFFF0000; mov.b32 x, s; mov.b32 y, t;
    cvt.rn.satfinite.e4m3x2.f32 h, y, x;
    mov.b32 $0, {l, h};
    shl.b32 s, b, 16; and.b32 t, b, 0xFFFF0000; mov.b32 x, s; mov.b32 y, t;
    cvt.rn.satfinite.e4m3x2.f32 l, y, x;
    shl.b32 s, d, 16; and.b32 t, d, 0xFFFF0000; mov.b32 x, s; mov.b32 y, t;
    cvt.rn.satfinite.e4m3x2.f32 h, y, x;
    mov.b32 $1, {l, h};
    }
    """
)

# A store that is never executed ($3 is 0, unknown to the compiler), so that $1 and $2 keep their values until
# here.
_KEEP = gl.constexpr(
    """
    {
    .reg .pred p;
    xor.b32 $0, $1, $2; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$3], $0;
    }
    """
)


@gluon.constexpr_function
def _tile_bases(warps, rank, step=1):
    """Returns the bases of a layout's warps along the first dimension."""
    return [[step * warp] + [0] * (rank - 1) for warp in (1, 2, 4)[: warps.bit_length() - 1]]


@gluon.constexpr_function
def words_layout(warps):
    """Return the layout of words [tiles, (2 chunks, 4), (8 lanes, 16 bytes)]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 4, 0]],
        [[0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0]],
        _tile_bases(warps, 3),
        [],
        [warps, 8, 128],
    )


@gluon.constexpr_function
def scales_layout(warps):
    """Return the layout of pairs (p) of scales of eight tiles, [tiles, (chunk, g, t / 2)]; four warps have
    two tiles each."""
    return gl.DistributedLinearLayout(
        [[0, 16]] + ([[4, 0]] if warps == 4 else []),
        [[0, 0], [0, 1], [0, 2], [0, 4], [0, 8]],
        _tile_bases(warps, 2),
        [],
        [8, 32],
    )


@gluon.constexpr_function
def _rows_layout(warps):
    """Return the layout of one chunk, (tile, g, t / 2, p) by (t % 2, j, pair): numbers of a row share their
    scale."""
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 2], [0, 4]],
        [[0, 8], [2, 0], [4, 0], [8, 0], [16, 0]],
        _tile_bases(warps, 2, 32),
        [],
        [32 * warps, 16],
    )


# Single scales: [8 tiles, (chunk, g, t / 2, p)].
SCALES8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 32]],
        [[0, 0], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 64],
    )
)
# Both chunks, (tile, chunk, g, t / 2) by (t % 2, byte): numbers of a row share its two scales.
_ROWS8 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [16, 0]],
        [[0, 16], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[32, 0], [64, 0], [128, 0]],
        [],
        [256, 32],
    )
)


@gluon.jit
def scales_of(pairs):
    """Convert [tiles, n] uint16, two exponents each, to [tiles, 2 n] bfloat16. Both stay halves of one
    register, as multiplications need them."""
    first, second = gl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x4140; shl.b32 t, t, 7; mov.b32 {$0, $1}, t; }",
        "=h,=h,r",
        [pairs.to(gl.uint32)],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    both = gl.join(first, second)
    return gl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]])


@gluon.jit
def _scaled(half, scale, TILES: gl.constexpr):
    half = gl.reshape(half, [TILES, 8, 2, 2, 4, 2, 2])  # tile, g, t / 2, t % 2, j, p, pair
    half = gl.reshape(gl.permute(half, (0, 1, 2, 5, 3, 4, 6)), [32 * TILES, 16])
    return gl.convert_layout(half, _rows_layout(TILES), assert_trivial=True) * scale


@gluon.jit
def chunk_operand(packed, scale, operand: gl.constexpr):
    """Decode one chunk: packed bytes [tiles, 512], its ``scales_of`` [tiles, 32] -> [16 tiles, 64]
    bfloat16."""
    TILES: gl.constexpr = packed.shape[0]
    rows: gl.constexpr = gl.SliceLayout(1, _rows_layout(TILES))
    scale = gl.reshape(scale, [32 * TILES])
    scale = gl.expand_dims(gl.convert_layout(scale, rows, assert_trivial=True), 1)
    near, far = gl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,=r,=r,r",
        [gl.reshape(packed, [TILES, 32, 16])],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    both = gl.join(_scaled(near, scale, TILES), _scaled(far, scale, TILES))
    both = gl.reshape(both, [TILES, 8, 2, 2, 2, 4, 2, 2])  # tile, g, t / 2, p | t % 2, j, pair, near or far
    both = gl.permute(both, (0, 3, 1, 5, 7, 2, 4, 6))  # row: tile, p, g. column: j, near or far, t, pair
    return gl.convert_layout(gl.reshape(both, [16 * TILES, 64]), operand, assert_trivial=True)


@gluon.jit
def keep(upper, lower, zero):
    """Keep an operand in its registers up to here.

    wgmma reads its first operand long after it was issued, and the compiler sometimes reuses the registers
    earlier. (A wait can name values that must live until then, but no 8-bit values.)
    """
    gl.inline_asm_elementwise(
        _KEEP, "=r,r,r,r", [upper, lower, zero.to(gl.uint8)], dtype=gl.uint8, is_pure=False, pack=4
    )


@gluon.jit
def step_operand8(packed, exponents, largest, operand: gl.constexpr):
    """Decode both chunks: packed bytes, exponents and their rows' largest [8, 64] -> [128, 128] e4m3.

    Weights are divided by their row's largest scale, times 2: exact for ten powers of two below it. Columns
    of a chunk are in the order (j / 2, j % 2, t, pair of pairs). Also returns the operand's two parts, for
    ``keep``.
    """
    exponents = exponents.to(gl.int32) - largest + 254
    exponents = gl.minimum(gl.maximum(exponents, 0), 254)  # 255 marks a missing tile
    scale = (exponents.to(gl.uint16) << 7).to(gl.bfloat16, bitcast=True)
    first, second = gl.split(gl.reshape(scale, [256, 2]))
    first = gl.convert_layout(first, gl.SliceLayout(1, _ROWS8), assert_trivial=True)
    second = gl.convert_layout(second, gl.SliceLayout(1, _ROWS8), assert_trivial=True)
    words = gl.convert_layout(gl.reshape(packed, [256, 32]), _ROWS8, assert_trivial=True)
    first, words = gl.broadcast(gl.expand_dims(first, 1), words)
    second, words = gl.broadcast(gl.expand_dims(second, 1), words)
    upper, lower = gl.inline_asm_elementwise(
        _UNPACK8,
        "=r,=r,r,r,r,r,r",
        [words, first, second],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    both = gl.reshape(gl.join(upper, lower), [8, 2, 8, 2, 2, 4, 4, 2])  # tile, chunk, g, t, t, j, pairs, p
    both = gl.permute(both, (0, 7, 2, 1, 5, 3, 4, 6))  # row: tile, p, g. column: chunk, j, t, pairs
    return gl.convert_layout(gl.reshape(both, [128, 128]), operand, assert_trivial=True), upper, lower
