"""``DraftOps``: the ops of a draft head in addition to the model's.

The bytes of the weights limit a pass of a few tokens. So products are those of ``linear.py`` and
``skinny.py``, with as few kernels between them as possible. Rows of gate and up alternate: gate 0, up 0, gate
1, ...
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import DraftOps, HeadNorms, LayerCache, PairNorms
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import linear as dense
from chorale.kernels.triton.dense import skinny_fused
from chorale.kernels.triton.dense.linear import (
    Linear,
    chunk_of,
    float32_product,
    load_part,
    load_rows,
    pack_linear,
    product,
    stream_row,
)
from chorale.kernels.triton.dense.norm import in_fours, norm_parts, normed_row
from chorale.kernels.triton.dense.qkv import rotate_and_cache
from chorale.kernels.triton.dense.skinny import parts, whole
from chorale.kernels.triton.dense.skinny_fused import fits
from chorale.kernels.triton.kv_elements import kernel_view, store_pairs
from chorale.kernels.triton.launch import dependent, is_amd, wait_for_previous


@triton.jit
def _pair_kernel(
    embedding_ptr,  # [V, H]
    ids_ptr,  # [T] int64
    states_ptr,  # [T, H] float32
    token_norm_ptr,  # [H] float32
    state_norm_ptr,  # [H] float32
    normed_ptr,  # [T, 2, H]
    residual_ptr,  # [T, H] float32
    eps,
    H,
    KEEPS_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    token, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = in_fours(BLOCK)
    inside = columns < H
    place = normed_ptr + (token * 2 + side) * H + columns
    if side == 0:
        source = embedding_ptr + tl.load(ids_ptr + token) * H + columns
        x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(token_norm_ptr + columns, mask=inside, other=0.0)
        tl.store(place, normed_row(x, norm, eps, H).to(normed_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.load(states_ptr + token * H + columns, mask=inside, other=0.0)
        norm = tl.load(state_norm_ptr + columns, mask=inside, other=0.0)
        normed = normed_row(x, norm, eps, H)
        tl.store(place, normed.to(normed_ptr.dtype.element_ty), mask=inside)
        kept = normed if KEEPS_NORMED else x
        tl.store(residual_ptr + token * H + columns, kept, mask=inside)


@triton.jit
def _gated_row_kernel(
    x_ptr,  # [H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [2 I, H]
    out_ptr,  # [I]
    eps,
    I,
    H: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the result per program
    CHUNK: tl.constexpr,  # at least H / 4
    PDL: tl.constexpr,
):
    """Like ``qkv._one_kernel``: all weights are in flight before the wait, the norm's scale is applied
    last."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < I
    quarters: tl.constexpr = (H + CHUNK - 1) // CHUNK
    gates: tl.tuple = ()
    ups: tl.tuple = ()
    for n in tl.static_range(quarters):
        gates += (load_rows(w_ptr, rows * 2, inside, n * CHUNK, H, CHUNK),)
        ups += (load_rows(w_ptr, rows * 2 + 1, inside, n * CHUNK, H, CHUNK),)
    norm: tl.tuple = ()
    for n in tl.static_range(quarters):
        norm += (load_part(norm_ptr, n * CHUNK, H, CHUNK),)
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    x: tl.tuple = ()
    for n in tl.static_range(quarters):
        x += (load_part(x_ptr, n * CHUNK, H, CHUNK),)
    gate = tl.zeros((ROWS, CHUNK), tl.float32)
    up = tl.zeros((ROWS, CHUNK), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for n in tl.static_range(quarters):
        scaled = (x[n] * norm[n])[None, :]
        gate += gates[n].to(tl.float32) * scaled
        up += ups[n].to(tl.float32) * scaled
        squares += x[n] * x[n]
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)
    g = tl.sum(gate, 1) * scale
    result = g / (1.0 + tl.exp(-g)) * (tl.sum(up, 1) * scale)
    tl.store(out_ptr + rows, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_kernel(
    y_ptr,  # [T, I, 2]
    out_ptr,  # [T, I]
    I,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < I
    places = y_ptr + (token * I + columns) * 2
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + 1, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * I + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _norm_rotate_kernel(
    qkv_ptr,  # [T, Nl, Nq + 2 Nkv, D] float32
    norm_ptr,  # [Nl, Nq + Nkv, D] float32
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [Nl, blocks, 2, Nkv, KV_BLOCK, D]
    eps,
    layer_stride,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    PDL: tl.constexpr,
):
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half: tl.constexpr = D // 2
    pairs = tl.arange(0, half)
    inside, is_normed = heads < NUM_Q + 2 * NUM_KV, heads < NUM_Q + NUM_KV
    norms = norm_ptr + (layer * (NUM_Q + NUM_KV) + heads) * D + pairs[None, :]
    left_norm = tl.load(norms, mask=is_normed, other=0.0)
    right_norm = tl.load(norms + half, mask=is_normed, other=0.0)
    wait_for_previous(PDL)
    row = token * tl.num_programs(2) + layer
    source = qkv_ptr + (row * (NUM_Q + 2 * NUM_KV) + heads) * D + pairs[None, :]
    left = tl.load(source, mask=inside, other=0.0)
    right = tl.load(source + half, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
    left = tl.where(is_normed, left * scale * left_norm, left)
    right = tl.where(is_normed, right * scale * right_norm, right)
    cos = tl.load(rope_ptr + token * D + pairs)[None, :]
    sin = tl.load(rope_ptr + token * D + half + pairs)[None, :]
    store_pairs(
        left, right, cos, sin, tl.load(slots_ptr + token), token, heads, pairs[None, :], inside,
        q_ptr, kv_ptr + layer * layer_stride, NUM_Q, NUM_KV, D, KV_BLOCK,
    )  # fmt: skip


def norm_rope_cache(qkv: torch.Tensor, norms: HeadNorms, eps: float, cache: LayerCache) -> torch.Tensor:
    plan, kv = cache.plan, cache.kv
    shape, tokens = plan.shape, len(qkv)
    q = torch.empty(tokens, shape.num_heads, shape.head_dim, dtype=norms.dtype, device=qkv.device)
    each = tuning.rotate_heads(tokens)
    programs = triton.cdiv(shape.num_heads + 2 * shape.num_kv_heads, each)
    if tokens:
        _norm_rotate_kernel[(tokens, programs, len(kv))](
            qkv, norms.weight, cache.rope, plan.meta.slots[cache.group], q, kernel_view(kv), eps,
            kv.stride(0), **plan.sizes, HEADS=each, **dependent(qkv),
        )  # fmt: skip
    return q


def norm(x: torch.Tensor, norms: torch.Tensor, eps: float) -> torch.Tensor:
    return norm_parts(x, norms, eps, torch.float32)


def linear(x: torch.Tensor, norms: torch.Tensor | None, eps: float, packed: Linear) -> torch.Tensor:
    dtype = packed.weight.dtype
    x = x.to(dtype) if norms is None else norm_parts(x, norms, eps, dtype)
    tokens, rows = x.shape[0], packed.weight.shape[0]
    if 1 < tokens <= tuning.SKINNY_TOKENS:
        zeros = torch.zeros(tokens, rows, dtype=torch.float32, device=x.device)
        return dense.project_add(x, packed, zeros)
    one = tokens == 1
    y = stream_row(x, packed.weight, tuning.STREAM_ROW) if one else float32_product(x, packed.weight)
    return y if packed.bias is None else y.add_(packed.bias)


def join(
    embedding: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor, norms: PairNorms, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, hidden = states.shape
    normed = torch.empty(tokens, 2 * hidden, dtype=norms.dtype, device=states.device)
    x = torch.empty_like(states)
    if tokens:
        _pair_kernel[(tokens, 2)](
            embedding, token_ids, states, norms.token, norms.state, normed, x, eps, hidden,
            KEEPS_NORMED=norms.keeps_normed, BLOCK=triton.next_power_of_2(hidden), num_warps=8,
            **dependent(states),
        )  # fmt: skip
    return normed, x


def qkv_rope_cache(normed: torch.Tensor, packed: Linear, cache: LayerCache) -> torch.Tensor:
    """Like ``qkv.qkv_rope_cache``, for normed input."""
    tokens, weight = normed.shape[0], packed.weight
    tile = tuning.skinny_qkv(tokens)
    if tile is not None and fits(tile, normed, weight) and packed.bias is not None:
        shape, slots = cache.plan.shape, cache.plan.meta.slots[cache.group]
        q = normed.new_empty(tokens, shape.num_heads, shape.head_dim, dtype=weight.dtype)
        skinny_fused.qkv(
            normed, None, packed, 0.0, cache.rope, slots, q, kernel_view(cache.kv),
            cache.plan.sizes, tile,
        )  # fmt: skip
        return q
    if tokens == 1:
        qkv = stream_row(normed, weight, tuning.STREAM_ROW).unsqueeze(0)
    elif 0 < tokens <= tuning.SKINNY_TOKENS:
        qkv = parts(normed, weight)
    else:
        qkv = product(normed, packed)
    return rotate_and_cache(qkv, packed, cache)


def project_add(y: torch.Tensor, packed: Linear, x: torch.Tensor) -> torch.Tensor:
    tokens, depth = y.shape
    tile = tuning.skinny_output(tokens) if depth > tuning.RESIDENT_DEPTH else None
    if tile is not None and fits(tile, y, packed.weight):
        return skinny_fused.project(y.to(packed.weight.dtype), packed, x, tile)
    if tokens == 1 and depth > tuning.RESIDENT_DEPTH and packed.bias is None:
        return stream_row(y.to(packed.weight.dtype), packed.weight, tuning.STREAM_ROW, x)
    if 0 < tokens <= tuning.SKINNY_TOKENS:
        return dense.project_add(y, packed, x)
    return x.add_(product(y.to(packed.weight.dtype), packed))


def gated_silu(x: torch.Tensor, norm: torch.Tensor, packed: Linear, eps: float) -> torch.Tensor:
    weight, tokens = packed.weight, x.shape[0]
    inter = weight.shape[0] // 2
    out = torch.empty(tokens, inter, dtype=weight.dtype, device=x.device)
    fused = tuning.skinny_qkv(tokens) if tokens > 1 else None
    if fused is not None and fits(fused, x, weight):
        skinny_fused.gated(x, norm, weight, out, eps, fused)
    elif tokens == 1:
        tile = tuning.GATED_ROW
        _gated_row_kernel[(triton.cdiv(inter, tile.rows),)](
            x, norm, weight, out, eps, inter, H=x.shape[1], ROWS=tile.rows,
            CHUNK=chunk_of(x.shape[1]), num_warps=tile.num_warps, **dependent(x),
        )  # fmt: skip
    elif tokens > 1:
        normed = norm_parts(x, norm.unsqueeze(0), eps, weight.dtype)
        few = tokens <= tuning.SKINNY_TOKENS and weight.dtype == torch.bfloat16 and not is_amd(x.device)
        both = whole(normed, weight) if few else product(normed, packed)
        block = 1024
        _silu_kernel[(tokens, triton.cdiv(inter, block))](
            both, out, inter, BLOCK=block, num_warps=4, **dependent(x)
        )
    return out


def pack_gated(gate: torch.Tensor, up: torch.Tensor) -> Linear:
    return pack_linear(torch.stack((gate, up), dim=1).flatten(0, 1), None)


TRITON_DRAFT_OPS = DraftOps(
    norm=norm,
    linear=linear,
    join=join,
    qkv_rope_cache=qkv_rope_cache,
    norm_rope_cache=norm_rope_cache,
    project_add=project_add,
    gated_silu=gated_silu,
    pack_gated=pack_gated,
)
