"""The ops whose result is a sum over ranks, with the all-reduce in the kernels that follow the products.

The products do not add this rank's split or per-expert parts: the kernel that sends them does. Up to
``SymmetricReducer.is_one_shot`` rows, every rank has the whole x. For more rows, a rank keeps only its own
rows of x and routes only these; every rank has all rows of the norms. The last layer returns all of x.
"""

from __future__ import annotations

import torch

from chorale.kernels.ops import QkvWeights, Routed, RouterWeights
from chorale.kernels.reference.shared_ops import embedded_part
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import Linear, project_row
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.moe import moe as experts_of_one_rank
from chorale.kernels.triton.moe.combine import SomePairs, combine, some_pairs
from chorale.kernels.triton.moe.gemv import gemv_parts
from chorale.kernels.triton.moe.grouped import grouped_parts
from chorale.kernels.triton.moe.moe import form_of
from chorale.kernels.triton.moe.packing import Experts
from chorale.kernels.triton.moe.router import choices, projected, route, route_halves, route_many
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.parallel.rank import Rank


def embed(
    rank: Rank, reducer: SymmetricReducer, embedding: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """``Ops.embed`` for one rank's ids."""
    part = embedded_part(rank, embedding, token_ids)
    x = torch.zeros(part.shape, dtype=torch.float32, device=part.device)
    return reducer.add_norm(part.unsqueeze(0), None, x, None, whole=True).x if len(x) else x


def project_and_route(
    reducer: SymmetricReducer,
    attended: torch.Tensor,
    linear: Linear,
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
) -> tuple[torch.Tensor, Routed]:
    """``Ops.project_and_route`` for one rank's heads; only one rank's ``linear`` has a bias."""
    tokens, top_k, dtype = x.shape[0], weights.top_k, weights.dtype or torch.float32
    if tokens == 1 and linear.compact is None:
        parts, bias = project_row(attended, linear).unsqueeze(0), None
    else:
        parts, bias = projected(attended.to(linear.weight.dtype), linear)
    is_few = tokens * weights.linear.weight.shape[0] <= tuning.FEW_LOGITS
    if tokens and is_few and reducer.is_one_shot(tokens):
        total = reducer.add_norm(parts, bias, x, None).x
        return route(total, weights, eps)
    if tokens == 0:
        return x, Routed(x.to(dtype), *choices(x, 0, top_k))
    norm = Norm(weights.norm, eps, dtype)
    in_halves = weights.linear.halves is not None and reducer.can_share_choices(tokens, top_k)
    reduced = reducer.add_norm(parts, bias, x, norm, low=in_halves, whole=not in_halves)
    assert reduced.normed is not None
    if reduced.low is None:  # every rank has all of x
        ids, gates = choices(x, tokens, top_k)
        route_many(reduced.x, weights, eps, ids, gates)
    else:
        own = reducer.own_rows(tokens)
        ids, gates = choices(x, len(own), top_k)
        route_halves(reduced.normed[own.start : own.stop], reduced.low, weights, ids, gates)
        ids, gates = reducer.share_choices(ids, gates, tokens)
    return x, Routed(reduced.normed, ids, gates)


def moe(
    reducer: SymmetricReducer,
    routed: Routed,
    experts: Experts,
    x: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Ops.moe`` for one rank's columns of the experts, or its whole experts."""
    tokens = x.shape[0]
    if tokens == 0:
        return x, None
    norm = None
    if next_qkv is not None and (tokens > tuning.SKINNY_TOKENS or not reducer.is_one_shot(tokens)):
        norm = Norm(next_qkv.norm, eps, next_qkv.linear.weight.dtype)
    parts, some = _expert_parts(reducer, routed, experts, x)
    reduced = reducer.add_norm(parts, None, x, norm, whole=next_qkv is None, some=some)
    return reduced.x if next_qkv is None else x, reduced.normed


def _expert_parts(
    reducer: SymmetricReducer, routed: Routed, experts: Experts, x: torch.Tensor
) -> tuple[torch.Tensor, SomePairs | None]:
    """Return [S, T, H], whose sum over S is this rank's part; and the pairs that have parts, if not all
    do."""
    form, some = form_of(routed, experts, x.shape[1]), some_pairs(routed.expert_ids, experts)
    if form == "streamed" and (some is None or reducer.is_one_shot(len(x))):
        return gemv_parts(routed, experts).transpose(0, 1), some
    if form == "grouped":  # already in bfloat16, the type that ranks send
        parts = grouped_parts(routed, experts, x.shape[1])
        total = torch.empty(x.shape, dtype=parts[0].dtype, device=x.device)
        combine(*parts, total, some=some is not None, add=False)
        return total.unsqueeze(0), None
    total, _ = experts_of_one_rank.moe(routed, experts, torch.zeros_like(x), None, 0.0)
    return total.unsqueeze(0), None
