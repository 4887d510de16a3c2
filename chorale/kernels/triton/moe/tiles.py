"""Sorts (token, expert) pairs by expert and cuts them into tiles for the products of ``grouped_moe``.

For few pairs there is one kernel: each of its programs compares some pairs with all others. For many pairs,
one kernel counts and a second kernel sorts. A few programs only write the list of tiles. The order is stable
and does not depend on timing: programs do not communicate, and histograms add integers. Pairs of other ranks'
experts get place -1 and no tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.launch import dependent, wait_for_previous
from chorale.kernels.triton.moe.sort import own_ids

_LISTERS = 4  # programs that write the list of tiles
_GROUP = 4  # blocks of pairs that are counted together


@triton.jit
def _enter(tiles_ptr, place, expert, first, last, exists):
    entry = tiles_ptr + 4 + place * 4
    tl.store(entry, expert, mask=exists)
    tl.store(entry + 1, first, mask=exists)
    tl.store(entry + 2, last, mask=exists)


@triton.jit
def _cut(totals, WIDE: tl.constexpr, MID: tl.constexpr, NARROW: tl.constexpr, TAIL: tl.constexpr):
    """Return each expert's numbers of wide tiles, of other tiles (with a tail, or mid) and of narrow tiles,
    from its number of pairs, totals [EXPERTS] int32."""
    full = totals // WIDE
    rest = totals - full * WIDE
    tails = ((full > 0) & (rest > 0) & (rest <= TAIL)).to(tl.int32)
    wides = tl.where(tails > 0, full - 1, full + (rest > MID + NARROW).to(tl.int32))
    left = tl.where(tails > 0, 0, tl.maximum(totals - wides * WIDE, 0))
    mids = (left > NARROW).to(tl.int32)
    narrows = (left > mids * MID).to(tl.int32)
    others = tails if TAIL > 0 else mids
    return wides, others, narrows


@triton.jit
def _begins(totals, WIDE: tl.constexpr, MID: tl.constexpr, NARROW: tl.constexpr, TAIL: tl.constexpr):
    """Return the first row of each expert's pairs: after the last tile of the previous expert."""
    wides, others, narrows = _cut(totals, WIDE, MID, NARROW, TAIL)
    sizes = wides * WIDE + others * (WIDE + TAIL if TAIL > 0 else MID) + narrows * NARROW
    return tl.cumsum(sizes, 0) - sizes


