"""The expert layer for many pairs per expert: prefill and grouped decode batches. Deterministic, no atomics.

(token, expert) pairs are permuted by expert (``tiles.py``) and their inputs are copied in that order, so that
the copy engine fetches a tile of inputs as one block. ``hopper_kernel.py`` has the two products. An expert's
pairs are cut into wide tiles. The rest, if it fits, becomes the tail of the last wide tile, which avoids
decoding the weights again; otherwise it becomes a narrow tile, a mid tile, or both. The longest tiles come
first and narrow ones last, which balances the multiprocessors. Every tile has its full width: rows without a
pair hold zeros, which cost the tensor cores less power than another expert's pairs (``docs/lab/kernels.md``).
Down's results are rounded to bfloat16, one row per pair; the kernel that sums them in float32 also norms for
the next layer.

``can_use_grouped`` checks the conditions; ``moe.py`` covers all other cases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import Routed
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.launch import dependent, is_hopper, wait_for_previous
from chorale.kernels.triton.moe.combine import combine
from chorale.kernels.triton.moe.dequant import column_of
from chorale.kernels.triton.moe.packing import COLUMNS, Experts
from chorale.kernels.triton.moe.sort import Addends, Ends
from chorale.kernels.triton.moe.tiles import Permutation, permute_pairs


@triton.jit
def _zero_left_out(
    out_ptr, tiles_ptr, tile, places, width, WIDE: tl.constexpr, MID: tl.constexpr, NARROW: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set some columns of a tile's rows without a pair to zero. Does nothing past the end of the list."""
    if tile < tl.load(tiles_ptr):
        entry = tiles_ptr + 4 + tile * 4
        first, last = tl.load(entry + 1), tl.load(entry + 2)
        pairs = last - first
        size = tl.where(pairs > NARROW, MID if MID > 0 else WIDE, NARROW)
        size = tl.where(pairs > (MID if MID > 0 else NARROW), WIDE, size)
        size = tl.where(pairs > WIDE, WIDE + TAIL, size)
        zeros = tl.zeros((BLOCK,), tl.float32).to(out_ptr.dtype.element_ty)
        rows = out_ptr + last.to(tl.int64) * width + places
        for row in range(size - pairs):
            tl.store(rows + row * width, zeros, mask=places < width)


@triton.jit
def column8_of(place):
    """Convert position 32 s + 16 h + 4 t + b in every 64 of an e4m3 contraction to column 16 t + 8 s + 4 h +
    b."""
    return place // 64 * 64 + place // 4 % 4 * 16 + place % 64 // 16 * 4 + place % 4


