"""The two halves of an adapter's product: x a^T (``shrink``) and its product with b (``expand``).

Rows are tokens or (token, expert) pairs, sorted by group: a slot, or a slot and an expert. A program has up
to 16 rows of one group, whose number it reads from device memory. Tiles have one shape and a contraction is
always cut at the same places, so a row's bits depend on no other row. Parts of a rank beyond the adapter's
own are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache
from chorale.kernels.triton.kv_elements import from_kv_element, kernel_view, to_kv_element
from chorale.kernels.triton.launch import dependent, wait_for_previous
from chorale.kernels.triton.moe.dequant import place_of
from chorale.kernels.triton.moe.sort import OWN, Ends, find_tile

ROWS = tl.constexpr(16)
SPLITS = 8  # parts of a contraction with x
_DEPTH, _RANKS = 128, 64  # columns of x, and ranks, in a tile of ``a``
_WIDTH = 128  # outputs in a tile of ``b`` of rank 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order of their groups. Those without an adapter come last."""

    order: torch.Tensor  # [rows] int32
    offsets: torch.Tensor  # [groups + 2] int32: where groups begin in the order
    num_slots: int
    experts: int = 1  # groups per slot

    @property
    def tiles(self) -> int:
        """The maximum number of tiles."""
        most: int = len(self.order) // ROWS.value + self.num_slots * self.experts
        return min(len(self.order), most)

    def constants(self) -> dict[str, Any]:
        groups = triton.next_power_of_2(self.num_slots * self.experts)
        return {"SLOTS": self.num_slots, "EXPERTS": self.experts, "GROUPS": groups, "SPLITS": SPLITS}