@triton.jit
def _list_tiles(
    totals,  # [EXPERTS] int32: pairs of each expert
    tiles_ptr,  # [1 + max tiles, 4] int32
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    MID: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    LISTERS: tl.constexpr,
):
    """Write the number of tiles to entry 0, then (expert, first pair, end of pairs) of each, by kind: wide
    tiles with a tail (more than WIDE pairs), wide, mid (at most MID), narrow (at most NARROW).

    An expert's last wide tile may have a tail; then there is no remainder. TAIL or MID is 0. Programs below
    LISTERS share the wide tiles of each expert; an expert has at most one tile of each other kind.
    """
    experts, lister = tl.arange(0, EXPERTS), tl.program_id(0)
    wides, others, narrows = _cut(totals, WIDE, MID, NARROW, TAIL)
    begins = _begins(totals, WIDE, MID, NARROW, TAIL)
    most = WIDE + TAIL if TAIL > 0 else MID  # pairs of the kind before or after the wide tiles
    num_wide, num_other = tl.sum(wides, 0), tl.sum(others, 0)
    wide_at = tl.cumsum(wides, 0) - wides + (num_other if TAIL > 0 else 0)
    for index in range(lister, tl.max(wides, 0), LISTERS):
        first = begins + index * WIDE
        last = tl.minimum(first + WIDE, begins + totals)
        _enter(tiles_ptr, wide_at + index, experts, first, last, index < wides)
    if lister == 0:
        first = begins + wides * WIDE
        place = tl.cumsum(others, 0) - others + (0 if TAIL > 0 else num_wide)
        _enter(tiles_ptr, place, experts, first, tl.minimum(first + most, begins + totals), others > 0)
    if lister == LISTERS - 1:
        first = begins + wides * WIDE + (0 if TAIL > 0 else others * MID)
        place = num_wide + num_other + tl.cumsum(narrows, 0) - narrows
        _enter(tiles_ptr, place, experts, first, begins + totals, narrows > 0)
        tl.store(tiles_ptr, num_wide + num_other + tl.sum(narrows, 0))


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_experts"])
def _permute_few_kernel(
    ids_ptr,  # [num_pairs] int64
    place_ptr,  # [num_pairs] int32: row of each pair; -1: on another rank
    tiles_ptr,  # [1 + max tiles, 4] int32
    num_pairs,
    first_expert,  # None; or the id of this rank's first expert, and its number of experts
    num_experts,
    PAIRS: tl.constexpr,  # at least num_pairs
    PART: tl.constexpr,  # pairs per program
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    MID: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    LISTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    pairs = tl.arange(0, PAIRS)
    inside = pairs < num_pairs
    wait_for_previous(PDL)
    ids = tl.load(ids_ptr + pairs, mask=inside, other=0).to(tl.int32)
    ids, inside = own_ids(ids, inside, first_expert, num_experts)
    totals = tl.histogram(ids, EXPERTS, mask=inside)
    if tl.program_id(0) < LISTERS:
        _list_tiles(totals, tiles_ptr, EXPERTS, WIDE, MID, NARROW, TAIL, LISTERS)
    else:
        part = (tl.program_id(0) - LISTERS) * PART + tl.arange(0, PART)
        own = tl.load(ids_ptr + part, mask=part < num_pairs, other=0).to(tl.int32)
        own, is_own = own_ids(own, part < num_pairs, first_expert, num_experts)
        # Number of smaller keys: of lower experts, or of the same expert's earlier pairs.
        keys = tl.where(inside, ids * PAIRS + pairs, 2**31 - 1)
        before = keys[None, :] < (own * PAIRS + part)[:, None]
        left_out = _begins(totals, WIDE, MID, NARROW, TAIL) - (tl.cumsum(totals, 0) - totals)
        place = tl.sum(before.to(tl.int32), 1) + tl.gather(left_out, own, 0)
        if first_expert is not None:
            place = tl.where(is_own, place, -1)
        tl.store(place_ptr + part, place, mask=part < num_pairs)


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_experts"])
def _count_kernel(
    ids_ptr,  # [num_pairs] int64
    counts_ptr,  # [groups, EXPERTS] int32
    num_pairs,
    first_expert,
    num_experts,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    pairs = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    inside = pairs < num_pairs
    wait_for_previous(PDL)
    ids = tl.load(ids_ptr + pairs, mask=inside, other=0).to(tl.int32)
    ids, inside = own_ids(ids, inside, first_expert, num_experts)
    counts = tl.histogram(ids, EXPERTS, mask=inside)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def _sum_counts(counts_ptr, groups, own_group, EXPERTS: tl.constexpr):
    """Return two [EXPERTS] int32: each expert's pairs in total, and in groups before ``own_group``."""
    experts = tl.arange(0, EXPERTS)[None, :]
    totals = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, groups, 32):
        group = (first + tl.arange(0, 32))[:, None]
        counts = tl.load(counts_ptr + group * EXPERTS + experts, mask=group < groups, other=0)
        totals += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(group < own_group, counts, 0), 0)
    return totals, earlier


