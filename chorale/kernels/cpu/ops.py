"""The CPU op set: C++ for the expensive ops, the reference for the others.

The residual stream, norms, rotary, attention and the router are float32, as in the reference. Matrix products
are exact (the checkpoint's weights, float32 inputs and sums) or int8 (inputs and dense weights rounded to 8
bits in blocks of 32 with one scale each; MXFP4 weights unchanged). On AMX, inputs are rounded to bfloat16
instead if there are many tokens, also in attention. Apart from that, a token's result does not depend on the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from chorale.kernels.cpu.attention import attention, plan_attention, rotate_and_cache
from chorale.kernels.cpu.experts import CpuExperts
from chorale.kernels.cpu.library import library
from chorale.kernels.cpu.linear import CpuLinear
from chorale.kernels.cpu.sampler import CpuSampler
from chorale.kernels.cpu.threads import set_threads
from chorale.kernels.ops import ExpertTensors, LayerCache, Ops, Precision, QkvWeights, Routed, RouterWeights
from chorale.kernels.reference.dense.draft import REFERENCE_DRAFT_OPS, norm_rope_cache
from chorale.kernels.reference.lora import BaseOps, lora_ops
from chorale.kernels.reference.ops import REFERENCE_OPS


@dataclass(frozen=True, slots=True)
class CpuRouter:
    weight: torch.Tensor  # [E, H] float32
    bias: torch.Tensor  # [E] float32


def qkv_rope_cache(
    x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, eps: float, cache: LayerCache
) -> torch.Tensor:
    qkv = weights.linear(x, weights.norm, eps) if normed is None else weights.linear(normed)
    return rotate_and_cache(qkv, cache)


def draft_qkv_rope_cache(normed: torch.Tensor, packed: CpuLinear, cache: LayerCache) -> torch.Tensor:
    return rotate_and_cache(packed(normed), cache)


def project_and_route(
    attended: torch.Tensor, linear: CpuLinear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    return linear.add_to(x, attended), route(x, weights, eps)


def route(x: torch.Tensor, weights: RouterWeights, eps: float) -> Routed:
    router: CpuRouter = weights.linear
    (tokens, hidden), top_k = x.shape, weights.top_k
    normed, gates = torch.empty_like(x), x.new_empty(tokens, top_k)
    expert_ids = torch.empty(tokens, top_k, dtype=torch.int64)
    library().functions.route(
        x.data_ptr(), tokens, hidden, weights.norm.data_ptr(), eps, router.weight.data_ptr(),
        router.bias.data_ptr(), len(router.bias), top_k, normed.data_ptr(), expert_ids.data_ptr(),
        gates.data_ptr(),
    )  # fmt: skip
    return Routed(normed, expert_ids, gates)


def moe(
    routed: Routed, experts: CpuExperts, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
) -> tuple[torch.Tensor, None]:
    return experts(*routed, x), None


def lm_head(
    x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: CpuLinear, eps: float
) -> torch.Tensor:
    return head(x.index_select(0, logits_index), norm, eps)


def router_logits(router: CpuRouter, normed: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(normed, router.weight, router.bias)


def pack_router(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> CpuRouter:
    return CpuRouter(weight.float().contiguous(), bias.float().contiguous())


def cpu_ops(precision: Precision, fixed: bool = False) -> Ops:
    """Return the CPU ops, which use as many threads as torch. ``library()`` must be available.

    ``fixed``: without AMX, so that a token's result never depends on the batch."""
    set_threads(torch.get_num_threads())

    def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
        return CpuLinear(weight, bias, precision, fixed=fixed)

    def pack_gated(gate: torch.Tensor, up: torch.Tensor) -> CpuLinear:
        return pack_linear(torch.cat((gate, up)), None)

    def pack_experts(tensors: ExpertTensors) -> CpuExperts:
        return CpuExperts(tensors, precision)

    ops = replace(
        REFERENCE_OPS,
        name="cpu",
        plan_attention=partial(plan_attention, precision="exact" if fixed else precision),
        qkv_rope_cache=qkv_rope_cache,
        attention=attention,
        project_and_route=project_and_route,
        moe=moe,
        lm_head=lm_head,
        pack_linear=pack_linear,
        pack_router=pack_router,
        pack_experts=pack_experts,
        keeps_dtypes=True,
        detail=f"{library().name}, {precision}",
        make_sampler=CpuSampler,
        pack_head=partial(pack_linear, bias=None),
        draft=replace(
            REFERENCE_DRAFT_OPS,
            qkv_rope_cache=draft_qkv_rope_cache,
            norm_rope_cache=partial(norm_rope_cache, rotate=rotate_and_cache),
            pack_gated=pack_gated,
        ),
    )
    return replace(ops, lora=lora_ops(BaseOps(ops, router_logits=router_logits)))
