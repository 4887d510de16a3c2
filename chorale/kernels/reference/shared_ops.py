"""The reference op set for one of several ranks: the ops of ``ops.py`` on the rank's share, and the
exchanges.

A rank computes its own heads, columns and token ids; every rank has the whole x, with the same bits. Output
projection and expert layer give one addend per rank: the first rank adds its addend to x, the others to
zeros, and the sum over all ranks is the new x. So only the first rank adds biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.ops import Ops, QkvWeights, Routed, RouterWeights
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference.dense.linear import Linear
from chorale.kernels.reference.lora import BaseOps, lora_ops
from chorale.kernels.reference.ops import REFERENCE_OPS, output_projection, route
from chorale.kernels.reference.sampling.shared_sampling import make_shared_sampler
from chorale.parallel.rank import Rank


def shared_ops(rank: Rank) -> Ops:
    """Returns the reference ops of ``rank``."""
    ops = replace(
        REFERENCE_OPS,
        embed=partial(embed, rank),
        project_and_route=partial(project_and_route, rank),
        moe=partial(moe, rank),
        make_sampler=partial(make_shared_sampler, rank),
    )
    base = BaseOps(ops, partial(add_experts, rank), exchange=partial(exchange, rank))
    return replace(ops, lora=lora_ops(base))


def embed(rank: Rank, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """embedding [V of this rank, H], token_ids [T] of the whole vocabulary -> x [T, H]. Exact, because only
    one addend is not 0."""
    return rank.communicator.all_reduce_(embedded_part(rank, embedding, token_ids).float())


def embedded_part(rank: Rank, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return [T, H]: the embeddings of this rank's ids, and zeros for other ids."""
    local = token_ids - rank.share.vocabulary.start
    is_other = (local < 0) | (local >= len(embedding))
    part = F.embedding(local.masked_fill(is_other, 0), embedding)
    return part.masked_fill_(is_other.unsqueeze(1), 0.0)


def addend(rank: Rank, x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor to which this rank adds its result: x on the first rank, zeros on the others."""
    return x if rank.share.is_first else torch.zeros_like(x)


def exchange(rank: Rank, x: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return x plus the results of all ranks, which ``add`` adds to its argument."""
    return rank.communicator.all_reduce_(add(addend(rank, x)))


def project_and_route(
    rank: Rank, attended: torch.Tensor, linear: Linear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    x = exchange(rank, x, partial(output_projection, attended, linear))
    return x, route(x, weights, eps)


def moe(
    rank: Rank, routed: Routed, experts: Any, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
) -> tuple[torch.Tensor, None]:
    return exchange(rank, x, partial(add_experts, rank, routed, experts)), None


def add_experts(rank: Rank, routed: Routed, experts: Any, x: torch.Tensor) -> torch.Tensor:
    """``moe`` of the reference with the rank's experts."""
    own = rank.share.experts
    local = routed.expert_ids - own.start
    # Len(own): the expert is on another rank.
    local = local.masked_fill((local < 0) | (local >= len(own)), len(own))
    return reference_moe.moe(routed._replace(expert_ids=local), experts, x)
