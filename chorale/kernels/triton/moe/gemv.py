"""The expert products for few tokens: every warp streams its rows of an expert's weights once.

Only for NVIDIA and bfloat16 (the kernels are in ``gemv_kernel.py``, their loop in ``gemv_ptx.py``); otherwise
``moe.py`` reads the same packed weights.

Up to 16 tokens, the columns are the tokens (those that did not choose the expert are not loaded), and nothing
is sorted. For more tokens, pairs are sorted by expert and a product's columns are pairs of its expert. Tiles
of 16 after an expert's first tile have separate programs, which start before all others: if one program did
them in sequence, it would end last.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from chorale.kernels.ops import Routed
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.launch import dependent, is_nvidia
from chorale.kernels.triton.moe.combine import add_parts, some_pairs
from chorale.kernels.triton.moe.gemv_kernel import _product_kernel
from chorale.kernels.triton.moe.gemv_ptx import Loop, loop_text
from chorale.kernels.triton.moe.packing import COLUMNS, Experts, Matrices
from chorale.kernels.triton.moe.sort import Addends, Ends, sort_pairs


def can_use_gemv(normed: torch.Tensor, num_pairs: int, experts: Experts) -> bool:
    """Returns whether these kernels can run, and experts have few enough pairs."""
    whole = normed.shape[1] % COLUMNS == 0 and experts.intermediate % COLUMNS == 0
    few = num_pairs <= tuning.GEMV_PAIRS_EACH * experts.total or normed.shape[0] <= tuning.DIRECT_TOKENS
    few &= normed.shape[0] <= tuning.GEMV_TOKENS
    return few and whole and is_nvidia(normed.device) and experts.dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class Work:
    """The assignment of work to programs, shared by both products."""

    expert_ids: torch.Tensor  # [T, K] int64
    order: torch.Tensor  # from ``sort_pairs``, if sorted
    offsets: torch.Tensor
    first_expert: int | None  # as in ``Experts``; None if sorted, because the order has only own pairs
    programs: int  # one per expert, or one per pair, of which the first of each expert works
    constants: dict[str, Any]
    mean: float  # pairs per expert


def divide_work(expert_ids: torch.Tensor, experts: Experts) -> Work:
    tokens, num_pairs, num_experts = expert_ids.shape[0], expert_ids.numel(), experts.num_experts
    is_sorted = tokens > tuning.DIRECT_TOKENS
    order, offsets = expert_ids, expert_ids
    if is_sorted:
        order, offsets = sort_pairs(expert_ids, num_experts, experts.first)
    by_pair = not is_sorted and (num_pairs <= num_experts or tokens == 1)
    constants = {
        "K": expert_ids.shape[1],
        "PAIRS": 0 if is_sorted or tokens == 1 else triton.next_power_of_2(max(num_pairs, 64)),
        "BY_PAIR": by_pair,
        "SORTED": is_sorted,
        "EXPERTS": triton.next_power_of_2(num_experts),
    }
    programs = num_pairs if by_pair else num_experts
    first = None if is_sorted else experts.first
    return Work(expert_ids, order, offsets, first, programs, constants, num_pairs / experts.total)


def _multiply(
    x: torch.Tensor,
    experts: Experts,
    work: Work,
    tile: tuning.GemvConfig,
    split: Split,
    out: torch.Tensor,
    *,
    addends: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
) -> None:
    """Without ``gates``, write SwiGLU of each pair [T * K, I], for x [T, H]; ``addends`` [T * K, 2 I], gates
    and ups alternating, are added before it. With ``gates``, write the addends [T, K * splits, H] of each
    token's weighted sum, for x [T * K, I]. x is in the experts' dtype."""
    packed, bias, rest = experts.gate_up, experts.gate_up_bias, None
    limit: float | None = experts.swiglu_limit
    alpha: float | None = experts.swiglu_alpha
    if gates is not None:
        packed, bias, rest, limit, alpha = experts.down, experts.down_bias, split.rest, None, None
    fitted, further, launch = _fitted(tile, packed, split), _further_tiles(work, tile), dependent(x)
    programs = triton.cdiv(packed.row_tiles, fitted.tiles * tile.num_warps), further + work.programs
    _product_kernel[(*programs, split.splits)](
        x, packed.blocks, packed.scales, bias, addends, gates, work.expert_ids, work.order, work.offsets, out,
        work.expert_ids.shape[0], work.first_expert, further, out.shape[-1], experts.num_experts,
        packed.row_tiles, packed.chunks, split.groups, rest, limit, alpha, GATE_UP=gates is None,
        SPLITS=split.splits, **work.constants,
        **constants_of(fitted, wait=launch["PDL"] and gates is not None), **tail_constants(fitted, split),
        **launch,
    )  # fmt: skip


def gemv_moe(
    routed: Routed, experts: Experts, x: torch.Tensor, norm: Norm | None, added: Addends | None = None
) -> torch.Tensor | None:
    """``moe`` if ``can_use_gemv``: adds to x and returns the normed x if a ``norm`` is given."""
    parts = gemv_parts(routed, experts, added)
    return add_parts(parts, x, norm, some_pairs(routed.expert_ids, experts))


def gemv_parts(routed: Routed, experts: Experts, added: Addends | None = None) -> torch.Tensor:
    """Returns the addends of ``gemv_moe``: [T, parts, H] float32. Those of pairs whose experts are on other
    ranks are not written."""
    normed, expert_ids, gates = routed
    tokens, hidden = normed.shape
    work = divide_work(expert_ids, experts)
    inner = torch.empty(expert_ids.numel(), experts.intermediate, dtype=experts.dtype, device=normed.device)
    sizes, chunks = (tokens, work.mean, experts.down.chunks), experts.gate_up.chunks
    normed = normed.to(experts.dtype)
    addends = None if added is None else added.gate_up(normed, None, len(inner))
    tile = tuning.gemv_gate_up(*sizes)
    group = _divisor(chunks, tile.group)
    split = Split(1, group, chunks // group, 0, 0)
    _multiply(normed, experts, work, tile, split, inner, addends=addends)
    tile = tuning.gemv_down(*sizes)
    split = split_of(tile, experts.down.chunks)
    parts_each = expert_ids.shape[1] * split.splits
    parts = torch.empty(tokens, parts_each, hidden, dtype=torch.float32, device=inner.device)
    _multiply(inner, experts, work, tile, split, parts, gates=gates)
    if added is not None:
        ends = Ends(gates=gates, per_row=split.splits)
        added.down(inner, parts.view(-1, hidden), ends)
    return parts


def _further_tiles(work: Work, tile: tuning.GemvConfig) -> int:
    """Returns the largest number of tiles after experts' first tiles that get separate programs. 0 if pairs
    are not sorted, and for tiles of eight pairs, which would be too many (1.5 % slower)."""
    apart = work.constants["SORTED"] and tile.columns > 1
    return work.expert_ids.numel() // (8 * tile.columns) if apart else 0


class Split(NamedTuple):
    """The division of a contraction's chunks into splits."""

    splits: int
    group: int  # chunks that are loaded together
    groups: int  # groups per split
    tail: int  # further chunks, which are loaded at the end
    rest: int  # number of splits with a tail; 0: all


