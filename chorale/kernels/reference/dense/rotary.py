"""The last part of ``Ops.qkv_rope_cache`` in plain torch: rotates, and writes k and v into their blocks."""

from __future__ import annotations

import torch

from chorale.kernels.ops import LayerCache
from chorale.kernels.reference.attention import AttentionPlan
from chorale.kernels.reference.kv_elements import write_kv


def rotate_and_cache(qkv: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """qkv [T, (Nq + 2 Nkv) * D], heads in the order q, k, v -> q [T, Nq, D]; writes k and v into kv."""
    plan: AttentionPlan = cache.plan
    shape, group = plan.shape, cache.group
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    rotated = rotate(qkv[:, : heads + kv_heads], cache.rope)  # [T, Nq + Nkv, D]
    new = torch.stack((rotated[:, heads:], qkv[:, heads + kv_heads :]), dim=1)  # [T, 2, Nkv, D]
    write_kv(cache.kv, plan.slot_block[group], plan.slot_offset[group], new)
    return rotated[:, :heads]


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2). x [T, heads, D], rope [T, D]: cosines, then sines."""
    cos, sin = rope.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
