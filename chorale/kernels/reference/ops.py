"""The reference op set in plain torch: the specification of every op, and the oracle of tests.

The residual stream, norms, rotary, attention, router and gates are float32; matrix products run in the dtype
of their weights (float32, or bfloat16 for checkpoints too large to widen). Every op computes rows
independently, so the batch changes a row's result only through the rounding of matrix products, whose kernel
torch picks by shape: steps of equal shape are bit-identical, others agree to float32 rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.ops import LayerCache, Ops, QkvWeights, Routed, RouterWeights
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference.attention import attention, plan_attention
from chorale.kernels.reference.dense.draft import REFERENCE_DRAFT_OPS
from chorale.kernels.reference.dense.linear import Head, Linear, pack_linear
from chorale.kernels.reference.dense.rotary import rotate_and_cache
from chorale.kernels.reference.lora import BaseOps, lora_ops
from chorale.kernels.reference.moe import pack_decoded, pack_experts
from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.kernels.reference.sampling.decode_inputs import decode_inputs
from chorale.kernels.reference.sampling.draft_steps import accept, draft_passes, verify_inputs
from chorale.kernels.reference.sampling.sampling import ReferenceSampler


def pack_router(weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> Linear:
    return pack_linear(weight, bias)


def pack_head(weight: torch.Tensor) -> Head:
    return Head(weight)


def embed(embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(token_ids, embedding).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def qkv_rope_cache(
    x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, eps: float, cache: LayerCache
) -> torch.Tensor:
    normed = rms_norm(x, weights.norm, eps) if normed is None else normed
    return rotate_and_cache(weights.linear(normed), cache)


def output_projection(attended: torch.Tensor, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    return x.add_(linear(attended))


def route(x: torch.Tensor, weights: RouterWeights, eps: float) -> Routed:
    normed = rms_norm(x, weights.norm, eps)
    top = torch.topk(weights.linear(normed), weights.top_k, dim=-1)
    return Routed(normed, top.indices, torch.softmax(top.values, dim=-1))


def project_and_route(
    attended: torch.Tensor, linear: Linear, x: torch.Tensor, weights: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    x = output_projection(attended, linear, x)
    return x, route(x, weights, eps)


def moe(
    routed: Routed, experts: Any, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
) -> tuple[torch.Tensor, None]:
    return reference_moe.moe(routed, experts, x), None


def lm_head(
    x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: Head, eps: float
) -> torch.Tensor:
    result: torch.Tensor = head(rms_norm(x.index_select(0, logits_index), norm, eps))
    return result


_PLAIN_OPS = Ops(
    name="reference",
    plan_attention=plan_attention,
    embed=embed,
    qkv_rope_cache=qkv_rope_cache,
    attention=attention,
    project_and_route=project_and_route,
    moe=moe,
    lm_head=lm_head,
    pack_linear=pack_linear,
    pack_router=pack_router,
    pack_experts=pack_experts,
    pack_head=pack_head,
    make_sampler=ReferenceSampler,
    decode_inputs=decode_inputs,
    verify_inputs=verify_inputs,
    accept=accept,
    draft_passes=draft_passes,
    page_copies=ReferencePageCopies,
    draft=REFERENCE_DRAFT_OPS,
    supports_fp8_kv=True,
)
REFERENCE_OPS = replace(_PLAIN_OPS, lora=lora_ops(BaseOps(_PLAIN_OPS, reference_moe.moe)))


def decoding_ops(ops: Ops) -> Ops:
    """Returns ``ops`` for a device without MXFP4 and e4m3: experts are decoded when they are loaded."""
    return replace(ops, pack_experts=pack_decoded, decodes_experts=True, supports_fp8_kv=False)
