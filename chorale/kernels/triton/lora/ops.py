"""``LoraOps`` around the Triton ops.

What an adapter adds to q, k, v, the attention's output, the head and down is computed by kernels of its own,
before or after the plain op, so that rows without an adapter keep its bits. Only gate_up's kernels take an
addend, because SwiGLU follows in the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chorale.kernels.adapters import EXPERTS, HEADS, WHOLE, LoraOps
from chorale.kernels.ops import LayerCache, Ops, QkvWeights, Routed, RouterWeights
from chorale.kernels.triton.dense.linear import Linear
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.invariant import product
from chorale.kernels.triton.lora.kernels import Rows, expand, expand_rotated, shrink
from chorale.kernels.triton.lora.lone import add_pairs
from chorale.kernels.triton.lora.slots import (
    DOWN,
    GATE_UP,
    HEAD,
    OUTPUT,
    QKV,
    ROUTER,
    SlotBatch,
    TritonSlots,
)  # fmt: skip
from chorale.kernels.triton.moe.packing import Experts
from chorale.kernels.triton.moe.sort import Ends

LONE_PAIRS = 512  # maximum (token, expert) pairs that are not sorted


def lora_ops(
    base: Ops, *, invariant: bool = False, addend: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> LoraOps:
    """Returns the ops around ``base``. ``invariant``: a token's bits do not depend on its batch.

    ``addend``: returns the tensor to which a rank adds its results, for x. ``project_and_route`` and ``moe``
    of ``base`` take it in place of x, and return the sum of all ranks.
    """
    return LoraOps(
        qkv_rope_cache=partial(qkv_rope_cache, base),
        project_and_route=partial(project_and_route, base, addend),
        moe=partial(moe, base, invariant, addend),
        lm_head=partial(lm_head, base),
        make_slots=TritonSlots,
    )


def qkv_rope_cache(
    base: Ops,
    x: torch.Tensor,
    normed: torch.Tensor | None,
    weights: QkvWeights,
    eps: float,
    cache: LayerCache,
    batch: SlotBatch,
    layer: int,
) -> torch.Tensor:
    a, b, bias, ranks = batch.adapters.of_layer(QKV, layer)
    inputs = normed
    if inputs is None:
        inputs = rms_norm(x, weights.norm, eps, weights.linear.weight.dtype)
    s = shrink(inputs, a, ranks, batch.rows)
    q = base.qkv_rope_cache(x, normed, weights, eps, cache)
    assert bias is not None
    expand_rotated(s, b, bias, ranks, batch.rows, q, cache)
    return q


def project_and_route(
    base: Ops,
    addend: Callable[[torch.Tensor], torch.Tensor],
    attended: torch.Tensor,
    linear: Linear,
    x: torch.Tensor,
    weights: RouterWeights,
    eps: float,
    batch: SlotBatch,
    layer: int,
) -> tuple[torch.Tensor, Routed]:
    a, b, bias, ranks = batch.adapters.of_layer(OUTPUT, layer)
    part = addend(x)
    expand(shrink(attended, a, ranks, batch.rows), b, bias, ranks[0], batch.rows, part)
    x, routed = base.project_and_route(attended, linear, part, weights, eps)
    if batch.reach >= WHOLE:
        _route_again(x, weights, eps, routed, batch, layer)
    return x, routed


def _route_again(
    x: torch.Tensor, weights: RouterWeights, eps: float, routed: Routed, batch: SlotBatch, layer: int
) -> None:
    """Change the experts and gates of tokens whose adapters change the router."""
    _, ids, gates = routed
    a, b, bias, ranks = batch.adapters.of_layer(ROUTER, layer)
    normed = rms_norm(x, weights.norm, eps, torch.float32)  # not rounded: a logit may choose another expert
    logits = product(normed, Linear(weights.linear.weight, weights.linear.bias), torch.float32)
    expand(shrink(normed, a, ranks, batch.rows), b, bias, ranks[0], batch.rows, logits)
    top = torch.topk(logits, weights.top_k, dim=-1)
    is_plain = ((batch.slots < 0) | (ranks[0, batch.slots.clamp(min=0)] == 0))[:, None]
    ids.copy_(torch.where(is_plain, ids, top.indices))
    gates.copy_(torch.where(is_plain, gates, torch.softmax(top.values, dim=-1)))


def moe(
    base: Ops,
    invariant: bool,
    addend: Callable[[torch.Tensor], torch.Tensor],
    routed: Routed,
    experts: Experts,
    x: torch.Tensor,
    next_qkv: QkvWeights | None,
    eps: float,
    batch: SlotBatch,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    plain: Any = base.moe
    added = None
    if batch.reach >= EXPERTS and len(x):
        ids = routed.expert_ids
        is_lone = ids.numel() <= LONE_PAIRS and not invariant
        pairs = None if is_lone else batch.adapters.pairs_of(batch.slots, ids)
        added = ExpertAddends(batch, layer, ids, pairs)
    x, normed = plain(routed, experts, addend(x), next_qkv, eps, added=added)
    return x, normed


@dataclass(frozen=True, slots=True)
class ExpertAddends:
    """``Addends`` of a step."""

    batch: SlotBatch
    layer: int
    ids: torch.Tensor  # [T, K] int64: experts of the step's pairs
    rows: Rows | None  # the pairs, sorted; None: they are few, and ``lone.py`` computes each alone

    def gate_up(self, normed: torch.Tensor, place: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        b = self.batch.adapters.of_layer(GATE_UP, self.layer)[1]
        make = torch.empty if self.rows is None else torch.zeros
        out = make(num_rows, b.shape[-2], dtype=b.dtype, device=normed.device)
        self._add(GATE_UP, normed, out, Ends(per_x=self.ids.shape[1], place=place, add=False))
        return out

    def down(self, inner: torch.Tensor, parts: torch.Tensor, ends: Ends) -> None:
        self._add(DOWN, inner, parts, ends)

    def _add(self, part: slice, x: torch.Tensor, out: torch.Tensor, ends: Ends) -> None:
        a, b, _, ranks = self.batch.adapters.of_layer(part, self.layer)
        if self.rows is None:
            add_pairs(x, a, b, ranks, self.batch.slots, self.ids, out, ends)
        else:
            expand(shrink(x, a, ranks, self.rows, ends), b, None, ranks[0], self.rows, out, ends)


def lm_head(
    base: Ops,
    x: torch.Tensor,
    logits_index: torch.Tensor,
    norm: torch.Tensor,
    head: Linear,
    eps: float,
    batch: SlotBatch,
) -> torch.Tensor:
    logits = base.lm_head(x, logits_index, norm, head, eps)
    if batch.reach >= WHOLE:
        a, b, bias, ranks = batch.adapters.of_layer(HEAD, 0)
        rows = batch.adapters.rows_of(batch.slots.index_select(0, logits_index))
        normed = rms_norm(x, norm, eps, head.weight.dtype, index=logits_index)
        expand(shrink(normed, a, ranks, rows), b, bias, ranks[0], rows, logits)
    if batch.reach == HEADS:
        slots = batch.slots.index_select(0, logits_index)
        # A copy: another thread may place an adapter meanwhile.
        for slot, own in tuple(batch.adapters.heads.items()):
            chosen = (slots == slot).nonzero().squeeze(1)
            if len(chosen):
                logits[chosen] = base.lm_head(x, logits_index[chosen], norm, own, eps)
    return logits
