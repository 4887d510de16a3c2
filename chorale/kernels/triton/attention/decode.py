"""Paged attention with sinks and a window. The specification is ``kernels/reference/attention.py``.

Rows with one new token use the decode kernel: the context is split so that enough programs run, and a second
kernel joins the parts and adds the sink. Rows with more tokens use ``prefill.py``. The device distinguishes
the rows; the host never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache
from chorale.kernels.triton.attention.plan import LOG2E
from chorale.kernels.triton.attention.prefill import load_keys, prefill
from chorale.kernels.triton.kv_elements import converts_pairs, from_e4m3_pair, pair_view, query_of
from chorale.kernels.triton.launch import dependent, tuning_of, wait_for_previous

_LOG2E = tl.constexpr(LOG2E)
_DOT_ROWS = 16


# These may start at any offset of the step's numbers. No kernel reads them in vectors.
_INDICES = ["table_ptr", "context_ptr", "start_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def _decode_kernel(
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D], or of int16 [..., D / 2]: pairs of e4m3 elements
    sinks_ptr,  # [Nq] float32
    table_ptr,  # [R, table_stride] int32
    context_ptr,  # [R] int32
    start_ptr,  # [R + 1] int32
    out_ptr,  # [T, Nq, D]
    part_ptr,  # [R, Nq, SPLITS, D] float32: unnormalised sums
    stat_ptr,  # [R, Nq, SPLITS, 2] float32: maximum (base 2), mass
    table_stride,
    scale,  # factor of the scores, times log2(e)
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NATIVE: tl.constexpr,  # how pairs are converted: see ``from_e4m3_pair``
    PDL: tl.constexpr,
):
    """Of pairs, ``q``, ``k``, ``v`` and ``acc`` have the even dimensions, ``odd_q`` etc. the odd ones."""
    wait_for_previous(PDL)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(start_ptr + row).to(tl.int64)
    if tl.load(start_ptr + row + 1) - token == 1:
        group: tl.constexpr = NUM_Q // NUM_KV
        context = tl.load(context_ptr + row)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(context - WINDOW, 0)
        first = low // KEYS
        tiles = (context + KEYS - 1) // KEYS - first
        each = (tiles + SPLITS - 1) // SPLITS
        begin = (first + split * each) * KEYS
        end = tl.minimum((first + (split + 1) * each) * KEYS, context)
        heads = head * group + tl.arange(0, ROWS)
        real = tl.arange(0, ROWS) < group
        kind: tl.constexpr = kv_ptr.dtype.element_ty
        size: tl.constexpr = 2 if kind == tl.int16 else 1  # dimensions of an element
        WIDTH: tl.constexpr = D // size
        dims = tl.arange(0, WIDTH) * size
        places = (token * NUM_Q + heads[:, None]) * D + dims[None, :]
        if size == 2:
            odd_q = tl.load(q_ptr + places + 1, mask=real[:, None], other=0.0)
            odd_q, _ = query_of(odd_q, scale, kind)
            odd_acc = tl.zeros((ROWS, WIDTH), tl.float32)
        q, scale = query_of(tl.load(q_ptr + places, mask=real[:, None], other=0.0), scale, kind)
        if SPLITS == 1:
            top = tl.load(sinks_ptr + heads, mask=real, other=0.0) * _LOG2E
            mass = tl.full((ROWS,), 1.0, tl.float32)
        else:
            top = tl.full((ROWS,), -float("inf"), tl.float32)
            mass = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        for position in range(begin, end, KEYS):
            keys = position + tl.arange(0, KEYS)
            seen = (keys >= low) & (keys < end)
            table = table_ptr + row * table_stride
            k, v = load_keys(
                kv_ptr, table, head, position, low, end, True, q.dtype, WIDTH, NUM_KV, KV_BLOCK, KEYS
            )
            scores = tl.zeros((ROWS, KEYS), tl.float32)
            if size == 2:
                k, odd_k = from_e4m3_pair(k, q.dtype, NATIVE)
                v, odd_v = from_e4m3_pair(v, q.dtype, NATIVE)
                scores = tl.dot(odd_q, tl.trans(odd_k), scores, input_precision="ieee")
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
            fade = tl.exp2(top - new_top)
            mass = mass * fade + tl.sum(weights, 1)
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
            if size == 2:
                odd_acc = tl.dot(weights, odd_v, odd_acc * fade[:, None], input_precision="ieee")
            top = new_top
        if SPLITS == 1:
            tl.store(out_ptr + places, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
            if size == 2:
                odd_out = (odd_acc / mass[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + places + 1, odd_out, mask=real[:, None])
        else:
            part = (row.to(tl.int64) * NUM_Q + heads) * SPLITS + split
            parts = part_ptr + part[:, None] * D + dims[None, :]
            tl.store(parts, acc, mask=real[:, None])
            if size == 2:
                tl.store(parts + 1, odd_acc, mask=real[:, None])
            tl.store(stat_ptr + part * 2, top, mask=real)
            tl.store(stat_ptr + part * 2 + 1, mass, mask=real)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _join_kernel(
    part_ptr,
    stat_ptr,
    sinks_ptr,
    start_ptr,
    out_ptr,
    NUM_Q: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(start_ptr + row).to(tl.int64)
    if tl.load(start_ptr + row + 1) - token == 1:
        splits = (row.to(tl.int64) * NUM_Q + head) * SPLITS + tl.arange(0, SPLITS)
        dims = tl.arange(0, D)
        tops = tl.load(stat_ptr + splits * 2)
        masses = tl.load(stat_ptr + splits * 2 + 1)
        sink = tl.load(sinks_ptr + head) * _LOG2E
        top = tl.maximum(tl.max(tops, 0), sink)
        fades = tl.exp2(tops - top)  # 0 for a part without keys
        mass = tl.sum(masses * fades, 0) + tl.exp2(sink - top)
        parts = tl.load(part_ptr + splits[:, None] * D + dims[None, :])
        out = tl.sum(parts * fades[:, None], 0) / mass
        tl.store(out_ptr + (token * NUM_Q + head) * D + dims, out.to(out_ptr.dtype.element_ty))


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """q [T, Nq, D], sinks [Nq] float32 -> [T, Nq * D]."""
    meta, out = cache.plan.meta, torch.empty_like(q)
    if meta.max_query_len > 1:
        prefill(q, sinks, cache, out)
    if meta.max_query_len == 1 or len(meta.context_lens) > 1:
        _decode(q, sinks, cache, out)
    return out.view(q.shape[0], -1)


def _decode(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
    plan, group = cache.plan, cache.group
    meta, shape, rows = plan.meta, plan.shape, plan.meta.context_lens.shape[0]
    is_e4m3 = cache.kv.element_size() == 1
    splits = 1 if group else plan.num_e4m3_splits if is_e4m3 else plan.num_splits
    tile = tuning_of(q.device).decode_tile(rows, is_window=group != 0, is_e4m3=is_e4m3)
    parts = stats = out
    if splits > 1:
        count = rows * shape.num_heads * splits
        parts = torch.empty(count * shape.head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(count * 2, dtype=torch.float32, device=q.device)
    table = meta.block_tables[group]
    _decode_kernel[(rows, shape.num_kv_heads, splits)](
        q, pair_view(cache.kv), sinks, table, meta.context_lens, meta.query_start, out, parts, stats,
        table.stride(0), plan.scale, **plan.sizes, WINDOW=shape.window(group), SPLITS=splits,
        ROWS=max(_DOT_ROWS, triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)),
        KEYS=tile.depth, NATIVE=converts_pairs(q.device), num_warps=tile.num_warps,
        num_stages=tile.num_stages, **dependent(q),
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows, shape.num_heads)](
            parts, stats, sinks, meta.query_start, out,
            NUM_Q=shape.num_heads, D=shape.head_dim, SPLITS=splits, num_warps=1, **dependent(q),
        )  # fmt: skip
