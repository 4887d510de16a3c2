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
from chorale.kernels.triton.tuning import LargeTile

# Triton 3.9's name, and that of versions before.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# A packed word -> the operand's four registers for one 16 columns: a pair each of rows g and g + 8, and again
# eight columns on. Values are times 2^-126.
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


@gluon.jit
def _operand(packed, exponents, rows: gl.constexpr, operand: gl.constexpr):
    """Packed bytes [8, 32, 16] of a chunk (64 columns of 8 row tiles) and exponents [256] -> [128, 64].

    ``rows``: a layout of [256, 16], in which a row shares its scale.
    """
    scale = (exponents.to(gl.uint16) << 7).to(gl.bfloat16, bitcast=True)
    scale = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, rows), assert_trivial=True), 1)
    near, far = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
    )
    both = gl.join(_scaled(near, scale, rows), _scaled(far, scale, rows))
    both = gl.reshape(both, [8, 8, 2, 2, 2, 4, 2, 2])  # tile, g, t, p | t, j, pair, near or far
    both = gl.permute(both, (0, 3, 1, 5, 7, 2, 4, 6))  # row: tile, p, g. column: j, near or far, t, pair
    return gl.convert_layout(gl.reshape(both, [128, 64]), operand, assert_trivial=True)


@gluon.jit
def _scaled(half, scale, rows: gl.constexpr):
    half = gl.reshape(half, [8, 8, 2, 2, 4, 2, 2])  # tile, g, t, t, j, p, pair
    half = gl.reshape(gl.permute(half, (0, 1, 2, 5, 3, 4, 6)), [256, 16])
    return gl.convert_layout(half, rows, assert_trivial=True) * scale


@gluon.jit
def _halves(pair):
    """(8 tiles, 2 chunks, ...) -> the two [8, ...]."""
    rest: gl.constexpr = pair.numel // 16
    return gl.split(gl.permute(gl.reshape(pair, [8, 2, rest]), (0, 2, 1)))


@gluon.jit
def _fetch(
    wide_desc,
    narrow_desc,
    blocks_desc,
    scales_desc,
    tiles_ptr,
    x_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    row_blocks,
    row_tiles,
    chunks,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The fetching warp: every step of every tile that this program has."""
    items = gl.load(tiles_ptr) * row_blocks
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + 4 + (item // row_blocks) * 4
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        is_wide = gl.load(entry + 2) - first > NARROW
        tile = expert * row_tiles + item % row_blocks * 8
        for chunk in range(0, chunks, 2):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            left, right = x_smem.index(stage * 2), x_smem.index(stage * 2 + 1)
            if is_wide:
                mbarrier.expect(bar, WIDE * 256 + 8192 + 512)
                _copy(wide_desc, [first, chunk * 64], bar, left)
                _copy(wide_desc, [first, chunk * 64 + 64], bar, right)
            else:
                mbarrier.expect(bar, NARROW * 256 + 8192 + 512)
                at = chunk * 64
                _copy(narrow_desc, [first, at], bar, left.slice(0, NARROW, 0))
                _copy(narrow_desc, [first, at + 64], bar, right.slice(0, NARROW, 0))
            w = w_smem.index(stage)
            _copy(scales_desc, [tile, chunk * 32], bar, s_smem.index(stage))
            for i in gl.static_range(8):
                at = (tile + i) * chunks + chunk
                _copy(blocks_desc, [at * 32, 0], bar, w.slice(i * 64, 64, 0))
            step += 1


@gluon.jit
def _multiply(
    x_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    chunks,
    mma: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """[128, TOKENS] float32: one tile. Two products are in flight while a chunk is decoded."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    # Packed bytes [(8 tiles, 2 chunks, 32 lanes), 16] and scales [8, (chunk, g, t, p)]: a warp has a tile.
    words: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[64, 0], [128, 0], [256, 0]],
        [],
        [512, 16],
    )
    bytes: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 32]],
        [[0, 0], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 64],
    )
    rows: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 2], [0, 4]],
        [[0, 8], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0], [128, 0]],
        [],
        [256, 16],
    )
    acc = gl.zeros([128, TOKENS], gl.float32, mma)
    right = gl.zeros([128, 64], gl.bfloat16, operand)
    for chunk in range(0, chunks, 2):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        packed = w_smem.index(stage).load(words)
        scales = s_smem.index(stage).load(bytes)
        left_packed, right_packed = _halves(packed)
        left_scale, right_scale = _halves(scales)
        left_x = x_smem.index(stage * 2).slice(0, TOKENS, 0).permute((1, 0))
        right_x = x_smem.index(stage * 2 + 1).slice(0, TOKENS, 0).permute((1, 0))
        left = _operand(gl.reshape(left_packed, [8, 32, 16]), gl.reshape(left_scale, [256]), rows, operand)
        going = warpgroup_mma(left, left_x, acc, is_async=True)
        acc, right = warpgroup_mma_wait(1, deps=(going, right))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=chunk > 0)
        right = _operand(gl.reshape(right_packed, [8, 32, 16]), gl.reshape(right_scale, [256]), rows, operand)
        going = warpgroup_mma(right, right_x, acc, is_async=True)
        acc, left = warpgroup_mma_wait(1, deps=(going, left))
        step += 1
    acc, right = warpgroup_mma_wait(0, deps=(acc, right))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, step


