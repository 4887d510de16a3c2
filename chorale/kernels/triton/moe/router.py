"""Output projection and residual, then norm, router, top-k and softmax over the chosen.

Few tokens: a program computes some experts' logits of one token, and the last of a token's programs to finish
chooses the experts. Many tokens: addition to the residual stream and norm are one kernel (``norm.add_norm``);
then a program takes some tokens, all experts and a part of the hidden size; again the last program to finish
adds the parts (always in the same order) and chooses. The product takes three tf32 passes, which is as exact
as float32, because a rounded logit can choose another expert. Weights that were bfloat16, as in published
checkpoints, take two passes in bfloat16, with inputs split into two halves. For a large chunk in bfloat16,
inputs and weights are split into two bfloat16 halves each, and cuBLAS multiplies them (except low by low:
2^-17).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import Routed, RouterWeights
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import Linear, float32_product, product, project_add
from chorale.kernels.triton.dense.norm import add_norm, in_fours
from chorale.kernels.triton.dense.skinny import parts
from chorale.kernels.triton.dense.skinny_fused import project, shape_of
from chorale.kernels.triton.launch import dependent, is_nvidia, tuning_of, wait_for_previous


@dataclass(frozen=True, slots=True)
class Router:
    """logits = normed weight^T + bias."""

    weight: torch.Tensor  # [E, H] float32, contiguous
    bias: torch.Tensor  # [E] float32
    # [2 E, H] bfloat16: the rounded weight, then the rounding error. None: experts are not in bfloat16.
    halves: torch.Tensor | None
    is_bfloat16: bool  # there is no rounding error
    arrivals: torch.Tensor  # [MOST_ARRIVALS] int32, zeros between kernels: finished programs of each tile


def pack_router(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> Router:
    """Pack weight [E, H] and bias [E] float32; ``dtype``: type of the experts' products."""
    weight, halves, is_bfloat16 = weight.contiguous(), None, False
    if dtype == torch.bfloat16:
        high = weight.to(dtype)
        low = (weight - high.float()).to(dtype)
        halves, is_bfloat16 = torch.cat((high, low)), weight.is_meta or not bool(low.any())
    arrivals = torch.zeros(tuning.MOST_ARRIVALS, dtype=torch.int32, device=weight.device)
    return Router(weight, bias.contiguous(), halves, is_bfloat16, arrivals)


