"""The two halves of an adapter's product for single (token, expert) pairs: ``kernels.py`` for few pairs.

Few pairs seldom share a slot and an expert, so a program takes one pair, without tensor cores, and has all of
its part of the matrix in flight at once. The order of additions differs from that of ``kernels.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.launch import dependent, wait_for_previous
from chorale.kernels.triton.moe.dequant import place_of
from chorale.kernels.triton.moe.sort import OWN, Ends

_SPLITS = 4  # parts of a contraction with x
_DEPTH, _RANKS = 256, 16  # columns and ranks of a tile of ``a``
_OUTPUTS = 8192  # numbers of a tile of ``b``


@triton.jit
def _group_of_pair(slots_ptr, ids_ptr, ranks_ptr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """Return (pair, its group, the rank of its adapter; 0 if it has none)."""
    pair = tl.program_id(0)
    slot = tl.load(slots_ptr + pair // TOP_K)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    group = tl.maximum(slot, 0).to(tl.int64) * EXPERTS + tl.load(ids_ptr + pair)
    return pair.to(tl.int64), group, rank


@triton.jit
def _shrink_pair_kernel(
    x_ptr,  # [*, WIDTH]
    a_ptr,  # [groups, R, K]
    ranks_ptr,  # [slots] int32
    out_ptr,  # [SPLITS, pairs, R] float32
    slots_ptr,  # [T] int32
    ids_ptr,  # [pairs] int64
    place_ptr,  # None; or [pairs] int32: the row of x
    K: tl.constexpr, WIDTH: tl.constexpr, PER_X: tl.constexpr, FRAGMENT: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    pair, group, rank = _group_of_pair(slots_ptr, ids_ptr, ranks_ptr, TOP_K, EXPERTS)
    begin = tl.program_id(1) * BLOCK
    if rank > begin:
        source = pair // PER_X
        if place_ptr is not None:
            source = tl.load(place_ptr + pair).to(tl.int64)
        ranks = begin + tl.arange(0, BLOCK)
        weights = a_ptr + (group * R + ranks)[:, None] * K
        acc = tl.zeros((BLOCK, DEPTH), tl.float32)
        for step in tl.static_range(STEPS):
            columns = (tl.program_id(2) * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
            some = columns < K
            a = tl.load(weights + columns[None, :], mask=(ranks < rank)[:, None] & some[None, :], other=0.0)
            places = columns
            if FRAGMENT:
                places = place_of(columns)
            x = tl.load(x_ptr + source * WIDTH + places, mask=some, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        places = (tl.program_id(2) * tl.num_programs(0) + pair) * R + ranks
        tl.store(out_ptr + places, tl.sum(acc, 1))


@triton.jit
def _expand_pair_kernel(
    s_ptr,  # [SPLITS, pairs, R] float32
    b_ptr,  # [groups, N, R]
    ranks_ptr,  # [slots] int32
    gates_ptr,  # None; or [pairs] float32: factors
    out_ptr,  # [*, N]
    slots_ptr,  # [T] int32
    ids_ptr,  # [pairs] int64
    place_ptr,  # None; or [pairs] int32: the row of out
    N: tl.constexpr, PER_ROW: tl.constexpr,
    ADD: tl.constexpr,  # out +=; otherwise pairs without an adapter get zeros
    R: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    pair, group, rank = _group_of_pair(slots_ptr, ids_ptr, ranks_ptr, TOP_K, EXPERTS)
    if (rank > 0) | (not ADD):
        ranks, columns = tl.arange(0, R), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        some, known = columns < N, ranks < rank
        weights = b_ptr + (group * N + columns)[:, None] * R + ranks[None, :]
        b = tl.load(weights, mask=some[:, None] & known[None, :], other=0.0)
        s = tl.zeros((R,), tl.float32)
        for split in tl.static_range(SPLITS):
            s += tl.load(s_ptr + (split * tl.num_programs(0) + pair) * R + ranks, mask=known, other=0.0)
        y = tl.sum(b.to(tl.float32) * s[None, :], 1)
        target = pair * PER_ROW
        if place_ptr is not None:
            target = tl.load(place_ptr + pair).to(tl.int64)
        if gates_ptr is not None:
            y *= tl.load(gates_ptr + pair)
        outputs = out_ptr + target * N + columns
        if ADD:
            y += tl.load(outputs, mask=some, other=0.0).to(tl.float32)
        tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=some)


def add_pairs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    ends: Ends = OWN,
) -> None:
    """``shrink`` and ``expand`` for the pairs of ids [T, K], at least one; slots [T], ranks [slots]. Without
    ``ends.add``, all pairs are written."""
    (experts, rank, depth), width, columns = a.shape[1:], b.shape[-2], _OUTPUTS // a.shape[-2]
    s = torch.empty(_SPLITS, ids.numel(), rank, dtype=torch.float32, device=x.device)
    common = {"R": rank, "TOP_K": ids.shape[1], "EXPERTS": experts, **dependent(x)}
    _shrink_pair_kernel[(ids.numel(), rank // _RANKS, _SPLITS)](
        x, a, ranks, s, slots, ids, ends.x_place, K=depth, WIDTH=x.shape[1], PER_X=ends.per_x,
        FRAGMENT=ends.fragment, BLOCK=_RANKS, DEPTH=_DEPTH, STEPS=triton.cdiv(depth, _DEPTH * _SPLITS),
        **common,
    )  # fmt: skip
    _expand_pair_kernel[(ids.numel(), triton.cdiv(width, columns))](
        s, b, ranks, ends.gates, out, slots, ids, ends.place, N=width, PER_ROW=ends.per_row, ADD=ends.add,
        COLUMNS=columns, SPLITS=_SPLITS, **common,
    )  # fmt: skip
