"""Kernels of the streaming expert products (``gemv.py``): every warp streams its rows of an expert's weights.

Tensors have one element per thread: lane ``4 g + t`` of a warp loads inputs for column ``g`` of the product
and gets rows ``g`` and ``8 + g`` of columns ``2 t`` and ``2 t + 1``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from chorale.kernels.triton.launch import wait_for_previous
from chorale.kernels.triton.moe.combine import swiglu


@triton.jit
def _expert_of(
    ids_ptr, program, num_pairs, first_expert, E, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr
):  # fmt: skip
    """Return (expert, whether there is work) of a program. There is one program for each pair, of which the
    first of each expert works (BY_PAIR), or one for each expert. Pairs whose expert is on another rank have
    no work."""
    if BY_PAIR:
        expert = tl.load(ids_ptr + program).to(tl.int32)
        if first_expert is not None:
            expert -= first_expert
    else:
        expert = program
    work = True
    if PAIRS > 0:
        pairs = tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
        if first_expert is not None:
            ids -= first_expert
        if BY_PAIR:
            work = tl.sum(((ids == expert) & (pairs < program)).to(tl.int32), 0) == 0
        else:
            work = tl.sum((ids == expert).to(tl.int32), 0) > 0
    if BY_PAIR and first_expert is not None:
        work = work & (expert >= 0) & (expert < E)
    return expert, work


@triton.jit
def _id_of(expert, first_expert):
    if first_expert is not None:
        expert += first_expert
    return expert


class Chosen(NamedTuple):
    """The pairs of one expert that a program works on."""

    ids_ptr: Any  # [T * K] int64
    order_ptr: Any  # [T * K] int32 (if SORTED)
    num_tokens: Any
    id: Any  # the expert's id
    last: Any  # the end of its pairs in the order (if SORTED)


@triton.jit
def _pair_of_column(chosen, column, first, K: tl.constexpr, SORTED: tl.constexpr):
    """Convert columns of a product (tokens, or the order from ``first``) to pairs; -1 without a pair."""
    if SORTED:
        pairs = tl.load(chosen.order_ptr + first + column, mask=first + column < chosen.last, other=-1)
    else:  # the pair in which each token chose the expert
        pairs = column * 0 - 1
        for k in tl.static_range(K):
            mask = column < chosen.num_tokens
            ids = tl.load(chosen.ids_ptr + column * K + k, mask=mask, other=-1).to(tl.int32)
            pairs = tl.where(ids == chosen.id, column * K + k, pairs)
    return pairs


@triton.jit
def _pairs(chosen, column, begin, K: tl.constexpr, SORTED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the pairs of columns ``column`` and (if COLUMNS == 2) ``column + 8``, as a tuple."""
    pairs: tl.tuple = ()
    for n in tl.static_range(COLUMNS):
        pairs += (_pair_of_column(chosen, column + 8 * n, begin, K, SORTED),)
    return pairs


class Packed(NamedTuple):
    """Weights, and the part of them that a lane multiplies."""

    blocks_ptr: Any
    scales_ptr: Any
    row_tile: Any
    row_tiles: Any
    chunks: Any
    groups: Any


