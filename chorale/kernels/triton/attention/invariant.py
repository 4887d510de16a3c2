"""Paged attention whose bits depend only on the query's position and its sequence.

Decodes, chunks of prompts and verified drafts run the same arithmetic: tiles of keys begin at multiples of
the tile's size, and the tiles of full attention form parts with fixed boundaries. A part starts from the sink
with mass 0, so a tile or a part without visible keys changes nothing. Parts are joined in order, by the
program that computed them, or, for few rows, by a second kernel after one program per part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache
from chorale.kernels.triton import tuning
from chorale.kernels.triton.attention.plan import LOG2E
from chorale.kernels.triton.attention.prefill import _attend, _find_row
from chorale.kernels.triton.kv_elements import kernel_view, query_of
from chorale.kernels.triton.launch import dependent, tuning_of, wait_for_previous

_LOG2E = tl.constexpr(LOG2E)
# Parts of a context: short ones first, so that short contexts are divided too, then long ones.
_SHORT, _LONG, _NUM_SHORT = tl.constexpr(256), tl.constexpr(1024), tl.constexpr(32)
_JOINED = tl.constexpr(8)  # parts that are loaded together


def parts_of(context: int) -> int:
    """Returns the number of parts of a context."""
    short, long, count = int(_SHORT.value), int(_LONG.value), int(_NUM_SHORT.value)
    return -(-context // short) if context <= count * short else count - (count * short - context) // long


@triton.jit
def _begin_of(part):
    """Return the first position of a part."""
    return tl.where(part < _NUM_SHORT, part * _SHORT, _NUM_SHORT * _SHORT + (part - _NUM_SHORT) * _LONG)


@triton.jit
def _begins_part(at):
    return (at > 0) & (at % tl.where(at <= _NUM_SHORT * _SHORT, _SHORT, _LONG) == 0)


@triton.jit
def _sink(sinks_ptr, heads, real):
    """Return the sinks' scores. Not a plain product, which could be contracted with a later subtraction."""
    return tl.fma(tl.load(sinks_ptr + heads, mask=real, other=0.0), _LOG2E, 0.0)


