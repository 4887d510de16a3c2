"""The products of ``grouped_moe`` for Hopper, in Gluon: warps with roles.

A program stays on its multiprocessor and takes every n-th (tile of pairs, block of weight rows). One warp
fetches inputs, packed weights and scales through the copy engine, up to ``STAGES`` steps of 128 columns
ahead. ``WARPS`` (4 or 8) warps compute: each decodes its 16 rows of a step in registers, ``UNITS`` times, as
the first operand of wgmma, while the tensor cores still work on the previous half step (``hopper_mma.py``),
and then runs the epilogue (``hopper_epilogue.py``). Weights are packed in the order of that operand
(``packing.py``), so decoding moves nothing between threads.

Weights of a program's first steps are in flight before it waits for the kernel that makes its inputs. Until
then it reads only the list of tiles, which was complete before that kernel started.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chorale.kernels.triton.launch import dependent, tuning_of, wait_for_previous
from chorale.kernels.triton.moe.hopper_epilogue import Output, finish, row_of
from chorale.kernels.triton.moe.hopper_mma import (
    GROUP8,
    Pipeline,
    multiply,
    multiply8,
    products_layout,
    scale_boxes,
)
from chorale.kernels.triton.moe.hopper_operand import SCALES8
from chorale.kernels.triton.moe.packing import COLUMNS, Experts, Matrices
from chorale.kernels.triton.tuning import GroupedTile

# The name in Triton 3.9, and in earlier versions.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Sources(NamedTuple):
    """Tensor descriptors for the copy engine: inputs in boxes of three heights, and weights."""

    wide: Any
    narrow: Any
    other: Any
    blocks: Any
    scales: Any


@gluon.constexpr_function
def _most_of_second(wide, mid, narrow, tail):
    """Return the pairs of the second kind of tile: wide without a tail, or mid; narrow if there is none."""
    return wide if tail else mid or narrow


@gluon.jit
def _entry(tiles_ptr, item, row_blocks):
    """Return (expert, first pair, end of pairs) of an item's tile."""
    entry = tiles_ptr + 4 + (item // row_blocks) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _fetch_inputs(desc, smem, stage, first, chunk, bar):
    """Fetch a step's inputs of as many pairs as desc's box has to the first rows of a stage in smem."""
    pairs: gl.constexpr = desc.block_shape[0]
    box: gl.constexpr = desc.block_shape[1]  # columns: a box is 128 bytes wide
    for i in gl.static_range(128 // box):
        x = smem.index(stage * (128 // box) + i).slice(0, pairs, 0)
        _copy(desc, [first, chunk * 64 + i * box], bar, x)


@gluon.jit
def _fetch_weights(
    sources, pipe, bar, stage, tile, chunk, pairs, BOUND: gl.constexpr, NARROW: gl.constexpr,
    MOST: gl.constexpr,
):  # fmt: skip
    """Announce all bytes of a step of a tile with ``pairs`` pairs, and fetch its weights."""
    STAGES: gl.constexpr = pipe.ready.shape[0]
    UNITS: gl.constexpr = pipe.words.shape[0] // STAGES
    TILES: gl.constexpr = pipe.words.shape[1]
    SCALES: gl.constexpr = scale_boxes(UNITS, TILES)
    ROW: gl.constexpr = 16 * sources.wide.dtype.primitive_bitwidth  # bytes of a pair's 128 columns
    WEIGHTS: gl.constexpr = UNITS * TILES * 1024 + SCALES * 512
    if pairs > BOUND:
        mbarrier.expect(bar, MOST * ROW + WEIGHTS)
    elif pairs > NARROW:
        if BOUND > NARROW:
            mbarrier.expect(bar, BOUND * ROW + WEIGHTS)
    else:
        mbarrier.expect(bar, NARROW * ROW + WEIGHTS)
    for unit in gl.static_range(UNITS):
        words = pipe.words.index(stage * UNITS + unit)
        _copy(sources.blocks, [tile + unit * TILES, chunk * 4, 0], bar, words)
    width: gl.constexpr = sources.scales.block_shape[1] // 2  # bytes of a chunk
    for box in gl.static_range(SCALES):
        scales = pipe.scales.index(stage * SCALES + box)
        _copy(sources.scales, [tile + box * 8, chunk * width], bar, scales)


@gluon.jit
def _fetch(
    sources, tiles_ptr, pipe, row_blocks, row_tiles, chunks, WIDE: gl.constexpr, MID: gl.constexpr,
    NARROW: gl.constexpr, TAIL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The fetching warp: fetches every step of every tile of this program."""
    STAGES: gl.constexpr = pipe.ready.shape[0]
    # Row tiles per tile of a program.
    ROWS: gl.constexpr = pipe.words.shape[0] // STAGES * pipe.words.shape[1]
    BOUND: gl.constexpr = _most_of_second(WIDE, MID, NARROW, TAIL)
    MOST: gl.constexpr = WIDE + TAIL
    items = gl.load(tiles_ptr) * row_blocks
    ahead = gl.minimum((chunks + 1) // 2, STAGES)
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, last = _entry(tiles_ptr, item, row_blocks)
        pairs = last - first
        tile = expert * row_tiles + item % row_blocks * ROWS
        if step == 0:  # weights of the first steps, while the previous kernel still makes their inputs
            for early in range(ahead):
                bar = pipe.ready.index(early)
                _fetch_weights(sources, pipe, bar, early, tile, 2 * early, pairs, BOUND, NARROW, MOST)
            wait_for_previous(PDL)
        for chunk in range(0, chunks, 2):
            stage = step % STAGES
            bar = pipe.ready.index(stage)
            if step >= ahead:
                mbarrier.wait(pipe.empty.index(stage), ((step // STAGES) & 1) ^ 1)
                _fetch_weights(sources, pipe, bar, stage, tile, chunk, pairs, BOUND, NARROW, MOST)
            if pairs > BOUND:
                _fetch_inputs(sources.wide, pipe.x, stage, first, chunk, bar)
                if TAIL > 0:
                    _fetch_inputs(sources.other, pipe.tail, stage, first + WIDE, chunk, bar)
            elif pairs > NARROW:
                if BOUND > NARROW:
                    if TAIL > 0:
                        _fetch_inputs(sources.wide, pipe.x, stage, first, chunk, bar)
                    else:
                        _fetch_inputs(sources.other, pipe.x, stage, first, chunk, bar)
            else:
                _fetch_inputs(sources.narrow, pipe.x, stage, first, chunk, bar)
            step += 1


@gluon.jit
def _tile(
    out, pipe, step, expert, first, last, block, chunks, zero, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    REST: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute one tile with its epilogue: UNITS times 16 WARPS weight rows times pairs first .. last - 1.
    Returns step."""
    WARPS: gl.constexpr = pipe.words.shape[1]
    UNITS: gl.constexpr = pipe.words.shape[0] // pipe.ready.shape[0]
    mma: gl.constexpr = products_layout(TOKENS, out.FP8, WARPS)
    lanes = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, mma))
    factor = 0
    if out.FP8:
        gl.static_assert(WARPS == 8 and UNITS == 1)
        its_tile, p, g = block * 8 + (lanes >> 4), lanes >> 3 & 1, lanes & 7
        column, place = row_of(its_tile, p, g, expert, out)
        tile = block * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, SCALES8)), 1)
        byte = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, SCALES8)), 0)
        its_column, its_place = row_of(tile, byte & 1, byte >> 2 & 7, expert, out)
        largest = gl.load(out.largest_ptr + its_place, mask=its_column < out.rows, other=254).to(gl.int32)
        exponent = gl.load(out.largest_ptr + place, mask=column < out.rows, other=254).to(gl.int32)
        groups = (chunks + 1) // (2 * GROUP8)
        acc, tail, step = multiply8(pipe, step, groups, largest, zero, TOKENS, TAIL, REST)
        # 2^(largest - 254), from its exponent field.
        factor = (gl.maximum(exponent - 127, 0) << 23).to(gl.float32, bitcast=True)
        accs = (acc,)
        tails = (tail,)
    else:
        accs, tails, step = multiply(pipe, step, chunks, TOKENS, TAIL, OVERLAP, REST)
    biases: gl.tuple = ()
    for unit in gl.static_range(UNITS):
        tile = (block * UNITS + unit) * WARPS + (lanes >> 4)
        column, place = row_of(tile, lanes >> 3 & 1, lanes & 7, expert, out)
        bias = gl.load(out.bias_ptr + place, mask=column < out.rows, other=0.0).to(gl.float32)
        biases += (bias,)
    for unit in gl.static_range(UNITS):
        row_block = block * UNITS + unit
        end = last
        if TAIL > 0:
            finish(tails[unit], biases[unit], factor, out, first + TOKENS, last, row_block)
            end = first + TOKENS
        finish(accs[unit], biases[unit], factor, out, first, end, row_block)
    return step


