"""The inner loop of the streaming expert products, as PTX for NVIDIA GPUs from sm_80 on. Text only.

One warp makes ``tiles`` row tiles of one expert for up to ``8 * columns`` inputs. A lane's 16 bytes of a
chunk are loaded some chunks ahead into registers, decoded there (``decode.UNPACK``) and handed to the tensor
core as its A operand; the inputs, 16 columns of one token in a run, are its B operand as they lie in memory.
Counted for one row tile and 8 inputs: 64 instructions for a lane's 32 weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from chorale.kernels.triton.decode import UNPACK

CHUNK_BYTES = 512  # of a row tile's weights
SCALE_BYTES = 32
INPUT_BYTES = 128  # 64 bfloat16


@dataclass(frozen=True, slots=True)
class Loop:
    """Operands: 4 * tiles * columns float32 results, then those of ``constraints``.

    Weights are loaded by groups of chunks, because a warp can tell only six groups of loads in flight apart.
    A block of code per group in flight: what was decoded is loaded anew at its end, for ``groups`` later. The
    branch between two blocks keeps the assembler from collecting those loads at the end of the loop.
    """

    tiles: int  # row tiles
    columns: int  # inputs / 8
    group: int  # chunks; divides their number
    groups: int  # in flight; at most their number
    wait: bool  # for the kernel before (programmatic dependent launch), once the first weights travel

    @property
    def chunks(self) -> int:
        """In the whole loop body."""
        return self.group * self.groups

    @property
    def ahead(self) -> int:
        """Chunks that inputs are loaded ahead: one less than their buffers, which go into the body."""
        return next(n for n in (3, 2, 1) if self.chunks % n == 0) - 1

    @property
    def outputs(self) -> int:
        return 4 * self.tiles * self.columns

    @property
    def constraints(self) -> str:
        """weights, scales, their bytes from tile to tile, number of groups, inputs ..., input exists ..."""
        return ",".join(["=&f"] * self.outputs + list("llrrr") + ["l"] * self.columns + ["r"] * self.columns)


@functools.cache
def loop_text(loop: Loop) -> str:
    return "{\n" + "\n".join((*_begin(loop), "AGAIN:", *_body(loop), "DONE:")) + "\n}"


def _begin(loop: Loop) -> Iterator[str]:
    weights, scales, weight_stride, scale_stride, groups = (f"${loop.outputs + n}" for n in range(5))
    inputs = [f"${loop.outputs + 5 + n}" for n in range(loop.columns)]
    exist = [f"${loop.outputs + 5 + loop.columns + n}" for n in range(loop.columns)]
    yield from _registers(loop)
    yield f"mov.b32 left, {groups};"
    for r in range(loop.tiles):
        yield f"mad.wide.s32 wp{r}, {weight_stride}, {r}, {weights};"
        yield f"mad.wide.s32 sp{r}, {scale_stride}, {r}, {scales};"
    for j in range(loop.chunks):
        yield from _load_weights(loop, j, j, "")
    if loop.wait:
        yield "griddepcontrol.wait; griddepcontrol.launch_dependents;"
    for n in range(loop.columns):
        yield f"mov.b64 xp{n}, {inputs[n]}; setp.ne.s32 there{n}, {exist[n]}, 0;"
    for j in range(loop.ahead):
        yield from _load_inputs(loop, j, "there")
    for result in range(loop.outputs):
        yield f"mov.f32 ${result}, 0f00000000;"


def _body(loop: Loop) -> Iterator[str]:
    """``left`` groups are not done when a block begins, its own included."""
    for block in range(loop.groups):
        yield f"setp.gt.s32 next, left, 1; setp.gt.s32 more, left, {loop.groups}; add.s32 left, left, -1;"
        for n in range(loop.columns):
            yield f"and.pred both{n}, there{n}, next;"
        first, end = block * loop.group, (block + 1) * loop.group
        for j in range(first, end):
            yield from _load_inputs(loop, j + loop.ahead, "there" if j + loop.ahead < end else "both")
            for r in range(loop.tiles):
                yield from _multiply(loop, r, j)
        for j in range(first, end):
            yield from _load_weights(loop, j, j + loop.chunks, "@more ")
        yield "@!next bra DONE;"
    for r in range(loop.tiles):
        yield f"add.s64 wp{r}, wp{r}, {loop.chunks * CHUNK_BYTES};"
        yield f"add.s64 sp{r}, sp{r}, {loop.chunks * SCALE_BYTES};"
    for n in range(loop.columns):
        yield f"add.s64 xp{n}, xp{n}, {loop.chunks * INPUT_BYTES};"
    yield "bra AGAIN;"


def _registers(loop: Loop) -> Iterator[str]:
    words = [f"w{r}_{j}_{k}" for r in range(loop.tiles) for j in range(loop.chunks) for k in range(4)]
    words += [f"s{r}_{j}" for r in range(loop.tiles) for j in range(loop.chunks)]
    words += [f"x{b}_{n}_{k}" for b in range(loop.ahead + 1) for n in range(loop.columns) for k in range(8)]
    yield f".reg .b32 {', '.join(words)};"
    yield ".reg .b32 a, b, c, p0, p1, p2, p3, low, high, zeros, left;"
    yield f".reg .b64 {', '.join(f'wp{r}, sp{r}' for r in range(loop.tiles))};"
    yield f".reg .b64 {', '.join(f'xp{n}' for n in range(loop.columns))};"
    yield f".reg .pred next, more, {', '.join(f'there{n}, both{n}' for n in range(loop.columns))};"
    yield "mov.b32 zeros, 0x80008000;"  # two negative zeros: x * y + zeros is x * y


def _load_weights(loop: Loop, j: int, chunk: int, guard: str) -> Iterator[str]:
    for r in range(loop.tiles):
        words = ", ".join(f"w{r}_{j}_{k}" for k in range(4))
        yield (
            f"{guard}ld.global.nc.L1::no_allocate.v4.b32 {{{words}}}, [wp{r} + {chunk * CHUNK_BYTES}];"
            f" {guard}ld.global.nc.u16 s{r}_{j}, [sp{r} + {chunk * SCALE_BYTES}];"
        )


def _load_inputs(loop: Loop, chunk: int, guard: str) -> Iterator[str]:
    for n in range(loop.columns):
        for half in (0, 1):
            words = ", ".join(f"x{chunk % (loop.ahead + 1)}_{n}_{4 * half + k}" for k in range(4))
            yield f"@{guard}{n} ld.global.v4.b32 {{{words}}}, [xp{n} + {chunk * INPUT_BYTES + 16 * half}];"


def _multiply(loop: Loop, r: int, j: int) -> Iterator[str]:
    """One row tile times one chunk of the inputs. The scale's byte is an exponent: 7 bits up."""
    yield f"prmt.b32 low, s{r}_{j}, 0, 0x4040; shl.b32 low, low, 7;"
    yield f"prmt.b32 high, s{r}_{j}, 0, 0x4141; shl.b32 high, high, 7;"
    for k in range(4):
        yield _unpack(f"w{r}_{j}_{k}")
        for part in range(4):
            yield f"fma.rn.bf16x2 p{part}, p{part}, {('low', 'high')[part % 2]}, zeros;"
        for n in range(loop.columns):
            first = 4 * (r * loop.columns + n)
            results = ", ".join(f"${first + i}" for i in range(4))
            x = f"x{j % (loop.ahead + 1)}_{n}_"
            yield (
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{results}}}, {{p0, p1, p2, p3}},"
                f" {{{x}{2 * k}, {x}{2 * k + 1}}}, {{{results}}};"
            )


def _unpack(word: str) -> str:
    text = UNPACK.replace("$4", word)
    for part in range(4):
        text = text.replace(f"${part}", f"p{part}")
    return text
