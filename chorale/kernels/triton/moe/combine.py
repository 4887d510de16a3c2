"""The end of the expert layer: SwiGLU in registers, and the sum over a token's experts with the next layer's
norm in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm, in_fours, normed_row, sum_ending
from chorale.kernels.triton.launch import dependent, wait_for_previous
from chorale.kernels.triton.moe.packing import Experts


@triton.jit
def swiglu(gate, up, limit, alpha):
    # Comparisons, because minimum() drops NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def own_columns(columns, pair, pair_ids_ptr, first_expert, num_experts):
    """Return ``columns`` if the pair's expert belongs to this rank, else 0. ``pair_ids_ptr`` None: all
    experts do."""
    if pair_ids_ptr is not None:
        expert = tl.load(pair_ids_ptr + pair).to(tl.int32) - first_expert
        columns = tl.where((expert >= 0) & (expert < num_experts), columns, 0)
    return columns


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _sum_kernel(
    parts_ptr,  # [T, K, H] float32; or [rows, H], by expert
    place_ptr,  # None; or [T * K] int32: the row of each pair's part; -1: no part (if SOME)
    # None; or [T * K / SPLITS] int64: expert ids, if this rank has the parts of only some pairs.
    pair_ids_ptr,
    first_expert,  # the rank's first expert (if pair_ids_ptr), and its number of experts
    num_experts,
    gates_ptr,  # None; or [T * K] float32: factor of each part
    x_ptr,  # [T, H] float32; or of any type, and only written (if not ADD)
    norm_ptr,  # [H] float32 (if NORM, for which BLOCK is at least H)
    normed_ptr,  # [T, H] (if NORM)
    eps,
    H,
    K: tl.constexpr,
    SPLITS: tl.constexpr,  # parts per pair
    SOME: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + in_fours(BLOCK)
    inside = columns < H
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    if ADD:
        x = tl.load(x_ptr + token * H + columns, mask=inside, other=0.0)
    else:
        x = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        if place_ptr is None:
            pair = token * (K // SPLITS) + k // SPLITS
            own = own_columns(H, pair, pair_ids_ptr, first_expert, num_experts)
            x += tl.load(parts_ptr + (token * K + k) * H + columns, mask=columns < own, other=0.0)
        else:
            row = tl.load(place_ptr + token * K + k).to(tl.int64)
            own = H
            if SOME:
                own = tl.where(row >= 0, H, 0)
            part = tl.load(parts_ptr + row * H + columns, mask=columns < own, other=0.0)
            x += part.to(tl.float32) * tl.load(gates_ptr + token * K + k)
    tl.store(x_ptr + token * H + columns, x.to(x_ptr.dtype.element_ty), mask=inside)
    if NORM:
        normed = normed_row(x, norm, eps, H)
        tl.store(normed_ptr + token * H + columns, normed.to(normed_ptr.dtype.element_ty), mask=inside)


class SomePairs(NamedTuple):
    """The (token, expert) pairs of a rank with whole experts."""

    ids: torch.Tensor  # [T, K] int64: expert ids of all pairs
    first_expert: int  # the rank's first expert
    num_experts: int


ALL_PAIRS = (None, None, None)  # arguments if the rank has all pairs


def some_pairs(expert_ids: torch.Tensor, experts: Experts) -> SomePairs | None:
    """Returns this rank's pairs, or None if it has all experts."""
    return None if experts.first is None else SomePairs(expert_ids, experts.first, experts.num_experts)


def add_parts(
    parts: torch.Tensor,
    x: torch.Tensor,
    norm: Norm | None = None,
    some: SomePairs | None = None,
) -> torch.Tensor | None:
    """x [T, H] float32 += the sum of parts [T, K, H] float32 over K, always in this order. Returns the normed
    x [T, H] if a norm is given; a program then computes a whole row. ``some``: the pairs that have parts."""
    tokens, each, hidden = parts.shape
    normed, ending = sum_ending(norm, x)
    block = triton.next_power_of_2(hidden)
    if norm is None:
        block = min(1024, block) if tokens > 8 else 256
    _sum_kernel[tokens, triton.cdiv(hidden, block)](
        parts, None, *(some or ALL_PAIRS), None, x, *ending, hidden, K=each,
        SPLITS=1 if some is None else each // some.ids.shape[1], SOME=False, NORM=norm is not None, ADD=True,
        BLOCK=block,
        num_warps=block // 256 or 1 if norm is None else tuning.ADD_NORM_WARPS, **dependent(x),
    )  # fmt: skip
    return normed


def combine(
    parts: torch.Tensor,
    place: torch.Tensor,
    gates: torch.Tensor,
    x: torch.Tensor,
    norm: Norm | None = None,
    *,
    some: bool = False,
    add: bool = True,
) -> torch.Tensor | None:
    """x [T, H] float32 += the sum of gates [T, K] times parts [rows, H] (by expert). Returns the normed x [T,
    H] if a norm is given; a program then computes a whole row. ``some``: pairs without a part have ``place``
    -1. Without ``add``, x may have any type and is only written."""
    tokens, hidden = x.shape
    normed, ending = sum_ending(norm, x)
    block = 1024 if norm is None else triton.next_power_of_2(hidden)
    _sum_kernel[tokens, triton.cdiv(hidden, block)](
        parts, place, *ALL_PAIRS, gates, x, *ending, hidden, K=gates.shape[1], SPLITS=1, SOME=some,
        NORM=norm is not None, ADD=add, BLOCK=block, num_warps=tuning.COMBINE_WARPS, **dependent(x),
    )  # fmt: skip
    return normed