@gluon.jit
def _compute(
    tiles_ptr, out, pipe, row_blocks, chunks, zero, WIDE: gl.constexpr, MID: gl.constexpr,
    NARROW: gl.constexpr, TAIL: gl.constexpr, REST: gl.constexpr, OVERLAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The computing warps."""
    BOUND: gl.constexpr = _most_of_second(WIDE, MID, NARROW, TAIL)
    items = gl.load(tiles_ptr) * row_blocks
    wait_for_previous(PDL)  # x_scale must be written, and no kernel may still read out's memory
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, last = _entry(tiles_ptr, item, row_blocks)
        block = item % row_blocks
        if last - first > BOUND:
            step = _tile(out, pipe, step, expert, first, last, block, chunks, zero, WIDE, TAIL, REST, OVERLAP)
        elif last - first > NARROW:
            if BOUND > NARROW:  # a separate loop without a tail: a test in each step would be slower
                step = _tile(
                    out, pipe, step, expert, first, last, block, chunks, zero, BOUND, 0, REST, OVERLAP
                )
        else:
            step = _tile(out, pipe, step, expert, first, last, block, chunks, zero, NARROW, 0, REST, OVERLAP)


@gluon.jit
def _product_kernel(
    wide_desc,  # [pairs, columns] in the operand's order, box [WIDE, 128 bytes]
    narrow_desc,  # the same, box [NARROW, 128 bytes]
    other_desc,  # the same, box [TAIL or MID, 128 bytes] (if there is one of them)
    blocks_desc,  # the packed bytes, [row tiles, chunks x 4, 128], box [8, 8, 128]: one copy per step
    scales_desc,  # [row tiles, chunks x 32] uint8, box [8, 64]; or pairs as 16 bits (not FP8)
    tiles_ptr,  # [1 + tiles, 4] int32: grouped_moe's Permutation
    bias_ptr,  # [2, E, I] or [E, H]
    largest_ptr,  # like bias, uint8: each row's largest exponent (if FP8)
    x_scale_ptr,  # [pairs] float32: divisors of gate_up's inputs (if FP8)
    out_ptr,  # [pairs, width]
    row_blocks,  # blocks of UNITS x 16 weight rows per warp: GroupedTile.row_blocks
    row_tiles,  # tiles of 16 rows
    chunks,  # chunks of 64 columns
    rows,  # rows of a matrix: I for gate_up, H for down
    width,  # columns of out
    limit,
    alpha,
    experts,
    inner_scale,  # the factor on gate_up's results (if FP8)
    added_ptr,  # [pairs, 2 rows]: addends of gates and ups, which alternate (if ADDED)
    zero,  # 0, unknown to the compiler
    WIDE: gl.constexpr,
    MID: gl.constexpr,
    NARROW: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    FP8: gl.constexpr,
    REST: gl.constexpr,  # FP8: steps after the last group; else 1 if the last step is half a step
    UNITS: gl.constexpr,
    OVERLAP: gl.constexpr,
    PDL: gl.constexpr,
    ADDED: gl.constexpr = False,
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
    WARPS: gl.constexpr = blocks_desc.block_shape[0]
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * UNITS, WARPS, 8, 128], blocks_desc.layout)
    SCALES: gl.constexpr = scale_boxes(UNITS, WARPS)
    s_smem = gl.allocate_shared_memory(
        scales_desc.dtype, [STAGES * SCALES, 8, scales_desc.block_shape[1]], scales_desc.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    pipe = Pipeline(x_smem, tail_smem, w_smem, s_smem, ready, empty)
    # Inline, because constants in a tuple with a name become tensors.
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    tiles_ptr,
                    Output(
                        bias_ptr, largest_ptr, x_scale_ptr, out_ptr, rows, width, limit, alpha, experts,
                        inner_scale, added_ptr, GATE_UP, FP8, ADDED,
                    ),
                    pipe, row_blocks, chunks, zero, WIDE, MID, NARROW, TAIL, REST, OVERLAP, PDL,
                ),
            ),
            (
                _fetch,
                (
                    Sources(wide_desc, narrow_desc, other_desc, blocks_desc, scales_desc),
                    tiles_ptr, pipe, row_blocks, row_tiles, chunks, WIDE, MID, NARROW, TAIL, PDL,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def rest_of_steps(chunks: int, fp8: bool) -> int:
    """Return REST of the kernel."""
    return (chunks + 1) // 2 % GROUP8.value if fp8 else chunks % 2


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
    tile: GroupedTile,
    is_gate_up: bool,
    addends: torch.Tensor | None = None,
) -> None:
    width, fp8 = 128 // x.element_size(), x.element_size() == 1
    inputs = gl.NVMMASharedLayout(128, 8 * x.element_size())
    scales = matrices.scales.view(-1, matrices.chunks * 32)
    scales = scales if fp8 else scales.view(torch.uint16)
    limits = {"maxnreg": tile.registers} if tile.registers else {}
    _product_kernel[(tuning_of(x.device).multiprocessors * tile.programs,)](
        TensorDescriptor.from_tensor(x, [tile.wide, width], inputs),
        TensorDescriptor.from_tensor(x, [tile.narrow, width], inputs),
        TensorDescriptor.from_tensor(x, [tile.tail or tile.middle or tile.narrow, width], inputs),
        TensorDescriptor.from_tensor(
            matrices.blocks.view(torch.uint8).view(-1, matrices.chunks * 4, 128), [tile.warps, 8, 128],
            gl.NVMMASharedLayout(128, 8, rank=3),
        ),
        TensorDescriptor.from_tensor(
            scales, [8, 64 // scales.element_size()], gl.NVMMASharedLayout(64, 8 * scales.element_size())
        ),
        tiles, bias, largest, x_scale, out,
        tile.row_blocks(out.shape[1], is_gate_up=is_gate_up), matrices.row_tiles, matrices.chunks, rows,
        out.shape[1],
        experts.swiglu_limit, experts.swiglu_alpha, experts.num_experts, inner_scale(experts),
        out if addends is None else addends, 0,
        WIDE=tile.wide, MID=tile.middle, NARROW=tile.narrow, TAIL=tile.tail, STAGES=tile.num_stages,
        GATE_UP=is_gate_up, FP8=fp8, REST=rest_of_steps(matrices.chunks, fp8),
        UNITS=tile.units, OVERLAP=tile.overlap, num_warps=tile.warps, ADDED=addends is not None, **limits,
        **dependent(x),
    )  # fmt: skip


def inner_scale(experts: Experts) -> float:
    """Returns the factor on SwiGLU's results: the checkpoint's (overflow saturates), or one that scales their
    largest possible value to e4m3's maximum."""
    if experts.down_input_scale is not None:
        return 1.0 / experts.down_input_scale
    return 448.0 / (experts.swiglu_limit * (experts.swiglu_limit + 1))


def gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    tiles: torch.Tensor,
    experts: Experts,
    tile: GroupedTile,
    addends: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [pairs, 64 chunks] of ``grouped.gather``, and the divisors [pairs] of e4m3 inputs -> SwiGLU [pairs,
    64 chunks of down] in x's dtype (e4m3: times ``inner_scale``). ``addends`` [pairs, 2 I]: added before
    SwiGLU, gates and ups alternating.
    """
    out = torch.empty(x.shape[0], experts.down.chunks * COLUMNS, dtype=x.dtype, device=x.device)
    largest = out if experts.gate_up_largest is None else experts.gate_up_largest
    scale = out if x_scale is None else x_scale
    _launch(
        x, experts.gate_up, tiles, experts.gate_up_bias, largest, scale, out, experts.intermediate, experts,
        tile, True, addends,
    )  # fmt: skip
    return out


def down(
    inner: torch.Tensor, tiles: torch.Tensor, experts: Experts, hidden: int, tile: GroupedTile
) -> torch.Tensor:
    """inner of ``gate_up`` -> [pairs, H] bfloat16, by expert, before multiplication by gates."""
    out = torch.empty(inner.shape[0], hidden, dtype=torch.bfloat16, device=inner.device)
    largest = out if experts.down_largest is None else experts.down_largest
    _launch(inner, experts.down, tiles, experts.down_bias, largest, out, out, hidden, experts, tile, False)
    return out
