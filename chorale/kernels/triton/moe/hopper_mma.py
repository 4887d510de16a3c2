"""The products of ``hopper_kernel``: some weight rows of a tile, over the whole contraction.

Shared memory holds the stages of a ``Pipeline``, each with a step of 128 columns. A unit is 16 weight rows
per warp; the units of a step share inputs and have separate sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from chorale.kernels.triton.moe.hopper_operand import (
    SCALES8,
    chunk_operand,
    keep,
    scales_layout,
    scales_of,
    step_operand8,
    words_layout,
)

GROUP8 = gl.constexpr(6)  # e4m3 steps between two waits for all products


class Pipeline(NamedTuple):
    """Steps in shared memory: step ``n`` is in stage ``n % STAGES``.

    The fetching warp signals filled stages on ``ready``, the computing warps signal read stages on ``empty``.
    """

    x: Any  # [STAGES x boxes, pairs, 128 bytes]
    tail: Any  # likewise; x if there are no tails
    words: Any  # [STAGES x UNITS, WARPS, 8, 128] uint8
    scales: Any  # [STAGES x boxes, 8, 32 uint16 or 64 uint8]
    ready: Any  # [STAGES, 1]
    empty: Any


@gluon.constexpr_function
def products_layout(tokens, fp8, warps):
    """Return the layout of [16 warps, tokens] sums: a warp has 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 32 if fp8 else 16])


@gluon.constexpr_function
def scale_boxes(units, warps):
    """Return the number of copies for a step's scales, of eight row tiles each; the last may have unused
    ones."""
    return (units * warps + 7) // 8


@gluon.jit
def _load_scales(scales, stage, unit: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr):
    box = scales.index(stage * scale_boxes(UNITS, WARPS) + unit * WARPS // 8).load(scales_layout(WARPS))
    if WARPS == 4:
        first, second = gl.split(gl.permute(gl.reshape(box, [2, 4, 32]), (1, 2, 0)))
        box = second if unit % 2 else first
    return scales_of(box)


@gluon.jit
def _halves(pair):
    """Split (tiles, 2 chunks, ...) into two [tiles, ...]."""
    tiles: gl.constexpr = pair.shape[0]
    rest: gl.constexpr = pair.numel // (2 * tiles)
    return gl.split(gl.permute(gl.reshape(pair, [tiles, 2, rest]), (0, 2, 1)))


@gluon.jit
def _times_tail(weights, tail_smem, place, tail, pairs: gl.constexpr):
    """Multiply weights in registers by the tail. ``pairs``: numbers per register."""
    operand: gl.constexpr = gl.DotOperandLayout(0, tail.type.layout, pairs)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(weights, tail_smem.index(place).permute((1, 0)), tail, is_async=True)


@gluon.jit
def _chunk(
    packed,
    scale,
    before,  # the operand of the product in flight
    pipe,
    place,
    acc,
    tail,
    TAIL: gl.constexpr,
    OVERLAP: gl.constexpr,  # products are still in flight at the return
):
    """Decode one chunk, start its products, and wait for those of the previous chunk. Returns the chunk's
    operand and the sums."""
    LEFT: gl.constexpr = 1 if OVERLAP else 0
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = chunk_operand(packed, scale, operand)
    x = pipe.x.index(place).slice(0, acc.shape[1], 0).permute((1, 0))
    going = warpgroup_mma(weights, x, acc, is_async=True)
    if TAIL > 0:
        also = _times_tail(weights, pipe.tail, place, tail, 2)
        acc, tail, before = warpgroup_mma_wait(2 * LEFT, deps=(going, also, before))
    else:
        acc, before = warpgroup_mma_wait(LEFT, deps=(going, before))
    return weights, acc, tail


@gluon.jit
def _replaced(values, place: gl.constexpr, value):
    return values[:place] + (value,) + values[place + 1 :]  # noqa: RUF005  (Gluon has no stars)


@gluon.jit
def _step(
    pipe,
    step,
    has_previous,  # whether a previous step's last product ends here
    before,
    accs,
    tails,
    TAIL: gl.constexpr,
    OVERLAP: gl.constexpr,
    HALF: gl.constexpr,  # only the first chunk
):
    """Multiply both chunks of each unit. Returns the last chunk's operand and the sums."""
    UNITS: gl.constexpr = len(accs)
    STAGES: gl.constexpr = pipe.ready.shape[0]
    WARPS: gl.constexpr = pipe.words.shape[1]
    stage = step % STAGES
    mbarrier.wait(pipe.ready.index(stage), (step // STAGES) & 1)
    for unit in gl.static_range(UNITS):
        left, right = _halves(pipe.words.index(stage * UNITS + unit).load(words_layout(WARPS)))
        left_scale, right_scale = _halves(_load_scales(pipe.scales, stage, unit, UNITS, WARPS))
        acc = accs[unit]
        tail = tails[unit]
        before, acc, tail = _chunk(left, left_scale, before, pipe, stage * 2, acc, tail, TAIL, OVERLAP)
        if unit == 0:
            mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), pred=has_previous)
        if not HALF:
            before, acc, tail = _chunk(
                right, right_scale, before, pipe, stage * 2 + 1, acc, tail, TAIL, OVERLAP
            )
        accs = _replaced(accs, unit, acc)
        tails = _replaced(tails, unit, tail)
    return before, accs, tails


@gluon.jit
def multiply(
    pipe,
    step,
    chunks,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    OVERLAP: gl.constexpr,  # a chunk's products (two with a tail) are in flight while the next is decoded
    ODD: gl.constexpr,  # chunks % 2: the last step is half a step
):
    """Multiply one tile in bfloat16. Returns tuples of UNITS [16 WARPS, TOKENS] and [16 WARPS, TAIL]
    float32."""
    STAGES: gl.constexpr = pipe.ready.shape[0]
    WARPS: gl.constexpr = pipe.words.shape[1]
    UNITS: gl.constexpr = pipe.words.shape[0] // STAGES
    mma: gl.constexpr = products_layout(TOKENS, False, WARPS)
    accs: gl.tuple = ()
    tails: gl.tuple = ()
    for _ in gl.static_range(UNITS):
        accs += (gl.zeros([16 * WARPS, TOKENS], gl.float32, mma),)
        if TAIL > 0:
            tails += (gl.zeros([16 * WARPS, TAIL], gl.float32, products_layout(TAIL, False, WARPS)),)
        else:
            tails += (0,)
    before = gl.zeros([16 * WARPS, 64], gl.bfloat16, gl.DotOperandLayout(0, mma, 2))
    for chunk in range(0, chunks - ODD, 2):
        before, accs, tails = _step(pipe, step, chunk > 0, before, accs, tails, TAIL, OVERLAP, False)
        step += 1
    if ODD:
        before, accs, tails = _step(pipe, step, chunks > 1, before, accs, tails, TAIL, OVERLAP, True)
        step += 1
    accs, tails = _finished(accs, tails, before, TAIL)
    mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES))
    return accs, tails, step


