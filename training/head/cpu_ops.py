"""The training ops for a forward-only target on a CPU: the same results with less memory traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from chorale.kernels.ops import LayerCache, Routed
from training import ops as plain


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Computes ``training.ops.attention``, fused. The sink is an additional key that every query sees; an
    additional dimension contains its score."""
    plan, group, kv = cache.plan, cache.group, cache.kv
    shape, size = plan.shape, (plan.num_sequences, plan.seq_len)
    repeat, dim = shape.num_heads // shape.num_kv_heads, shape.head_dim
    room = 8  # added dimensions; the kernel is slow for odd sizes
    of_sink = F.pad((sinks.float() * dim**0.5).to(q.dtype).unsqueeze(-1), (0, room - 1))
    q = torch.cat((q, of_sink.expand(len(q), -1, -1)), dim=-1).unflatten(0, size).transpose(1, 2)
    k = F.pad(kv.k.unflatten(0, size), (0, room, 0, 0, 0, 1)).transpose(1, 2)
    k[:, :, -1, dim] = 1
    v = F.pad(kv.v.unflatten(0, size), (0, room, 0, 0, 0, 1)).transpose(1, 2)
    k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    mask = F.pad(plan.masks[group], (0, 1), value=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=dim**-0.5)
    return out[..., :dim].transpose(1, 2).flatten(0, 1).flatten(1)


_experts = torch.compile(plain.add_experts, dynamic=False)


def moe(routed: Routed, experts: plain.TrainedExperts, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
    return _experts(routed, experts, x), None


CPU_OPS = replace(plain.TRAINING_OPS, name="forward-cpu", attention=attention, moe=moe)
