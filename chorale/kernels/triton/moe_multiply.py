"""The products of ``moe_hopper``: 128 weight rows of a tile, over the whole contraction.

Shared memory holds ``STAGES`` steps of 128 columns. The fetching warp says on ``ready`` that one is there,
the computing warps on ``empty`` that they have read one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from chorale.kernels.triton.moe_operand import SCALES, chunk_operand, keep, load_words, step_operand8

GROUP8 = gl.constexpr(6)  # steps in e4m3 between two waits for everything


@gluon.constexpr_function
def products_layout(tokens, fp8):
    """The layout of [128, tokens] sums: a warp has 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, tokens, 32 if fp8 else 16])


@gluon.jit
def _halves(pair):
    """(8 tiles, 2 chunks, ...) -> the two [8, ...]."""
    rest: gl.constexpr = pair.numel // 16
    return gl.split(gl.permute(gl.reshape(pair, [8, 2, rest]), (0, 2, 1)))


@gluon.jit
def _times_tail(weights, tail_smem, place, tail, pairs: gl.constexpr):
    """The tail's product: weights as they are in registers. ``pairs``: what is packed in one of those."""
    operand: gl.constexpr = gl.DotOperandLayout(0, tail.type.layout, pairs)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(weights, tail_smem.index(place).permute((1, 0)), tail, is_async=True)


@gluon.jit
def multiply(
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
    ODD: gl.constexpr,  # chunks % 2: the last step is half a step
):
    """[128, TOKENS] and [128, TAIL] float32: one tile in bfloat16.

    A chunk's products (with a tail, two) are in flight while the next chunk is decoded.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    acc = gl.zeros([128, TOKENS], gl.float32, mma)
    tail = 0
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, products_layout(TAIL, False))
    right = gl.zeros([128, 64], gl.bfloat16, operand)
    for chunk in range(0, chunks - ODD, 2):
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
    if ODD:
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        left_packed, _ = _halves(load_words(w_smem, stage))
        left_scale, _ = _halves(s_smem.index(stage).load(SCALES))
        left_x = x_smem.index(stage * 2).slice(0, TOKENS, 0).permute((1, 0))
        left = chunk_operand(left_packed, left_scale, operand)
        acc = warpgroup_mma(left, left_x, acc, is_async=True)
        if TAIL > 0:
            tail = _times_tail(left, tail_smem, stage * 2, tail, 2)
            acc, tail, left, right = warpgroup_mma_wait(0, deps=(acc, tail, left, right))
        else:
            acc, left, right = warpgroup_mma_wait(0, deps=(acc, left, right))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=chunks > 1)
        step += 1
    elif TAIL > 0:
        acc, tail, right = warpgroup_mma_wait(0, deps=(acc, tail, right))
    else:
        acc, right = warpgroup_mma_wait(0, deps=(acc, right))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, tail, step


@gluon.jit
def _group8(
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    largest,
    zero,
    acc,
    tail,
    mma: gl.constexpr,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
):
    """STEPS steps in e4m3, whose last product is waited for."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    for i in gl.static_range(STEPS):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        packed, scales = load_words(w_smem, stage), s_smem.index(stage).load(SCALES)
        weights, upper, lower = step_operand8(packed, scales, largest, operand)
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
def multiply8(
    x_smem,
    tail_smem,
    w_smem,
    s_smem,
    ready,
    empty,
    step,
    groups,  # of GROUP8 steps
    largest,  # [8, 64] int32, as SCALES: each row's largest exponent
    zero,
    mma: gl.constexpr,
    TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    REST: gl.constexpr,  # steps beside those of groups: 0 to GROUP8 - 1
):
    """``multiply`` in e4m3: weights are divided by their row's largest scale, times 2.

    Steps go in groups whose last product is waited for: an operand that lived across the loop's end would be
    unpacked into bytes by the compiler, so it could not be kept in its registers.
    """
    acc = gl.zeros([128, TOKENS], gl.float32, mma)
    tail = 0
    if TAIL > 0:
        tail = gl.zeros([128, TAIL], gl.float32, products_layout(TAIL, True))
    for _ in range(groups):
        acc, tail, step = _group8(
            x_smem, tail_smem, w_smem, s_smem, ready, empty, step, largest, zero, acc, tail, mma, TOKENS,
            TAIL, STAGES, GROUP8,
        )  # fmt: skip
    if REST > 0:
        acc, tail, step = _group8(
            x_smem, tail_smem, w_smem, s_smem, ready, empty, step, largest, zero, acc, tail, mma, TOKENS,
            TAIL, STAGES, REST,
        )  # fmt: skip
    return acc, tail, step
