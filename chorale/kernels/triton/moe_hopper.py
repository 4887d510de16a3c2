"""The products of ``moe_large`` for Hopper, in Gluon: warps with roles.

A program stays on its multiprocessor and takes every n-th (tile of slots, 128 weight rows). One warp fetches:
inputs, packed weights and scales, up to ``STAGES`` steps of 128 columns ahead, through the copy engine. Eight
warps compute: each decodes its 16 rows of a step in registers, as the first operand of wgmma, while the
tensor cores still work on the half step before. Weights are packed in the order of that operand
(``experts.py``), so decoding moves nothing between threads.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chorale.kernels.triton.experts import COLUMNS, Experts, Matrices
from chorale.kernels.triton.moe_operand import (
    SCALES,
    chunk_operand,
    keep,
    load_words,
    step_operand8,
)
from chorale.kernels.triton.tuning import LargeTile

# Triton 3.9's name, and that of versions before.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


_GROUP = gl.constexpr(6)  # steps in e4m3 between two waits for everything; 20b and 120b have 23 steps


@gluon.jit
def _steps(chunks, FP8: gl.constexpr):
    """Steps of two chunks; in e4m3 whole groups of them. Past the last chunk, inputs are zero."""
    steps = (chunks + 1) // 2
    if FP8:
        steps = (steps + _GROUP - 1) // _GROUP * _GROUP
    return steps


@gluon.constexpr_function
def _most_of_second(wide, mid, narrow, tail):
    """Slots of the second kind of tile: a wide one without a tail, or a mid one. If there is none: narrow."""
    return wide if tail else mid or narrow


@gluon.jit
def _fetch_inputs(desc, smem, stage, first, chunk, bar):
    """A step's inputs of as many slots as desc's box has, to the first rows of a stage in smem."""
    slots: gl.constexpr = desc.block_shape[0]
    box: gl.constexpr = desc.block_shape[1]  # columns: a box is 128 bytes wide
    for i in gl.static_range(128 // box):
        x = smem.index(stage * (128 // box) + i).slice(0, slots, 0)
        _copy(desc, [first, chunk * 64 + i * box], bar, x)


@gluon.jit
def _fetch(
    wide_desc,
    narrow_desc,
    other_desc,
    blocks_desc,
    scales_desc,
    tiles_ptr,
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    row_blocks,
    row_tiles,
    chunks,
    WIDE: gl.constexpr,
    MID: gl.constexpr,
    NARROW: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    FP8: gl.constexpr,
):
    """The fetching warp: every step of every tile that this program has."""
    boxes: gl.constexpr = 128 // wide_desc.block_shape[1]
    BOUND: gl.constexpr = _most_of_second(WIDE, MID, NARROW, TAIL)
    rows: gl.constexpr = blocks_desc.block_shape[0]  # of a row tile's two chunks
    items = gl.load(tiles_ptr) * row_blocks
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + 4 + (item // row_blocks) * 4
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        slots = gl.load(entry + 2) - first
        tile = expert * row_tiles + item % row_blocks * 8
        for chunk in range(0, _steps(chunks, FP8) * 2, 2):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            if slots > BOUND:
                mbarrier.expect(bar, boxes * (WIDE + TAIL) * 128 + 8192 + 512)
                _fetch_inputs(wide_desc, x_smem, stage, first, chunk, bar)
                if TAIL > 0:
                    _fetch_inputs(other_desc, tail_smem, stage, first + WIDE, chunk, bar)
            elif slots > NARROW:
                if BOUND > NARROW:
                    mbarrier.expect(bar, boxes * BOUND * 128 + 8192 + 512)
                    if TAIL > 0:
                        _fetch_inputs(wide_desc, x_smem, stage, first, chunk, bar)
                    else:
                        _fetch_inputs(other_desc, x_smem, stage, first, chunk, bar)
            else:
                mbarrier.expect(bar, boxes * NARROW * 128 + 8192 + 512)
                _fetch_inputs(narrow_desc, x_smem, stage, first, chunk, bar)
            _copy(scales_desc, [tile, chunk * 32], bar, s_smem.index(stage))
            w = w_smem.index(stage)
            for i in gl.static_range(8):
                at = ((tile + i) * chunks + chunk) * (rows // 2)
                _copy(blocks_desc, [at, 0], bar, w.slice(i * rows, rows, 0))
            step += 1


@gluon.jit
def _halves(pair):
    """(8 tiles, 2 chunks, ...) -> the two [8, ...]."""
    rest: gl.constexpr = pair.numel // 16
    return gl.split(gl.permute(gl.reshape(pair, [8, 2, rest]), (0, 2, 1)))


@gluon.constexpr_function
def _products(tokens, fp8):
    """The layout of [128, tokens] sums: a warp has 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, tokens, 32 if fp8 else 16])


