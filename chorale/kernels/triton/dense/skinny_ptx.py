"""Generates the dense product of up to 16 tokens: PTX for NVIDIA GPUs since sm_90.

One program computes ``units`` of eight weight rows for all tokens. Its warps divide the contraction into
chunks, and add their sums in shared memory at the end. A block is one unit's rows of a warp's chunk. A lane
copies its part of a block to an address in shared memory that only this lane reads: eight columns of a row in
bfloat16, or sixteen of ``compact.CompactRows``. The same columns of a token are the lane's part of the tensor
core's first operand: the order of a sum is free, so lanes exchange nothing. Weights are in flight before the
program waits for its predecessor. All loops are unrolled, because a warp has few chunks.

The inputs of several tokens are loaded by the lanes that multiply them, some rounds ahead. One token's are
loaded once and passed through shared memory, so that all are in flight at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from chorale.kernels.triton.dense import compact

CHUNK = 32  # columns that take two steps of the tensor core
MOST_SHARED = 48 * 1024  # bytes of shared memory that need no attribute at launch


@dataclass(frozen=True, slots=True)
class Product:
    """The shape of a product. Its operands: see ``constraints``."""

    units: int  # number of units of eight rows
    columns: int  # tokens / 8
    warps: int
    slots: int  # blocks per warp whose weights are in flight
    ahead: int  # rounds by which inputs are loaded ahead
    depth: int  # columns of the contraction
    # Rotary: a unit is four pairs (i, i + D/2), a pair's rows next to each other. 0: rows in order.
    head_dim: int
    norm: bool  # inputs are float32 and are multiplied by a norm's weights; their squares are summed
    # Early loads of the epilogue: constants are "b", bfloat16, or "c", float32; after the wait, "f" are
    # float32 and "l" int64.
    early: str
    pdl: bool  # the successor may start once all weights are here
    is_compact: bool = False
    is_staged: bool = False  # one token, whose inputs pass through shared memory

    @property
    def parts(self) -> int:
        """Number of times 32 columns in a chunk."""
        return 2 if self.is_compact else 1

    @property
    def chunks(self) -> int:
        return self.depth // (CHUNK * self.parts)

    @property
    def rounds(self) -> int:
        return -(-self.chunks // self.warps)

    @property
    def ring(self) -> int:
        """Bytes of shared memory for weights."""
        return (compact.BLOCK_BYTES if self.is_compact else 512) * self.warps * self.slots

    @property
    def stage(self) -> int:
        """Bytes of shared memory for a warp's inputs."""
        each = self.rounds_per_load
        return -(-self.rounds // each) * each * 2 * CHUNK * self.parts if self.is_staged else 0

    @property
    def rounds_per_load(self) -> int:
        """Rounds whose inputs a warp loads together: 128 numbers in float32, 256 in bfloat16."""
        return (4 if self.norm else 8) // self.parts

    @property
    def outputs(self) -> int:
        return 2 + self.norm + len(self.early)

    @property
    def constraints(self) -> str:
        """Outputs: two results of a token (rows 2 t and 2 t + 1 of a unit), its sum of squares, early values.
        Inputs: addresses of weights (bfloat16: the lane's row of unit 0; else the lane's part of the warp's
        first block), first unit, norm, inputs ..., early values."""
        results = ["=&f"] * (2 + self.norm) + ["=&l" if kind == "l" else "=&f" for kind in self.early]
        return ",".join(results + list("lrl") + ["l"] * (self.columns + len(self.early)))

    def check(self) -> None:
        """Raises ``ValueError`` for an impossible shape."""
        fits = self.ring + self.warps * self.stage <= MOST_SHARED and self.units * self.columns <= self.warps
        if not fits or self.slots <= self.units:
            raise ValueError(f"no such product: {self}")
        if self.depth % (CHUNK * self.parts):
            raise ValueError(f"{self.depth} columns are not chunks of {CHUNK * self.parts}")
        if self.is_staged and not (self.is_compact and self.columns == 1):
            raise ValueError("only one token's inputs of compact rows are staged")


@functools.cache
def product_text(p: Product) -> str:
    p.check()
    return "{\n" + "\n".join((*_begin(p), *_body(p), *_end(p))) + "\n}"


def _begin(p: Product) -> Iterator[str]:
    weights, first, norm, *rest = (f"${p.outputs + n}" for n in range(3 + p.columns + len(p.early)))
    yield from _registers(p)
    yield f".shared .align 16 .b8 skinny_ring[{p.ring + p.warps * p.stage}];"
    yield "mov.u32 a, %tid.x; mov.u32 own, skinny_ring; shl.b32 b, a, 4; add.u32 own, own, b;"
    yield "shr.u32 warp, a, 5;"
    yield from _compact_places(p, weights) if p.is_compact else _row_places(p, weights, first)
    yield f"mov.b64 mp, {norm};"
    for n in range(p.columns):
        yield f"mov.b64 xp{n}, {rest[n]};"
    for block in range(p.slots):
        yield from _copy(p, block)
    early = list(zip(p.early, rest[p.columns :], strict=True))
    for n, (kind, place) in enumerate(early):
        if kind in "bc":
            yield f"ld.global.b16 h{n}, [{place}];" if kind == "b" else f"ld.global.b32 e{n}, [{place}];"
    ahead = range(p.rounds if p.is_staged else min(p.ahead, p.rounds))
    for r in ahead:
        yield from _load_norm(p, r)
    if p.pdl:
        yield "griddepcontrol.wait;"
    for r in ahead:
        yield from _load_inputs(p, r)
    for n, (kind, place) in enumerate(early):
        if kind in "fl":
            yield f"ld.global.b{64 if kind == 'l' else 32} e{n}, [{place}];"


def _row_places(p: Product, weights: str, first: str) -> Iterator[str]:
    """Set wp0, wp1, ... to the lane's weights of each unit."""
    for u in range(p.units):
        yield f"add.s32 a, {first}, {u};"
        if p.head_dim:
            shift = (p.head_dim // 8).bit_length() - 1
            yield f"shr.u32 b, a, {shift}; mul.lo.s32 b, b, {p.head_dim};"
            yield f"and.b32 a, a, {p.head_dim // 8 - 1}; mad.lo.s32 a, a, 4, b;"
        else:
            yield "shl.b32 a, a, 3;"
        yield f"mad.wide.s32 wp{u}, a, {2 * p.depth}, {weights};"


def _compact_places(p: Product, weights: str) -> Iterator[str]:
    """Set wp0 and wp1 to the two parts of the lane's weights in the warp's first block, own and ends to their
    places in shared memory, and staged to the warp's inputs."""
    yield f"mov.b64 wp0, {weights}; and.b32 b, a, 31; mad.lo.s32 b, b, -8, 512; mad.wide.s32 wp1, b, 1, wp0;"
    yield "shl.b32 b, a, 3; mov.u32 ends, skinny_ring; add.u32 ends, ends, b;"
    yield f"add.u32 ends, ends, {512 * p.warps * p.slots};"
    for name, mask in zip(("all", "second", "third"), (compact.ALL, *compact.TURNED[1:]), strict=True):
        yield f"mov.b32 {name}, {mask:#x};"
    if p.is_staged:
        yield f"mov.u32 staged, skinny_ring; add.u32 staged, staged, {p.ring};"
        yield f"mad.lo.s32 staged, warp, {p.stage}, staged;"
        yield f"and.b32 a, a, 31; mad.lo.s32 put, a, {8 if p.norm else 16}, staged;"
        yield "and.b32 b, a, 3; mad.lo.s32 staged, b, 16, staged;"
        lanes = 32 // p.rounds_per_load
        yield f"div.u32 mine, a, {lanes}; mad.lo.s32 mine, mine, {p.warps}, warp;"


def _registers(p: Product) -> Iterator[str]:
    yield ".reg .b32 a, b, own, warp, mine, w0, w1, w2, w3, size, zero;"
    yield ".reg .b32 half, ends, staged, put, all, second, third, t0, t1, t2, c0, c1, c2, c3, c4, c5;"
    yield ".reg .pred q;"
    yield f".reg .b64 mp, {', '.join(f'wp{u}' for u in range(max(2, p.units)))};"
    yield f".reg .b64 {', '.join(f'xp{n}' for n in range(p.columns))};"
    yield f".reg .f32 {', '.join(f'acc{u}_{k}' for u in range(p.units) for k in range(4))};"
    words = _words(p)
    names = [f"x{r}_{n}_{k}" for r in range(p.rounds) for n in range(p.columns) for k in range(words)]
    if p.norm:
        names += [f"m{r}_{k}" for r in range(p.rounds) for k in range(words)]
        yield f".reg .f32 f0, f1, {', '.join(f'sq{n}' for n in range(p.columns))};"
    if p.norm or p.is_staged:
        names += [f"p{n}_{k}" for n in range(p.columns) for k in range(4 * p.parts)]
    yield f".reg .b32 {', '.join(names)};"
    for n, kind in enumerate(p.early):
        yield f".reg .b{64 if kind == 'l' else 32} e{n}; .reg .b16 h{n};"


def _words(p: Product) -> int:
    """Return the words that a lane loads of a token in a round."""
    return 4 if p.is_staged else (8 if p.norm else 4) * p.parts


def _guard(p: Product, r: int, owner: str = "warp", rounds: int = 1) -> str | None:
    """Set ``q`` if ``owner``, a warp, has a chunk in round ``r``. Returns None if every warp has it, in as
    many rounds."""
    if (r + rounds) * p.warps <= p.chunks:
        return None
    return f"setp.lt.s32 q, {owner}, {p.chunks - r * p.warps};"


def _copy(p: Product, block: int) -> Iterator[str]:
    """Start the copy of a block's weights; missing chunks become zeros."""
    r, u = divmod(block, p.units)
    if r < p.rounds:
        slot, guard = block % p.slots, _guard(p, r)
        first, rest = (", 16", ", 8") if guard is None else (", 16, size", ", 8, half")
        if guard is not None:
            yield f"{guard} selp.b32 size, 16, 0, q; selp.b32 half, 8, 0, q;"
        if p.is_compact:
            offset = compact.BLOCK_BYTES * (u * p.chunks + r * p.warps)
            yield f"cp.async.cg.shared.global [own + {512 * p.warps * slot}], [wp0 + {offset}]{first};"
            yield f"cp.async.ca.shared.global [ends + {256 * p.warps * slot}], [wp1 + {offset}]{rest};"
        else:
            offset = 2 * CHUNK * r * p.warps
            yield f"cp.async.cg.shared.global [own + {512 * p.warps * slot}], [wp{u} + {offset}]{first};"
    yield "cp.async.commit_group;"


def _loads(p: Product, r: int, name: str, pointer: str) -> Iterator[str]:
    item = 4 if p.norm else 2
    if p.is_staged:
        if r % p.rounds_per_load:
            return
        guard, each = _guard(p, r, "mine", p.rounds_per_load), 1
    else:
        guard, each = _guard(p, r), item // 2
    if guard is not None:
        yield guard
        yield from (f"mov.b32 {name}_{k}, 0;" for k in range(_words(p)))
    for n in range(_words(p) // 4):
        some = ", ".join(f"{name}_{4 * n + k}" for k in range(4))
        place = item * CHUNK * (r * p.warps * p.parts + n // each) + n % each * 16
        yield f"{'@q ' if guard else ''}ld.global.v4.b32 {{{some}}}, [{pointer} + {place}];"


def _load_norm(p: Product, r: int) -> Iterator[str]:
    if p.norm:
        yield from _loads(p, r, f"m{r}", "mp")


def _load_inputs(p: Product, r: int) -> Iterator[str]:
    for n in range(p.columns):
        yield from _loads(p, r, f"x{r}_{n}", f"xp{n}")


def _body(p: Product) -> Iterator[str]:
    yield "mov.b32 zero, 0;"
    for u in range(p.units):
        yield " ".join(f"mov.f32 acc{u}_{k}, 0f00000000;" for k in range(4))
    for n in range(p.columns) if p.norm else ():
        yield f"mov.f32 sq{n}, 0f00000000;"
    if p.is_staged:
        yield from _stage(p)
    for r in range(p.rounds):
        if p.is_staged:
            yield from _read_stage(p, r)
        elif p.norm:
            yield from _convert(p, r, 4 * p.parts)
        if not p.is_staged and r + p.ahead < p.rounds:
            yield from _load_norm(p, r + p.ahead)
            yield from _load_inputs(p, r + p.ahead)
        for u in range(p.units):
            yield "bar.warp.sync 0xffffffff;"  # else the assembler would move the loads to their uses
            yield f"cp.async.wait_group {p.slots - 1};"
            yield from _multiply(p, r, u)
            yield from _copy(p, r * p.units + u + p.slots)


def _stage(p: Product) -> Iterator[str]:
    """Round the inputs and put them where all lanes find them."""
    for r in range(0, p.rounds, p.rounds_per_load):
        place = f"[put + {r * 2 * CHUNK * p.parts}]"
        if p.norm:
            yield from _convert(p, r, 2)
            yield f"st.shared.v2.b32 {place}, {{p0_0, p0_1}};"
        else:
            yield f"st.shared.v4.b32 {place}, {{{', '.join(f'x{r}_0_{k}' for k in range(4))}}};"
    yield "bar.warp.sync 0xffffffff;"


def _read_stage(p: Product, r: int) -> Iterator[str]:
    for part in range(p.parts):
        some = ", ".join(f"p0_{4 * part + k}" for k in range(4))
        yield f"ld.shared.v4.b32 {{{some}}}, [staged + {2 * CHUNK * (r * p.parts + part)}];"


def _convert(p: Product, r: int, pairs: int) -> Iterator[str]:
    """Multiply inputs by the norm's weights to pairs of bfloat16, and add the squares of the plain inputs."""
    for n in range(p.columns):
        for k in range(pairs):
            for half in (0, 1):
                x, norm = (f"{name}_{2 * k + half}" for name in (f"x{r}_{n}", f"m{r}"))
                yield f"fma.rn.f32 sq{n}, {x}, {x}, sq{n}; mul.rn.f32 f{half}, {x}, {norm};"
            yield f"cvt.rn.bf16x2.f32 p{n}_{k}, f1, f0;"


def _multiply(p: Product, r: int, u: int) -> Iterator[str]:
    slot = (r * p.units + u) % p.slots
    place = f"[own + {512 * p.warps * slot}]"
    if not p.is_compact:
        yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, {place};"
        yield from _steps(p, r, u, 0)
        return
    yield f"ld.shared.v4.b32 {{c0, c1, c2, c3}}, {place};"
    yield f"ld.shared.v2.b32 {{c4, c5}}, [ends + {256 * p.warps * slot}];"
    for part in (0, 1):
        yield from _expand(3 * part)
        yield from _steps(p, r, u, part)


def _expand(first: int) -> Iterator[str]:
    """Make eight bfloat16, w0 to w3, of three words (``compact.py``)."""
    for k in range(3):
        yield f"and.b32 w{k}, c{first + k}, all;"
        yield f"shf.r.wrap.b32 t{k}, c{first + k}, c{first + k}, {compact.TURNS[k]};"
    # 0xe4: the first operand where the third is set, else the second
    yield "lop3.b32 t0, t1, t0, second, 0xe4; lop3.b32 t0, t2, t0, third, 0xe4; and.b32 w3, t0, all;"


def _steps(p: Product, r: int, u: int, part: int) -> Iterator[str]:
    results = ", ".join(f"acc{u}_{k}" for k in range(4))
    for step in (0, 1):
        inputs = []
        for k in (4 * part + 2 * step, 4 * part + 2 * step + 1):
            for n in (0, 1):
                name = f"p{n}_{k}" if p.norm or p.is_staged else f"x{r}_{n}_{k}"
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
        for distance in (1, 2, 4, 8, 16) if p.is_staged else (1, 2):
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