def split_of(tile: tuning.GemvConfig, chunks: int) -> Split:
    """Divide any number of chunks. A single split may have a tail; several splits differ by at most one
    chunk."""
    splits = tile.splits if chunks % tile.splits == 0 or chunks >= 2 * tile.splits else 1
    each, rest = divmod(chunks, splits)
    if splits == 1:
        group = min(tile.group, each)
        return Split(1, group, each // group, each % group, 0)
    group = _divisor(each, tile.group)
    return Split(splits, group, each // group, min(rest, 1), rest)


def _divisor(chunks: int, most: int) -> int:
    """Returns the largest divisor of ``chunks`` that is not above ``most``."""
    return next(n for n in range(min(most, chunks), 0, -1) if chunks % n == 0)


def _fitted(tile: tuning.GemvConfig, packed: Matrices, split: Split) -> tuning.GemvConfig:
    """Return the loop of a program."""
    tiles = min(tile.tiles, 1 << (packed.row_tiles.bit_length() - 1))
    in_flight = min(tile.groups, split.groups)
    return dataclasses.replace(tile, tiles=tiles, group=split.group, groups=in_flight)


def constants_of(tile: tuning.GemvConfig, wait: bool) -> dict[str, Any]:
    loop = Loop(tile.tiles, tile.columns, tile.num_warps, tile.group, tile.groups, wait)
    return {
        "TILES": tile.tiles,
        "COLUMNS": tile.columns,
        "WARPS": tile.num_warps,
        "LOOP": loop_text(loop),
        "CONSTRAINTS": loop.constraints,
        "QUADS": loop.outputs // 4,
        "num_warps": tile.num_warps,
    }


def tail_constants(tile: tuning.GemvConfig, split: Split) -> dict[str, Any]:
    if not split.tail:
        return {"TAIL": 0, "TAIL_LOOP": "", "TAIL_CONSTRAINTS": ""}
    loop = Loop(tile.tiles, tile.columns, tile.num_warps, split.tail, 1, wait=False)
    return {"TAIL": split.tail, "TAIL_LOOP": loop_text(loop), "TAIL_CONSTRAINTS": loop.constraints}
