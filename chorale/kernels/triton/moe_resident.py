"""The products of ``moe_large`` for 8 to 16 slots an expert, in Gluon for Hopper: inputs stay, weights pass.

With so few slots a tile of ``moe_hopper`` reads half as many bytes of inputs from the L2, again for every 128
weight rows, as bytes of weights, and the L2 is what it waits for. Here a program takes a run of consecutive
(tile of slots, 256 weight rows): all inputs of a tile, 16 slots by the whole contraction, lie in shared
memory for as long as the run stays with it, and only weights are fetched step by step. Sixteen warps compute,
a warp a row tile; one warp fetches weights and scales, another a tile's inputs once the tile before is done.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chorale.kernels.triton.experts import Experts, Matrices
from chorale.kernels.triton.moe_endings import finish_piece, row_of
from chorale.kernels.triton.moe_multiply import halves, products_layout
from chorale.kernels.triton.moe_operand import chunk_operand, scales_layout, words_layout

# Triton 3.9's name, and that of versions before.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

SLOTS = 16  # of a tile
TILES = gl.constexpr(16)  # row tiles of a step
_WARPS = gl.constexpr(16)
_REGISTERS = 96  # of 65,536, a thread of 16 computing, 2 fetching and 2 idle warps


@gluon.jit
def _run(tiles_ptr, row_blocks):
    """This program's run: [begin, end) of (tile, row block)."""
    items, me, programs = gl.load(tiles_ptr) * row_blocks, gl.program_id(0), gl.num_programs(0)
    return me * items // programs, (me + 1) * items // programs