@triton.jit(do_not_specialize=["num_pairs", "groups", "first_expert", "num_experts"])
def _permute_many_kernel(
    ids_ptr,  # [num_pairs] int64
    counts_ptr,  # [groups, EXPERTS] int32: pairs of each expert in every GROUP pairs
    place_ptr,  # [num_pairs] int32
    tiles_ptr,  # [1 + max tiles, 4] int32
    num_pairs,
    groups,
    first_expert,
    num_experts,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs per program, a part of a group
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    MID: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    LISTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    if tl.program_id(0) < LISTERS:
        totals, _ = _sum_counts(counts_ptr, groups, 0, EXPERTS)
        _list_tiles(totals, tiles_ptr, EXPERTS, WIDE, MID, NARROW, TAIL, LISTERS)
    else:
        lanes = tl.arange(0, BLOCK)
        begin = (tl.program_id(0) - LISTERS) * BLOCK
        inside = begin + lanes < num_pairs
        own = tl.load(ids_ptr + begin + lanes, mask=inside, other=0).to(tl.int32)
        own, is_own = own_ids(own, inside, first_expert, num_experts)
        pairs = begin // GROUP * GROUP + tl.arange(0, GROUP)
        ids = tl.load(ids_ptr + pairs, mask=pairs < begin, other=0).to(tl.int32)
        ids, is_earlier = own_ids(ids, pairs < begin, first_expert, num_experts)
        totals, earlier = _sum_counts(counts_ptr, groups, begin // GROUP, EXPERTS)
        earlier += tl.histogram(ids, EXPERTS, mask=is_earlier)
        before = (own[:, None] == own[None, :]) & (lanes[:, None] < lanes[None, :])
        if first_expert is not None:
            before &= is_own[:, None]
        begins = _begins(totals, WIDE, MID, NARROW, TAIL)
        place = tl.gather(begins + earlier, own, 0) + tl.sum(before.to(tl.int32), 0)
        if first_expert is not None:
            place = tl.where(is_own, place, -1)
        tl.store(place_ptr + begin + lanes, place, mask=inside)


@dataclass(frozen=True, slots=True)
class Permutation:
    """Pairs in the order of their experts, cut into tiles."""

    place: torch.Tensor  # [T * K] int32: row of each pair; -1: on another rank
    # [1 + max tiles, 4] int32: number of tiles; then expert, first row, end of rows, unused.
    tiles: torch.Tensor
    rows: int  # maximum number of rows


def permute_pairs(
    expert_ids: torch.Tensor, num_experts: int, tile: tuning.GroupedTile, first: int | None = None
) -> Permutation:
    """Sort the pairs of expert_ids [T, K] int64. Stable: an expert's pairs keep their order. ``first``: the
    id of this rank's first expert, if it has only ``num_experts`` whole experts."""
    num_pairs, device = expert_ids.numel(), expert_ids.device
    # The remainder may be a mid and a narrow tile.
    max_tiles = num_pairs // tile.wide + num_experts * (2 if tile.middle else 1)
    place = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(1 + max_tiles, 4, dtype=torch.int32, device=device)
    experts = max(32, triton.next_power_of_2(num_experts))
    rows = num_pairs + min(num_experts, num_pairs) * tile.most_left_out
    common: dict[str, Any] = {
        "EXPERTS": experts, "WIDE": tile.wide, "MID": tile.middle, "NARROW": tile.narrow, "TAIL": tile.tail,
        "LISTERS": _LISTERS, "num_warps": 8, **dependent(expert_ids),
    }  # fmt: skip
    own = (first, None if first is None else num_experts)
    if num_pairs <= tuning.PERMUTE_AT_ONCE:
        pairs = max(512, triton.next_power_of_2(num_pairs))
        part = pairs // tuning.PERMUTE_PROGRAMS if pairs >= 8 * tuning.PERMUTE_PROGRAMS else 8
        grid = (_LISTERS + triton.cdiv(num_pairs, part),)
        _permute_few_kernel[grid](expert_ids, place, tiles, num_pairs, *own, PAIRS=pairs, PART=part, **common)
        return Permutation(place, tiles, rows)
    block = triton.next_power_of_2(triton.cdiv(num_pairs, tuning.PERMUTE_PROGRAMS))
    block = min(256, max(64, block))
    group, programs = _GROUP * block, triton.cdiv(num_pairs, block)
    groups = triton.cdiv(num_pairs, group)
    counts = torch.empty(groups, experts, dtype=torch.int32, device=device)
    _count_kernel[(groups,)](
        expert_ids,
        counts,
        num_pairs,
        *own,
        EXPERTS=experts,
        GROUP=group,
        num_warps=8,
        **dependent(expert_ids),
    )
    _permute_many_kernel[(_LISTERS + programs,)](
        expert_ids, counts, place, tiles, num_pairs, groups, *own, GROUP=group, BLOCK=block, **common
    )
    return Permutation(place, tiles, rows)