@triton.jit
def _keys(logits, experts, EXPERTS: tl.constexpr):
    """Return integers in the order of the logits; of equal logits the first expert's is largest. One
    reduction finds the best logit and its expert. NaN counts as 0."""
    bits = tl.where(logits == logits, logits + 0.0, 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (EXPERTS - 1 - experts).to(tl.int64)


@triton.jit
def _logits_of(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def choose(logits, token, ids_ptr, gates_ptr, E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr):
    """Store the K largest of logits [EXPERTS] float32, -inf past E (of equal ones the first), and their
    softmax."""
    width: tl.constexpr = triton.next_power_of_2(K)
    places = tl.arange(0, width)
    best = tl.full((width,), -(2**63), tl.int64)
    # A row with NaN gets any existing experts, with NaN gates.
    broken = tl.sum((logits != logits).to(tl.int32), 0) > 0
    keys = _keys(logits, tl.arange(0, EXPERTS), EXPERTS)
    for k in tl.static_range(K):
        most = tl.max(keys, 0)
        best = tl.where(places == k, most, best)
        keys = tl.where(keys == most, -(2**63), keys)
    ids = tl.minimum(EXPERTS - 1 - (best & 0xFFFFFFFF), E - 1)
    values = tl.where(places < K, _logits_of(best), -float("inf"))
    mass = tl.exp(values - tl.max(values, 0))
    gates = tl.where(broken, float("nan"), mass / tl.sum(mass, 0))
    tl.store(ids_ptr + token * K + places, ids, mask=places < K)
    tl.store(gates_ptr + token * K + places, gates, mask=places < K)


@triton.jit
def _choose_all(
    logits,
    tokens,
    inside,
    ids_ptr,
    gates_ptr,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """``choose`` for logits [TOKENS, EXPERTS]."""
    width: tl.constexpr = triton.next_power_of_2(K)
    places = tl.arange(0, width)[None, :]
    best = tl.full((TOKENS, width), -(2**63), tl.int64)
    broken = tl.sum((logits != logits).to(tl.int32), 1) > 0
    keys = _keys(logits, tl.arange(0, EXPERTS)[None, :], EXPERTS)
    for k in tl.static_range(K):
        most = tl.max(keys, 1)[:, None]
        best = tl.where(places == k, most, best)
        keys = tl.where(keys == most, -(2**63), keys)
    ids = tl.minimum(EXPERTS - 1 - (best & 0xFFFFFFFF), E - 1)
    values = tl.where(places < K, _logits_of(best), -float("inf"))
    mass = tl.exp(values - tl.max(values, 1)[:, None])
    gates = tl.where(broken[:, None], float("nan"), mass / tl.sum(mass, 1)[:, None])
    mask = inside[:, None] & (places < K)
    tl.store(ids_ptr + tokens[:, None] * K + places, ids, mask=mask)
    tl.store(gates_ptr + tokens[:, None] * K + places, gates, mask=mask)


@triton.jit
def _few_kernel(
    x_ptr,  # [T, H] float32
    y_ptr,  # [T, H], added to x (if ADD)
    sum_ptr,  # [T, H] float32: the sum (if ADD). Not x, which other programs still read
    norm_ptr,  # [H] float32
    w_ptr,  # [E, H] float32
    b_ptr,  # [E] float32
    normed_ptr,  # [T, H]
    logits_ptr,  # [T, E] float32
    arrivals_ptr,  # [MOST_ARRIVALS] int32, zeros between steps
    ids_ptr,  # [T, K] int64
    gates_ptr,  # [T, K] float32
    eps,
    H,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,  # experts per program
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    mine = tl.program_id(0) * EACH + tl.arange(0, EACH)
    depth = in_fours(BLOCK)
    inside = depth < H
    norm = tl.load(norm_ptr + depth, mask=inside, other=0.0)
    w = tl.load(
        w_ptr + mine[:, None] * H + depth[None, :], mask=(mine < E)[:, None] & inside[None, :], other=0.0
    )
    bias = tl.load(b_ptr + mine, mask=mine < E, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * H + depth, mask=inside, other=0.0)
    if ADD:
        x += tl.load(y_ptr + token * H + depth, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)) * norm
    if tl.program_id(0) == 0:
        if ADD:
            tl.store(sum_ptr + token * H + depth, x, mask=inside)
        tl.store(normed_ptr + token * H + depth, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(logits_ptr + token * E + mine, tl.sum(w * normed[None, :], 1) + bias, mask=mine < E)
    tl.debug_barrier()  # all threads must have written their logits before the program counts as finished
    if tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        experts = tl.arange(0, EXPERTS)
        # Read from L2, because other multiprocessors wrote them.
        places = logits_ptr + token * E + experts
        logits = tl.load(places, mask=experts < E, other=-float("inf"), cache_modifier=".cg")
        choose(logits, token, ids_ptr, gates_ptr, E, K, EXPERTS)
        tl.store(arrivals_ptr + token, 0)


@triton.jit(do_not_specialize=["T"])
def _many_kernel(
    x_ptr,  # [T, H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [E, H] float32 or bfloat16
    b_ptr,  # [E] float32
    logits_ptr,  # [SLICES, T, E] float32: partial sums without the norm's scale
    squares_ptr,  # [SLICES, T] float32
    arrivals_ptr,  # [MOST_ARRIVALS] int32, zeros between steps
    ids_ptr,  # [T, K] int64
    gates_ptr,  # [T, K] float32
    T,
    eps,
    H,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,  # parts of H, one program each
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    tokens = tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    depth = tl.arange(0, DEPTH)
    inside, real = tokens < T, experts < E
    rows = x_ptr + tokens[:, None] * H + depth[None, :]
    weights = w_ptr + experts[None, :] * H + depth[:, None]
    logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    each = tl.cdiv(tl.cdiv(H, DEPTH), SLICES) * DEPTH
    wait_for_previous(PDL)
    for k in tl.range(part * each, tl.minimum((part + 1) * each, H), DEPTH, num_stages=STAGES):
        some = k + depth < H
        x = tl.load(rows + k, mask=inside[:, None] & some[None, :], other=0.0)
        squares += tl.sum(x * x, 1)
        x = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)[None, :]
        w = tl.load(weights + k, mask=some[:, None] & real[None, :], other=0.0)
        if w.dtype == tl.bfloat16 and PRECISION != "ieee":
            high = x.to(tl.bfloat16)
            low = (x - high.to(tl.float32)).to(tl.bfloat16)
            logits = tl.dot(high, w, logits)
            logits = tl.dot(low, w, logits)
        else:
            logits = tl.dot(x, w.to(tl.float32), logits, input_precision=PRECISION)
    places = tokens[:, None] * E + experts[None, :]
    mask = inside[:, None] & real[None, :]
    last = True
    if SLICES > 1:
        tl.store(logits_ptr + part.to(tl.int64) * T * E + places, logits, mask=mask)
        tl.store(squares_ptr + part * T + tokens, squares, mask=inside)
        tl.debug_barrier()  # all threads must have written their parts before the program counts as finished
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SLICES - 1
    if last:
        if SLICES > 1:
            logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
            squares = tl.zeros((TOKENS,), tl.float32)
            # Always in this order; from L2, because other multiprocessors wrote them.
            for other in tl.static_range(SLICES):
                some_squares = squares_ptr + other * T + tokens
                squares += tl.load(some_squares, mask=inside, other=0.0, cache_modifier=".cg")
                some_logits = logits_ptr + tl.cast(other, tl.int64) * T * E + places
                logits += tl.load(some_logits, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
        scale = 1.0 / tl.sqrt(squares / H + eps)
        bias = tl.load(b_ptr + experts, mask=real, other=0.0)
        logits = tl.where(real[None, :], logits * scale[:, None] + bias[None, :], -float("inf"))
        _choose_all(logits, tokens, inside, ids_ptr, gates_ptr, E, K, EXPERTS, TOKENS)


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    both_ptr,  # [T, 2 E] float32: high half times the weights' high half, and times their low half
    low_ptr,  # [T, E] float32: low half times high half
    b_ptr,  # [E] float32
    ids_ptr,
    gates_ptr,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    inside, real = tokens < T, (experts < E)[None, :]
    mask = inside[:, None] & real
    both = both_ptr + tokens[:, None] * (2 * E) + experts[None, :]
    logits = tl.load(low_ptr + tokens[:, None] * E + experts[None, :], mask=mask, other=0.0)
    logits += tl.load(both + E, mask=mask, other=0.0)
    logits += tl.load(both, mask=mask, other=0.0)
    logits += tl.load(b_ptr + experts, mask=experts < E, other=0.0)[None, :]
    logits = tl.where(real, logits, -float("inf"))
    _choose_all(logits, tokens, inside, ids_ptr, gates_ptr, E, K, EXPERTS, TOKENS)


def project_and_route(
    attended: torch.Tensor, linear: Linear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    """attended [T, Nq * D], x [T, H] float32 -> (new x, its norm and experts). The norm is rounded to
    ``weights.dtype``, the type of the experts' products. May overwrite x.
    """
    tokens = x.shape[0]
    is_few = tokens * weights.linear.weight.shape[0] <= tuning.FEW_LOGITS
    if tokens == 0:
        return route(x, weights, eps)
    if is_few and tokens <= tuning.SKINNY_TOKENS:
        return route(project_add(attended, linear, x), weights, eps)
    if is_few:
        return route(x, weights, eps, product(attended.to(linear.weight.dtype), linear).unsqueeze(0))
    return route(x, weights, eps, *projected(attended.to(linear.weight.dtype), linear))


def route(
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
    added: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Routed]:
    """``project_and_route`` for the sum of x, added [S, T, H] and bias [H], or for a complete x."""
    tokens, dtype = x.shape[0], weights.dtype or torch.float32
    ids, gates = choices(x, tokens, weights.top_k)
    if tokens == 0:
        return x, Routed(x.to(dtype), ids, gates)
    if tokens * weights.linear.weight.shape[0] <= tuning.FEW_LOGITS:
        return _route_few(x, None if added is None else added[0], weights, eps, ids, gates)
    in_halves = weights.linear.halves is not None
    in_halves &= tokens >= tuning.route_in_halves_from(weights.linear.weight.shape[0])
    added = x.new_empty(0, *x.shape) if added is None else added
    normed, low = add_norm(x, added, bias, weights.norm, eps, dtype, with_low=in_halves)
    if low is None:
        route_many(x, weights, eps, ids, gates)
    else:
        route_halves(normed, low, weights, ids, gates)
    return x, Routed(normed, ids, gates)


def choices(x: torch.Tensor, rows: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate memory for chosen experts and gates."""
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    return ids, torch.empty(rows, top_k, dtype=torch.float32, device=x.device)


def projected(attended: torch.Tensor, linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (parts [SPLITS, T, H] of the product, the bias that is not added yet)."""
    tile = shape_of(attended, linear, tuning.compact_output)
    if tile is not None:
        return project(attended, linear, None, tile).unsqueeze(0), None
    if 1 < attended.shape[0] <= tuning.SKINNY_TOKENS:
        return parts(attended, linear.weight), linear.bias
    return product(attended, linear).unsqueeze(0), None


def _route_few(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weights: RouterWeights,
    eps: float,
    ids: torch.Tensor,
    gates: torch.Tensor,
) -> tuple[torch.Tensor, Routed]:
    """Route few tokens. Returns x + y [T, H], and its norm and experts."""
    linear, (tokens, hidden) = weights.linear, x.shape
    num_experts = linear.weight.shape[0]
    each = tuning.experts_each(tokens, num_experts)
    normed = torch.empty_like(x, dtype=weights.dtype or torch.float32)
    logits = torch.empty(tokens, num_experts, dtype=torch.float32, device=x.device)
    total = x if y is None else torch.empty_like(x)
    _few_kernel[(triton.cdiv(num_experts, each), tokens)](
        x, x if y is None else y, total, weights.norm, linear.weight, linear.bias, normed, logits,
        linear.arrivals, ids, gates, eps, hidden, E=num_experts, K=weights.top_k,
        EXPERTS=triton.next_power_of_2(num_experts), EACH=each, ADD=y is not None,
        BLOCK=triton.next_power_of_2(hidden), num_warps=8, **dependent(x),
    )  # fmt: skip
    return total, Routed(normed, ids, gates)


def route_many(
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
    ids: torch.Tensor,
    gates: torch.Tensor,
    *,
    slices: int | None = None,
) -> None:
    """Route many tokens. ``slices``: parts of the contraction, with the tile of the fewest tokens, instead of
    a choice by the number of tokens."""
    linear, (tokens, hidden) = weights.linear, x.shape
    num_experts = linear.weight.shape[0]
    arch = tuning_of(x.device)
    tile = arch.route(tokens if slices is None else 1)
    tiles = triton.cdiv(tokens, tile.tokens)
    steps = triton.cdiv(hidden, tile.depth)
    each = triton.cdiv(steps, slices or arch.route_slices(tiles))
    slices = triton.cdiv(steps, each)  # every slice has work
    partial = torch.empty(slices * tokens * (num_experts + 1), dtype=torch.float32, device=x.device)
    weight = linear.weight
    if linear.is_bfloat16:
        weight = linear.halves[:num_experts]
    _many_kernel[(tiles, slices)](
        x, weights.norm, weight, linear.bias, partial, partial[slices * tokens * num_experts :],
        linear.arrivals, ids, gates, tokens, eps, hidden,
        E=num_experts, K=weights.top_k, EXPERTS=triton.next_power_of_2(num_experts),
        TOKENS=tile.tokens, DEPTH=tile.depth, SLICES=slices, STAGES=tile.num_stages,
        PRECISION="tf32x3" if is_nvidia(x.device) else "ieee", num_warps=tile.num_warps, **dependent(x),
    )  # fmt: skip


def route_halves(
    high: torch.Tensor, low: torch.Tensor, weights: RouterWeights, ids: torch.Tensor, gates: torch.Tensor
) -> None:
    """Route many tokens. high, low [T, H] bfloat16: the rounded normed input, and the rounding error."""
    linear, tokens = weights.linear, high.shape[0]
    num_experts = linear.weight.shape[0]
    _choose_kernel[(triton.cdiv(tokens, 16),)](
        float32_product(high, linear.halves), float32_product(low, linear.halves[:num_experts]),
        linear.bias, ids, gates, tokens,
        E=num_experts, K=weights.top_k, EXPERTS=triton.next_power_of_2(num_experts), TOKENS=16,
        **dependent(high),
    )  # fmt: skip
