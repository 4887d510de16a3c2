"""The expert layer: MXFP4 gate_up with SwiGLU, MXFP4 down, and the weighted sum. No atomics: deterministic.

A slot is a (token, chosen expert) pair. Few slots: a tile is one slot, nothing is sorted. Many: slots are
sorted by expert on the device and a tile is up to 64 slots of one expert. Weights are the rows of the
products (they are decoded in registers), slots the columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.decode import load_tile
from chorale.kernels.triton.experts import Experts
from chorale.kernels.triton.sort import find_tile, sort_slots


@triton.jit
def _multiply(
    acc,  # [ROWS, 64] if TOKENS == 1, else [ROWS, TOKENS]
    low,
    high,  # [ROWS, 64]: columns 0..63 and 64..127 of a weight tile
    x_low,
    x_high,  # [64, TOKENS]
    TOKENS: tl.constexpr,
):
    if TOKENS == 1:
        acc += low.to(tl.float32) * tl.trans(x_low).to(tl.float32)
        acc += high.to(tl.float32) * tl.trans(x_high).to(tl.float32)
    else:
        acc = tl.dot(low, x_low, acc, input_precision="ieee")
        acc = tl.dot(high, x_high, acc, input_precision="ieee")
    return acc


@triton.jit
def _load_input(x_ptr, sources, inside, k, width, BF16: tl.constexpr):
    """Columns k..k+63 of some rows of x [*, width], as [64, TOKENS] in the experts' dtype."""
    depth = k + tl.arange(0, 64)
    places = x_ptr + sources.to(tl.int64)[None, :] * width + depth[:, None]
    x = tl.load(places, mask=inside[None, :] & (depth < width)[:, None], other=0.0)
    return x.to(tl.bfloat16 if BF16 else tl.float32)


