"""The ops of steps with LoRA adapters in plain torch, around the ops of the reference or of the CPU.

The tokens of each adapter are computed together. Their additions are float32, like the residual stream, if
the adapter's tensors are; they come before rotary, top-k and swiglu, where the products of a merged model
have them. Each of several ranks adds its part to its part of the base's product, before the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.adapters import AdapterBatch, LayerAdapter, LoraOps, LowRank
from chorale.kernels.ops import Ops, QkvWeights, Routed
from chorale.kernels.reference import moe as reference_moe


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *norm: Any) -> torch.Tensor:
    """x [n, K] -> [n, N]. ``norm``: (weight, eps) of the norm before the product, if there is one."""
    x = F.rms_norm(x, norm[0].shape, *norm) if norm else x
    return F.linear(x.to(weight.dtype), weight, bias)


@dataclass(frozen=True, slots=True)
class BaseOps:
    """A rank's plain ops, which adapters extend, and parts of them. The matrices can be called."""

    ops: Ops
    # (routed, experts or ``AdaptedExperts``, x) -> x plus the rank's sum
    add_experts: Callable[..., torch.Tensor] = lambda routed, experts, x: experts(*routed, x)
    # (packed router, normed [n, H]) -> [n, E]
    router_logits: Callable[[Any, torch.Tensor], torch.Tensor] = lambda router, normed: router(normed)
    linear: Callable[..., torch.Tensor] = linear
    # (x, function that adds the rank's sum to its argument) -> x plus the sums of all ranks
    exchange: Callable[[torch.Tensor, Any], torch.Tensor] = lambda x, add: add(x)

    def addition(self, part: LowRank, x: torch.Tensor, *norm: Any) -> torch.Tensor:
        """x [n, K] -> [n, N] float32."""
        return self.linear(self.linear(x, part.a, None, *norm), part.b, part.bias).float()


def lora_ops(base: BaseOps) -> LoraOps:
    return LoraOps(
        qkv_rope_cache=partial(qkv_rope_cache, base),
        project_and_route=partial(project_and_route, base),
        moe=partial(moe, base),
        lm_head=partial(lm_head, base),
    )


@dataclass(frozen=True)
class _Added:
    """A matrix whose product gets additions for some tokens."""

    base: BaseOps
    matrix: Any
    parts: list[tuple[LowRank, torch.Tensor]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matrix, name)

    def __call__(self, x: torch.Tensor, *norm: Any) -> torch.Tensor:
        return self._add(self.matrix(x, *norm), x, norm)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._add(self.matrix.add_to(out, x), x, ())

    def _add(self, y: torch.Tensor, x: torch.Tensor, norm: tuple[Any, ...]) -> torch.Tensor:
        for part, rows in self.parts:
            added = self.base.addition(part, x.index_select(0, rows), *norm)
            y[:, part.first : part.first + added.shape[1]].index_add_(0, rows, added.to(y.dtype))
        return y


def qkv_rope_cache(
    base: BaseOps, x: torch.Tensor, normed: torch.Tensor | None, weights: QkvWeights, *given: Any
) -> torch.Tensor:
    """``given``: eps, cache, adapters, layer."""
    *rest, adapters, layer = given
    parts = [(part, rows) for adapter, rows in adapters.in_layer(layer) for part in adapter.qkv]
    added = replace(weights, linear=_Added(base, weights.linear, parts))
    return base.ops.qkv_rope_cache(x, normed, added, *rest)


def project_and_route(
    base: BaseOps, attended: torch.Tensor, linear: Any, *given: Any
) -> tuple[torch.Tensor, Routed]:
    """``linear``: the output projection, or a list of the matrices of its parts (``FixedSums``). ``given``:
    x, weights, eps, adapters, layer."""
    x, weights, eps, adapters, layer = given
    own = adapters.in_layer(layer)
    parts = [(adapter.output, rows) for adapter, rows in own if adapter.output is not None]
    added: Any = _Added(base, linear, parts)
    if isinstance(linear, list):
        begins = accumulate((each.columns for each in linear), initial=0)
        added = [
            _Added(base, each, [(_columns(part, begin, each.columns), rows) for part, rows in parts])
            for each, begin in zip(linear, begins, strict=False)
        ]
    x, routed = base.ops.project_and_route(attended, added, x, weights, eps)
    for adapter, rows in own:
        if adapter.router is not None:
            inputs = routed.normed.index_select(0, rows).float()
            logits = base.router_logits(weights.linear, inputs) + base.addition(adapter.router, inputs)
            top = torch.topk(logits, weights.top_k, dim=-1)
            routed.expert_ids[rows] = top.indices
            routed.gates[rows] = torch.softmax(top.values, dim=-1)
    return x, routed


