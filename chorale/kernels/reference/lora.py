"""The ops of steps with LoRA adapters in plain torch, around the ops of the reference or of the CPU.

The tokens of each adapter are computed together. Their additions are float32, like the residual stream, if
the adapter's tensors are; they come before rotary, top-k and swiglu, where the products of a merged model
have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.adapters import AdapterBatch, ExpertLowRank, LayerAdapter, LoraOps, LowRank
from chorale.kernels.ops import Ops, QkvWeights, RouterWeights
from chorale.kernels.reference import moe as reference_moe

# (a router's packed weights, normed [n, H]) -> logits [n, E]
RouterLogits = Callable[[Any, torch.Tensor], torch.Tensor]


def lora_ops(base: Ops, router_logits: RouterLogits) -> LoraOps:
    """Return the ops around ``base``, whose ``qkv`` and ``head`` matrices can be called, and whose experts
    have ``up`` and ``back`` of the reference's."""
    return LoraOps(
        qkv_rope_cache=partial(qkv_rope_cache, base),
        project_and_route=partial(project_and_route, base, router_logits),
        moe=partial(moe, base),
        lm_head=partial(lm_head, base),
    )


def addition(part: LowRank, x: torch.Tensor) -> torch.Tensor:
    """x [n, K] -> [n, N] float32."""
    y = F.linear(F.linear(x.to(part.a.dtype), part.a), part.b, part.bias)
    return y.float()


@dataclass(frozen=True, slots=True)
class _Added:
    """A matrix whose product gets additions: (tokens, first output, [n, N])."""

    linear: Any
    additions: list[tuple[torch.Tensor, int, torch.Tensor]]

    def __call__(self, *inputs: Any) -> torch.Tensor:
        y: torch.Tensor = self.linear(*inputs)
        for rows, first, added in self.additions:
            y[:, first : first + added.shape[1]].index_add_(0, rows, added)
        return y


def qkv_rope_cache(
    base: Ops,
    x: torch.Tensor,
    normed: torch.Tensor | None,
    weights: QkvWeights,
    eps: float,
    rope: torch.Tensor,
    plan: Any,
    group: int,
    kv: torch.Tensor,
    adapters: AdapterBatch,
    layer: int,
) -> torch.Tensor:
    additions = []
    for adapter, rows in adapters.in_layer(layer):
        if adapter.qkv:
            inputs = (x if normed is None else normed).index_select(0, rows)
            if normed is None:
                inputs = F.rms_norm(inputs, weights.norm.shape, weights.norm, eps)
            additions += [(rows, part.first, addition(part, inputs)) for part in adapter.qkv]
    added = replace(weights, linear=_Added(weights.linear, additions))
    return base.qkv_rope_cache(x, normed, added, eps, rope, plan, group, kv)


def project_and_route(
    base: Ops,
    router_logits: RouterLogits,
    attended: torch.Tensor,
    linear: Any,
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
    adapters: AdapterBatch,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = adapters.in_layer(layer)
    for adapter, rows in parts:
        if adapter.output is not None:
            x.index_add_(0, rows, addition(adapter.output, attended.index_select(0, rows)).to(x.dtype))
    x, normed, expert_ids, gates = base.project_and_route(attended, linear, x, weights, eps)
    for adapter, rows in parts:
        if adapter.router is not None:
            own = normed.index_select(0, rows).float()
            logits = router_logits(weights.linear, own) + addition(adapter.router, own)
            top = torch.topk(logits, weights.top_k, dim=-1)
            expert_ids[rows] = top.indices
            gates[rows] = torch.softmax(top.values, dim=-1)
    return x, normed, expert_ids, gates


@dataclass(frozen=True)
class _AdaptedExperts:
    """A layer's experts as one adapter changes them."""

    experts: Any
    adapter: LayerAdapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return _with(self.adapter.gate_up, expert, x, self.experts.up(expert, x))

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return _with(self.adapter.down, expert, inner, self.experts.back(expert, inner))


def _with(part: ExpertLowRank | None, expert: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own = None if part is None else part.of(expert)
    return y if own is None else y + addition(own, x).to(y.dtype)


def moe(
    base: Ops,
    normed: torch.Tensor,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    experts: Any,
    x: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
    adapters: AdapterBatch,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    adapted = [(adapter, rows) for adapter, rows in adapters.in_layer(layer) if adapter.has_experts]
    if not adapted:
        return base.moe(normed, expert_ids, gates, experts, x, next_qkv, eps)
    is_plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for adapter, rows in adapted:
        is_plain[rows] = False
        given = [tensor.index_select(0, rows) for tensor in (normed, expert_ids, gates, x)]
        own: Any = _AdaptedExperts(experts, adapter)
        changed = reference_moe.moe(given[0], given[1], given[2], own, given[3])
        x.index_copy_(0, rows, changed)
    plain = is_plain.nonzero().squeeze(1)
    if len(plain):
        given = [tensor.index_select(0, plain) for tensor in (normed, expert_ids, gates, x)]
        x.index_copy_(0, plain, base.moe(given[0], given[1], given[2], experts, given[3], next_qkv, eps)[0])
    return x, None


def lm_head(
    base: Ops,
    x: torch.Tensor,
    logits_index: torch.Tensor,
    norm: torch.Tensor,
    head: Any,
    eps: float,
    adapters: AdapterBatch,
) -> torch.Tensor:
    logits = base.lm_head(x, logits_index, norm, head, eps)
    slots = adapters.slots.index_select(0, logits_index)
    for adapter, tokens in adapters.groups:
        if adapter.head is None or not len(tokens):
            continue
        rows = (slots == adapters.slots[tokens[0]]).nonzero().squeeze(1)
        normed = F.rms_norm(x.index_select(0, logits_index.index_select(0, rows)), norm.shape, norm, eps)
        if isinstance(adapter.head, LowRank):
            logits.index_add_(0, rows, addition(adapter.head, normed))
        else:
            logits[rows] = F.linear(normed.to(adapter.head.dtype), adapter.head).float()
    return logits