@gluon.jit
def _times_tail(weights, tail_smem, place, tail, pairs: gl.constexpr):
    """The tail's product: weights as they are in registers. ``pairs``: what is packed in one of those."""
    operand: gl.constexpr = gl.DotOperandLayout(0, tail.type.layout, pairs)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(weights, tail_smem.index(place).permute((1, 0)), tail, is_async=True)


@gluon.jit
def _multiply(
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    chunks,
    mma: gl.constexpr,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """[128, TOKENS] and [128, TAIL] float32: one tile in bfloat16.

    A chunk's products (with a tail, two) are in flight while the next chunk is decoded.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    acc = gl.zeros([128, TOKENS], gl.float32, mma)
    tail = 0
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, _products(TAIL, False))
    right = gl.zeros([128, 64], gl.bfloat16, operand)
    for chunk in range(0, chunks, 2):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        left_packed, right_packed = _halves(load_words(w_smem, stage))
        left_scale, right_scale = _halves(s_smem.index(stage).load(SCALES))
        left_x = x_smem.index(stage * 2).slice(0, TOKENS, 0).permute((1, 0))
        right_x = x_smem.index(stage * 2 + 1).slice(0, TOKENS, 0).permute((1, 0))
        left = chunk_operand(left_packed, left_scale, operand)
        going = warpgroup_mma(left, left_x, acc, is_async=True)
        if TAIL > 0:
            also = _times_tail(left, tail_smem, stage * 2, tail, 2)
            acc, tail, right = warpgroup_mma_wait(2, deps=(going, also, right))
        else:
            acc, right = warpgroup_mma_wait(1, deps=(going, right))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=chunk > 0)
        right = chunk_operand(right_packed, right_scale, operand)
        going = warpgroup_mma(right, right_x, acc, is_async=True)
        if TAIL > 0:
            also = _times_tail(right, tail_smem, stage * 2 + 1, tail, 2)
            acc, tail, left = warpgroup_mma_wait(2, deps=(going, also, left))
        else:
            acc, left = warpgroup_mma_wait(1, deps=(going, left))
        step += 1
    if TAIL > 0:
        acc, tail, right = warpgroup_mma_wait(0, deps=(acc, tail, right))
    else:
        acc, right = warpgroup_mma_wait(0, deps=(acc, right))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, tail, step


@gluon.jit
def _multiply8(
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    chunks,
    largest,  # [8, 64] int32, as SCALES: each row's largest exponent
    zero,
    mma: gl.constexpr,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``_multiply`` in e4m3: weights are divided by their row's largest scale, times 2.

    Steps go in groups whose last product is waited for: an operand that lived across the loop's end would be
    unpacked into bytes by the compiler, so it could not be kept in its registers.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    acc = gl.zeros([128, TOKENS], gl.float32, mma)
    tail = 0
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, _products(TAIL, True))
    for _ in range(_steps(chunks, True) // _GROUP):
        for i in gl.static_range(_GROUP):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            packed = load_words(w_smem, stage)
            weights, upper, lower = step_operand8(packed, s_smem.index(stage).load(SCALES), largest, operand)
            x = x_smem.index(stage).slice(0, TOKENS, 0).permute((1, 0))
            going = warpgroup_mma(weights, x, acc, is_async=True)
            if TAIL > 0:
                also = _times_tail(weights, tail_smem, stage, tail, 4)
                acc, tail = warpgroup_mma_wait(2, deps=(going, also))
            else:
                acc = warpgroup_mma_wait(1, deps=(going,))
            if i > 0:
                keep(upper_before, lower_before, zero)  # noqa: F821  (of the turn before)
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
            upper_before = upper  # noqa: F841
            lower_before = lower  # noqa: F841
            step += 1
        if TAIL > 0:
            acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        keep(upper, lower, zero)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, tail, step


@gluon.jit
def _store(result, out_ptr, first, last, column, width, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """result [TOKENS, COLUMNS] -> rows first.., columns column.. of out, up to row last and to width."""
    each: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes
    lanes: gl.constexpr = COLUMNS // each
    layout: gl.constexpr = gl.BlockedLayout([1, each], [32 // lanes, lanes], [8, 1], [1, 0])
    result = gl.convert_layout(result, layout)
    rows = first + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    places = gl.expand_dims(rows.to(gl.int64) * width, 1) + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(rows < last, 1) & gl.expand_dims(columns < width, 0)
    gl.store(out_ptr + places, result, mask=mask)


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2^-x), approximately (2^-22); NaN stays."""
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
    """float32 -> e4m3, the nearest; beyond 448 it is 448."""
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
def _row_of(tile, p, g, expert, block, experts, rows, GATE_UP: gl.constexpr):
    """(which output column, and its place in [2, E, rows] or [E, rows]) of row 8 p + g of one of 8 tiles."""
    if GATE_UP:  # of each 16 rows, 8 gates and their 8 ups
        column = block * 64 + tile * 8 + g
        place = (p * experts + expert) * rows + column
    else:
        column = block * 128 + tile * 16 + p * 8 + g
        place = expert * rows + column
    return column, place


@gluon.jit
def _swiglu(acc, limit, alpha, TOKENS: gl.constexpr):
    """[128, TOKENS], of each 16 rows 8 gates and 8 ups -> [64, TOKENS]."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, [8, 2, 8, TOKENS]), (0, 2, 3, 1)))
    gate = gl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * _sigmoid(gate * (1.4426950408889634 * alpha)) * (up + 1.0)


@gluon.jit
def _tile(
    bias_ptr,
    largest_ptr,
    x_scale_ptr,
    out_ptr,
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    expert,
    first,
    last,
    block,
    chunks,
    rows,
    width,
    limit,
    alpha,
    experts,
    inner_scale,
    zero,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
):
    """One tile: 128 weight rows times slots first .. last - 1, and what follows on it. Returns step."""
    mma: gl.constexpr = _products(TOKENS, FP8)
    lanes = gl.arange(0, 128, gl.SliceLayout(1, mma))
    column, place = _row_of(lanes >> 4, lanes >> 3 & 1, lanes & 7, expert, block, experts, rows, GATE_UP)
    bias = gl.load(bias_ptr + place, mask=column < rows, other=0.0).to(gl.float32)
    factor = bias
    if FP8:
        tile = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, SCALES)), 1)
        byte = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, SCALES)), 0)
        its_column, its_place = _row_of(tile, byte & 1, byte >> 2 & 7, expert, block, experts, rows, GATE_UP)
        largest = gl.load(largest_ptr + its_place, mask=its_column < rows, other=254).to(gl.int32)
        exponent = gl.load(largest_ptr + place, mask=column < rows, other=254).to(gl.int32)
        acc, tail, step = _multiply8(
            x_smem, tail_smem, w_smem, s_smem, ready, empty, step, chunks, largest, zero, mma, TOKENS, TAIL,
            STAGES,
        )  # fmt: skip
        # 2^(largest - 254), from its exponent field.
        factor = (gl.maximum(exponent - 127, 0) << 23).to(gl.float32, bitcast=True)
    else:
        acc, tail, step = _multiply(
            x_smem, tail_smem, w_smem, s_smem, ready, empty, step, chunks, mma, TOKENS, TAIL, STAGES
        )
    if TAIL > 0:
        _finish(
            tail, bias, factor, x_scale_ptr, out_ptr, first + TOKENS, last, block, width, limit, alpha,
            inner_scale, TAIL, GATE_UP, FP8,
        )  # fmt: skip
        last = first + TOKENS
    _finish(
        acc, bias, factor, x_scale_ptr, out_ptr, first, last, block, width, limit, alpha, inner_scale, TOKENS,
        GATE_UP, FP8,
    )  # fmt: skip
    return step


@gluon.jit
def _split_slots(acc, TOKENS: gl.constexpr):
    """[128, TOKENS] -> the first and the second half of the slots."""
    return gl.split(gl.permute(gl.reshape(acc, [128, 2, TOKENS // 2]), (0, 2, 1)))


@gluon.jit
def _finish(
    acc,
    bias,
    factor,  # if FP8: what the weights of a row were divided by
    x_scale_ptr,
    out_ptr,
    first,
    last,
    block,
    width,
    limit,
    alpha,
    inner_scale,
    TOKENS: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
):
    """What follows on a product: acc [128, TOKENS], bias and factor [128] -> slots first .. last - 1 of out.

    In pieces of 64 slots: few values at once need few registers, and each piece passes through shared memory,
    of which little is left.
    """
    if TOKENS > 64:
        left, right = _split_slots(acc, TOKENS)
        _finish(
            left, bias, factor, x_scale_ptr, out_ptr, first, last, block, width, limit, alpha, inner_scale,
            TOKENS // 2, GATE_UP, FP8,
        )  # fmt: skip
        _finish(
            right, bias, factor, x_scale_ptr, out_ptr, first + TOKENS // 2, last, block, width, limit, alpha,
            inner_scale, TOKENS // 2, GATE_UP, FP8,
        )  # fmt: skip
    else:
        _finish_piece(
            acc, bias, factor, x_scale_ptr, out_ptr, first, last, block, width, limit, alpha, inner_scale,
            TOKENS, GATE_UP, FP8,
        )  # fmt: skip


@gluon.jit
def _finish_piece(
    acc,
    bias,
    factor,
    x_scale_ptr,
    out_ptr,
    first,
    last,
    block,
    width,
    limit,
    alpha,
    inner_scale,
    TOKENS: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
):
    mma: gl.constexpr = acc.type.layout
    row: gl.constexpr = gl.SliceLayout(1, mma)
    bias = gl.convert_layout(bias, row, assert_trivial=True)
    if FP8:
        acc *= gl.expand_dims(gl.convert_layout(factor, row, assert_trivial=True), 1)
        if GATE_UP:
            slots = first + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [8], [0]))
            scale = gl.load(x_scale_ptr + slots, mask=slots < last, other=0.0)
            acc *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(0, mma)), 0)
        else:
            acc *= 1.0 / inner_scale
    acc += gl.expand_dims(bias, 1)
    if GATE_UP:
        inner = _swiglu(acc, limit, alpha, TOKENS)
        if FP8:
            inner = gl.reshape(_to_fp8(inner * inner_scale), [4, 4, 4, TOKENS])  # column: t, j, pairs
            inner = gl.reshape(gl.permute(inner, (3, 1, 0, 2)), [TOKENS, 64])  # place: j, t, pairs
        else:
            inner = gl.reshape(inner.to(gl.bfloat16), [4, 4, 2, 2, TOKENS])  # column: t, j, q, pair
            inner = gl.reshape(gl.permute(inner, (4, 1, 2, 0, 3)), [TOKENS, 64])  # place: j, q, t, pair
        _store(inner, out_ptr, first, last, block * 64, width, TOKENS, 64)
    else:
        acc = gl.permute(acc.to(gl.bfloat16), (1, 0))
        _store(acc, out_ptr, first, last, block * 128, width, TOKENS, 128)


@gluon.jit
def _compute(
    tiles_ptr,
    bias_ptr,
    largest_ptr,
    x_scale_ptr,
    out_ptr,
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    row_blocks,
    chunks,
    rows,
    width,
    limit,
    alpha,
    experts,
    inner_scale,
    zero,
    WIDE: gl.constexpr,
    MID: gl.constexpr,
    NARROW: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
):
    """The computing warps."""
    BOUND: gl.constexpr = _most_of_second(WIDE, MID, NARROW, TAIL)
    items = gl.load(tiles_ptr) * row_blocks
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + 4 + (item // row_blocks) * 4
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        last = gl.load(entry + 2)
        block = item % row_blocks
        if last - first > BOUND:
            step = _tile(
                bias_ptr, largest_ptr, x_scale_ptr, out_ptr, x_smem, tail_smem, w_smem, s_smem, ready,
                empty, step, expert, first, last, block, chunks, rows, width, limit, alpha, experts,
                inner_scale, zero, WIDE, TAIL, STAGES, GATE_UP, FP8,
            )  # fmt: skip
        elif last - first > NARROW:
            if BOUND > NARROW:  # with tails: a loop without, because asking at each step would slow it down
                step = _tile(
                    bias_ptr, largest_ptr, x_scale_ptr, out_ptr, x_smem, tail_smem, w_smem, s_smem, ready,
                    empty, step, expert, first, last, block, chunks, rows, width, limit, alpha, experts,
                    inner_scale, zero, BOUND, 0, STAGES, GATE_UP, FP8,
                )  # fmt: skip
        else:
            step = _tile(
                bias_ptr, largest_ptr, x_scale_ptr, out_ptr, x_smem, tail_smem, w_smem, s_smem, ready,
                empty, step, expert, first, last, block, chunks, rows, width, limit, alpha, experts,
                inner_scale, zero, NARROW, 0, STAGES, GATE_UP, FP8,
            )  # fmt: skip


@gluon.jit
def _product_kernel(
    wide_desc,  # [slots, columns] in the operand's order, box [WIDE, 128 bytes]
    narrow_desc,  # the same, box [NARROW, 128 bytes]
    other_desc,  # the same, box [TAIL or MID, 128 bytes] (if there is one of them)
    blocks_desc,  # the packed bytes, [*, 128], box [8, 128] (or [*, 16], box [64, 16])
    scales_desc,  # [row tiles, chunks x 32] uint8, box [8, 64]
    tiles_ptr,  # [1 + tiles, 4] int32: moe_large's Placement
    bias_ptr,  # [2, E, I] or [E, H]
    largest_ptr,  # like bias, uint8: each row's largest exponent (if FP8)
    x_scale_ptr,  # [slots] float32: what gate_up's inputs were divided by (if FP8)
    out_ptr,  # [slots, width]
    row_blocks,  # of 128 weight rows
    row_tiles,  # of 16
    chunks,  # of 64 columns
    rows,  # of a matrix: gate_up's I, down's H
    width,  # of out
    limit,
    alpha,
    experts,
    inner_scale,  # what gate_up's results are multiplied with (if FP8)
    zero,  # 0, unknown to the compiler
    WIDE: gl.constexpr,
    MID: gl.constexpr,
    NARROW: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
):
    boxes: gl.constexpr = 128 // wide_desc.block_shape[1]
    x_smem = gl.allocate_shared_memory(
        wide_desc.dtype, [STAGES * boxes, WIDE, wide_desc.block_shape[1]], wide_desc.layout
    )
    tail_smem = x_smem
    if TAIL > 0:
        tail_smem = gl.allocate_shared_memory(
            wide_desc.dtype, [STAGES * boxes, TAIL, wide_desc.block_shape[1]], wide_desc.layout
        )
    w_smem = gl.allocate_shared_memory(
        gl.uint8, [STAGES, 8192 // blocks_desc.block_shape[1], blocks_desc.block_shape[1]], blocks_desc.layout
    )
    s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 8, 64], scales_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    tiles_ptr, bias_ptr, largest_ptr, x_scale_ptr, out_ptr, x_smem, tail_smem, w_smem, s_smem,
                    ready, empty, row_blocks, chunks, rows, width, limit, alpha, experts, inner_scale, zero,
                    WIDE, MID, NARROW, TAIL, STAGES, GATE_UP, FP8,
                ),
            ),
            (
                _fetch,
                (
                    wide_desc, narrow_desc, other_desc, blocks_desc, scales_desc, tiles_ptr, x_smem,
                    tail_smem, w_smem, s_smem, ready, empty, row_blocks, row_tiles, chunks, WIDE, MID, NARROW,
                    TAIL, STAGES, FP8,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    x: torch.Tensor,
    matrices: Matrices,
    tiles: torch.Tensor,
    bias: torch.Tensor,
    largest: torch.Tensor,
    x_scale: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    experts: Experts,
    tile: LargeTile,
    is_gate_up: bool,
) -> None:
    width = 128 // x.element_size()
    inputs = gl.NVMMASharedLayout(128, 8 * x.element_size())
    limits = {"maxnreg": tile.registers} if tile.registers else {}
    _product_kernel[(_num_multiprocessors(x.device) * tile.programs,)](
        TensorDescriptor.from_tensor(x, [tile.wide, width], inputs),
        TensorDescriptor.from_tensor(x, [tile.narrow, width], inputs),
        TensorDescriptor.from_tensor(x, [tile.tail or tile.middle or tile.narrow, width], inputs),
        TensorDescriptor.from_tensor(
            matrices.blocks.view(torch.uint8).view(-1, 128), [8, 128], gl.NVMMASharedLayout(128, 8)
        ),
        TensorDescriptor.from_tensor(
            matrices.scales.view(-1, matrices.chunks * 32), [8, 64], gl.NVMMASharedLayout(64, 8)
        ),
        tiles, bias, largest, x_scale, out,
        triton.cdiv(matrices.row_tiles, 8), matrices.row_tiles, matrices.chunks, rows, out.shape[1],
        experts.swiglu_limit, experts.swiglu_alpha, experts.num_experts, inner_scale(experts), 0,
        WIDE=tile.wide, MID=tile.middle, NARROW=tile.narrow, TAIL=tile.tail, STAGES=tile.num_stages,
        GATE_UP=is_gate_up, FP8=x.element_size() == 1, num_warps=8, **limits,
    )  # fmt: skip


def inner_scale(experts: Experts) -> float:
    """What SwiGLU's results are multiplied with: the checkpoint's choice (what does not fit saturates), or
    what brings the largest that they can be to e4m3's largest number."""
    if experts.down_input_scale is not None:
        return 1.0 / experts.down_input_scale
    return 448.0 / (experts.swiglu_limit * (experts.swiglu_limit + 1))


def gate_up(
    x: torch.Tensor, x_scale: torch.Tensor | None, tiles: torch.Tensor, experts: Experts, tile: LargeTile
) -> torch.Tensor:
    """x [slots, 64 chunks], of ``moe_large.gather``, and what e4m3 inputs were divided by [slots].

    -> SwiGLU [slots, 64 chunks of down] in x's dtype (e4m3: times ``inner_scale``).
    """
    out = torch.empty(x.shape[0], experts.down.chunks * COLUMNS, dtype=x.dtype, device=x.device)
    largest = out if experts.gate_up_largest is None else experts.gate_up_largest
    scale = out if x_scale is None else x_scale
    _launch(
        x, experts.gate_up, tiles, experts.gate_up_bias, largest, scale, out, experts.intermediate, experts,
        tile, True,
    )  # fmt: skip
    return out


def down(
    inner: torch.Tensor, tiles: torch.Tensor, experts: Experts, hidden: int, tile: LargeTile
) -> torch.Tensor:
    """inner as ``gate_up`` makes it -> [slots, H] bfloat16, by expert, without gates."""
    out = torch.empty(inner.shape[0], hidden, dtype=torch.bfloat16, device=inner.device)
    largest = out if experts.down_largest is None else experts.down_largest
    _launch(inner, experts.down, tiles, experts.down_bias, largest, out, out, hidden, experts, tile, False)
    return out