def _columns(part: LowRank, begin: int, count: int) -> LowRank:
    """Return the addend of some inputs; the first has the bias."""
    return replace(part, a=part.a[:, begin : begin + count], bias=None if begin else part.bias)


@dataclass(frozen=True)
class AdaptedExperts:
    """A layer's experts as one adapter changes them."""

    base: BaseOps
    experts: Any
    adapter: LayerAdapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        *routed, x = given
        return reference_moe.moe(Routed(*routed), self, x)

    def parts(self, *given: torch.Tensor) -> torch.Tensor:
        """``CpuExperts.parts``, of each token alone: the bits of torch's swiglu of one row, which has a
        multiple of 32 columns, depend on nothing else."""
        zeros = given[0].new_zeros(len(self.ends), 1, given[0].shape[1])
        rows = zip(*(each.split(1) for each in given), strict=True)
        return torch.cat([self(*row, zeros.clone()) for row in rows], dim=1)

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts.up(expert, x)
        own = None if self.adapter.gate_up is None else self.adapter.gate_up.of(expert)
        return y if own is None else y.add_(self.base.addition(own, x))

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H], or [P, n, H]: the addends of parts of the columns."""
        y: torch.Tensor = self.experts.back(expert, inner)
        own = None if self.adapter.down is None else self.adapter.down.of(expert)
        ends = (inner.shape[1],) if y.dim() == 2 else self.ends
        for part, (begin, end) in zip(y.view(len(ends), *y.shape[-2:]), pairwise((0, *ends)), strict=True):
            if own is not None:
                part += self.base.addition(_columns(own, begin, end - begin), inner[:, begin:end])
        return y


def moe(base: BaseOps, *given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``given``: the arguments of ``Ops.moe``, adapters, layer."""
    *plain, adapters, layer = given
    routed, experts, x = plain[:3]
    adapted = [(adapter, rows) for adapter, rows in adapters.in_layer(layer) if adapter.has_experts]
    if not adapted:
        return base.ops.moe(*plain)
    is_plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for _, rows in adapted:
        is_plain[rows] = False
    groups: list[tuple[Any, torch.Tensor]] = [(experts, is_plain.nonzero().squeeze(1))]
    groups += [(AdaptedExperts(base, experts, adapter), rows) for adapter, rows in adapted]

    def add(own: torch.Tensor) -> torch.Tensor:
        for some, rows in groups:
            if len(rows):
                inputs = Routed(*(each.index_select(0, rows) for each in routed))
                own.index_copy_(0, rows, base.add_experts(inputs, some, own.index_select(0, rows)))
        return own

    return base.exchange(x, add), None


def lm_head(
    base: BaseOps,
    x: torch.Tensor,
    logits_index: torch.Tensor,
    norm: torch.Tensor,
    head: Any,
    eps: float,
    adapters: AdapterBatch,
) -> torch.Tensor:
    logits = base.ops.lm_head(x, logits_index, norm, head, eps)
    slots = adapters.slots.index_select(0, logits_index)
    for adapter, tokens in adapters.groups:
        rows = (slots == adapters.slots[tokens[0]]).nonzero().squeeze(1)
        if adapter.head is None or not len(rows):
            continue
        chosen = x.index_select(0, logits_index.index_select(0, rows))
        if isinstance(adapter.head, LowRank):
            logits.index_add_(0, rows, base.addition(adapter.head, chosen, norm, eps))
        else:
            logits[rows] = base.linear(chosen, adapter.head, None, norm, eps).float()
    return logits
