"""The epilogue of a product of ``hopper_kernel``: bias, SwiGLU, rounding and stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Output(NamedTuple):
    """The destination of a product, and the parameters of its epilogue."""

    bias_ptr: Any  # [2, E, rows] if GATE_UP, else [E, rows]
    largest_ptr: Any  # likewise, uint8: each row's largest exponent (if FP8)
    x_scale_ptr: Any  # [pairs] float32: divisors of gate_up's inputs (if FP8)
    ptr: Any  # [pairs, width]
    rows: Any  # rows of a matrix: I for gate_up, H for down
    width: Any
    limit: Any
    alpha: Any
    experts: Any  # number of experts
    inner_scale: Any  # the factor on gate_up's results (if FP8)
    added_ptr: Any  # [pairs, 2 rows]: addends of gates and ups, which alternate (if ADDED)
    GATE_UP: gl.constexpr
    FP8: gl.constexpr
    ADDED: gl.constexpr


@gluon.jit
def row_of(tile, p, g, expert, out):
    """Return (output column, its index in [2, E, rows] or [E, rows]) of row 8 p + g of a tile."""
    if out.GATE_UP:  # 16 rows are 8 gates and their 8 ups
        column = tile * 8 + g
        place = (p * out.experts + expert) * out.rows + column
    else:
        column = tile * 16 + p * 8 + g
        place = expert * out.rows + column
    return column, place


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2^-x) to 2^-22; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 t;
        neg.f32 t, $1; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;
        }
        """,
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _to_fp8(x):
    """Convert float32 to the nearest e4m3; values beyond 448 become 448."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 l, h;
        cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};
        }
        """,
        "=r,f,f,f,f",
        [x],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _swiglu(acc, limit, alpha, TOKENS: gl.constexpr):
    """[16 tiles, TOKENS], where 16 rows are 8 gates and 8 ups -> [8 tiles, 8, TOKENS]."""
    tiles: gl.constexpr = acc.shape[0] // 16
    gate, up = gl.split(gl.permute(gl.reshape(acc, [tiles, 2, 8, TOKENS]), (0, 2, 3, 1)))
    gate = gl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * _sigmoid(gate * (1.4426950408889634 * alpha)) * (up + 1.0)


@gluon.jit
def _store(
    result, out, first, last, column, WARPS: gl.constexpr, ZEROS: gl.constexpr, STRIDE: gl.constexpr = 0
):
    """Store result [TOKENS, COLUMNS] to rows first.., columns column.. of out, up to row last and out's
    width.

    ``ZEROS``: write zeros to the other rows. ``STRIDE``: columns come in groups of 4 at distance STRIDE.
    """
    TOKENS: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1]
    each: gl.constexpr = 4 if STRIDE > 0 else 128 // out.ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes
    lanes: gl.constexpr = COLUMNS // each
    layout: gl.constexpr = gl.BlockedLayout([1, each], [32 // lanes, lanes], [WARPS, 1], [1, 0])
    result = gl.convert_layout(result, layout)
    rows = first + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    if STRIDE > 0:
        columns = columns // 4 * STRIDE + columns % 4
    columns += column
    places = gl.expand_dims(rows.to(gl.int64) * out.width, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < last, 1)
    mask = gl.expand_dims(columns < out.width, 0)
    if ZEROS:
        inside, result = gl.broadcast(inside, result)
        result = gl.where(inside, result, gl.zeros_like(result))
    else:
        mask = inside & mask
    gl.store(out.ptr + places, result, mask=mask)


@gluon.jit
def _split_pairs(acc, TOKENS: gl.constexpr):
    """Split [rows, TOKENS] into the first and the second half of the pairs."""
    rows: gl.constexpr = acc.shape[0]
    return gl.split(gl.permute(gl.reshape(acc, [rows, 2, TOKENS // 2]), (0, 2, 1)))


@gluon.jit
def finish(
    acc,
    bias,
    factor,  # if FP8: the divisor of a row's weights
    out,
    first,
    last,
    block,
):
    """Finish acc [128, TOKENS] with bias and factor [128]; write pairs first .. last - 1 of out.

    Works in pieces of 64 pairs, which need few registers and little shared memory.
    """
    TOKENS: gl.constexpr = acc.shape[1]
    if TOKENS > 64:
        left, right = _split_pairs(acc, TOKENS)
        finish(left, bias, factor, out, first, last, block)
        finish(right, bias, factor, out, first + TOKENS // 2, last, block)
    else:
        _finish_piece(acc, bias, factor, out, first, last, block)


@gluon.jit
def _addends(out, first, last, block, mma: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Load the addends of gate_up's rows, [16 WARPS, TOKENS] float32."""
    lanes = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, mma))
    column = (block * WARPS + (lanes >> 4)) * 8 + (lanes & 7)
    pairs = first + gl.arange(0, TOKENS, gl.SliceLayout(0, mma))
    places = gl.expand_dims(2 * column + (lanes >> 3 & 1), 1)
    rows = gl.expand_dims(pairs.to(gl.int64) * (2 * out.rows), 0)
    mask = gl.expand_dims(column < out.rows, 1) & gl.expand_dims(pairs < last, 0)
    return gl.load(out.added_ptr + (rows + places), mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _finish_piece(acc, bias, factor, out, first, last, block):
    WARPS: gl.constexpr = acc.shape[0] // 16
    TOKENS: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = acc.type.layout
    row: gl.constexpr = gl.SliceLayout(1, mma)
    bias = gl.convert_layout(bias, row, assert_trivial=True)
    if out.FP8:
        acc *= gl.expand_dims(gl.convert_layout(factor, row, assert_trivial=True), 1)
        if out.GATE_UP:
            pairs = first + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [8], [0]))
            scale = gl.load(out.x_scale_ptr + pairs, mask=pairs < last, other=0.0)
            acc *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, mma)), 0)
        else:
            acc *= 1.0 / out.inner_scale
    acc += gl.expand_dims(bias, 1)
    if out.ADDED:
        acc += _addends(out, first, last, block, mma, WARPS, TOKENS)
    if out.GATE_UP:
        inner = _swiglu(acc, out.limit, out.alpha, TOKENS)
        if out.FP8:
            inner = gl.reshape(_to_fp8(inner * out.inner_scale), [4, 4, 4, TOKENS])  # column: t, j, pairs
            inner = gl.reshape(gl.permute(inner, (3, 1, 0, 2)), [TOKENS, 64])  # place: j, t, pairs
            _store(inner, out, first, last, block * 64, WARPS, True)
        else:
            quarters: gl.constexpr = WARPS // 2  # quarters of 64 columns
            inner = gl.reshape(inner.to(gl.bfloat16), [quarters, 4, 2, 2, TOKENS])  # column: t, j, q, pair
            inner = gl.reshape(gl.permute(inner, (4, 1, 2, 0, 3)), [TOKENS, 16 * quarters])  # j, q, t, pair
            if WARPS == 8:
                _store(inner, out, first, last, block * 64, WARPS, True)
            else:  # half of 64 columns: two values of t
                _store(inner, out, first, last, block // 2 * 64 + block % 2 * 4, WARPS, True, 8)
    else:
        acc = gl.permute(acc.to(gl.bfloat16), (1, 0))
        _store(acc, out, first, last, block * 16 * WARPS, WARPS, False)