@triton.jit
def _slots_of_tile(
    ids_ptr,
    order_ptr,
    offsets_ptr,
    tile,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """(expert, slots [TOKENS], which of them exist)."""
    lanes = tl.arange(0, TOKENS)
    if SORTED:
        expert, first, last = find_tile(offsets_ptr, tile, E, EXPERTS, TOKENS)
        inside = first + lanes < last
        slots = tl.load(order_ptr + first + lanes, mask=inside, other=0)
    else:
        expert = tl.load(ids_ptr + tile).to(tl.int32)
        inside = lanes == 0
        slots = tile + lanes
    return expert, slots, inside


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, H]
    blocks_ptr,
    scales_ptr,
    bias_ptr,  # [2, E, I]
    ids_ptr,  # [T * K] int64
    order_ptr,
    offsets_ptr,
    out_ptr,  # [T * K, I]
    H,
    I,
    row_tiles,
    column_tiles,
    limit,
    alpha,
    K: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SORTED: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    parts: tl.constexpr = 64 // ROWS
    expert, slots, inside = _slots_of_tile(
        ids_ptr, order_ptr, offsets_ptr, tl.program_id(1), E, EXPERTS, TOKENS, SORTED
    )
    if expert < E:
        row_tile = tl.program_id(0) // parts
        rows = (tl.program_id(0) % parts) * ROWS + tl.arange(0, ROWS)  # in the tile
        gate_tile = (expert.to(tl.int64) * row_tiles + row_tile) * column_tiles
        up_tile = gate_tile + tl.cast(E, tl.int64) * row_tiles * column_tiles
        width: tl.constexpr = 64 if TOKENS == 1 else TOKENS
        gate = tl.zeros((ROWS, width), tl.float32)
        up = tl.zeros((ROWS, width), tl.float32)
        for k in tl.range(0, column_tiles, num_stages=STAGES):
            x_low = _load_input(x_ptr, slots // K, inside, k * 128, H, BF16)
            x_high = _load_input(x_ptr, slots // K, inside, k * 128 + 64, H, BF16)
            at = gate_tile + k
            low, high = load_tile(blocks_ptr + at * 4096, scales_ptr + at * 256, rows, ROWS, BF16, ASM)
            gate = _multiply(gate, low, high, x_low, x_high, TOKENS)
            at = up_tile + k
            low, high = load_tile(blocks_ptr + at * 4096, scales_ptr + at * 256, rows, ROWS, BF16, ASM)
            up = _multiply(up, low, high, x_low, x_high, TOKENS)
        if TOKENS == 1:
            gate = tl.sum(gate, 1)[:, None]
            up = tl.sum(up, 1)[:, None]
        columns = row_tile * 64 + rows
        biases = bias_ptr + expert * I + columns
        gate += tl.load(biases, mask=columns < I, other=0.0).to(tl.float32)[:, None]
        up += tl.load(biases + E * I, mask=columns < I, other=0.0).to(tl.float32)[:, None]
        # Comparisons, because minimum() drops NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        inner = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        places = out_ptr + slots.to(tl.int64)[None, :] * I + columns[:, None]
        tl.store(places, inner.to(out_ptr.dtype.element_ty), mask=inside[None, :] & (columns < I)[:, None])


@triton.jit
def _down_kernel(
    inner_ptr,  # [T * K, I]
    blocks_ptr,
    scales_ptr,
    bias_ptr,  # [E, H]
    gates_ptr,  # [T * K] float32
    ids_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,  # [T * K, H] float32
    H,
    I,
    row_tiles,
    column_tiles,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SORTED: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    parts: tl.constexpr = 64 // ROWS
    expert, slots, inside = _slots_of_tile(
        ids_ptr, order_ptr, offsets_ptr, tl.program_id(1), E, EXPERTS, TOKENS, SORTED
    )
    if expert < E:
        row_tile = tl.program_id(0) // parts
        rows = (tl.program_id(0) % parts) * ROWS + tl.arange(0, ROWS)
        tile = (expert.to(tl.int64) * row_tiles + row_tile) * column_tiles
        width: tl.constexpr = 64 if TOKENS == 1 else TOKENS
        acc = tl.zeros((ROWS, width), tl.float32)
        for k in tl.range(0, column_tiles, num_stages=STAGES):
            x_low = _load_input(inner_ptr, slots, inside, k * 128, I, BF16)
            x_high = _load_input(inner_ptr, slots, inside, k * 128 + 64, I, BF16)
            at = tile + k
            low, high = load_tile(blocks_ptr + at * 4096, scales_ptr + at * 256, rows, ROWS, BF16, ASM)
            acc = _multiply(acc, low, high, x_low, x_high, TOKENS)
        if TOKENS == 1:
            acc = tl.sum(acc, 1)[:, None]
        columns = row_tile * 64 + rows
        acc += tl.load(bias_ptr + expert * H + columns, mask=columns < H, other=0.0).to(tl.float32)[:, None]
        acc *= tl.load(gates_ptr + slots, mask=inside, other=0.0)[None, :]
        places = out_ptr + slots.to(tl.int64)[None, :] * H + columns[:, None]
        tl.store(places, acc, mask=inside[None, :] & (columns < H)[:, None])


@triton.jit
def _sum_kernel(
    parts_ptr,  # [T * K, H] float32
    x_ptr,  # [T, H] float32
    H,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + token * H + columns, mask=inside, other=0.0)
    for k in tl.static_range(K):
        x += tl.load(parts_ptr + (token * K + k) * H + columns, mask=inside, other=0.0)
    tl.store(x_ptr + token * H + columns, x, mask=inside)


def moe(
    normed: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor, experts: Experts, x: torch.Tensor
) -> torch.Tensor:
    """x [T, H] float32 += sum over the K chosen experts of gate * expert(normed); returns x."""
    tokens, hidden = x.shape
    top_k, num_slots, inter = expert_ids.shape[1], expert_ids.numel(), experts.intermediate
    if tokens == 0:
        return x
    if tokens > tuning.SMALL_TOKENS:
        normed = normed.to(experts.dtype)  # fewer are rounded as they are loaded
    alone = num_slots <= tuning.LONE_SLOTS
    each = 1 if alone else tuning.tokens_each(num_slots, experts.num_experts)
    if alone:
        order, offsets, tiles = expert_ids, expert_ids, num_slots
    else:
        order, offsets = sort_slots(expert_ids, experts.num_experts)
        tiles = min(num_slots, triton.cdiv(num_slots, each) + experts.num_experts)
    inner = torch.empty(num_slots, inter, dtype=experts.dtype, device=x.device)
    parts = torch.empty(num_slots, hidden, dtype=torch.float32, device=x.device)
    common = _constants(experts, alone, each, x.is_cuda)
    tile = tuning.gate_up(each)
    blocks, scales = experts.gate_up.blocks, experts.gate_up.scales
    _gate_up_kernel[(blocks.shape[2] * (64 // tile.rows), tiles)](
        normed, blocks, scales, experts.gate_up_bias, expert_ids, order, offsets, inner,
        hidden, inter, blocks.shape[2], blocks.shape[3], experts.swiglu_limit, experts.swiglu_alpha,
        K=top_k, ROWS=tile.rows, STAGES=tile.num_stages, num_warps=tile.num_warps, **common,
    )  # fmt: skip
    tile = tuning.down(each)
    blocks, scales = experts.down.blocks, experts.down.scales
    _down_kernel[(blocks.shape[1] * (64 // tile.rows), tiles)](
        inner, blocks, scales, experts.down_bias, gates, expert_ids, order, offsets, parts,
        hidden, inter, blocks.shape[1], blocks.shape[2],
        ROWS=tile.rows, STAGES=tile.num_stages, num_warps=tile.num_warps, **common,
    )  # fmt: skip
    _sum_kernel[(tokens, triton.cdiv(hidden, 1024))](parts, x, hidden, K=top_k, BLOCK=1024)
    return x


def _constants(experts: Experts, alone: bool, each: int, on_gpu: bool) -> dict[str, Any]:
    return {
        "E": experts.num_experts,
        "EXPERTS": triton.next_power_of_2(experts.num_experts),
        "TOKENS": each,
        "SORTED": not alone,
        "BF16": experts.dtype == torch.bfloat16,
        "ASM": on_gpu and torch.version.hip is None,
    }
