"""Norm, router, top-k and softmax over the chosen.

Few tokens: one kernel, a program a token. Many: norm kernel, cuBLAS in float32 (a rounded logit can choose
another expert), and the choice. ``normed`` is float32: the expert layer rounds it to what it computes in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import RouterWeights
from chorale.kernels.triton import tuning
from chorale.kernels.triton.norm import rms_norm


@triton.jit
def _choose(logits, token, ids_ptr, gates_ptr, E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr):
    """logits [EXPERTS] float32, -inf past E: the K largest (of equals the first) and their softmax."""
    experts = tl.arange(0, EXPERTS)
    width: tl.constexpr = triton.next_power_of_2(K)
    places = tl.arange(0, width)
    values = tl.full((width,), -float("inf"), tl.float32)
    ids = tl.zeros((width,), tl.int32)
    # NaN has no order: such a row takes any experts that exist, and its gates are NaN.
    broken = tl.sum((logits != logits).to(tl.int32), 0) > 0
    logits = tl.where(logits == logits, logits, 0.0)
    for k in tl.static_range(K):
        best = tl.max(logits, 0)
        expert = tl.minimum(tl.min(tl.where(logits == best, experts, EXPERTS), 0), E - 1)
        value = tl.sum(tl.where(experts == expert, logits, 0.0), 0)
        values = tl.where(places == k, value, values)
        ids = tl.where(places == k, expert, ids)
        logits = tl.where(experts == expert, -float("inf"), logits)
    mass = tl.exp(values - tl.max(values, 0))
    gates = tl.where(broken, float("nan"), mass / tl.sum(mass, 0))
    tl.store(ids_ptr + token * K + places, ids.to(tl.int64), mask=places < K)
    tl.store(gates_ptr + token * K + places, gates, mask=places < K)


@triton.jit
def _route_kernel(
    x_ptr,  # [T, H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [E, H] float32
    b_ptr,  # [E] float32
    normed_ptr,  # [T, H] float32
    ids_ptr,  # [T, K] int64
    gates_ptr,  # [T, K] float32
    eps,
    H,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    depth = tl.arange(0, DEPTH)
    real = experts < E
    products = tl.zeros((EXPERTS, DEPTH), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    for k in tl.range(0, H, DEPTH, num_stages=3):
        some = k + depth < H
        x = tl.load(x_ptr + token * H + k + depth, mask=some, other=0.0)
        squares += x * x
        x = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)
        w = tl.load(
            w_ptr + experts[:, None] * H + k + depth[None, :], mask=real[:, None] & some[None, :], other=0.0
        )
        products += w.to(tl.float32) * x[None, :]
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)
    for k in range(0, H, DEPTH):
        some = k + depth < H
        x = tl.load(x_ptr + token * H + k + depth, mask=some, other=0.0) * scale
        x = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)
        tl.store(normed_ptr + token * H + k + depth, x, mask=some)
    logits = tl.sum(products, 1) * scale + tl.load(b_ptr + experts, mask=real, other=0.0).to(tl.float32)
    logits = tl.where(real, logits, -float("inf"))
    _choose(logits, token, ids_ptr, gates_ptr, E, K, EXPERTS)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [T, E] float32
    ids_ptr,
    gates_ptr,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * E + experts, mask=experts < E, other=-float("inf"))
    _choose(logits, token, ids_ptr, gates_ptr, E, K, EXPERTS)


def route(
    x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H] float32 -> (normed [T, H] float32, expert_ids [T, K] int64, gates [T, K] float32)."""
    tokens, hidden = x.shape
    linear, top_k = weights.linear, weights.top_k
    num_experts = linear.weight.shape[0]
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    gates = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    sizes = {"E": num_experts, "K": top_k, "EXPERTS": triton.next_power_of_2(num_experts)}
    if 0 < tokens <= tuning.SMALL_TOKENS:
        normed = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
        _route_kernel[(tokens,)](
            x,
            weights.norm,
            linear.weight,
            linear.bias,
            normed,
            ids,
            gates,
            eps,
            hidden,
            **sizes,
            DEPTH=128,
            num_warps=8,
        )
        return normed, ids, gates
    normed = rms_norm(x, weights.norm, eps, torch.float32)
    logits = torch.addmm(linear.bias, normed, linear.weight.t())
    _choose_kernel[(tokens,)](logits, ids, gates, **sizes, num_warps=1)
    return normed, ids, gates
