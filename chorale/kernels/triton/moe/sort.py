"""Sorts (token, expert) pairs, called pairs, by expert for the grouped products.

A rank with whole experts passes the id of its ``first`` expert: pairs of other ranks' experts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.launch import dependent, wait_for_previous


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a product reads and writes its rows. ``None``: row i is row i of the tensor."""

    per_x: int = 1  # rows that share a row of x
    x_place: torch.Tensor | None = None  # [rows] int32: each row's row of x
    fragment: bool = False  # x's columns are in fragment order
    place: torch.Tensor | None = None  # [rows] int32: each row's row of the output
    per_row: int = 1  # rows of the output for each row, of which the first is written
    gates: torch.Tensor | None = None  # [rows] float32: factors of the outputs
    add: bool = True  # to the output; otherwise it is written


OWN = Ends()


class Addends(Protocol):
    """What LoRA adapters add to the products of a layer's experts."""

    def gate_up(self, normed: torch.Tensor, place: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        """normed [T, H] -> addends of gate_up, [num_rows, 2 I] in the adapters' dtype. A pair's row is
        ``place[pair]``, or its number; the rows of no pair are undefined."""
        ...

    def down(self, inner: torch.Tensor, parts: torch.Tensor, ends: Ends) -> None:
        """Add to ``parts`` [*, H], down's results. inner [*, width]: SwiGLU."""
        ...


@triton.jit
def own_ids(ids, inside, first_expert, num_experts):
    """Return (ids relative to this rank's first expert, 0 for others; whether they are ``inside`` and belong
    to this rank). ``first_expert`` None: this rank has all experts."""
    if first_expert is not None:
        ids -= first_expert
        inside = inside & (ids >= 0) & (ids < num_experts)
        ids = tl.where(inside, ids, 0)
    return ids, inside


@triton.jit
def numbered(ids, first_expert, E):
    """Returns ids relative to this rank's first expert; E for other ranks' experts."""
    if first_expert is not None:
        ids -= first_expert
        ids = tl.where((ids >= 0) & (ids < E), ids, E)
    return ids


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _rank_kernel(
    ids_ptr,  # [num_pairs] int64
    order_ptr,  # [num_pairs] int32
    offsets_ptr,  # [E + 1] int32
    num_pairs,
    first_expert,
    E,
    PAIRS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sorts some pairs and counts for some experts by comparing with all ids. Stable."""
    part = tl.program_id(0) * PART + tl.arange(0, PART)
    pairs = tl.arange(0, PAIRS)
    wait_for_previous(PDL)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=2**30).to(tl.int32)[None, :]
    own = tl.load(ids_ptr + part, mask=part < num_pairs, other=0).to(tl.int32)[:, None]
    ids, own = numbered(ids, first_expert, E), numbered(own, first_expert, E)
    before = (ids < own) | ((ids == own) & (pairs[None, :] < part[:, None]))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), part, mask=part < num_pairs)
    tl.store(offsets_ptr + part, tl.sum((ids < part[:, None]).to(tl.int32), 1), mask=part <= E)


def sort_pairs(
    expert_ids: torch.Tensor, num_experts: int, first: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_ids [T, K] int64 -> (order [T * K] int32: pairs by expert, offsets [E + 1] int32 into it).

    With ``first``, the E experts begin with this id, and the order ends with the last of their pairs.
    """
    ids = expert_ids.reshape(-1)
    if ids.shape[0] > tuning.RANK_LIMIT:
        if first is not None:
            ids = ids - first
            ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
        sorted_ids, order = torch.sort(ids, stable=True)
        bounds = torch.arange(num_experts + 1, device=ids.device)
        return order.int(), torch.searchsorted(sorted_ids, bounds, out_int32=True)
    order = torch.empty(ids.shape[0], dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    pairs, each = max(32, triton.next_power_of_2(ids.shape[0])), 16
    grid = (triton.cdiv(max(ids.shape[0], num_experts + 1), each),)
    _rank_kernel[grid](
        ids, order, offsets, ids.shape[0], first, num_experts, PAIRS=pairs, PART=each, **dependent(ids)
    )
    return order, offsets


@triton.jit
def find_tile(offsets_ptr, tile, E: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return (expert, first and end index in the order) of a tile of TOKENS pairs; expert >= E: no such tile.

    Each expert has ceil(count / TOKENS) tiles; tiles are ordered by expert.
    """
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    stops = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    tiles = (stops - begins + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = experts == expert
    before = tl.sum(tl.where(mine, ends - tiles, 0), 0)
    first = tl.sum(tl.where(mine, begins, 0), 0) + (tile - before) * TOKENS
    last = tl.sum(tl.where(mine, stops, 0), 0)
    return expert, first, last