@gluon.jit
def _fetch_weights(
    blocks_desc,
    scales_desc,
    tiles_ptr,
    w_smem,
    s_smem,
    ready,
    empty,
    row_blocks,
    chunks,
    STAGES: gl.constexpr,
):
    begin, end = _run(tiles_ptr, row_blocks)
    step = 0
    for item in range(begin, end):
        expert = gl.load(tiles_ptr + 4 + (item // row_blocks) * 4)
        tile = item % row_blocks * TILES
        for chunk in range(0, chunks, 2):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, TILES * (1024 + 64))
            _copy(scales_desc, [expert, tile, chunk * 32], bar, s_smem.index(stage))
            _copy(blocks_desc, [expert, tile, chunk * 4, 0], bar, w_smem.index(stage))
            step += 1


@gluon.jit
def _fetch_inputs(x_desc, tiles_ptr, x_smem, there, free, row_blocks, CHUNKS: gl.constexpr):
    """All inputs of each tile of the run, a chunk of 64 columns a copy."""
    begin, end = _run(tiles_ptr, row_blocks)
    if end > begin:
        begin = begin // row_blocks
        for tile in range(begin, (end - 1) // row_blocks + 1):
            first = gl.load(tiles_ptr + 4 + tile * 4 + 1)
            mbarrier.wait(free.index(0), ((tile - begin) & 1) ^ 1)
            bar = there.index(0)
            mbarrier.expect(bar, CHUNKS * x_desc.block_type.nbytes)
            for chunk in range(CHUNKS):
                _copy(x_desc, [first, chunk * 64], bar, x_smem.index(chunk))


@gluon.jit
def _words(w_smem, stage):
    """A step's packed bytes [TILES, 8, 128]."""
    return w_smem.index(stage).reshape([TILES, 8, 128]).load(words_layout(TILES))


@gluon.jit
def _scales(s_smem, stage):
    """A step's scales [TILES, 64]."""
    return s_smem.index(stage).reshape([TILES, 64]).load(scales_layout(TILES))


@gluon.jit
def _multiply(
    x_smem, w_smem, s_smem, ready, empty, step, chunks, mma: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """[16 TILES, TOKENS] float32: as ``moe_multiply.multiply``, with inputs by chunk."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    acc = gl.zeros([16 * TILES, TOKENS], gl.float32, mma)
    right = gl.zeros([16 * TILES, 64], gl.bfloat16, operand)
    for chunk in range(0, chunks - ODD, 2):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        left_packed, right_packed = halves(_words(w_smem, stage))
        left_scale, right_scale = halves(_scales(s_smem, stage))
        left = chunk_operand(left_packed, left_scale, operand)
        going = warpgroup_mma(left, x_smem.index(chunk).permute((1, 0)), acc, is_async=True)
        acc, right = warpgroup_mma_wait(1, deps=(going, right))
        right = chunk_operand(right_packed, right_scale, operand)
        going = warpgroup_mma(right, x_smem.index(chunk + 1).permute((1, 0)), acc, is_async=True)
        acc, left = warpgroup_mma_wait(1, deps=(going, left))
        mbarrier.arrive(empty.index(stage))  # all of it is in registers
        step += 1
    if ODD:
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        left_packed, _ = halves(_words(w_smem, stage))
        left_scale, _ = halves(_scales(s_smem, stage))
        left = chunk_operand(left_packed, left_scale, operand)
        acc = warpgroup_mma(left, x_smem.index(chunks - 1).permute((1, 0)), acc, is_async=True)
        acc, left, right = warpgroup_mma_wait(0, deps=(acc, left, right))
        mbarrier.arrive(empty.index(stage))
        step += 1
    else:
        acc, right = warpgroup_mma_wait(0, deps=(acc, right))
    return acc, step


@gluon.jit
def _compute(
    tiles_ptr,
    bias_ptr,
    out_ptr,
    x_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    there,
    free,
    row_blocks,
    chunks,
    rows,
    width,
    limit,
    alpha,
    experts,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    ODD: gl.constexpr,
):
    """The computing warps."""
    mma: gl.constexpr = products_layout(TOKENS, False, _WARPS)
    lanes = gl.arange(0, 16 * TILES, gl.SliceLayout(1, mma))
    begin, end = _run(tiles_ptr, row_blocks)
    step, number = 0, 0
    for item in range(begin, end):
        block = item % row_blocks
        entry = tiles_ptr + 4 + (item // row_blocks) * 4
        expert, first, last = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        if (block == 0) | (item == begin):
            mbarrier.wait(there.index(0), number & 1)
            number += 1
        column, place = row_of(
            lanes >> 4, lanes >> 3 & 1, lanes & 7, expert, block, experts, rows, GATE_UP, TILES
        )
        bias = gl.load(bias_ptr + place, mask=column < rows, other=0.0).to(gl.float32)
        acc, step = _multiply(
            x_smem, w_smem, s_smem, ready, empty, step, chunks, mma, TOKENS, STAGES, ODD
        )  # fmt: skip
        mbarrier.arrive(free.index(0), pred=block == row_blocks - 1)
        finish_piece(
            acc, bias, bias, bias_ptr, out_ptr, first, last, block, width, limit, alpha, 1.0, TOKENS, GATE_UP,
            False,
        )  # fmt: skip


@gluon.jit
def _resident_kernel(
    x_desc,  # [slots, columns] in the operand's order, box [TOKENS, 64]
    blocks_desc,  # the packed bytes, [E, row tiles, chunks x 4, 128], box [1, TILES, 8, 128]
    scales_desc,  # [E, row tiles, chunks x 32] uint8, box [1, TILES, 64]
    tiles_ptr,  # [1 + tiles, 4] int32: moe_place's
    bias_ptr,  # [2, E, I] or [E, H]
    out_ptr,  # [slots, width]
    row_blocks,  # of 16 TILES weight rows
    chunks,  # of 64 columns
    rows,  # of a matrix: gate_up's I, down's H
    width,  # of out
    limit,
    alpha,
    experts,
    TOKENS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
):
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [CHUNKS, TOKENS, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, TILES, 8, 128], blocks_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, TILES, 64], scales_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(there.index(0), count=1)
    mbarrier.init(free.index(0), count=1)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, s_smem, ready, empty, there, free,
                    row_blocks, chunks, rows, width, limit, alpha, experts, TOKENS, STAGES, GATE_UP,
                    CHUNKS % 2,
                ),
            ),
            (
                _fetch_weights,
                (
                    blocks_desc, scales_desc, tiles_ptr, w_smem, s_smem, ready, empty, row_blocks, chunks,
                    STAGES,
                ),
            ),
            (_fetch_inputs, (x_desc, tiles_ptr, x_smem, there, free, row_blocks, CHUNKS)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


def fits(chunks: int, stages: int) -> bool:
    """Whether a tile's inputs and the steps ahead fit in an H200's shared memory."""
    return chunks * SLOTS * 128 + stages * TILES.value * (1024 + 64) + 16384 <= 227 * 1024


def product(
    x: torch.Tensor,
    matrices: Matrices,
    tiles: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    experts: Experts,
    stages: int,
    programs: int,
    is_gate_up: bool,
) -> None:
    """``moe_hopper``'s products in bfloat16, for tiles of at most SLOTS slots."""
    chunks = matrices.chunks
    blocks = matrices.blocks.view(torch.uint8).view(-1, matrices.row_tiles, chunks * 4, 128)
    scales = matrices.scales.view(-1, matrices.row_tiles, chunks * 32)
    _resident_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [SLOTS, 64], gl.NVMMASharedLayout(128, 16)),
        TensorDescriptor.from_tensor(blocks, [1, TILES.value, 8, 128], gl.NVMMASharedLayout(128, 8, rank=4)),
        TensorDescriptor.from_tensor(scales, [1, TILES.value, 64], gl.NVMMASharedLayout(64, 8, rank=3)),
        tiles, bias, out, triton.cdiv(matrices.row_tiles, TILES.value), chunks, rows, out.shape[1],
        experts.swiglu_limit, experts.swiglu_alpha, experts.num_experts,
        TOKENS=SLOTS, CHUNKS=chunks, STAGES=stages, GATE_UP=is_gate_up, num_warps=_WARPS.value,
        maxnreg=_REGISTERS,
    )  # fmt: skip
