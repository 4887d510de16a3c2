"""A differentiable Ops record, so that training runs ``chorale.model.gpt_oss.GptOss`` itself.

Packed rows of one length S: T = B * S tokens, several documents per row, no paging; a document begins where
its position is 0. ``kv[slot]`` passes within a step k and v from ``qkv_rope_cache`` to
``attention``. Every expert runs on every token (8 experts of 256: cheaper than sorting), weighted by its
gate or zero. MXFP4 is trained with straight-through rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.mxfp4 import FP4_VALUES, GROUP
from chorale.kernels.ops import (
    AttentionMeta,
    AttentionShape,
    ExpertTensors,
    LayerCache,
    Ops,
    QkvWeights,
    Routed,
    RouterWeights,
)
from chorale.kernels.reference.pages import ReferencePageCopies
from chorale.kernels.reference.sampling.decode_inputs import decode_inputs
from chorale.kernels.reference.sampling.draft_steps import accept, draft_passes, verify_inputs
from chorale.kernels.reference.sampling.sampling import ReferenceSampler


class KeyValueHolder:
    """Replaces the KV pool of serving. ``shape[3]`` (the block size) has no meaning here."""

    shape = (1, 2, 1, 1, 1)

    def __init__(self) -> None:
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The masks of both groups (dense booleans here, block masks on a GPU), and the batch's shape."""

    num_sequences: int
    seq_len: int
    masks: tuple[Any, Any]
    shape: AttentionShape


@dataclass(frozen=True, slots=True)
class TrainedExperts:
    """One layer's experts, dense: gate_up [E, 2 I, H], down [E, H, I] (rows as MXFP4 packs them)."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    limit: float
    alpha: float


def document_ids(positions: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Returns [B, S]: the number of each token's document; a document begins at position 0."""
    return (positions == 0).cumsum(0).view(-1, seq_len)


