"""First half of attention: norm, QKV, bias, rotary, and k and v into their blocks.

One token takes one kernel. A program computes rows ``i`` and ``i + D/2`` of one head, which rotary rotates
together. The norm's scale is one number, so it is applied after the product, and all weights are in flight
before the program waits for its input. Up to 8 tokens also take one kernel, where ``skinny_fused.py`` can
run. Otherwise a product is followed by a kernel that rotates and writes. The product uses ``skinny.py`` up to
16 tokens and cuBLAS for more. Its input was normed by the previous layer or, in the first layer, by a norm
kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache, QkvWeights
from chorale.kernels.triton import tuning
from chorale.kernels.triton.attention.plan import AttentionPlan
from chorale.kernels.triton.dense import skinny_fused
from chorale.kernels.triton.dense.linear import Linear, chunk_of, load_part, load_rows, product
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.dense.skinny import parts
from chorale.kernels.triton.kv_elements import kernel_view, store_pairs, to_kv_element
from chorale.kernels.triton.launch import dependent, wait_for_previous


@triton.jit
def _store_pair(
    left,
    right,  # [P] float32: dimensions d and d + D/2 of one head, not yet rotated
    cos,
    sin,  # [P]
    slot,
    head,
    pairs,
    q_ptr,
    kv_ptr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """Rotate and store some dimensions of one head."""
    half: tl.constexpr = D // 2
    low = left * cos - right * sin
    high = right * cos + left * sin
    if head < NUM_Q:
        place = q_ptr + head * D + pairs
        tl.store(place, low.to(q_ptr.dtype.element_ty))
        tl.store(place + half, high.to(q_ptr.dtype.element_ty))
    else:
        chunk = (slot // KV_BLOCK) * 2 * NUM_KV + (head - NUM_Q)  # k heads, then v heads, as in the block
        cell = kv_ptr + (chunk * KV_BLOCK + slot % KV_BLOCK) * D + pairs  # its type differs from q's
        tl.store(cell, to_kv_element(low, kv_ptr.dtype.element_ty))
        tl.store(cell + half, to_kv_element(high, kv_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _one_kernel(
    x_ptr,  # [H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [(Nq + 2 Nkv) * D, H]
    b_ptr,  # [(Nq + 2 Nkv) * D]
    rope_ptr,  # [D] float32
    slots_ptr,  # [1] int64
    q_ptr,  # [Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
    eps,
    H: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,  # at least H / 4
    PDL: tl.constexpr,
):
    half: tl.constexpr = D // 2
    per_head: tl.constexpr = half // PAIRS
    head = tl.program_id(0) // per_head
    pairs = (tl.program_id(0) % per_head) * PAIRS + tl.arange(0, PAIRS)
    rows = head * D + pairs
    all_rows = pairs < half
    quarters: tl.constexpr = (H + CHUNK - 1) // CHUNK
    w_left: tl.tuple = ()
    w_right: tl.tuple = ()
    for n in tl.static_range(quarters):
        w_left += (load_rows(w_ptr, rows, all_rows, n * CHUNK, H, CHUNK),)
        w_right += (load_rows(w_ptr, rows + half, all_rows, n * CHUNK, H, CHUNK),)
    bias_left = tl.load(b_ptr + rows).to(tl.float32)
    bias_right = tl.load(b_ptr + rows + half).to(tl.float32)
    norm: tl.tuple = ()
    for n in tl.static_range(quarters):
        norm += (load_part(norm_ptr, n * CHUNK, H, CHUNK),)
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    x: tl.tuple = ()
    for n in tl.static_range(quarters):
        x += (load_part(x_ptr, n * CHUNK, H, CHUNK),)
    turned = head + pairs * 0 < NUM_Q + NUM_KV  # v is not rotated
    cos = tl.load(rope_ptr + pairs, mask=turned, other=1.0)
    sin = tl.load(rope_ptr + pairs + half, mask=turned, other=0.0)
    slot = tl.load(slots_ptr)
    left = tl.zeros((PAIRS, CHUNK), tl.float32)
    right = tl.zeros((PAIRS, CHUNK), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    # A quarter of the columns, for both products and the input's sum of squares.
    for n in tl.static_range(quarters):
        scaled = (x[n] * norm[n])[None, :]
        left += w_left[n].to(tl.float32) * scaled
        right += w_right[n].to(tl.float32) * scaled
        squares += x[n] * x[n]
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)
    left_sum = tl.sum(left, 1) * scale + bias_left
    right_sum = tl.sum(right, 1) * scale + bias_right
    _store_pair(left_sum, right_sum, cos, sin, slot, head, pairs, q_ptr, kv_ptr, NUM_Q, NUM_KV, D, KV_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_kernel(
    qkv_ptr,  # [T, Nq + 2 Nkv, D], or parts of it: [SPLITS, T, ...] float32, before scale and bias
    x_ptr,  # [T, H] float32 (these three if SPLITS)
    b_ptr,  # [(Nq + 2 Nkv) * D]
    eps,
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,  # heads per program
    H: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: qkv is whole
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    SCALED: tl.constexpr,  # the parts are products of x before its norm (if SPLITS)
):
    wait_for_previous(PDL)
    half: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, half)
    inside = (heads < NUM_Q + 2 * NUM_KV)[:, None]
    source = qkv_ptr + (token * (NUM_Q + 2 * NUM_KV) + heads[:, None]) * D + pairs[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        stride = tl.num_programs(0) * (NUM_Q + 2 * NUM_KV) * D
        for split in tl.static_range(1, SPLITS):
            left += tl.load(source + split * stride, mask=inside, other=0.0)
            right += tl.load(source + split * stride + half, mask=inside, other=0.0)
        if SCALED:
            x = tl.load(x_ptr + token * H + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < H, other=0.0)
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        else:
            scale = 1.0
        biases = b_ptr + heads[:, None] * D + pairs[None, :]
        left = left * scale + tl.load(biases, mask=inside, other=0.0).to(tl.float32)
        right = right * scale + tl.load(biases + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + token * D + pairs)[None, :]
    sin = tl.load(rope_ptr + token * D + half + pairs)[None, :]
    slot = tl.load(slots_ptr + token)
    store_pairs(
        left, right, cos, sin, slot, token, heads[:, None], pairs[None, :], inside,
        q_ptr, kv_ptr, NUM_Q, NUM_KV, D, KV_BLOCK,
    )  # fmt: skip


def qkv_rope_cache(
    x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, eps: float, cache: LayerCache
) -> torch.Tensor:
    plan: AttentionPlan = cache.plan
    shape, linear, tokens = plan.shape, weights.linear, x.shape[0]
    tile = skinny_fused.shape_of(x, linear, tuning.compact_qkv, tuning.skinny_qkv)
    if tokens > 1 and tile is None:
        if tokens <= tuning.SKINNY_TOKENS:
            return rotate_and_cache(parts(x, linear.weight, weights.norm), linear, cache, x, eps)
        if normed is None:
            normed = rms_norm(x, weights.norm, eps, linear.weight.dtype)
        return rotate_and_cache(product(normed, linear), linear, cache)
    dim, heads = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty(tokens, shape.num_heads, dim, dtype=linear.weight.dtype, device=x.device)
    places = cache.rope, plan.meta.slots[cache.group], q, kernel_view(cache.kv)
    if tokens == 1 and linear.compact is None:
        row = tuning.QKV_ROW
        pairs = min(row.rows, dim // 2)
        _one_kernel[(heads * (dim // 2 // pairs),)](
            x, weights.norm, linear.weight, linear.bias, *places, eps,
            **plan.sizes, H=x.shape[1], PAIRS=pairs, CHUNK=chunk_of(x.shape[1]),
            num_warps=row.num_warps, **dependent(x),
        )  # fmt: skip
    elif tile is not None and tokens:
        skinny_fused.qkv(x, weights.norm, linear, eps, *places, plan.sizes, tile)
    return q


def rotate_and_cache(
    qkv: torch.Tensor, linear: Linear, cache: LayerCache, x: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """The last part of ``qkv_rope_cache``: ``qkv`` [T, (Nq + 2 Nkv) * D], or its parts without bias, [SPLITS,
    T, ...] float32. ``x``: the parts are products of x before its norm."""
    plan: AttentionPlan = cache.plan
    shape, tokens, hidden = plan.shape, qkv.shape[-2], 1 if x is None else x.shape[1]
    heads = shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty(tokens, shape.num_heads, shape.head_dim, dtype=linear.weight.dtype, device=qkv.device)
    each = tuning.rotate_heads(tokens)
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads, each))](
            qkv, cache.rope if x is None else x, linear.bias, eps, cache.rope, plan.meta.slots[cache.group],
            q, kernel_view(cache.kv), **plan.sizes, HEADS=each, H=hidden,
            SPLITS=len(qkv) if qkv.dim() == 3 else 0, BLOCK=triton.next_power_of_2(hidden),
            SCALED=x is not None, **dependent(qkv),
        )  # fmt: skip
    return q