@gluon.jit
def _split_slots(result, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """[TOKENS, COLUMNS] -> the first and the second half of the slots."""
    return gl.split(gl.permute(gl.reshape(result, [2, TOKENS // 2, COLUMNS]), (1, 2, 0)))


@gluon.jit
def _store(result, out_ptr, first, last, column, width, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """``_store_some`` in pieces, because each passes through shared memory, of which little is left."""
    if TOKENS == 256:
        left, right = _split_slots(result, TOKENS, COLUMNS)
        a, b = _split_slots(left, 128, COLUMNS)
        c, d = _split_slots(right, 128, COLUMNS)
        _store_some(a, out_ptr, first, last, column, width, 64, COLUMNS)
        _store_some(b, out_ptr, first + 64, last, column, width, 64, COLUMNS)
        _store_some(c, out_ptr, first + 128, last, column, width, 64, COLUMNS)
        _store_some(d, out_ptr, first + 192, last, column, width, 64, COLUMNS)
    elif TOKENS == 128:
        a, b = _split_slots(result, TOKENS, COLUMNS)
        _store_some(a, out_ptr, first, last, column, width, 64, COLUMNS)
        _store_some(b, out_ptr, first + 64, last, column, width, 64, COLUMNS)
    else:
        _store_some(result, out_ptr, first, last, column, width, TOKENS, COLUMNS)


@gluon.jit
def _store_some(result, out_ptr, first, last, column, width, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """result [TOKENS, COLUMNS] -> rows first.., columns column.. of out, up to row last and to width."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [8, 1], [1, 0])
    result = gl.convert_layout(result.to(out_ptr.dtype.element_ty), layout)
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
def _tile(
    bias_ptr,
    out_ptr,
    x_smem,
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
    rows,  # of a matrix: gate_up's I, down's H
    width,  # of out
    limit,
    alpha,
    experts,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
):
    """One tile: 128 weight rows times slots first .. last - 1, and what follows on it. Returns step."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TOKENS, 16])
    lanes = gl.arange(0, 128, gl.SliceLayout(1, mma))
    if GATE_UP:  # of each 16 rows, 8 gates and their 8 ups
        column = block * 64 + (lanes >> 4) * 8 + (lanes & 7)
        biases = bias_ptr + ((lanes >> 3 & 1) * experts + expert) * rows + column
    else:
        column = block * 128 + lanes
        biases = bias_ptr + expert * rows + column
    bias = gl.load(biases, mask=column < rows, other=0.0).to(gl.float32)
    acc, step = _multiply(x_smem, w_smem, s_smem, ready, empty, step, chunks, mma, TOKENS, STAGES)
    acc += gl.expand_dims(bias, 1)
    if GATE_UP:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [8, 2, 8, TOKENS]), (0, 2, 3, 1)))
        gate = gl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        inner = gate * _sigmoid(gate * (1.4426950408889634 * alpha)) * (up + 1.0)
        inner = gl.reshape(inner.to(gl.bfloat16), [4, 4, 2, 2, TOKENS])  # column: t, j, q, pair
        inner = gl.reshape(gl.permute(inner, (4, 1, 2, 0, 3)), [TOKENS, 64])  # place: j, q, t, pair
        _store(inner, out_ptr, first, last, block * 64, width, TOKENS, 64)
    else:
        acc = gl.permute(acc.to(gl.bfloat16), (1, 0))
        _store(acc, out_ptr, first, last, block * 128, width, TOKENS, 128)
    return step


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
    row_blocks,
    chunks,
    rows,
    width,
    limit,
    alpha,
    experts,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
):
    """The computing warps."""
    items = gl.load(tiles_ptr) * row_blocks
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + 4 + (item // row_blocks) * 4
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        last = gl.load(entry + 2)
        block = item % row_blocks
        if last - first > NARROW:
            step = _tile(
                bias_ptr, out_ptr, x_smem, w_smem, s_smem, ready, empty, step, expert, first, last, block,
                chunks, rows, width, limit, alpha, experts, WIDE, STAGES, GATE_UP,
            )  # fmt: skip
        else:
            step = _tile(
                bias_ptr, out_ptr, x_smem, w_smem, s_smem, ready, empty, step, expert, first, last, block,
                chunks, rows, width, limit, alpha, experts, NARROW, STAGES, GATE_UP,
            )  # fmt: skip


@gluon.jit
def _product_kernel(
    wide_desc,  # [slots, columns] in fragment order, box [WIDE, 64]
    narrow_desc,  # the same, box [NARROW, 64]
    blocks_desc,  # [row tiles of 16 x chunks of 64 x 32 lanes, 16] uint8, box [64, 16]
    scales_desc,  # [row tiles, chunks x 32] uint8, box [8, 64]
    tiles_ptr,  # [1 + tiles, 4] int32: moe_large's Placement
    bias_ptr,  # [2, E, I] or [E, H]
    out_ptr,  # [slots, width] bfloat16
    row_blocks,  # of 128 weight rows
    row_tiles,  # of 16
    chunks,  # of 64 columns
    rows,
    width,
    limit,
    alpha,
    experts,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
):
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, WIDE, 64], wide_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 512, 16], blocks_desc.layout)
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
                    tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, s_smem, ready, empty, row_blocks,
                    chunks, rows, width, limit, alpha, experts, WIDE, NARROW, STAGES, GATE_UP,
                ),
            ),
            (
                _fetch,
                (
                    wide_desc, narrow_desc, blocks_desc, scales_desc, tiles_ptr, x_smem, w_smem, s_smem,
                    ready, empty, row_blocks, row_tiles, chunks, WIDE, NARROW, STAGES,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@functools.cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    x: torch.Tensor,
    matrices: Matrices,
    tiles: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    experts: Experts,
    tile: LargeTile,
    is_gate_up: bool,
) -> None:
    wide_x = gl.NVMMASharedLayout(128, 16)
    plain = gl.NVMMASharedLayout(0, 8)
    blocks = matrices.blocks.view(torch.uint8).view(-1, 16)
    scales = matrices.scales.view(-1, matrices.chunks * 32)
    row_blocks = triton.cdiv(matrices.row_tiles, 8)
    _product_kernel[(_num_programs(x.device),)](
        TensorDescriptor.from_tensor(x, [tile.wide, 64], wide_x),
        TensorDescriptor.from_tensor(x, [tile.narrow, 64], wide_x),
        TensorDescriptor.from_tensor(blocks, [64, 16], plain),
        TensorDescriptor.from_tensor(scales, [8, 64], gl.NVMMASharedLayout(64, 8)),
        tiles, bias, out, row_blocks, matrices.row_tiles, matrices.chunks, rows, out.shape[1],
        experts.swiglu_limit, experts.swiglu_alpha, experts.num_experts,
        WIDE=tile.wide, NARROW=tile.narrow, STAGES=tile.num_stages,
        GATE_UP=is_gate_up, num_warps=8,
    )  # fmt: skip


def gate_up(x: torch.Tensor, tiles: torch.Tensor, experts: Experts, tile: LargeTile) -> torch.Tensor:
    """x [slots, 64 chunks] bfloat16, of ``moe_large.gather`` -> SwiGLU [slots, 64 chunks of down]."""
    out = torch.empty(x.shape[0], experts.down.chunks * COLUMNS, dtype=x.dtype, device=x.device)
    _launch(x, experts.gate_up, tiles, experts.gate_up_bias, out, experts.intermediate, experts, tile, True)
    return out


def down(
    inner: torch.Tensor, tiles: torch.Tensor, experts: Experts, hidden: int, tile: LargeTile
) -> torch.Tensor:
    """inner as ``gate_up`` makes it -> [slots, H] bfloat16, by expert, without gates."""
    out = torch.empty(inner.shape[0], hidden, dtype=inner.dtype, device=inner.device)
    _launch(inner, experts.down, tiles, experts.down_bias, out, hidden, experts, tile, False)
    return out
