"""Ops whose bits for a token do not depend on the other tokens of a step (``--batch-invariant``).

Each op has one order of operations for all sizes. Dense products have one kernel, which adds a token's terms
in order, without splits; tiles may differ by size. Its result is rounded to the type of the weights, as
cuBLAS does for many tokens. The expert layer always takes the form for many pairs; attention is in
``attention/invariant.py``. Norms and the sum over a token's experts have one program per row in any case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import LayerCache, QkvWeights, Routed, RouterWeights
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import Linear
from chorale.kernels.triton.dense.norm import add_norm, rms_norm
from chorale.kernels.triton.dense.qkv import rotate_and_cache
from chorale.kernels.triton.launch import dependent, tuning_of, wait_for_previous
from chorale.kernels.triton.moe.router import choices, route_many


@triton.jit(do_not_specialize=["T"])
def _product_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], in x's dtype
    b_ptr,  # [N] (if HAS_BIAS)
    out_ptr,  # [T, N]
    T,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same weights run together, so that the weights are read from memory once.
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    inside, present = rows < N, tokens < T
    weights = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    inputs = x_ptr + tokens[:, None] * K + depth[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        # Zeros past K add nothing.
        some = k + depth < K
        w = tl.load(weights + k, mask=inside[:, None] & some[None, :], other=0.0)
        x = tl.load(inputs + k, mask=present[:, None] & some[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    places = out_ptr + tokens[:, None] * N + rows[None, :]
    tl.store(places, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :])


def product(x: torch.Tensor, linear: Linear, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, K] weight^T + bias, summed in float32 -> [T, N] in ``dtype``, or in the weight's."""
    weight, bias, tokens = linear.weight, linear.bias, x.shape[0]
    out = torch.empty(tokens, weight.shape[0], dtype=dtype or weight.dtype, device=x.device)
    if tokens:
        sizes = weight.element_size(), out.element_size()
        tile = tuning_of(x.device).invariant_product(tokens, *sizes, is_head=dtype is not None)
        _product_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(weight.shape[0], tile.rows))](
            x.to(weight.dtype), weight, weight if bias is None else bias, out, tokens, weight.shape[0],
            K=weight.shape[1], HAS_BIAS=bias is not None, ROWS=tile.rows, TOKENS=tile.tokens,
            DEPTH=tile.depth, STAGES=tile.num_stages, num_warps=tile.num_warps, **dependent(x),
        )  # fmt: skip
    return out


def qkv_rope_cache(
    x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, eps: float, cache: LayerCache
) -> torch.Tensor:
    """``Ops.qkv_rope_cache``."""
    if normed is None:
        normed = rms_norm(x, weights.norm, eps, weights.linear.weight.dtype)
    return rotate_and_cache(product(normed, weights.linear), weights.linear, cache)


def project_and_route(
    attended: torch.Tensor, linear: Linear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    """``Ops.project_and_route``."""
    tokens, dtype = x.shape[0], weights.dtype or torch.float32
    ids, gates = choices(x, tokens, weights.top_k)
    if tokens == 0:
        return x, Routed(x.to(dtype), ids, gates)
    normed, _ = add_norm(x, product(attended, linear).unsqueeze(0), None, weights.norm, eps, dtype)
    most = tuning.INVARIANT_ROUTED
    for some in (slice(first, first + most) for first in range(0, tokens, most)):
        route_many(x[some], weights, eps, ids[some], gates[some], slices=tuning.INVARIANT_SLICES)
    return x, Routed(normed, ids, gates)


def lm_head(
    x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: Linear, eps: float
) -> torch.Tensor:
    """``Ops.lm_head``."""
    return product(rms_norm(x, norm, eps, head.weight.dtype, index=logits_index), head, torch.float32)
