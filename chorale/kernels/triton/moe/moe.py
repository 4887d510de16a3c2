"""The expert layer: MXFP4 gate_up with SwiGLU, MXFP4 down, and the weighted sum. No atomics: deterministic.

``moe`` chooses among three forms by device, dtype and (token, chosen expert) pairs per expert: ``gemv.py``,
``grouped.py``, and the form here, for any device and dtype. With few pairs, a tile is one pair and nothing is
sorted. With many, pairs are sorted by expert on the device and a tile is up to 64 pairs of one expert.
Weights, decoded in registers, are the rows of the products, pairs the columns. The kernel that writes inputs
uses the column order of the packed weights (``packing.fragment_columns``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import QkvWeights, Routed
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.launch import is_nvidia
from chorale.kernels.triton.moe.combine import add_parts, some_pairs, swiglu
from chorale.kernels.triton.moe.dequant import column_of, load_tile, place_of
from chorale.kernels.triton.moe.gemv import can_use_gemv, gemv_moe
from chorale.kernels.triton.moe.grouped import can_use_grouped, grouped_moe
from chorale.kernels.triton.moe.packing import COLUMNS, Experts
from chorale.kernels.triton.moe.sort import Addends, Ends, find_tile, numbered, sort_pairs


@triton.jit
def _shuffle_kernel(
    x_ptr,  # [T, H]
    out_ptr,  # [T, width]: x's columns in fragment order, zeros after the last
    H,
    width,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = column_of(places)
    x = tl.load(x_ptr + token * H + columns, mask=columns < H, other=0.0)
    tl.store(out_ptr + token * width + places, x.to(out_ptr.dtype.element_ty), mask=places < width)


@triton.jit
def _pairs_of_tile(
    ids_ptr, order_ptr, offsets_ptr, first_expert, E: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Return (expert, pairs [TOKENS], which of them exist) of a program; expert >= E means no work."""
    tile, lanes = tl.program_id(1), tl.arange(0, TOKENS)
    if SORTED:
        expert, first, last = find_tile(offsets_ptr, tile, E, EXPERTS, TOKENS)
        inside = first + lanes < last
        pairs = tl.load(order_ptr + first + lanes, mask=inside, other=0)
    else:
        expert = numbered(tl.load(ids_ptr + tile).to(tl.int32), first_expert, E)
        inside = lanes == 0
        pairs = tile + lanes
    return expert, pairs, inside


