"""The training ops for a GPU: the same functions compiled, and attention by flex_attention.

The sink of attention: flex_attention computes the softmax without it and the log of the denominator (lse), so
the result with the sink is out * sigmoid(lse - sink).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache, Ops, QkvWeights, Routed
from training import ops as plain


def sink_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, mask: Any
) -> torch.Tensor:
    """q [B, S, Nq, D], k and v [B, S, Nkv, D] -> [B, S, Nq * D]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, aux = flex_attention(
        q, k, v, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    share = torch.sigmoid(aux.lse - sinks.view(1, -1, 1)).unsqueeze(-1)
    return (out * share).to(q.dtype).transpose(1, 2).flatten(2)


class FusedOps:
    """Holds the buffer that the mask functions read, so that their identity never changes."""

    def __init__(self, rows: int, seq_len: int, window: int, device: torch.device) -> None:
        self.documents = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
        documents = self.documents

        def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (documents[b, i] == documents[b, j]) & (i >= j)

        def windowed(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (documents[b, i] == documents[b, j]) & (i >= j) & (i - j < window)

        self.mask_functions = (causal, windowed)
        self.project = torch.compile(plain.project, dynamic=False)
        self.attend = torch.compile(sink_attention, dynamic=False)
        self.add_experts = torch.compile(plain.add_experts, dynamic=False)

    def plan_attention(self, meta: AttentionMeta, shape: AttentionShape, block_size: int) -> plain.Plan:
        rows, seq_len = self.documents.shape
        self.documents.copy_(plain.document_ids(meta.positions, seq_len))
        made = [
            create_block_mask(function, rows, None, seq_len, seq_len, device=self.documents.device)
            for function in self.mask_functions
        ]
        return plain.Plan(rows, seq_len, (made[0], made[1]), shape)

    def qkv(
        self, x: torch.Tensor, normed: None, weights: QkvWeights, eps: float, cache: LayerCache
    ) -> torch.Tensor:
        kv: Any = cache.kv
        q, kv.k, kv.v = self.project(x, weights, eps, cache.rope, cache.plan.shape)
        return q

    def attention(self, q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        plan, group, kv = cache.plan, cache.group, cache.kv
        size = (plan.num_sequences, plan.seq_len)
        q, k, v = (t.unflatten(0, size) for t in (q, kv.k, kv.v))
        return self.attend(q, k, v, sinks, plan.masks[group]).flatten(0, 1)

    def moe(
        self,
        routed: Routed,
        experts: plain.TrainedExperts,
        x: torch.Tensor,
        next_qkv: QkvWeights | None,
        eps: float,
    ) -> tuple[torch.Tensor, None]:
        return self.add_experts(routed, experts, x), None

    def record(self) -> Ops:
        return replace(
            plain.TRAINING_OPS,
            name="training-fused",
            plan_attention=self.plan_attention,
            embed=torch.compile(plain.embed, dynamic=False),
            qkv_rope_cache=self.qkv,
            attention=self.attention,
            project_and_route=torch.compile(plain.project_and_route, dynamic=False),
            moe=self.moe,
            lm_head=torch.compile(plain.lm_head, dynamic=False),
        )