@triton.jit
def _row_tile(thread, row_tiles, TILES: tl.constexpr, WARPS: tl.constexpr):
    # The rows of the last program's warps may overlap: they write the same values twice.
    return tl.minimum((tl.program_id(0) * WARPS + thread // 32) * TILES, row_tiles - TILES)


@triton.jit
def _gemv(
    x_ptr,  # bfloat16 [*, 64 chunks]
    pairs,  # a tuple, one pair per lane for each 8 columns: row of x = pair // PER_ROW; -1 without a pair
    packed,
    first_chunk,
    expert,
    lane,
    LOOP: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    QUADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Run LOOP. Returns its 4 * QUADS float32 results."""
    chunks = packed.chunks
    at = (expert.to(tl.int64) * packed.row_tiles + packed.row_tile) * chunks + first_chunk
    weights = (packed.blocks_ptr + at * 128 + lane * 4).to(tl.int64)
    scales = (packed.scales_ptr + at * 32 + lane // 4 * 4).to(tl.int64)
    place = first_chunk * 64 + lane % 4 * 16
    width = chunks * 64
    inputs: tl.tuple = ()
    there: tl.tuple = ()
    for n in tl.static_range(COLUMNS):
        inputs += ((x_ptr + (pairs[n] // PER_ROW).to(tl.int64) * width + place).to(tl.int64),)
        there += ((pairs[n] >= 0).to(tl.int32),)
    operands = (weights, scales, chunks * 512, chunks * 32, packed.groups) + inputs + there  # noqa: RUF005
    return tl.inline_asm_elementwise(
        LOOP, CONSTRAINTS, operands, dtype=(tl.float32,) * (4 * QUADS), is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_tokens", "groups", "further", "rest", "first_expert"])
def _product_kernel(
    x_ptr,  # [T, H], or SwiGLU [T * K, I]
    blocks_ptr,
    scales_ptr,
    bias_ptr,  # [2, E, I] or [E, H]
    added_ptr,  # None; or [T * K, 2 I]: addends of gates and ups, which alternate (if GATE_UP)
    gates_ptr,  # [T * K] float32: factors of down's results; None for gate_up
    ids_ptr,  # [T * K] int64
    order_ptr,  # [T * K] int32, offsets [E + 1] int32 (if SORTED)
    offsets_ptr,
    out_ptr,  # [T * K, I], or [T * K, SPLITS, H] float32
    num_tokens,
    first_expert,  # None; or the id of this rank's first expert
    further,
    rows,  # rows of a matrix: I for gate_up, H for down
    E,
    row_tiles,
    chunks,
    groups,
    # The first ``rest`` splits have TAIL chunks after the groups of LOOP; 0: all splits. None for gate_up.
    rest,
    limit,  # None for down
    alpha,
    GATE_UP: tl.constexpr,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    SORTED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,  # of down; 1 for gate_up
    LOOP: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    QUADS: tl.constexpr,
    TAIL: tl.constexpr,  # of down; 0 for gate_up
    TAIL_LOOP: tl.constexpr,
    TAIL_CONSTRAINTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate_up waits for the previous kernel. Down's LOOP does so once its first weights are in flight: the
    kernel that chose the experts ran before that kernel. A rank's columns may be a prime number of chunks:
    then LOOP takes complete groups, and TAIL_LOOP the others."""
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    row_tile = _row_tile(thread, row_tiles, TILES, WARPS)
    if GATE_UP:
        wait_for_previous(PDL)
    split = tl.program_id(2)
    expert, first, last = _work_of(
        ids_ptr, offsets_ptr, tl.program_id(1), num_tokens * K, first_expert, further, E, PAIRS, BY_PAIR,
        SORTED, COLUMNS, EXPERTS,
    )  # fmt: skip
    chosen = Chosen(ids_ptr, order_ptr, num_tokens, _id_of(expert, first_expert), last)
    packed = Packed(blocks_ptr, scales_ptr, row_tile, row_tiles, chunks, groups)
    for begin in range(first, last, 8 * COLUMNS):
        sources = _pairs(chosen, lane // 4, begin, K, SORTED, COLUMNS)
        # Loaded before the product, which hides the latency.
        pairs = _pairs(chosen, lane % 4 * 2, begin, K, SORTED, COLUMNS)
        pairs += _pairs(chosen, lane % 4 * 2 + 1, begin, K, SORTED, COLUMNS)
        gates: tl.tuple = ()
        biases: tl.tuple = ()
        if GATE_UP:
            for r in tl.static_range(TILES):
                columns = (row_tile + r) * 8 + lane // 4
                place = bias_ptr + expert * rows + columns
                biases += (tl.load(place, mask=columns < rows, other=0.0),)
                biases += (tl.load(place + E * rows, mask=columns < rows, other=0.0),)
            results = _gemv(x_ptr, sources, packed, 0, expert, lane, LOOP, CONSTRAINTS, QUADS, COLUMNS, K)
        else:
            for n in tl.static_range(2 * COLUMNS):
                gates += (tl.load(gates_ptr + pairs[n], mask=pairs[n] >= 0, other=0.0),)
            for r in tl.static_range(2 * TILES):
                columns = row_tile * 16 + 8 * r + lane // 4
                place = bias_ptr + expert * rows + columns
                biases += (tl.load(place, mask=columns < rows, other=0.0),)
            first_chunk = split * (chunks // SPLITS)
            if TAIL > 0:
                first_chunk += tl.minimum(split, rest)
            results = _gemv(
                x_ptr, sources, packed, first_chunk, expert, lane, LOOP, CONSTRAINTS, QUADS, COLUMNS, 1
            )
        if TAIL > 0:
            has_tail = (rest == 0) | (split < rest)  # the others compute a tail too, and drop it
            behind = (split + 1) * (chunks // SPLITS) + tl.minimum(split + 1, rest)
            tail_packed = Packed(blocks_ptr, scales_ptr, row_tile, row_tiles, chunks, 1)
            more = _gemv(
                x_ptr, sources, tail_packed, behind - TAIL, expert, lane, TAIL_LOOP, TAIL_CONSTRAINTS, QUADS,
                COLUMNS, 1,
            )  # fmt: skip
            total: tl.tuple = ()
            for n in tl.static_range(4 * QUADS):
                total += (results[n] + tl.where(has_tail, more[n], 0.0),)
            results = total
        for h in tl.static_range(2):
            if GATE_UP:
                for r in tl.static_range(TILES):
                    columns = (row_tile + r) * 8 + lane // 4
                    for n in tl.static_range(COLUMNS):
                        pair = pairs[h * COLUMNS + n]
                        gate = results[4 * (r * COLUMNS + n) + h] + biases[2 * r].to(tl.float32)
                        up = results[4 * (r * COLUMNS + n) + h + 2] + biases[2 * r + 1].to(tl.float32)
                        there = (columns < rows) & (pair >= 0)
                        if added_ptr is not None:
                            added = added_ptr + pair.to(tl.int64) * (2 * rows) + 2 * columns
                            gate += tl.load(added, mask=there, other=0.0).to(tl.float32)
                            up += tl.load(added + 1, mask=there, other=0.0).to(tl.float32)
                        inner = swiglu(gate, up, limit, alpha)
                        places = out_ptr + pair.to(tl.int64) * rows + columns
                        tl.store(places, inner.to(out_ptr.dtype.element_ty), mask=there)
            else:
                for n in tl.static_range(COLUMNS):
                    pair, gate = pairs[h * COLUMNS + n], gates[h * COLUMNS + n]
                    for r in tl.static_range(TILES):
                        for p in tl.static_range(2):
                            columns = (row_tile + r) * 16 + 8 * p + lane // 4
                            value = results[4 * (r * COLUMNS + n) + 2 * p + h]
                            value += tl.where(split == 0, biases[2 * r + p].to(tl.float32), 0.0)
                            places = out_ptr + (pair.to(tl.int64) * SPLITS + split) * rows + columns
                            tl.store(places, value * gate, mask=(pair >= 0) & (columns < rows))


@triton.jit
def _work_of(
    ids_ptr,
    offsets_ptr,
    program,
    num_pairs,
    first_expert,
    # Number of first programs, for tiles after an expert's first tile (0: no such programs; if SORTED).
    further,
    E,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    SORTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Return (expert, first column, end of columns); columns index the order, or the tokens."""
    if SORTED:
        if program < further:
            expert, first = _further_tile(offsets_ptr, program, E, 8 * COLUMNS, EXPERTS)
        else:
            expert = program - further
            first = tl.load(offsets_ptr + expert)
        last = tl.load(offsets_ptr + expert + 1)
        if further > 0:
            last = tl.minimum(last, first + 8 * COLUMNS)
    else:
        expert, work = _expert_of(ids_ptr, program, num_pairs, first_expert, E, PAIRS, BY_PAIR)
        first = 0
        last = tl.where(work, 8 * COLUMNS, 0)
    return expert, first, last


@triton.jit
def _further_tile(offsets_ptr, number, E, WIDTH: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (expert, first index in the order) of a tile after experts' first tiles; past the end if there
    are fewer."""
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    stops = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    more = tl.maximum((stops - begins + WIDTH - 1) // WIDTH - 1, 0)
    ends = tl.cumsum(more, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)  # E or more: the tile does not exist
    mine = experts == expert
    before = tl.sum(tl.where(mine, ends - more, 0), 0)
    first = tl.sum(tl.where(mine, begins, 0), 0) + (number - before + 1) * WIDTH
    there = expert < E
    return tl.where(there, expert, 0), tl.where(there, first, 2**30)