@triton.jit(do_not_specialize=["T"])
def _gather_kernel(
    x_ptr,  # [T, H]
    place_ptr,  # [T * K] int32
    out_ptr,  # [rows, width]: rows by expert, columns in the order of the contraction, zeros past H
    scale_ptr,  # None; or [rows] float32: the divisor of each row, if out is e4m3
    tiles_ptr,  # [1 + max tiles, 4] int32
    T,
    H,
    width,
    fixed,  # None; or the scale of all rows, if FIXED
    K: tl.constexpr,
    WIDE: tl.constexpr,
    MID: tl.constexpr,
    NARROW: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,  # at least width for e4m3
    FIXED: tl.constexpr,
    SOME: tl.constexpr,  # places may be -1 for experts on other ranks
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if scale_ptr is None:
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        columns = column_of(places)
    else:
        places = tl.arange(0, BLOCK)
        columns = column8_of(places)
    wait_for_previous(PDL)
    if token >= T:
        _zero_left_out(out_ptr, tiles_ptr, token - T, places, width, WIDE, MID, NARROW, TAIL, BLOCK)
    else:
        x = tl.load(x_ptr + token * H + columns, mask=columns < H, other=0.0)
        if scale_ptr is not None:
            x = x.to(tl.float32)
            if FIXED:
                scale = fixed
                x = tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            else:
                largest = tl.max(tl.abs(x), 0)
                scale = tl.where(largest > 0, largest / 448.0, 1.0)
                x = x / scale
        x = x.to(out_ptr.dtype.element_ty)
        for k in tl.static_range(K):
            row = tl.load(place_ptr + token * K + k).to(tl.int64)
            end = width
            if SOME:
                end = tl.where(row >= 0, width, 0)
            tl.store(out_ptr + row * width + places, x, mask=places < end)
            if scale_ptr is not None:
                if SOME:
                    tl.store(scale_ptr + row, scale, mask=row >= 0)
                else:
                    tl.store(scale_ptr + row, scale)


def gather(
    normed: torch.Tensor,
    permuted: Permutation,
    experts: Experts,
    tile: tuning.GroupedTile,
    *,
    fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """normed [T, H] -> [rows, 64 chunks] in the experts' dtype: one row per pair, by expert, and zeros in a
    tile's other rows. ``fp8``: in e4m3; also returns each row's divisor [rows] float32: the checkpoint's
    scale (larger values saturate), or one that maps the row's largest value to 448."""
    (tokens, hidden), device = normed.shape, normed.device
    rows, width = permuted.rows, experts.gate_up.chunks * COLUMNS
    dtype = torch.float8_e4m3fn if fp8 else experts.dtype
    out = torch.empty(rows, width, dtype=dtype, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device) if fp8 else None
    fixed = experts.gate_up_input_scale
    block = triton.next_power_of_2(width) if fp8 else 1024  # a row's largest value takes the whole row
    programs = tokens + permuted.tiles.shape[0] - 1
    _gather_kernel[programs, triton.cdiv(width, block)](
        normed, permuted.place, out, scale, permuted.tiles, tokens, hidden, width,
        (fixed or 1.0) if fp8 else None, K=permuted.place.shape[0] // tokens, WIDE=tile.wide, MID=tile.middle,
        NARROW=tile.narrow, TAIL=tile.tail, BLOCK=block, FIXED=fp8 and fixed is not None,
        SOME=experts.owned is not None, num_warps=8 if fp8 else 4, **dependent(normed),
    )  # fmt: skip
    return out, scale


def can_use_grouped(experts: Experts, hidden: int, num_pairs: int | None, device: torch.device) -> bool:
    """Requires Hopper, bfloat16, sizes that the copy engine can address, and enough pairs per expert (None:
    any number)."""
    return (
        is_hopper(device)
        and experts.dtype == torch.bfloat16
        and (num_pairs is None or num_pairs > tuning.GROUPED_FROM * experts.total)
        and hidden % 16 == 0
    )


def uses_e4m3(experts: Experts, num_pairs: int, *, invariant: bool) -> bool:
    """Returns whether inputs are converted to e4m3: if the experts are packed for that and have many pairs.
    With ``invariant`` the number of pairs does not matter, so that a token's bits do not depend on it."""
    has_many = num_pairs > tuning.E4M3_FROM * experts.total
    return experts.down_largest is not None and (invariant or has_many)


def grouped_moe(
    routed: Routed,
    experts: Experts,
    x: torch.Tensor,
    norm: Norm | None = None,
    added: Addends | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor | None:
    """``moe.moe`` if ``can_use_grouped``: x [T, H] float32 += sum of gate * expert(normed); returns the
    normed x if a ``norm`` is given.
    """
    parts = grouped_parts(routed, experts, x.shape[1], added, invariant=invariant)
    return combine(*parts, x, norm, some=experts.owned is not None)


def grouped_parts(
    routed: Routed,
    experts: Experts,
    hidden: int,
    added: Addends | None = None,
    *,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the inputs of ``combine``: down's results [rows, hidden] by expert, each pair's row, gates.

    Scratch memory for each of the T * K pairs: its input, SwiGLU's result (bfloat16, or e4m3 if
    ``uses_e4m3``) and down's result (bfloat16).
    """
    from chorale.kernels.triton.moe.hopper_kernel import down, gate_up

    normed, expert_ids, gates = routed
    fp8 = uses_e4m3(experts, expert_ids.numel(), invariant=invariant)
    tile = tuning.grouped(expert_ids.numel() / experts.total, experts.total, fp8=fp8)
    permuted = permute_pairs(expert_ids, experts.num_experts, tile, experts.first)
    addends = None if added is None else added.gate_up(normed, permuted.place, permuted.rows)
    inner = gate_up(*gather(normed, permuted, experts, tile, fp8=fp8), permuted.tiles, experts, tile, addends)
    parts = down(inner, permuted.tiles, experts, hidden, tile)
    if added is not None:
        added.down(inner, parts, Ends(x_place=permuted.place, place=permuted.place, fragment=True))
    return parts, permuted.place, gates
