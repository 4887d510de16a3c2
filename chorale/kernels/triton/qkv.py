"""First half of attention: norm, QKV, bias, rotary, and k and v into their pages.

Few tokens: one kernel. A program makes rows ``i`` and ``i + D/2`` of one head, which rotary turns together;
the norm's scale is a number per token, so it is applied after the product. Many tokens: norm kernel,
cuBLAS, and a kernel that rotates and writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import QkvWeights
from chorale.kernels.triton import tuning
from chorale.kernels.triton.linear import product
from chorale.kernels.triton.norm import rms_norm

if TYPE_CHECKING:
    from chorale.kernels.triton.attention import Plan

_DOT_ROWS = 16  # the least that the tensor cores take


@triton.jit
def _store_pair(
    left,
    right,  # [P, T] float32: dimensions d and d + D/2 of one head, not yet rotated
    head,
    pairs,
    tokens,
    inside,  # [T] bool
    rope_ptr,
    slots_ptr,
    q_ptr,
    kv_ptr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Rotate (not v) and store one head's part."""
    half: tl.constexpr = D // 2
    where = tokens[None, :] * D + pairs[:, None]
    turned = (inside & (head + tokens * 0 < NUM_Q + NUM_KV))[None, :]
    cos = tl.load(rope_ptr + where, mask=turned, other=1.0)
    sin = tl.load(rope_ptr + where + half, mask=turned, other=0.0)
    low = left * cos - right * sin
    high = right * cos + left * sin
    if head < NUM_Q:
        place = q_ptr + (tokens[None, :].to(tl.int64) * NUM_Q + head) * D + pairs[:, None]
        tl.store(place, low.to(q_ptr.dtype.element_ty), mask=inside[None, :])
        tl.store(place + half, high.to(q_ptr.dtype.element_ty), mask=inside[None, :])
    else:
        slot = tl.load(slots_ptr + tokens, mask=inside, other=0)
        chunk = (slot // PAGE) * 2 * NUM_KV + (head - NUM_Q)  # k heads, then v heads: as in the page
        place = kv_ptr + ((chunk * PAGE + slot % PAGE) * D)[None, :] + pairs[:, None]
        tl.store(place, low.to(kv_ptr.dtype.element_ty), mask=inside[None, :])
        tl.store(place + half, high.to(kv_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _small_kernel(
    x_ptr,  # [T, H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [(Nq + 2 Nkv) * D, H]
    b_ptr,  # [(Nq + 2 Nkv) * D]
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [pages, 2, Nkv, PAGE, D]
    T,
    H,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    parts: tl.constexpr = D // 2 // PAIRS
    head = tl.program_id(0) // parts
    pairs = (tl.program_id(0) % parts) * PAIRS + tl.arange(0, PAIRS)
    rows = head * D + pairs
    depth = tl.arange(0, DEPTH)
    tokens = tl.arange(0, TOKENS)
    inside = tokens < T
    lefts = w_ptr + rows[:, None] * H + depth[None, :]
    rights = lefts + (D // 2) * H
    bias_left = tl.load(b_ptr + rows).to(tl.float32)[:, None]
    bias_right = tl.load(b_ptr + rows + D // 2).to(tl.float32)[:, None]
    if TOKENS == 1:
        sum_left = tl.zeros((PAIRS, DEPTH), tl.float32)
        sum_right = tl.zeros((PAIRS, DEPTH), tl.float32)
        squares = tl.zeros((DEPTH,), tl.float32)
        for k in tl.range(0, H, DEPTH, num_stages=STAGES):
            some = k + depth < H
            wl = tl.load(lefts + k, mask=some[None, :], other=0.0).to(tl.float32)
            wr = tl.load(rights + k, mask=some[None, :], other=0.0).to(tl.float32)
            x = tl.load(x_ptr + k + depth, mask=some, other=0.0)
            normed = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)
            squares += x * x
            sum_left += wl * normed[None, :]
            sum_right += wr * normed[None, :]
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)
        left = tl.sum(sum_left, 1)[:, None] * scale + bias_left
        right = tl.sum(sum_right, 1)[:, None] * scale + bias_right
        _store_pair(
            left,
            right,
            head,
            pairs,
            tokens,
            inside,
            rope_ptr,
            slots_ptr,
            q_ptr,
            kv_ptr,
            NUM_Q,
            NUM_KV,
            D,
            PAGE,
        )
    else:
        left = tl.zeros((PAIRS, TOKENS), tl.float32)
        right = tl.zeros((PAIRS, TOKENS), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for k in tl.range(0, H, DEPTH, num_stages=STAGES):
            some = k + depth < H
            wl = tl.load(lefts + k, mask=some[None, :], other=0.0)
            wr = tl.load(rights + k, mask=some[None, :], other=0.0)
            x = tl.load(
                x_ptr + tokens[None, :] * H + k + depth[:, None],
                mask=some[:, None] & inside[None, :],
                other=0.0,
            )
            squares += tl.sum(x * x, 0)
            x = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)[:, None]
            x = x.to(w_ptr.dtype.element_ty)
            left = tl.dot(wl, x, left, input_precision="ieee")
            right = tl.dot(wr, x, right, input_precision="ieee")
        scale = (1.0 / tl.sqrt(squares / H + eps))[None, :]
        left = left * scale + bias_left
        right = right * scale + bias_right
        _store_pair(
            left,
            right,
            head,
            pairs,
            tokens,
            inside,
            rope_ptr,
            slots_ptr,
            q_ptr,
            kv_ptr,
            NUM_Q,
            NUM_KV,
            D,
            PAGE,
        )


@triton.jit
def _rotate_kernel(
    qkv_ptr,  # [T, Nq + 2 Nkv, D]
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [pages, 2, Nkv, PAGE, D]
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
):
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, half)
    inside = (heads < NUM_Q + 2 * NUM_KV)[:, None]
    source = qkv_ptr + (token * (NUM_Q + 2 * NUM_KV) + heads[:, None]) * D + pairs[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    turned = (heads < NUM_Q + NUM_KV)[:, None]
    cos = tl.where(turned, tl.load(rope_ptr + token * D + pairs)[None, :], 1.0)
    sin = tl.where(turned, tl.load(rope_ptr + token * D + half + pairs)[None, :], 0.0)
    low = left * cos - right * sin
    high = right * cos + left * sin
    query = (heads < NUM_Q)[:, None]
    place = q_ptr + (token * NUM_Q + heads[:, None]) * D + pairs[None, :]
    tl.store(place, low.to(q_ptr.dtype.element_ty), mask=query)
    tl.store(place + half, high.to(q_ptr.dtype.element_ty), mask=query)
    slot = tl.load(slots_ptr + token)
    chunk = (slot // PAGE) * 2 * NUM_KV + (heads[:, None] - NUM_Q)
    place = kv_ptr + (chunk * PAGE + slot % PAGE) * D + pairs[None, :]
    new = inside & (heads >= NUM_Q)[:, None]
    tl.store(place, low.to(kv_ptr.dtype.element_ty), mask=new)
    tl.store(place + half, high.to(kv_ptr.dtype.element_ty), mask=new)


def qkv_rope_cache(
    x: torch.Tensor,
    weights: QkvWeights,
    eps: float,
    rope: torch.Tensor,
    plan: Plan,
    group: int,
    kv: torch.Tensor,
) -> torch.Tensor:
    shape, linear = plan.shape, weights.linear
    tokens, dim = x.shape[0], shape.head_dim
    heads = shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty(tokens, shape.num_heads, dim, dtype=linear.weight.dtype, device=x.device)
    slots = plan.meta.slots[group]
    constants = {
        "NUM_Q": shape.num_heads,
        "NUM_KV": shape.num_kv_heads,
        "D": dim,
        "PAGE": plan.block_size,
    }
    if tokens <= tuning.SMALL_TOKENS and dim // 2 >= _DOT_ROWS:
        tile = tuning.qkv(tokens)
        _small_kernel[(heads * (dim // 2 // tile.rows),)](
            x,
            weights.norm,
            linear.weight,
            linear.bias,
            rope,
            slots,
            q,
            kv,
            tokens,
            x.shape[1],
            eps,
            **constants,
            PAIRS=tile.rows,
            TOKENS=tile.tokens,
            DEPTH=min(tile.depth, triton.next_power_of_2(x.shape[1])),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        return q
    qkv = product(rms_norm(x, weights.norm, eps, linear.weight.dtype), linear)
    _rotate_kernel[(tokens, triton.cdiv(heads, 16))](qkv, rope, slots, q, kv, **constants, HEADS=16)
    return q