@triton.jit
def _product(
    x_ptr,
    sources,  # [TOKENS]: rows of x
    inside,  # [TOKENS]: which of them exist
    blocks_ptr,
    scales_ptr,
    first_tile,
    row_tiles,
    chunks,
    expert,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply TILES row tiles of one expert by the inputs at ``sources``: [16 TILES, TOKENS] float32."""
    acc = tl.zeros((16 * TILES, 64 if TOKENS == 1 else TOKENS), tl.float32)
    start = (expert.to(tl.int64) * row_tiles + first_tile) * chunks
    places = tl.arange(0, 64)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        at = start + chunk
        weights = load_tile(
            blocks_ptr + at * 128, scales_ptr + at * 32, row_tiles - first_tile, chunks, TILES, BF16, ASM
        )
        rows = x_ptr + sources.to(tl.int64)[None, :] * (chunks * 64)
        x = tl.load(rows + (chunk * 64 + places)[:, None], mask=inside[None, :], other=0.0)
        if TOKENS == 1:
            acc += weights.to(tl.float32) * tl.trans(x).to(tl.float32)
        else:
            acc = tl.dot(weights, x, acc, input_precision="ieee")
    if TOKENS == 1:
        acc = tl.sum(acc, 1)[:, None]
    return acc


@triton.jit(do_not_specialize=["first_expert"])
def _product_kernel(
    x_ptr,  # [*, 64 chunks], shuffled
    blocks_ptr,
    scales_ptr,
    bias_ptr,  # [2, E, I] or [E, H]
    added_ptr,  # None; or [T * K, 2 I]: addends of gates and ups, which alternate (if GATE_UP)
    gates_ptr,  # [T * K] float32: factors of down's results; None for gate_up
    ids_ptr,  # [T * K] int64
    order_ptr,
    offsets_ptr,
    out_ptr,  # [T * K, width]: SwiGLU, shuffled, or down's results, float32
    first_expert,  # None; or the id of this rank's first expert
    rows,  # rows of a matrix: I for gate_up, H for down
    width,
    row_tiles,
    chunks,
    limit,  # None for down
    alpha,
    GATE_UP: tl.constexpr,
    PER_X: tl.constexpr,  # pairs that share a row of x
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    SORTED: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, pairs, inside = _pairs_of_tile(
        ids_ptr, order_ptr, offsets_ptr, first_expert, E, EXPERTS, TOKENS, SORTED
    )
    if expert < E:
        first_tile = tl.program_id(0) * TILES
        acc = _product(
            x_ptr, pairs // PER_X, inside, blocks_ptr, scales_ptr, first_tile, row_tiles, chunks, expert,
            TILES, TOKENS, BF16, ASM, STAGES,
        )  # fmt: skip
        outputs = out_ptr + pairs.to(tl.int64)[None, :] * width
        if GATE_UP:
            both = tl.permute(tl.reshape(acc, (TILES, 2, 8, TOKENS)), (0, 2, 3, 1))
            gate, up = tl.split(tl.reshape(both, (8 * TILES, TOKENS, 2)))
            columns = first_tile * 8 + tl.arange(0, 8 * TILES)
            biases = bias_ptr + expert * rows + columns
            gate += tl.load(biases, mask=columns < rows, other=0.0).to(tl.float32)[:, None]
            up += tl.load(biases + E * rows, mask=columns < rows, other=0.0).to(tl.float32)[:, None]
            if added_ptr is not None:
                added = added_ptr + pairs.to(tl.int64)[None, :] * (2 * rows) + 2 * columns[:, None]
                mask = inside[None, :] & (columns < rows)[:, None]
                gate += tl.load(added, mask=mask, other=0.0).to(tl.float32)
                up += tl.load(added + 1, mask=mask, other=0.0).to(tl.float32)
            result = tl.where((columns < rows)[:, None], swiglu(gate, up, limit, alpha), 0.0)
            outputs += place_of(columns)[:, None]
        else:
            columns = first_tile * 16 + tl.arange(0, 16 * TILES)
            biases = tl.load(bias_ptr + expert * rows + columns, mask=columns < rows, other=0.0)
            result = acc + biases.to(tl.float32)[:, None]
            result *= tl.load(gates_ptr + pairs, mask=inside, other=0.0)[None, :]
            outputs += columns[:, None]
        mask = inside[None, :] & (columns < width)[:, None]
        tl.store(outputs, result.to(out_ptr.dtype.element_ty), mask=mask)


def moe(
    routed: Routed,
    experts: Experts,
    x: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
    *,
    invariant: bool = False,
    added: Addends | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] float32 += sum over the K chosen experts of gate * expert(normed); returns x and the normed x.

    The norm is ``next_qkv``'s, [T, H] in the dtype of its weights. It is None without ``next_qkv``, and up to
    ``tuning.SKINNY_TOKENS`` tokens, where the QKV kernels apply it. ``invariant``: the form does not depend
    on the number of pairs, and there is always a norm. ``added``: what adapters add to the products.
    """
    tokens, hidden = x.shape
    if tokens == 0:
        return x, None
    norm = None
    if next_qkv is not None and (invariant or tokens > tuning.SKINNY_TOKENS):
        norm = Norm(next_qkv.norm, eps, next_qkv.linear.weight.dtype)
    form = form_of(routed, experts, hidden, invariant=invariant)
    if form == "tiles":
        return x, _moe_of_tiles(routed, experts, x, norm, invariant, added)
    if form == "grouped":
        return x, grouped_moe(routed, experts, x, norm, added, invariant=invariant)
    return x, gemv_moe(routed, experts, x, norm, added)


def form_of(
    routed: Routed, experts: Experts, hidden: int, *, invariant: bool = False
) -> Literal["grouped", "streamed", "tiles"]:
    """Returns the form for the pairs. All tiles of "grouped" give the same bits."""
    normed, num_pairs = routed.normed, routed.expert_ids.numel()
    if invariant:
        return "grouped" if can_use_grouped(experts, hidden, None, normed.device) else "tiles"
    is_direct = normed.shape[0] <= tuning.DIRECT_TOKENS
    if not is_direct and can_use_grouped(experts, hidden, num_pairs, normed.device):
        return "grouped"
    return "streamed" if can_use_gemv(normed, num_pairs, experts) else "tiles"


def _moe_of_tiles(
    routed: Routed,
    experts: Experts,
    x: torch.Tensor,
    norm: Norm | None,
    invariant: bool,
    added: Addends | None,
) -> torch.Tensor | None:
    """The form in which a program takes at most 64 pairs of one expert; for any device and dtype."""
    normed, expert_ids, gates = routed
    hidden = x.shape[1]
    (tokens, top_k), num_pairs = expert_ids.shape, expert_ids.numel()
    alone = num_pairs <= tuning.LONE_PAIRS and not invariant
    each = 1 if alone else tuning.tokens_each(num_pairs, experts.total)
    if alone:
        order, offsets, tiles = expert_ids, expert_ids, num_pairs
    else:
        order, offsets = sort_pairs(expert_ids, experts.num_experts, experts.first)
        tiles = min(num_pairs, triton.cdiv(num_pairs, each) + experts.num_experts)
    shuffled = shuffle_inputs(normed, experts)
    width = experts.down.chunks * COLUMNS
    inner = torch.empty(num_pairs, width, dtype=experts.dtype, device=x.device)
    if width > experts.gate_up.row_tiles * 8:
        inner.zero_()  # no kernel writes the last columns, which are multiplied by zero weights
    parts = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
    bf16, tile = experts.dtype == torch.bfloat16, tuning.expert_tile(each)
    common: dict[str, Any] = {
        "E": experts.num_experts, "EXPERTS": triton.next_power_of_2(experts.num_experts), "TOKENS": each,
        "SORTED": not alone, "BF16": bf16, "ASM": bf16 and is_nvidia(x.device),
        "TILES": tile.rows // 16, "STAGES": tile.num_stages, "num_warps": tile.num_warps,
    }  # fmt: skip
    packed = experts.gate_up
    _product_kernel[(triton.cdiv(packed.row_tiles * 16, tile.rows), tiles)](
        shuffled, packed.blocks, packed.scales, experts.gate_up_bias,
        None if added is None else added.gate_up(normed, None, num_pairs), None, expert_ids, order, offsets,
        inner, experts.first, experts.intermediate, width, packed.row_tiles, packed.chunks,
        experts.swiglu_limit, experts.swiglu_alpha, GATE_UP=True, PER_X=top_k, **common,
    )  # fmt: skip
    packed = experts.down
    _product_kernel[(triton.cdiv(packed.row_tiles * 16, tile.rows), tiles)](
        inner, packed.blocks, packed.scales, experts.down_bias, None, gates, expert_ids, order, offsets,
        parts, experts.first, hidden, hidden, packed.row_tiles, packed.chunks, None, None, GATE_UP=False,
        PER_X=1, **common,
    )  # fmt: skip
    if added is not None:
        added.down(inner, parts, Ends(gates=gates, fragment=True))
    return add_parts(parts.view(tokens, top_k, hidden), x, norm, some_pairs(expert_ids, experts))


def shuffle_inputs(normed: torch.Tensor, experts: Experts) -> torch.Tensor:
    """normed [T, H] -> [T, 64 chunks] in the experts' dtype, columns in fragment order, padded with zeros."""
    tokens, hidden = normed.shape
    width = experts.gate_up.chunks * COLUMNS
    shuffled = torch.empty(tokens, width, dtype=experts.dtype, device=normed.device)
    _shuffle_kernel[(tokens, triton.cdiv(width, 1024))](normed, shuffled, hidden, width, BLOCK=1024)
    return shuffled
