"""Generates the inner loop of the streaming expert products: PTX for NVIDIA GPUs since sm_80.

One warp computes ``tiles`` row tiles of one expert for up to ``8 * columns`` inputs. A lane copies its 16
bytes of weights and 4 bytes of scales of a 64-column chunk into shared memory some chunks ahead, which takes
no registers, and reads them back itself, so that no lane waits for another. Decoded in registers
(``dequant.UNPACK``), they are the A operand of the tensor core. The inputs, 16 consecutive columns of one
token, are its B operand in memory order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from chorale.kernels.triton.moe.dequant import UNPACK

CHUNK_BYTES = 512  # weights of a row tile
SCALE_BYTES = 32
INPUT_BYTES = 128  # 64 bfloat16


@dataclass(frozen=True, slots=True)
class Loop:
    """The shape of a loop.

    Operands: 4 * tiles * columns float32 results, then those of ``constraints``. A round of the loop takes
    one group of chunks, and starts the copy of the group ``groups`` later into the memory that it has just
    read.
    """

    tiles: int  # row tiles
    columns: int  # inputs / 8
    warps: int  # warps per program
    group: int  # chunks per group; divides the number of chunks
    groups: int  # groups in flight; at most their number
    wait: bool  # wait for the previous kernel (dependent launch) once the first weights are in flight

    @property
    def ahead(self) -> int:
        """Chunks by which inputs are loaded ahead: one less than the buffers, whose number divides
        ``group``."""
        return next(n for n in (3, 2, 1) if self.group % n == 0) - 1

    @property
    def outputs(self) -> int:
        return 4 * self.tiles * self.columns

    @property
    def constraints(self) -> str:
        """Operands: weights, scales, their strides between tiles in bytes, number of groups, inputs ...,
        input exists ..."""
        return ",".join(["=&f"] * self.outputs + list("llrrr") + ["l"] * self.columns + ["r"] * self.columns)

    @property
    def ring(self) -> int:
        """Number of entries in a program's ring, each with 16 bytes of weights and 4 bytes of scales of a
        lane."""
        return 32 * self.warps * self.tiles * self.group * self.groups


@functools.cache
def loop_text(loop: Loop) -> str:
    return "{\n" + "\n".join((*_begin(loop), "AGAIN:", *_round(loop))) + "\n}"


def _begin(loop: Loop) -> Iterator[str]:
    weights, scales, weight_stride, scale_stride, groups = (f"${loop.outputs + n}" for n in range(5))
    inputs = [f"${loop.outputs + 5 + n}" for n in range(loop.columns)]
    exist = [f"${loop.outputs + 5 + loop.columns + n}" for n in range(loop.columns)]
    yield from _registers(loop)
    yield f"mov.b32 left, {groups};"
    for r in range(loop.tiles):
        yield f"mad.wide.s32 wp{r}, {weight_stride}, {r}, {weights};"
        yield f"mad.wide.s32 sp{r}, {scale_stride}, {r}, {scales};"
    yield f".shared .align 16 .b8 ring[{16 * loop.ring}]; .shared .align 4 .b8 scale_ring[{4 * loop.ring}];"
    yield "mov.u32 a, %tid.x; mov.u32 b, ring; mov.u32 c, scale_ring;"
    yield "shl.b32 first, a, 4; add.u32 first, first, b; shl.b32 to, a, 2; add.u32 to, to, c;"
    yield "mov.b32 own, first; mov.b32 own_scale, to; mov.b32 first_scale, to;"
    for group in range(loop.groups):
        yield from _copy_group(loop, group, group, "")
    if loop.wait:
        yield "griddepcontrol.wait; griddepcontrol.launch_dependents;"
    for n in range(loop.columns):
        yield f"mov.b64 xp{n}, {inputs[n]}; setp.ne.s32 there{n}, {exist[n]}, 0;"
    for j in range(loop.ahead):
        yield from _load_inputs(loop, j, "there")
    for result in range(loop.outputs):
        yield f"mov.f32 ${result}, 0f00000000;"
    yield "mov.b32 place, 0; and.b32 a, a, 2; mad.lo.s32 pick, a, 0x0101, 0x4140;"


def _round(loop: Loop) -> Iterator[str]:
    """One round. At its start ``left`` groups remain, including this round's."""
    yield f"setp.gt.s32 next, left, 1; setp.gt.s32 more, left, {loop.groups}; add.s32 left, left, -1;"
    for n in range(loop.columns):
        yield f"and.pred both{n}, there{n}, next;"
    yield f"cp.async.wait_group {loop.groups - 1};"
    for j in range(loop.group):
        yield from _load_inputs(loop, j + loop.ahead, "there" if j + loop.ahead < loop.group else "both")
        for r in range(loop.tiles):
            yield from _multiply(loop, r, j)
    yield from _copy_group(loop, 0, loop.groups, "@more ")
    for r in range(loop.tiles):
        yield f"add.s64 wp{r}, wp{r}, {loop.group * CHUNK_BYTES};"
        yield f"add.s64 sp{r}, sp{r}, {loop.group * SCALE_BYTES};"
    for n in range(loop.columns):
        yield f"add.s64 xp{n}, xp{n}, {loop.group * INPUT_BYTES};"
    if loop.groups > 1:
        yield f"add.s32 place, place, 1; setp.eq.s32 last, place, {loop.groups};"
        yield f"add.s32 own, own, {16 * loop.ring // loop.groups}; selp.b32 own, first, own, last;"
        yield f"add.s32 own_scale, own_scale, {4 * loop.ring // loop.groups};"
        yield "selp.b32 own_scale, first_scale, own_scale, last; selp.b32 place, 0, place, last;"
    yield "@next bra AGAIN;"


