"""The Triton op set for one of several ranks.

As in ``kernels/reference/shared_ops.py``, each rank adds its addend to x or to zeros, and the sum over ranks
is the new x. ``over_peers`` uses Chorale's kernels (``reduce``) for the sums and for the exchanges of
sampling. Steps with adapters take the sums of the communicator.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from chorale.kernels.ops import ExpertTensors, Ops, QkvWeights, Routed, RouterWeights, Sample, StepSizes
from chorale.kernels.reference.shared_ops import addend, embed
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import Linear, product, project_add
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.launch import is_amd
from chorale.kernels.triton.lora.ops import lora_ops
from chorale.kernels.triton.moe import moe as experts_of_one_rank
from chorale.kernels.triton.moe import packing
from chorale.kernels.triton.moe.packing import Experts, Owned
from chorale.kernels.triton.moe.router import route
from chorale.kernels.triton.moe.sort import Addends
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.reduce import ops as reduce_ops
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.kernels.triton.sampling.sample import make_sampler as sampler_of_one_rank
from chorale.kernels.triton.sampling.shared_sample import SharedSample
from chorale.parallel.rank import Rank
from chorale.parallel.shares import Share

logger = logging.getLogger(__name__)
LEAST_HIDDEN = 256  # minimum columns of x for the all-reduce kernels: eight for each thread of a warp


def shared_ops(rank: Rank) -> Ops:
    """Returns the Triton ops of ``rank``."""
    ops = replace(
        TRITON_OPS,
        embed=partial(embed, rank),
        project_and_route=partial(project_and_route, rank),
        moe=partial(moe, rank),
        pack_experts=partial(pack_experts, rank),
        make_sampler=partial(make_sampler, rank),
        over_peers=partial(over_peers, rank),
    )
    sums = replace(ops, project_and_route=partial(sum_and_route, rank), moe=partial(sum_experts, rank))
    return replace(ops, lora=lora_ops(sums, addend=partial(addend, rank)))


def over_peers(rank: Rank, sizes: StepSizes, device: torch.device) -> Ops | None:
    """``Ops.over_peers``."""
    size, ops = rank.share.size, shared_ops(rank)
    if sizes.hidden % 8 or sizes.hidden < LEAST_HIDDEN:
        return None
    if is_amd(device):
        if rank.share.is_first:
            logger.warning("ranks exchange through RCCL: Chorale's all-reduce is written for NVIDIA GPUs")
        return None
    few = min(sizes.tokens, tuning.one_shot_rows(size))
    layout = Layout(size, sizes.hidden, sizes.tokens, few, sizes.dtype)
    memory = rank.communicator.peer_memory(layout.num_bytes, device)
    if memory is None:
        return None
    reducer = SymmetricReducer(memory, layout)
    rank.communicator.watch(reducer)
    return replace(
        ops,
        embed=partial(reduce_ops.embed, rank, reducer),
        project_and_route=partial(reduce_ops.project_and_route, reducer),
        moe=partial(reduce_ops.moe, reducer),
        make_sampler=partial(make_sampler, rank, reducer=reducer),
        gather_few=partial(gather_few, rank, reducer),
        over_peers=None,
    )


def pack_experts(rank: Rank, tensors: ExpertTensors) -> Experts:
    """``Ops.pack_experts`` for columns of all experts, or for the share's whole experts."""
    return replace(packing.pack_experts(tensors), owned=owned(rank.share))


def owned(share: Share) -> Owned | None:
    """Returns the whole experts of the share, or None if it has columns of all experts."""
    return Owned(share.experts.start, share.num_experts) if share.by_expert else None


def project_and_route(
    rank: Rank, attended: torch.Tensor, linear: Linear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    return sum_and_route(rank, attended, linear, addend(rank, x), weights, eps)


def sum_and_route(
    rank: Rank, attended: torch.Tensor, linear: Linear, part: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    """``project_and_route`` for ``part`` [T, H], to which the rank adds its product; x is the sum of all."""
    if 0 < len(part) <= tuning.SKINNY_TOKENS:
        part = project_add(attended, linear, part)
    else:
        part.add_(product(attended.to(linear.weight.dtype), linear))
    x = rank.communicator.all_reduce_(part)
    return route(x, weights, eps)


def moe(
    rank: Rank, routed: Routed, experts: Experts, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return sum_experts(rank, routed, experts, addend(rank, x), next_qkv, eps)


def sum_experts(
    rank: Rank,
    routed: Routed,
    experts: Experts,
    part: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
    added: Addends | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``moe`` for ``part`` [T, H], as in ``sum_and_route``, with what adapters add to the rank's products."""
    part, _ = experts_of_one_rank.moe(routed, experts, part, None, eps, added=added)
    x = rank.communicator.all_reduce_(part)
    if next_qkv is None or len(x) <= tuning.SKINNY_TOKENS:
        return x, None
    return x, rms_norm(x, next_qkv.norm, eps, next_qkv.linear.weight.dtype)


def make_sampler(
    rank: Rank,
    forbidden: torch.Tensor,
    rows_at_once: int,
    *,
    ids: torch.Tensor | None = None,
    reducer: SymmetricReducer | None = None,
) -> Sample:
    """``Ops.make_sampler``. ``forbidden`` covers the whole vocabulary. With ``ids``, each rank has all
    columns."""
    if ids is not None:
        return sampler_of_one_rank(forbidden, rows_at_once, ids=ids)
    return SharedSample(rank, forbidden, rows_at_once, None if reducer is None else reducer.rows)


def gather_few(rank: Rank, reducer: SymmetricReducer, own: torch.Tensor) -> torch.Tensor:
    """``Ops.gather_few``."""
    found = reducer.all_gather(own)
    return rank.communicator.all_gather(own) if found is None else found