def plan_attention(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> Plan:
    """Returns boolean [B, 1, S, S], true where a query may see a key of its document's past or window."""
    seq_len = meta.max_query_len
    documents = document_ids(meta.positions, seq_len)
    index = torch.arange(seq_len, device=documents.device)
    distance = index[:, None] - index[None, :]
    same = (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
    causal = same & (distance >= 0)
    window = causal & (distance < shape.sliding_window)
    return Plan(documents.shape[0], seq_len, (causal, window), shape)


def embed(embedding: Callable[[torch.Tensor], torch.Tensor], token_ids: torch.Tensor) -> torch.Tensor:
    """``embedding`` computes the rows of the tokens (see ``net.Table``)."""
    return embedding(token_ids).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def linear(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Computes in bfloat16, as a served model on a GPU."""
    return F.linear(x.bfloat16(), weights[0].bfloat16(), weights[1].bfloat16())


def project(
    x: torch.Tensor, weights: QkvWeights, eps: float, rope: torch.Tensor, shape: AttentionShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rotated q [T, Nq, D] and k [T, Nkv, D], and v [T, Nkv, D], bfloat16."""
    qkv = linear(rms_norm(x, weights.norm, eps), weights.linear).unflatten(-1, (-1, shape.head_dim))
    q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    cos, sin = rope.unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D/2)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qkv_rope_cache(
    x: torch.Tensor, normed: None, weights: QkvWeights, eps: float, cache: LayerCache
) -> torch.Tensor:
    kv: Any = cache.kv
    q, kv.k, kv.v = project(x, weights, eps, cache.rope, cache.plan.shape)
    return q


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    plan, group, kv = cache.plan, cache.group, cache.kv
    shape, size = plan.shape, (plan.num_sequences, plan.seq_len)
    repeat = shape.num_heads // shape.num_kv_heads
    q = q.unflatten(0, size).transpose(1, 2)  # [B, Nq, S, D]
    k = kv.k.unflatten(0, size).transpose(1, 2).repeat_interleave(repeat, dim=1)
    v = kv.v.unflatten(0, size).transpose(1, 2).repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * shape.head_dim**-0.5  # [B, Nq, S, S]
    scores = scores.masked_fill(~plan.masks[group], float("-inf"))
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1).flatten(1)  # [T, Nq * D]


def output_projection(attended: torch.Tensor, weights: Any, x: torch.Tensor) -> torch.Tensor:
    return x + linear(attended, weights).float()


def route(x: torch.Tensor, weights: RouterWeights, eps: float) -> Routed:
    normed = rms_norm(x, weights.norm, eps)
    logits = F.linear(normed, weights.linear[0].float(), weights.linear[1].float())
    best, expert_ids = logits.topk(weights.top_k, dim=-1)
    return Routed(normed, expert_ids, best.softmax(dim=-1))


def project_and_route(
    attended: torch.Tensor, weights: Any, x: torch.Tensor, router: RouterWeights, eps: float
) -> tuple[torch.Tensor, Routed]:
    x = output_projection(attended, weights, x)
    return x, route(x, router, eps)


def add_experts(routed: Routed, experts: TrainedExperts, x: torch.Tensor) -> torch.Tensor:
    """Computes two matrix products over all experts at once: [T, E * 2 I], then [T, H]."""
    normed, expert_ids, gates = routed
    num_experts, double, _ = experts.gate_up.shape
    gate_of = torch.zeros(normed.shape[0], num_experts, device=x.device)
    gate_of = gate_of.scatter(1, expert_ids, gates)  # [T, E]
    up_weight = experts.gate_up.bfloat16().flatten(0, 1)  # [E * 2 I, H]
    hidden = F.linear(normed.bfloat16(), up_weight, experts.gate_up_bias.bfloat16().flatten())
    hidden = hidden.view(-1, num_experts, double // 2, 2)
    gate = hidden[..., 0].float().clamp(max=experts.limit)
    up = hidden[..., 1].float().clamp(-experts.limit, experts.limit)
    active = gate * torch.sigmoid(experts.alpha * gate) * (up + 1) * gate_of.unsqueeze(-1)  # [T, E, I]
    down_weight = experts.down.bfloat16().permute(1, 0, 2).flatten(1)  # [H, E * I]
    out = F.linear(active.bfloat16().flatten(1), down_weight)
    return x + out.float() + gate_of @ experts.down_bias.float()


def moe(
    routed: Routed, experts: TrainedExperts, x: torch.Tensor, next_qkv: QkvWeights | None, eps: float
) -> tuple[torch.Tensor, None]:
    """Prepares nothing for the next layer, since ``project`` norms."""
    return add_experts(routed, experts, x), None


def lm_head(
    x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, eps: float
) -> torch.Tensor:
    """Returns normed hidden states [L, H] instead of logits: the loss multiplies by rows of the head."""
    return rms_norm(x.index_select(0, logits_index), norm, eps)


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass and passes the gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def nearest_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Returns the values of ``mxfp4.quantize`` followed by ``dequantize``, [..., K] float32.

    The same rule as ``kernels.mxfp4.quantize`` (scale: the smallest power of two without clipping; ties to
    the even code), written for the GPU; ``tests/training`` compares the two bit for bit.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    exponent = torch.ceil(torch.log2(largest / FP4_VALUES[7])).clamp(-127, 127)
    scale = torch.exp2(torch.where(largest > 0, exponent, torch.zeros_like(exponent)))
    magnitude = groups.abs() / scale
    # Steps of 0.5 below 2, of 1 below 4, of 2 above; torch.round goes to even, which is the even code.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(magnitude / step) * step * scale).copysign(groups).flatten(-2)


def round_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """``nearest_mxfp4``, differentiable."""
    with torch.no_grad():
        rounded = nearest_mxfp4(weight)
    return StraightThrough.apply(weight, rounded)  # type: ignore[no-any-return, no-untyped-call]


def _identity_pair(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight, bias


def _pack_experts(tensors: ExpertTensors) -> TrainedExperts:
    raise TypeError("the trainer builds TrainedExperts itself")


TRAINING_OPS = Ops(
    name="training",
    plan_attention=plan_attention,
    embed=embed,
    qkv_rope_cache=qkv_rope_cache,
    attention=attention,
    project_and_route=project_and_route,
    moe=moe,
    lm_head=lm_head,
    pack_linear=_identity_pair,
    pack_router=lambda weight, bias, _: (weight, bias),
    pack_experts=_pack_experts,
    pack_head=lambda weight: weight,
    make_sampler=ReferenceSampler,
    decode_inputs=decode_inputs,
    verify_inputs=verify_inputs,
    accept=accept,
    draft_passes=draft_passes,
    page_copies=ReferencePageCopies,
)
