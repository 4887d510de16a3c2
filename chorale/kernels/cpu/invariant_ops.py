"""The CPU ops of ``--batch-invariant``, on one or several ranks: equal bits in every batch and on any number
of ranks.

Sums over heads and over columns of experts are computed in parts (``FixedSums``), each of which belongs to
one rank, and added as a binary tree. A rank has a whole subtree, so it sends one sum, as without this
option. All ranks get the logits of the whole vocabulary, and sample like a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chorale.kernels.cpu.attention import attention
from chorale.kernels.cpu.experts import CpuExperts
from chorale.kernels.cpu.linear import CpuLinear
from chorale.kernels.cpu.ops import CpuRouter, cpu_ops, lm_head, route
from chorale.kernels.ops import ExpertTensors, LayerCache, Ops, Precision, QkvWeights, Routed, RouterWeights
from chorale.kernels.reference.lora import BaseOps, lora_ops
from chorale.kernels.reference.one_by_one import attention_of_each
from chorale.kernels.reference.sampling.shared_sampling import gather_logits
from chorale.kernels.reference.shared_ops import embed
from chorale.parallel.rank import Rank
from chorale.parallel.shares import FixedSums, cut

TOKENS_AT_ONCE = 256  # whose addends of all parts are in memory


def invariant_ops(precision: Precision, fixed: FixedSums, rank: Rank | None) -> Ops:
    """Return the ops of ``rank``; None: the only one. ``library()`` must be available."""
    ops = cpu_ops(precision, fixed=True)

    def pack_output(weight: torch.Tensor, bias: torch.Tensor | None) -> list[CpuLinear]:
        parts = cut(weight.shape[1], fixed.heads, 1, "heads")
        return [
            CpuLinear(weight[:, part.start : part.stop], None if part.start else bias, precision, fixed=True)
            for part in parts
        ]

    def pack_experts(tensors: ExpertTensors) -> CpuExperts:
        blocks, dense = tensors.down_blocks, tensors.down
        columns = blocks.shape[2] * 32 if blocks is not None else 0 if dense is None else dense.shape[1]
        parts = cut(columns, fixed.columns, fixed.chunk, "columns of the experts")
        return CpuExperts(tensors, precision, [part.stop for part in parts])

    ops = replace(
        ops,
        attention=attend,
        project_and_route=partial(project_and_route, rank),
        moe=partial(moe, rank),
        pack_output=pack_output,
        pack_experts=pack_experts,
        detail=f"{ops.detail}, batch-invariant",
    )
    lora = lora_ops(BaseOps(ops, add_experts, router_logits, linear, partial(exchange, rank)))
    if rank is None:
        return replace(ops, lora=lora)

    def whole(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the function that gives the logits of all ranks."""
        return lambda *given: gather_logits(rank, own(*given), fixed.vocab_size)

    return replace(
        ops,
        embed=partial(embed, rank),
        lm_head=whole(lm_head),
        lora=replace(lora, lm_head=whole(lora.lm_head)),
        has_whole_logits=True,
    )


def attend(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """``Ops.attention``. The library does not support e4m3, so each of those tokens is computed alone."""
    if cache.kv.dtype == torch.float8_e4m3fn:
        return attention_of_each(q, sinks, cache, cache.plan.of_each_token)
    return attention(q, sinks, cache)


def project_and_route(
    rank: Rank | None,
    attended: torch.Tensor,
    output: list[CpuLinear],
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
) -> tuple[torch.Tensor, Routed]:
    inputs = attended.split([linear.columns for linear in output], dim=1)
    parts = (linear(each) for linear, each in zip(output, inputs, strict=True))
    x = x.add_(total(rank, tree_sum(parts)))
    return x, route(x, weights, eps)


def moe(
    rank: Rank | None,
    routed: Routed,
    experts: CpuExperts,
    x: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
) -> tuple[torch.Tensor, None]:
    return exchange(rank, x, partial(add_experts, routed, experts)), None


def add_experts(routed: Routed, experts: Any, x: torch.Tensor) -> torch.Tensor:
    """Add the rank's part of the sum over the chosen experts to x."""
    some = zip(*(each.split(TOKENS_AT_ONCE) for each in routed), strict=True)
    return x.add_(torch.cat([tree_sum(experts.parts(*each).unbind(0)) for each in some]))


def exchange(rank: Rank | None, x: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Add to x the sums of all ranks, which ``add`` adds to its argument."""
    return x.add_(total(rank, add(torch.zeros_like(x))))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *norm: Any) -> torch.Tensor:
    return CpuLinear(weight, bias, "exact", fixed=True)(x, *norm)


def router_logits(router: CpuRouter, normed: torch.Tensor) -> torch.Tensor:
    return linear(normed, router.weight, router.bias)


def total(rank: Rank | None, own: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, with the same bits on each."""
    return own if rank is None else tree_sum(rank.communicator.all_gather(own).unbind(0))


def tree_sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add neighbours in pairs, then these sums in pairs, and so on. The number of parts is a power of two."""
    sums: list[torch.Tensor] = []
    for count, part in enumerate(parts, 1):
        whole = part
        for _ in range((count & -count).bit_length() - 1):  # as many pairs end with this part
            whole = sums.pop() + whole
        sums.append(whole)
    (found,) = sums
    return found