@triton.jit
def _join(top, mass, acc, part_top, part_mass, part_acc):
    """Add a part to a sum: maxima and masses [R], sums [R, D]. ``tl.fma`` fixes which
    operations are fused."""
    most = tl.maximum(top, part_top)
    fade, part_fade = tl.exp2(top - most), tl.exp2(part_top - most)
    mass = tl.fma(mass, fade, part_mass * part_fade)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), part_acc * part_fade[:, None])
    return most, mass, acc


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "start_ptr"],
)
def _tiles_kernel(
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
    sinks_ptr,  # [Nq] float32
    table_ptr,  # [R, table_stride] int32
    context_ptr,  # [R] int32
    start_ptr,  # [R + 1] int32
    out_ptr,  # [T, Nq, D]
    part_ptr,  # [R, Nq, PARTS, D] float32: sums of the parts (if PARTS)
    stat_ptr,  # [R, Nq, PARTS, 2] float32: maximum (base 2), mass
    num_rows,
    table_stride,
    scale,  # factor of the scores, times log2(e)
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    GROUP: tl.constexpr,  # heads per kv head, rounded up to a power of two
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    ALONE: tl.constexpr,  # every row has one new token
    PARTS: tl.constexpr,  # programs per row, one for each part; 0: a program joins its parts
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    head = tl.program_id(0)
    if ALONE:
        row = tl.program_id(1)
        start = tl.load(start_ptr + row)
        first = 0
    else:
        tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long contexts first
        row = _find_row(start_ptr, num_rows, tile, TOKENS)
        start = tl.load(start_ptr + row)
        first = (tile - (start // TOKENS + row)) * TOKENS
    num_new = tl.load(start_ptr + row + 1) - start
    if first < num_new:
        group: tl.constexpr = NUM_Q // NUM_KV
        context = tl.load(context_ptr + row)
        lanes = tl.arange(0, GROUP * TOKENS)
        offset = first + lanes // GROUP
        heads = head * group + lanes % GROUP
        real = (offset < num_new) & (lanes % GROUP < group)
        base = context - num_new + first  # position of the tile's first token
        position = context - num_new + offset
        dims = tl.arange(0, D)
        places = ((start + offset).to(tl.int64) * NUM_Q + heads)[:, None] * D + dims[None, :]
        q = tl.load(q_ptr + places, mask=real[:, None], other=0.0)
        q, scale = query_of(q, scale, kv_ptr.dtype.element_ty)
        sink = _sink(sinks_ptr, heads, real)
        table = table_ptr + row * table_stride
        low, begin = 0, 0
        high = tl.minimum(context, base + TOKENS)
        end = high
        top = sink
        mass = tl.full((GROUP * TOKENS,), 1.0, tl.float32)
        acc = tl.zeros((GROUP * TOKENS, D), tl.float32)
        # Full attention: the sum of all earlier parts. A window has no parts, and its sum is in ``acc``.
        all_top, all_mass, all_acc = top, mass, acc
        plain = 0  # end of the tiles that all tokens see
        if WINDOW > 0:
            low = tl.maximum(base - WINDOW + 1, 0)
            begin = low // KEYS * KEYS
        else:
            mass = tl.zeros((GROUP * TOKENS,), tl.float32)
            plain = (base + 1) // KEYS * KEYS
            if PARTS > 0:
                begin = _begin_of(tl.program_id(2))
                end = tl.minimum(high, _begin_of(tl.program_id(2) + 1))
            plain = tl.minimum(plain, end)
            for at in tl.range(begin, plain, KEYS, num_stages=STAGES):
                if PARTS == 0:  # noqa: SIM102  (known to the compiler)
                    if _begins_part(at):
                        all_top, all_mass, all_acc = _join(all_top, all_mass, all_acc, top, mass, acc)
                        top, mass, acc = sink, tl.zeros_like(mass), tl.zeros_like(acc)
                top, mass, acc = _attend(
                    q, top, mass, acc, kv_ptr, table, head, at, 0, 0, position, scale,
                    False, WINDOW, D, NUM_KV, KV_BLOCK, KEYS,
                )  # fmt: skip
            begin = tl.maximum(begin, plain)
        for at in tl.range(begin, end, KEYS, num_stages=2):
            if (WINDOW == 0) & (PARTS == 0):  # noqa: SIM102
                if _begins_part(at):
                    all_top, all_mass, all_acc = _join(all_top, all_mass, all_acc, top, mass, acc)
                    top, mass, acc = sink, tl.zeros_like(mass), tl.zeros_like(acc)
            top, mass, acc = _attend(
                q, top, mass, acc, kv_ptr, table, head, at, low, high, position, scale,
                True, WINDOW, D, NUM_KV, KV_BLOCK, KEYS,
            )  # fmt: skip
        if PARTS > 0:
            part = (row.to(tl.int64) * NUM_Q + heads) * PARTS + tl.program_id(2)
            tl.store(part_ptr + part[:, None] * D + dims[None, :], acc, mask=real[:, None])
            tl.store(stat_ptr + part * 2, top, mask=real)
            tl.store(stat_ptr + part * 2 + 1, mass, mask=real)
        else:
            if WINDOW == 0:
                _, mass, acc = _join(all_top, all_mass, all_acc, top, mass, acc)
            tl.store(out_ptr + places, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize_on_alignment=["context_ptr", "start_ptr"])
def _join_kernel(
    part_ptr,  # [R, Nq, PARTS, D] float32
    stat_ptr,  # [R, Nq, PARTS, 2] float32
    sinks_ptr,  # [Nq] float32
    context_ptr,  # [R] int32
    start_ptr,  # [R + 1] int32
    out_ptr,  # [T, Nq, D]
    NUM_Q: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the parts of one head of a row with one new token."""
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(start_ptr + row).to(tl.int64)
    if tl.load(start_ptr + row + 1) > token:
        context = tl.load(context_ptr + row)
        heads, dims = head + tl.arange(0, 1), tl.arange(0, D)
        top = _sink(sinks_ptr, heads, heads < NUM_Q)
        mass = tl.full((1,), 1.0, tl.float32)
        acc = tl.zeros((1, D), tl.float32)
        part = (row * NUM_Q + heads) * PARTS
        for first in range(0, PARTS, _JOINED):
            if _begin_of(first) < context:
                tops: tl.tuple = ()
                masses: tl.tuple = ()
                sums: tl.tuple = ()
                for n in tl.static_range(_JOINED):  # all loads are in flight before the first is used
                    number = first + n + tl.arange(0, 1)
                    has_keys = (number < PARTS) & (_begin_of(number) < context)
                    at = part + number
                    tops += (tl.load(stat_ptr + at * 2, mask=has_keys, other=-float("inf")),)
                    masses += (tl.load(stat_ptr + at * 2 + 1, mask=has_keys, other=0.0),)
                    places = part_ptr + at[:, None] * D + dims[None, :]
                    sums += (tl.load(places, mask=has_keys[:, None], other=0.0),)
                for n in tl.static_range(_JOINED):
                    top, mass, acc = _join(top, mass, acc, tops[n], masses[n], sums[n])
        places = out_ptr + (token * NUM_Q + heads[:, None]) * D + dims[None, :]
        tl.store(places, (acc / mass[:, None]).to(out_ptr.dtype.element_ty))


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """q [T, Nq, D], sinks [Nq] float32 -> [T, Nq * D]."""
    plan, group, kv, _ = cache
    meta, shape, rows, kv = plan.meta, plan.shape, plan.meta.context_lens.shape[0], kernel_view(kv)
    arch, alone = tuning_of(q.device), meta.max_query_len <= 1
    tile = arch.prefill_tile(is_window=group != 0)
    padded = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
    tokens = max(1, tile.rows // padded)
    parts = 0
    if alone and not shape.window(group):
        bytes_of_part = rows * shape.num_heads * (shape.head_dim + 2) * 4
        parts = arch.invariant_parts(rows * shape.num_kv_heads, parts_of(meta.max_context_len), bytes_of_part)
    out = torch.empty_like(q)
    sums = stats = out
    if parts:
        count = rows * shape.num_heads * parts
        sums = torch.empty(count * shape.head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
    table = meta.block_tables[group]
    tiles = rows if alone else q.shape[0] // tokens + rows
    _tiles_kernel[(shape.num_kv_heads, tiles, max(1, parts))](
        q, kv, sinks, table, meta.context_lens, meta.query_start, out, sums, stats, rows, table.stride(0),
        plan.scale, **plan.sizes, WINDOW=shape.window(group), GROUP=padded, TOKENS=tokens, KEYS=tile.keys,
        ALONE=alone, PARTS=parts, STAGES=tuning.INVARIANT_STAGES if alone else tile.num_stages,
        num_warps=tile.num_warps, **dependent(q),
    )  # fmt: skip
    if parts:
        _join_kernel[(rows, shape.num_heads)](
            sums, stats, sinks, meta.context_lens, meta.query_start, out,
            NUM_Q=shape.num_heads, D=shape.head_dim, PARTS=parts, num_warps=1, **dependent(q),
        )  # fmt: skip
    return out.view(q.shape[0], -1)
