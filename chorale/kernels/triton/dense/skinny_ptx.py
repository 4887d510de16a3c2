"""Generates the dense product of up to 16 tokens: PTX for NVIDIA GPUs since sm_90.

One program computes ``units`` of eight weight rows for all tokens. Its warps divide the contraction into
chunks of 32 columns, and add their sums in shared memory at the end. A lane copies 16 bytes of a row (eight
columns) to an address in shared memory that only this lane reads. The same eight columns of a token are the
lane's part of the tensor core's first operand: the order of a sum is free, so lanes exchange nothing. Weights
are in flight before the program waits for its predecessor. All loops are unrolled, because a warp has few
chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = 32  # columns
MOST_SHARED = 48 * 1024  # bytes of shared memory that need no attribute at launch


@dataclass(frozen=True, slots=True)
class Product:
    """The shape of a product. Its operands: see ``constraints``."""

    units: int  # number of units of eight rows
    columns: int  # tokens / 8
    warps: int
    group: int  # chunks per warp and round
    groups: int  # rounds whose weights are in flight
    ahead: int  # rounds by which inputs are loaded ahead
    depth: int  # columns of the contraction
    # Rotary: a unit is four pairs (i, i + D/2), a pair's rows next to each other. 0: rows in order.
    head_dim: int
    norm: bool  # inputs are float32 and are multiplied by a norm's weights; their squares are summed
    # Early loads of the epilogue: "b": constant bfloat16; "f": float32, "l": int64, after the wait.
    early: str
    pdl: bool  # the successor may start once all weights are here

    @property
    def rounds(self) -> int:
        return -(-self.depth // (CHUNK * self.warps * self.group))

    @property
    def ring(self) -> int:
        """Bytes of shared memory."""
        return 512 * self.warps * self.units * self.group * self.groups

    @property
    def outputs(self) -> int:
        return 2 + self.norm + len(self.early)

    @property
    def constraints(self) -> str:
        """Outputs: two results of a token (rows 2 t and 2 t + 1 of a unit), its sum of squares, early values.
        Inputs: addresses of weights (the lane's row of unit 0), first unit, norm, inputs ..., early values.
        """
        results = ["=&f"] * (2 + self.norm) + ["=&l" if kind == "l" else "=&f" for kind in self.early]
        return ",".join(results + list("lrl") + ["l"] * (self.columns + len(self.early)))

    def check(self) -> None:
        """Raises ``ValueError`` for an impossible shape."""
        if self.ring > MOST_SHARED or self.units * self.columns > self.warps or self.group * self.groups < 2:
            raise ValueError(f"no such product: {self}")
        if self.depth % CHUNK:
            raise ValueError(f"{self.depth} columns are not chunks of {CHUNK}")


@functools.cache
def product_text(p: Product) -> str:
    p.check()
    return "{\n" + "\n".join((*_begin(p), *_body(p), *_end(p))) + "\n}"


def _begin(p: Product) -> Iterator[str]:
    weights, first, norm, *rest = (f"${p.outputs + n}" for n in range(3 + p.columns + len(p.early)))
    yield from _registers(p)
    yield f".shared .align 16 .b8 skinny_ring[{p.ring}];"
    yield "mov.u32 a, %tid.x; mov.u32 own, skinny_ring; shl.b32 b, a, 4; add.u32 own, own, b;"
    yield f"shr.u32 warp, a, 5; mul.lo.s32 mine, warp, {p.group};"
    for u in range(p.units):
        yield from _row(p, u, weights, first)
    yield f"mov.b64 mp, {norm};"
    for n in range(p.columns):
        yield f"mov.b64 xp{n}, {rest[n]};"
    for r in range(p.groups):
        yield from _copy(p, r)
    early = list(zip(p.early, rest[p.columns :], strict=True))
    for n, (kind, place) in enumerate(early):
        if kind == "b":
            yield f"ld.global.b16 h{n}, [{place}];"
    for r in range(min(p.ahead, p.rounds)):
        yield from _load_norm(p, r)
    if p.pdl:
        yield "griddepcontrol.wait;"
    for r in range(min(p.ahead, p.rounds)):
        yield from _load_inputs(p, r)
    for n, (kind, place) in enumerate(early):
        if kind != "b":
            yield f"ld.global.b{64 if kind == 'l' else 32} e{n}, [{place}];"


def _row(p: Product, u: int, weights: str, first: str) -> Iterator[str]:
    """Set wp to the lane's weights of unit ``u``."""
    yield f"add.s32 a, {first}, {u};"
    if p.head_dim:
        shift = (p.head_dim // 8).bit_length() - 1
        yield f"shr.u32 b, a, {shift}; mul.lo.s32 b, b, {p.head_dim};"
        yield f"and.b32 a, a, {p.head_dim // 8 - 1}; mad.lo.s32 a, a, 4, b;"
    else:
        yield "shl.b32 a, a, 3;"
    yield f"mad.wide.s32 wp{u}, a, {2 * p.depth}, {weights};"


def _registers(p: Product) -> Iterator[str]:
    yield ".reg .b32 a, b, own, warp, mine, w0, w1, w2, w3, size, zero;"
    yield ".reg .pred q;"
    yield f".reg .b64 mp, {', '.join(f'wp{u}' for u in range(p.units))};"
    yield f".reg .b64 {', '.join(f'xp{n}' for n in range(p.columns))};"
    yield f".reg .f32 {', '.join(f'acc{u}_{k}' for u in range(p.units) for k in range(4))};"
    words = 8 if p.norm else 4
    each = [(r, j) for r in range(p.rounds) for j in range(p.group)]
    names = [f"x{r}_{j}_{n}_{k}" for r, j in each for n in range(p.columns) for k in range(words)]
    if p.norm:
        names += [f"m{r}_{j}_{k}" for r, j in each for k in range(8)]
        names += [f"p{j}_{n}_{k}" for j in range(p.group) for n in range(p.columns) for k in range(4)]
        yield f".reg .f32 f0, f1, {', '.join(f'sq{n}' for n in range(p.columns))};"
    yield f".reg .b32 {', '.join(names)};"
    for n, kind in enumerate(p.early):
        yield f".reg .b{64 if kind == 'l' else 32} e{n}; .reg .b16 h{n};"


def _guard(p: Product, r: int, j: int) -> str | None:
    """Set ``q`` if this warp has the chunk. Returns None if every warp has it."""
    before, chunks = r * p.warps * p.group + j, p.depth // CHUNK
    if before + (p.warps - 1) * p.group < chunks:
        return None
    return f"setp.lt.s32 q, mine, {chunks - before};"


def _copy(p: Product, r: int) -> Iterator[str]:
    """Start the copy of round ``r``'s weights; missing chunks become zeros."""
    for j in range(p.group) if r < p.rounds else ():
        guard = _guard(p, r, j)
        if guard is not None:
            yield f"{guard} selp.b32 size, 16, 0, q;"
        offset = 2 * CHUNK * (r * p.warps * p.group + j)
        for u in range(p.units):
            to = 512 * p.warps * _slot(p, r, j, u)
            size = "16" if guard is None else "16, size"
            yield f"cp.async.cg.shared.global [own + {to}], [wp{u} + {offset}], {size};"
    yield "cp.async.commit_group;"


def _slot(p: Product, r: int, j: int, u: int) -> int:
    return (r % p.groups * p.group + j) * p.units + u


def _loads(p: Product, r: int, j: int, name: str, pointer: str, words: int) -> Iterator[str]:
    guard = _guard(p, r, j)
    offset = (4 if p.norm else 2) * CHUNK * (r * p.warps * p.group + j)
    if guard is not None:
        yield guard
        for k in range(words):
            yield f"mov.b32 {name}_{k}, 0;"
    for half in range(words // 4):
        some = ", ".join(f"{name}_{4 * half + k}" for k in range(4))
        yield f"{'@q ' if guard else ''}ld.global.v4.b32 {{{some}}}, [{pointer} + {offset + 16 * half}];"


def _load_norm(p: Product, r: int) -> Iterator[str]:
    for j in range(p.group) if p.norm else ():
        yield from _loads(p, r, j, f"m{r}_{j}", "mp", 8)


def _load_inputs(p: Product, r: int) -> Iterator[str]:
    for j in range(p.group):
        for n in range(p.columns):
            yield from _loads(p, r, j, f"x{r}_{j}_{n}", f"xp{n}", 8 if p.norm else 4)


def _body(p: Product) -> Iterator[str]:
    yield "mov.b32 zero, 0;"
    for u in range(p.units):
        yield " ".join(f"mov.f32 acc{u}_{k}, 0f00000000;" for k in range(4))
    for n in range(p.columns) if p.norm else ():
        yield f"mov.f32 sq{n}, 0f00000000;"
    for r in range(p.rounds):
        if p.norm:
            yield from _convert(p, r)
        if r + p.ahead < p.rounds:
            yield from _load_norm(p, r + p.ahead)
            yield from _load_inputs(p, r + p.ahead)
        yield "bar.warp.sync 0xffffffff;"  # without it, the assembler would move the loads to their uses
        yield f"cp.async.wait_group {p.groups - 1};"
        for j in range(p.group):
            for u in range(p.units):
                yield from _multiply(p, r, j, u)
        yield from _copy(p, r + p.groups)


def _convert(p: Product, r: int) -> Iterator[str]:
    """Multiply inputs by the norm's weights to pairs of bfloat16, and add the squares of the plain inputs."""
    for j in range(p.group):
        for n in range(p.columns):
            for k in range(4):
                for half in (0, 1):
                    x, norm = (f"{name}_{2 * k + half}" for name in (f"x{r}_{j}_{n}", f"m{r}_{j}"))
                    yield f"fma.rn.f32 sq{n}, {x}, {x}, sq{n}; mul.rn.f32 f{half}, {x}, {norm};"
                yield f"cvt.rn.bf16x2.f32 p{j}_{n}_{k}, f1, f0;"


def _multiply(p: Product, r: int, j: int, u: int) -> Iterator[str]:
    yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, [own + {512 * p.warps * _slot(p, r, j, u)}];"
    results = ", ".join(f"acc{u}_{k}" for k in range(4))
    for step in (0, 1):
        inputs = []
        for k in (2 * step, 2 * step + 1):
            for n in (0, 1):
                name = f"p{j}_{n}_{k}" if p.norm else f"x{r}_{j}_{n}_{k}"
                inputs.append(name if n < p.columns else "zero")
        yield (
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{results}}}, {{{', '.join(inputs)}}},"
            f" {{w{2 * step}, w{2 * step + 1}}}, {{{results}}};"
        )


def _end(p: Product) -> Iterator[str]:
    """Each lane stores its sums; then warp w adds the sums of unit w // columns."""
    place = 512 * p.warps
    if p.pdl:
        yield "griddepcontrol.launch_dependents;"
    for u in range(p.units):
        some = ", ".join(f"acc{u}_{k}" for k in range(4))
        yield f"st.shared.v4.b32 [own + {place * u}], {{{some}}};"
    for n in range(p.columns) if p.norm else ():
        for distance in (1, 2):
            yield f"shfl.sync.bfly.b32 f0, sq{n}, {distance}, 31, 0xffffffff; add.rn.f32 sq{n}, sq{n}, f0;"
        yield f"st.shared.b32 [own + {place * p.units + 4 * n}], sq{n};"
    yield "bar.sync 0;"
    yield "mov.u32 a, %tid.x; and.b32 a, a, 31; shl.b32 a, a, 4;"
    yield "mov.u32 own, skinny_ring; add.u32 own, own, a;"
    yield f"rem.u32 b, warp, {p.units * p.columns};"
    yield f"rem.u32 a, b, {p.columns}; div.u32 b, b, {p.columns};"
    if p.norm:
        yield "mad.lo.s32 size, a, 4, own;"
    yield f"mad.lo.s32 own, b, {place}, own; mad.lo.s32 own, a, 8, own;"
    for k in range(2 + p.norm):
        yield f"mov.f32 ${k}, 0f00000000;"
    for warp in range(p.warps):
        for k in (0, 1):
            yield f"ld.shared.b32 w{k}, [own + {512 * warp + 4 * k}]; add.rn.f32 ${k}, ${k}, w{k};"
        if p.norm:
            yield f"ld.shared.b32 w2, [size + {place * p.units + 512 * warp}]; add.rn.f32 $2, $2, w2;"
    for n, kind in enumerate(p.early):
        to = f"${2 + p.norm + n}"
        if kind == "b":
            yield f"cvt.u32.u16 a, h{n}; shl.b32 a, a, 16; mov.b32 {to}, a;"
        else:
            yield f"mov.b{64 if kind == 'l' else 32} {to}, e{n};"