def _registers(loop: Loop) -> Iterator[str]:
    inputs = [f"x{b}_{n}_{k}" for b in range(loop.ahead + 1) for n in range(loop.columns) for k in range(8)]
    parts = [f"p{k}_{part}" for k in range(2) for part in range(4)]
    yield f".reg .b32 {', '.join(inputs + parts)};"
    yield ".reg .b32 w0, w1, w2, w3, a, b, c, low, high, scale, zeros, left;"
    yield ".reg .b16 half0, half1; .reg .b32 both, pick, own, own_scale, first, first_scale, to, place;"
    yield f".reg .b64 {', '.join(f'wp{r}, sp{r}' for r in range(loop.tiles))};"
    yield f".reg .b64 {', '.join(f'xp{n}' for n in range(loop.columns))};"
    yield f".reg .pred next, more, last, {', '.join(f'there{n}, both{n}' for n in range(loop.columns))};"
    yield "mov.b32 zeros, 0x80008000;"  # two negative zeros: x * y + zeros is x * y


def _place(loop: Loop, r: int, j: int) -> int:
    """Returns the offset from ``own`` of a row tile's chunk ``j``, in ring entries."""
    return 32 * loop.warps * (j * loop.tiles + r)


def _copy_group(loop: Loop, place: int, group: int, guard: str) -> Iterator[str]:
    """Start the copy of the ``group``-th group after the pointers to the ``place``-th group after ``own``."""
    for j in range(loop.group):
        for r in range(loop.tiles):
            to, chunk = _place(loop, r, place * loop.group + j), group * loop.group + j
            weights, scales = chunk * CHUNK_BYTES, chunk * SCALE_BYTES
            yield f"{guard}cp.async.cg.shared.global [own + {16 * to}], [wp{r} + {weights}], 16;"
            yield f"{guard}cp.async.ca.shared.global [own_scale + {4 * to}], [sp{r} + {scales}], 4;"
    yield "cp.async.commit_group;"


def _load_inputs(loop: Loop, chunk: int, guard: str) -> Iterator[str]:
    for n in range(loop.columns):
        for half in (0, 1):
            words = ", ".join(f"x{chunk % (loop.ahead + 1)}_{n}_{4 * half + k}" for k in range(4))
            yield f"@{guard}{n} ld.global.v4.b32 {{{words}}}, [xp{n} + {chunk * INPUT_BYTES + 16 * half}];"


def _multiply(loop: Loop, r: int, j: int) -> Iterator[str]:
    """Multiply one row tile by one chunk of the inputs; each word is decoded while the previous is
    multiplied."""
    at = _place(loop, r, j)
    yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, [own + {16 * at}];"
    yield f"ld.shared.b32 scale, [own_scale + {4 * at}];"
    # Two bytes are exponents of rows g and g + 8: the first two in even groups of 32, the others in odd
    # groups (lanes with t >= 2). The last line is free: a multiplication can use one half twice.
    yield "prmt.b32 both, scale, 0, pick; shl.b32 both, both, 7;"
    yield "mov.b32 {half0, half1}, both; mov.b32 low, {half0, half0}; mov.b32 high, {half1, half1};"
    for k in range(5):
        if k < 4:
            yield from _decode(f"w{k}", f"p{k % 2}")
        if k > 0:
            for n in range(loop.columns):
                yield _mma(
                    4 * (r * loop.columns + n), f"p{(k - 1) % 2}", f"x{j % (loop.ahead + 1)}_{n}_", k - 1
                )


def _decode(word: str, to: str) -> Iterator[str]:
    text = UNPACK.replace("$4", word)
    for part in range(4):
        text = text.replace(f"${part}", f"{to}_{part}")
    yield text
    for part in range(4):
        yield f"fma.rn.bf16x2 {to}_{part}, {to}_{part}, {('low', 'high')[part % 2]}, zeros;"


def _mma(first: int, parts: str, inputs: str, k: int) -> str:
    results = ", ".join(f"${first + i}" for i in range(4))
    weights = ", ".join(f"{parts}_{part}" for part in range(4))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{results}}}, {{{weights}}},"
        f" {{{inputs}{2 * k}, {inputs}{2 * k + 1}}}, {{{results}}};"
    )
