"""The ops of steps with LoRA adapters in plain torch, around the ops of the reference or of the CPU.

The tokens of each adapter are computed together. Their additions are float32, like the residual stream, if
the adapter's tensors are; they come before rotary, top-k and swiglu, where the products of a merged model
have them. Each of several ranks adds its part to its part of the base's product, before the sum over ranks.
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

# (normed, expert_ids, gates, experts, x) -> x plus the rank's sum over its chosen experts
AddExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]


def _only_rank(x: torch.Tensor) -> torch.Tensor:
    return x


def _sum_of_only_rank(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return own


@dataclass(frozen=True, slots=True)
class Around:
    """The ops of a back end and of one rank, and their parts that additions need."""

    ops: Ops  # their ``qkv``, ``output`` and ``head`` matrices can be called
    router_logits: Callable[[Any, torch.Tensor], torch.Tensor]  # (packed router, normed [n, H]) -> [n, E]
    plain: AddExperts
    adapted: AddExperts = reference_moe.moe  # the same for experts of which only ``up`` and ``back`` are used
    linear: Callable[..., torch.Tensor] = F.linear  # (x [n, K], weight [N, K], bias [N] or None) -> [n, N]
    norm: Callable[..., torch.Tensor] = F.rms_norm  # (x, shape, weight, eps)
    start: Callable[[torch.Tensor], torch.Tensor] = _only_rank  # x -> what the rank adds its sum to
    # (x, start plus the rank's sum) -> new x, the same on all ranks
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _sum_of_only_rank
    gather: Callable[[torch.Tensor], torch.Tensor] = _only_rank  # the rank's logits -> those that are sampled

    def addition(self, part: LowRank, x: torch.Tensor) -> torch.Tensor:
        """x [n, K] -> [n, N] float32."""
        inner = self.linear(x.to(part.a.dtype), part.a, None)
        return self.linear(inner, part.b, part.bias).float()


def lora_ops(around: Around) -> LoraOps:
    return LoraOps(
        qkv_rope_cache=partial(qkv_rope_cache, around),
        project_and_route=partial(project_and_route, around),
        moe=partial(moe, around),
        lm_head=partial(lm_head, around),
    )


@dataclass(frozen=True)
class _Added:
    """A matrix whose product gets additions for some tokens."""

    around: Around
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
            inputs = x.index_select(0, rows)
            if norm:
                inputs = self.around.norm(inputs, norm[0].shape, *norm)
            added = self.around.addition(part, inputs)
            y[:, part.first : part.first + added.shape[1]].index_add_(0, rows, added.to(y.dtype))
        return y


def qkv_rope_cache(
    around: Around,
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
    parts = [(part, rows) for adapter, rows in adapters.in_layer(layer) for part in adapter.qkv]
    added = replace(weights, linear=_Added(around, weights.linear, parts))
    return around.ops.qkv_rope_cache(x, normed, added, eps, rope, plan, group, kv)


def project_and_route(
    around: Around,
    attended: torch.Tensor,
    linear: Any,
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
    adapters: AdapterBatch,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``linear``: the output projection, or a list of the matrices of its parts (``FixedSums``)."""
    own = adapters.in_layer(layer)
    parts = [(adapter.output, rows) for adapter, rows in own if adapter.output is not None]
    added: Any = _Added(around, linear, parts)
    if isinstance(linear, list):
        added, begin = [], 0
        for matrix in linear:
            some = [(_columns(part, begin, matrix.columns), rows) for part, rows in parts]
            added.append(_Added(around, matrix, some))
            begin += matrix.columns
    x, normed, expert_ids, gates = around.ops.project_and_route(attended, added, x, weights, eps)
    for adapter, rows in own:
        if adapter.router is not None:
            inputs = normed.index_select(0, rows).float()
            logits = around.router_logits(weights.linear, inputs) + around.addition(adapter.router, inputs)
            top = torch.topk(logits, weights.top_k, dim=-1)
            expert_ids[rows] = top.indices
            gates[rows] = torch.softmax(top.values, dim=-1)
    return x, normed, expert_ids, gates


def _columns(part: LowRank, begin: int, count: int) -> LowRank:
    """Return the addend of some inputs; the first has the bias."""
    return replace(part, a=part.a[:, begin : begin + count], bias=None if begin else part.bias)


@dataclass(frozen=True)
class _AdaptedExperts:
    """A layer's experts as one adapter changes them."""

    around: Around
    experts: Any
    adapter: LayerAdapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self._with(self.adapter.gate_up, expert, x, self.experts.up(expert, x))

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H], or [P, n, H]: the addends of parts of the columns."""
        y: torch.Tensor = self.experts.back(expert, inner)
        if y.dim() == 2:
            return self._with(self.adapter.down, expert, inner, y)
        own, begin = None if self.adapter.down is None else self.adapter.down.of(expert), 0
        for number, end in enumerate(self.experts.ends if own is not None else ()):
            assert own is not None
            some = _columns(own, begin, end - begin)
            y[number] += self.around.addition(some, inner[:, begin:end])
            begin = end
        return y

    def _with(
        self, part: ExpertLowRank | None, expert: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        own = None if part is None else part.of(expert)
        return y if own is None else y + self.around.addition(own, x).to(y.dtype)


def moe(
    around: Around,
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
        return around.ops.moe(normed, expert_ids, gates, experts, x, next_qkv, eps)
    own = around.start(x)
    is_plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for adapter, rows in adapted:
        is_plain[rows] = False
        given = [tensor.index_select(0, rows) for tensor in (normed, expert_ids, gates, own)]
        changed: Any = _AdaptedExperts(around, experts, adapter)
        own.index_copy_(0, rows, around.adapted(given[0], given[1], given[2], changed, given[3]))
    plain = is_plain.nonzero().squeeze(1)
    if len(plain):
        given = [tensor.index_select(0, plain) for tensor in (normed, expert_ids, gates, own)]
        own.index_copy_(0, plain, around.plain(given[0], given[1], given[2], experts, given[3]))
    return around.finish(x, own), None


def lm_head(
    around: Around,
    x: torch.Tensor,
    logits_index: torch.Tensor,
    norm: torch.Tensor,
    head: Any,
    eps: float,
    adapters: AdapterBatch,
) -> torch.Tensor:
    logits = around.ops.lm_head(x, logits_index, norm, head, eps)
    slots = adapters.slots.index_select(0, logits_index)
    for adapter, tokens in adapters.groups:
        if adapter.head is None or not len(tokens):
            continue
        rows = (slots == adapters.slots[tokens[0]]).nonzero().squeeze(1)
        if not len(rows):
            continue
        chosen = x.index_select(0, logits_index.index_select(0, rows))
        normed = around.norm(chosen, norm.shape, norm, eps)
        if isinstance(adapter.head, LowRank):
            logits.index_add_(0, rows, around.addition(adapter.head, normed))
        else:
            logits[rows] = around.linear(normed.to(adapter.head.dtype), adapter.head, None).float()
    return around.gather(logits)
