"""The reference ops of ``--batch-invariant``: every token is computed alone.

torch chooses the kernel of a product by its shape, so results depend on the number of rows. Here all shapes
depend on one token and its position only. Slow, but the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from chorale.kernels.ops import (
    AttentionMeta,
    AttentionShape,
    LayerCache,
    Ops,
    QkvWeights,
    Routed,
    RouterWeights,
)
from chorale.kernels.reference import attention as whole
from chorale.kernels.reference.attention import AttentionPlan
from chorale.kernels.reference.dense.rotary import rotate_and_cache


@dataclass(frozen=True, slots=True)
class EachPlan:
    """The plan of a step, which writes KV blocks, and those of its tokens, which read them."""

    step: AttentionPlan
    tokens: list[AttentionPlan]


def plan_each(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> list[AttentionPlan]:
    """Return ``plan_attention`` of each token alone."""
    plans, query_start = [], torch.tensor([0, 1], dtype=torch.int32, device=meta.query_start.device)
    starts = meta.query_start.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        tables = (meta.block_tables[0][row : row + 1], meta.block_tables[1][row : row + 1])
        for token in range(start, end):
            own, length = slice(token, token + 1), meta.context_lens[row : row + 1] - (end - 1 - token)
            slots, positions = (meta.slots[0][own], meta.slots[1][own]), meta.positions[own]
            alone = AttentionMeta(positions, query_start, length, tables, slots, 1, int(length))
            plans.append(whole.plan_attention(alone, shape, block_size))
    return plans


def attention_of_each(
    q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache, plans: list[AttentionPlan]
) -> torch.Tensor:
    """``Ops.attention`` with the plans of ``plan_each``."""
    each = zip(_each(q), plans, strict=True)
    return torch.cat([whole.attention(one, sinks, cache._replace(plan=plan)) for one, plan in each])


def one_by_one(ops: Ops) -> Ops:
    """Returns reference ``ops`` that compute every token alone."""

    def plan_attention(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> EachPlan:
        return EachPlan(ops.plan_attention(meta, shape, block_size), plan_each(meta, shape, block_size))

    def qkv_rope_cache(
        x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, eps: float, cache: LayerCache
    ) -> torch.Tensor:
        norm = weights.norm
        rows = [weights.linear(torch.nn.functional.rms_norm(row, norm.shape, norm, eps)) for row in _each(x)]
        return rotate_and_cache(torch.cat(rows), cache._replace(plan=cache.plan.step))

    def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        return attention_of_each(q, sinks, cache, cache.plan.tokens)

    def project_and_route(
        attended: torch.Tensor, linear: Any, x: torch.Tensor, weights: RouterWeights, eps: float
    ) -> tuple[torch.Tensor, Routed]:
        each = zip(_each(attended), _each(x), strict=True)
        rows = [ops.project_and_route(one, linear, row, weights, eps) for one, row in each]
        routed = zip(*(own for _, own in rows), strict=True)
        return torch.cat([row for row, _ in rows]), Routed(*map(torch.cat, routed))

    def moe(
        routed: Routed, experts: Any, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
    ) -> tuple[torch.Tensor, None]:
        each = zip(map(Routed, *map(_each, routed)), _each(x), strict=True)
        return torch.cat([ops.moe(one, experts, row, next_qkv, eps)[0] for one, row in each]), None

    def lm_head(
        x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: Any, eps: float
    ) -> torch.Tensor:
        return torch.cat([ops.lm_head(x, index, norm, head, eps) for index in logits_index.split(1)])

    return replace(
        ops,
        plan_attention=plan_attention,
        qkv_rope_cache=qkv_rope_cache,
        attention=attention,
        project_and_route=project_and_route,
        moe=moe,
        lm_head=lm_head,
        lora=None,  # products of torch, whose bits depend on the number of tokens
        detail="batch-invariant",
    )


def _each(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies of the rows of x, so that all have the same alignment."""
    return (row.clone() for row in x.split(1))