@gluon.jit
def _finished(accs, tails, before, TAIL: gl.constexpr):
    """Wait for the last product and return the sums."""
    UNITS: gl.constexpr = len(accs)
    accs += (before,)
    if TAIL > 0:
        done = warpgroup_mma_wait(0, deps=tails + accs)
        tails = done[:UNITS]
        accs = done[UNITS : 2 * UNITS]
    else:
        done = warpgroup_mma_wait(0, deps=accs)
        accs = done[:UNITS]
    return accs, tails


@gluon.jit
def _group8(pipe, step, largest, zero, acc, tail, TAIL: gl.constexpr, STEPS: gl.constexpr):
    """Multiply STEPS steps in e4m3 and wait for the last product."""
    STAGES: gl.constexpr = pipe.ready.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
    for i in gl.static_range(STEPS):
        stage = step % STAGES
        mbarrier.wait(pipe.ready.index(stage), (step // STAGES) & 1)
        packed, scales = pipe.words.index(stage).load(words_layout(8)), pipe.scales.index(stage).load(SCALES8)
        weights, upper, lower = step_operand8(packed, scales, largest, operand)
        x = pipe.x.index(stage).slice(0, acc.shape[1], 0).permute((1, 0))
        going = warpgroup_mma(weights, x, acc, is_async=True)
        if TAIL > 0:
            also = _times_tail(weights, pipe.tail, stage, tail, 4)
            acc, tail = warpgroup_mma_wait(2, deps=(going, also))
        else:
            acc = warpgroup_mma_wait(1, deps=(going,))
        if i > 0:
            keep(upper_before, lower_before, zero)  # type: ignore[has-type]  # noqa: F821  (of the turn before)
            mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES))
        upper_before = upper  # noqa: F841
        lower_before = lower  # noqa: F841
        step += 1
    if TAIL > 0:
        acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    keep(upper, lower, zero)
    mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES))
    return acc, tail, step


@gluon.jit
def multiply8(
    pipe,
    step,
    groups,  # number of groups of GROUP8 steps
    largest,  # [8, 64] int32, laid out like the scales: each row's largest exponent
    zero,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    REST: gl.constexpr,  # steps after the last group: 0 to GROUP8 - 1
):
    """``multiply`` in e4m3: weights are divided by their row's largest scale, times 2.

    Steps are grouped, and each group waits for its last product: the compiler would unpack an operand that
    lives across iterations into bytes, so it could not stay in its registers.
    """
    acc = gl.zeros([128, TOKENS], gl.float32, products_layout(TOKENS, True, 8))
    tail = 0
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, products_layout(TAIL, True, 8))
    for _ in range(groups):
        acc, tail, step = _group8(pipe, step, largest, zero, acc, tail, TAIL, GROUP8)
    if REST > 0:
        acc, tail, step = _group8(pipe, step, largest, zero, acc, tail, TAIL, REST)
    return acc, tail, step
