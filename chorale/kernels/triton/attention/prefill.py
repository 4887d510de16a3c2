"""Attention of rows with more than one new token, paged, with sinks and a window.

A program computes several tokens with all heads of one kv head, so that keys are read once for the group.
Keys that all of its tokens see are processed in pairs of tiles without masks; only tiles at an edge (the
diagonal, the window's end) compare positions. The device finds the rows and their tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache
from chorale.kernels.triton.attention.plan import LOG2E
from chorale.kernels.triton.kv_elements import from_kv_element, kernel_view, query_of
from chorale.kernels.triton.launch import tuning_of

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _find_row(start_ptr, num_rows, tile, TOKENS: tl.constexpr):
    """Row r's tiles start at start[r] // TOKENS + r: there is room for each row's last, partial tile."""
    row, above = 0, num_rows
    while above - row > 1:
        middle = (row + above) // 2
        if tl.load(start_ptr + middle) // TOKENS + middle <= tile:
            row = middle
        else:
            above = middle
    return row


@triton.jit
def load_keys(
    kv_ptr,
    table_ptr,
    head,
    begin,
    low,
    high,
    MASKED: tl.constexpr,
    TYPE: tl.constexpr,  # type to which e4m3 elements are converted
    D: tl.constexpr,
    NUM_KV: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Load (K, V) [KEYS, D] of one kv head from position ``begin``; if MASKED, zeros outside low .. high -
    1."""
    keys = begin + tl.arange(0, KEYS)
    dims = tl.arange(0, D)
    if MASKED or KV_BLOCK < KEYS:
        inside = (keys >= low) & (keys < high) if MASKED else None
        block = tl.load(table_ptr + keys // KV_BLOCK, mask=inside, other=0 if MASKED else None).to(tl.int64)
        rows = (block * 2 * NUM_KV + head) * KV_BLOCK + keys % KV_BLOCK
        places = kv_ptr + (rows * D)[:, None] + dims[None, :]
    else:
        block = tl.load(table_ptr + begin // KV_BLOCK).to(tl.int64)
        rows = begin % KV_BLOCK + tl.arange(0, KEYS)
        base = kv_ptr + (block * 2 * NUM_KV + head) * (KV_BLOCK * D)
        places = base + rows[:, None] * D + dims[None, :]
    if MASKED:
        inside = ((keys >= low) & (keys < high))[:, None]
        k = tl.load(places, mask=inside, other=0.0)
        v = tl.load(places + NUM_KV * KV_BLOCK * D, mask=inside, other=0.0)
    else:
        k = tl.load(places)
        v = tl.load(places + NUM_KV * KV_BLOCK * D)
    return from_kv_element(k, TYPE), from_kv_element(v, TYPE)


@triton.jit
def _attend(
    q,
    top,
    mass,
    acc,
    kv_ptr,
    table_ptr,
    head,
    begin,
    low,
    high,
    position,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    NUM_KV: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to one tile of keys. ``top``: maximum score as an exponent of two; ``scale`` is positive."""
    k, v = load_keys(kv_ptr, table_ptr, head, begin, low, high, MASKED, q.dtype, D, NUM_KV, KV_BLOCK, KEYS)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        keys = begin + tl.arange(0, KEYS)
        seen = (keys[None, :] <= position[:, None]) & ((keys >= low) & (keys < high))[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    mass = mass * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def _attend_two(
    q,
    top,
    mass,
    acc,
    kv_ptr,
    table_ptr,
    head,
    begin,
    scale,
    D: tl.constexpr,
    NUM_KV: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to two tiles that all tokens see, updating the maximum once."""
    k, v = load_keys(kv_ptr, table_ptr, head, begin, 0, 0, False, q.dtype, D, NUM_KV, KV_BLOCK, KEYS)
    k2, v2 = load_keys(kv_ptr, table_ptr, head, begin + KEYS, 0, 0, False, q.dtype, D, NUM_KV, KV_BLOCK, KEYS)
    first = tl.dot(q, tl.trans(k), input_precision="ieee")
    second = tl.dot(q, tl.trans(k2), input_precision="ieee")
    new_top = tl.maximum(top, tl.max(tl.maximum(first, second), 1) * scale)
    first = tl.exp2(first * scale - new_top[:, None])
    second = tl.exp2(second * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    mass = mass * fade + tl.sum(first + second, 1)
    acc = tl.dot(first.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    acc = tl.dot(second.to(v.dtype), v2, acc, input_precision="ieee")
    return new_top, mass, acc


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr", "start_ptr"],
)
def _prefill_kernel(
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
    sinks_ptr,  # [Nq] float32
    table_ptr,  # [R, table_stride] int32
    context_ptr,  # [R] int32
    start_ptr,  # [R + 1] int32
    out_ptr,  # [T, Nq, D]
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
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long contexts first
    row = _find_row(start_ptr, num_rows, tile, TOKENS)
    start = tl.load(start_ptr + row)
    num_new = tl.load(start_ptr + row + 1) - start
    first = (tile - (start // TOKENS + row)) * TOKENS
    if (first < num_new) & (num_new > 1):
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
        top = tl.load(sinks_ptr + heads, mask=real, other=0.0) * _LOG2E
        mass = tl.full((GROUP * TOKENS,), 1.0, tl.float32)
        acc = tl.zeros((GROUP * TOKENS, D), tl.float32)
        table = table_ptr + row * table_stride
        low = 0
        if WINDOW > 0:
            low = tl.maximum(base - WINDOW + 1, 0)
        high = tl.minimum(context, base + TOKENS)
        begin = low // KEYS * KEYS
        if WINDOW == 0:
            step: tl.constexpr = 2 * KEYS if PAIRS else KEYS
            plain = (base + 1) // step * step
            for at in tl.range(0, plain, step, num_stages=STAGES):
                if PAIRS:
                    top, mass, acc = _attend_two(
                        q, top, mass, acc, kv_ptr, table, head, at, scale, D, NUM_KV, KV_BLOCK, KEYS
                    )
                else:
                    top, mass, acc = _attend(
                        q, top, mass, acc, kv_ptr, table, head, at, 0, 0, position, scale,
                        False, WINDOW, D, NUM_KV, KV_BLOCK, KEYS,
                    )  # fmt: skip
            begin = plain
        for at in tl.range(begin, high, KEYS, num_stages=2):
            top, mass, acc = _attend(
                q, top, mass, acc, kv_ptr, table, head, at, low, high, position, scale,
                True, WINDOW, D, NUM_KV, KV_BLOCK, KEYS,
            )  # fmt: skip
        tl.store(out_ptr + places, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


def prefill(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
    """Writes rows with more than one new token into out [T, Nq, D]; does not write the others."""
    plan, group = cache.plan, cache.group
    meta, shape, rows = plan.meta, plan.shape, plan.meta.context_lens.shape[0]
    padded = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
    tile = tuning_of(q.device).prefill_tile(is_window=group != 0)
    tokens = max(1, tile.rows // padded)
    table = meta.block_tables[group]
    _prefill_kernel[(shape.num_kv_heads, q.shape[0] // tokens + rows)](
        q, kernel_view(cache.kv), sinks, table, meta.context_lens, meta.query_start, out, rows,
        table.stride(0), plan.scale, **plan.sizes, WINDOW=shape.window(group), GROUP=padded, TOKENS=tokens,
        KEYS=tile.keys, PAIRS=tile.pairs, STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