@triton.jit
def _rows_of_tile(
    order_ptr, offsets_ptr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Return (slot, group, rows [ROWS], which of them exist); slot at least SLOTS: no such tile."""
    group, first, last = find_tile(offsets_ptr, tl.program_id(0), SLOTS * EXPERTS, GROUPS, ROWS)
    lanes = tl.arange(0, ROWS)
    inside = first + lanes < last
    rows = tl.load(order_ptr + first + lanes, mask=inside, other=0)
    return group // EXPERTS, group.to(tl.int64), rows, inside


@triton.jit
def _rank_of(ranks_ptr, slot, part, SLOTS: tl.constexpr):
    """Return the rank of an adapter's part; 0 if there is none."""
    return tl.load(ranks_ptr + part * SLOTS + slot, mask=slot < SLOTS, other=0)


@triton.jit(do_not_specialize=["count"])
def _shrink_kernel(
    x_ptr,  # [*, WIDTH]
    a_ptr,  # [groups, PARTS * R, K]
    ranks_ptr,  # [PARTS, SLOTS] int32
    out_ptr,  # [SPLITS, count, PARTS * R] float32
    order_ptr, offsets_ptr,  # of ``Rows``
    place_ptr,  # None; or [count] int32: the row of x
    count,
    K: tl.constexpr, WIDTH: tl.constexpr, PER_X: tl.constexpr, FRAGMENT: tl.constexpr,
    R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    slot, group, rows, inside = _rows_of_tile(order_ptr, offsets_ptr, SLOTS, EXPERTS, GROUPS)
    part, begin = tl.program_id(1) // (R // BLOCK), tl.program_id(1) % (R // BLOCK) * BLOCK
    rank = _rank_of(ranks_ptr, slot, part, SLOTS)
    if rank > begin:
        split = tl.program_id(2)
        each: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
        first = split * each
        sources = rows // PER_X
        if place_ptr is not None:
            sources = tl.load(place_ptr + rows, mask=inside, other=0)
        ranks, depth = begin + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
        weights = a_ptr + ((group * PARTS + part) * R + ranks)[:, None] * K + depth[None, :]
        inputs = x_ptr + sources.to(tl.int64)[:, None] * WIDTH
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in tl.range(first, tl.minimum(first + each, K), DEPTH, num_stages=STAGES):
            some = (k + depth < K)[None, :]
            a = tl.load(weights + k, mask=(ranks < rank)[:, None] & some, other=0.0)
            places = k + depth
            if FRAGMENT:
                places = place_of(places)
            x = tl.load(inputs + places[None, :], mask=inside[:, None] & some, other=0.0)
            acc = tl.dot(x.to(a.dtype), tl.trans(a), acc, input_precision="ieee")
        places = (split * count + rows).to(tl.int64)[:, None] * (PARTS * R) + (part * R + ranks)[None, :]
        tl.store(out_ptr + places, acc, mask=inside[:, None])


@triton.jit
def _shrunk(
    s_ptr, rows, inside, count, first, rank, R: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the parts of x a^T, [ROWS, R] float32, zeros past the rank."""
    ranks = tl.arange(0, R)
    mask = inside[:, None] & (ranks < rank)[None, :]
    s = tl.zeros((ROWS, R), tl.float32)
    for split in tl.static_range(SPLITS):
        places = (split * count + rows).to(tl.int64)[:, None] * STRIDE + (first + ranks)[None, :]
        s += tl.load(s_ptr + places, mask=mask, other=0.0)
    return s


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    s_ptr,  # [SPLITS, count, R] float32
    b_ptr,  # [groups, N, R]
    bias_ptr,  # None; or [SLOTS, N]
    ranks_ptr,  # [SLOTS] int32
    gates_ptr,  # None; or [count] float32: factors of rows
    out_ptr,  # [*, N]
    order_ptr, offsets_ptr,
    place_ptr,  # None; or [count] int32: the row of out
    count,
    N: tl.constexpr, PER_ROW: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    slot, group, rows, inside = _rows_of_tile(order_ptr, offsets_ptr, SLOTS, EXPERTS, GROUPS)
    rank = _rank_of(ranks_ptr, slot, 0, SLOTS)
    if rank > 0:
        targets = rows.to(tl.int64) * PER_ROW
        if place_ptr is not None:
            targets = tl.load(place_ptr + rows, mask=inside, other=0).to(tl.int64)
        s = _shrunk(s_ptr, rows, inside, count, 0, rank, R, R, SPLITS).to(b_ptr.dtype.element_ty)
        ranks, columns = tl.arange(0, R), tl.arange(0, COLUMNS)
        weights = b_ptr + (group * N + columns)[:, None] * R + ranks[None, :]
        outputs = out_ptr + targets[:, None] * N + columns[None, :]
        begin = tl.program_id(1) * (COLUMNS * LOOP)
        for n in tl.range(begin, tl.minimum(begin + COLUMNS * LOOP, N), COLUMNS, num_stages=STAGES):
            some = n + columns < N
            b = tl.load(weights + n * R, mask=some[:, None] & (ranks < rank)[None, :], other=0.0)
            y = tl.dot(s, tl.trans(b), input_precision="ieee")
            if bias_ptr is not None:
                biases = bias_ptr + slot.to(tl.int64) * N + n + columns
                y += tl.load(biases, mask=some, other=0.0).to(tl.float32)[None, :]
            if gates_ptr is not None:
                y *= tl.load(gates_ptr + rows, mask=inside, other=0.0)[:, None]
            mask = inside[:, None] & some[None, :]
            if ADD:
                y += tl.load(outputs + n, mask=mask, other=0.0).to(tl.float32)
            tl.store(outputs + n, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_kernel(
    s_ptr,  # [SPLITS, count, 3 R] float32: of q, k and v
    b_ptr,  # [SLOTS, (NUM_Q + 2 NUM_KV) * D, R]
    bias_ptr,  # [SLOTS, (NUM_Q + 2 NUM_KV) * D]
    ranks_ptr,  # [3, SLOTS] int32
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64: places in the cache
    q_ptr,  # [T, NUM_Q, D], read and written
    kv_ptr,  # [blocks, 2, NUM_KV, KV_BLOCK, D], read and written
    order_ptr, offsets_ptr, count,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, KV_BLOCK: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotation is linear, so what an adapter adds to q and k is rotated and added to the rotated ones."""
    wait_for_previous(PDL)
    slot, group, rows, inside = _rows_of_tile(order_ptr, offsets_ptr, SLOTS, EXPERTS, GROUPS)
    head = tl.program_id(1)
    part = (head >= NUM_Q).to(tl.int32) + (head >= NUM_Q + NUM_KV).to(tl.int32)
    rank = _rank_of(ranks_ptr, slot, part, SLOTS)
    if rank > 0:
        half: tl.constexpr = D // 2
        pairs = tl.arange(0, half)
        column = group * ((NUM_Q + 2 * NUM_KV) * D) + head * D + pairs
        left, right = tl.zeros((ROWS, half), tl.float32), tl.zeros((ROWS, half), tl.float32)
        for begin in range(0, R, BLOCK):
            s = _shrunk(s_ptr, rows, inside, count, part * R + begin, rank - begin, BLOCK, 3 * R, SPLITS)
            ranks = begin + tl.arange(0, BLOCK)
            weights, known = b_ptr + column[:, None] * R + ranks[None, :], (ranks < rank)[None, :]
            upper = tl.load(weights, mask=known, other=0.0)
            lower = tl.load(weights + half * R, mask=known, other=0.0)
            left = tl.dot(s.to(upper.dtype), tl.trans(upper), left, input_precision="ieee")
            right = tl.dot(s.to(lower.dtype), tl.trans(lower), right, input_precision="ieee")
        left += tl.load(bias_ptr + column).to(tl.float32)[None, :]
        right += tl.load(bias_ptr + column + half).to(tl.float32)[None, :]
        mask = inside[:, None] & (pairs >= 0)[None, :]
        turned = mask & (head + pairs * 0 < NUM_Q + NUM_KV)[None, :]  # v is not rotated
        places = rope_ptr + rows[:, None] * D + pairs[None, :]
        cos = tl.load(places, mask=turned, other=1.0)
        sin = tl.load(places + half, mask=turned, other=0.0)
        low, high = left * cos - right * sin, right * cos + left * sin
        if head < NUM_Q:
            query = q_ptr + (rows.to(tl.int64)[:, None] * NUM_Q + head) * D + pairs[None, :]
            low += tl.load(query, mask=mask, other=0.0).to(tl.float32)
            high += tl.load(query + half, mask=mask, other=0.0).to(tl.float32)
            tl.store(query, low.to(q_ptr.dtype.element_ty), mask=mask)
            tl.store(query + half, high.to(q_ptr.dtype.element_ty), mask=mask)
        else:
            cells = tl.load(slots_ptr + rows, mask=inside, other=0)[:, None]
            chunk = (cells // KV_BLOCK) * 2 * NUM_KV + (head - NUM_Q)
            cell = kv_ptr + (chunk * KV_BLOCK + cells % KV_BLOCK) * D + pairs[None, :]
            low += from_kv_element(tl.load(cell, mask=mask, other=0), tl.float32).to(tl.float32)
            high += from_kv_element(tl.load(cell + half, mask=mask, other=0), tl.float32).to(tl.float32)
            tl.store(cell, to_kv_element(low, kv_ptr.dtype.element_ty), mask=mask)
            tl.store(cell + half, to_kv_element(high, kv_ptr.dtype.element_ty), mask=mask)


def shrink(
    x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: Rows, ends: Ends = OWN
) -> torch.Tensor:
    """x [*, width] times a [slots, (E,) PARTS * R, K] -> the parts of the product, [SPLITS, rows, PARTS * R]
    float32. ``ranks`` [PARTS, slots]."""
    count, parts, rank = len(rows.order), ranks.shape[0], a.shape[-2] // ranks.shape[0]
    out = torch.empty(SPLITS, count, parts * rank, dtype=torch.float32, device=x.device)
    block = min(rank, _RANKS)
    if count:
        _shrink_kernel[(rows.tiles, parts * rank // block, SPLITS)](
            x, a, ranks, out, rows.order, rows.offsets, ends.x_place, count, K=a.shape[-1], WIDTH=x.shape[1],
            PER_X=ends.per_x, FRAGMENT=ends.fragment, R=rank, PARTS=parts, BLOCK=block, DEPTH=_DEPTH,
            STAGES=4 if block <= 16 else 3, **rows.constants(), num_warps=2, **dependent(x),
        )  # fmt: skip
    return out


def _warps(rank: int) -> int:
    """Return the warps in whose registers the rows' results of ``shrink`` fit."""
    return 2 if rank <= 32 else 4 if rank <= 64 else 8


def expand(
    s: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    ends: Ends = OWN,
) -> None:
    """Write what ``shrink`` found, times b [slots, (E,) N, R], to out [*, N], or add it. Rows without an
    adapter are left alone. ``bias`` [slots, N], ``ranks`` [slots]."""
    count, width, rank = len(rows.order), *b.shape[-2:]
    columns = max(16, _WIDTH * 16 // rank)
    blocks = triton.cdiv(width, columns)
    loop = 1 if rows.tiles * blocks < 2048 else 12  # about 16 programs per multiprocessor
    if count:
        _expand_kernel[(rows.tiles, triton.cdiv(blocks, loop))](
            s, b, bias, ranks, ends.gates, out, rows.order, rows.offsets, ends.place, count, N=width,
            PER_ROW=ends.per_row, ADD=ends.add, R=rank, COLUMNS=columns, LOOP=loop, STAGES=4,
            **rows.constants(), num_warps=_warps(rank), **dependent(out),
        )  # fmt: skip


def expand_rotated(
    s: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    ranks: torch.Tensor,
    rows: Rows,
    q: torch.Tensor,
    cache: LayerCache,
) -> None:
    """Add what ``shrink`` found for q, k and v, rotated, to q [T, Nq, D] and to the cache."""
    sizes, slots = cache.plan.sizes, cache.plan.meta.slots[cache.group]
    if len(rows.order):
        _rotate_kernel[(rows.tiles, sizes["NUM_Q"] + 2 * sizes["NUM_KV"])](
            s, b, bias, ranks, cache.rope, slots, q, kernel_view(cache.kv), rows.order, rows.offsets,
            len(rows.order), **sizes, R=b.shape[-1], BLOCK=min(b.shape[-1], _RANKS), **rows.constants(),
            num_warps=2, **dependent(q),
        )  # fmt: skip
