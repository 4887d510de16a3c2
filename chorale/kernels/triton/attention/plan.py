"""The attention plan that all layers of a step share: ``Ops.plan_attention``."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.kernels.ops import AttentionMeta, AttentionShape
from chorale.kernels.triton.launch import tuning_of


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan: host integers and device tensors."""

    meta: AttentionMeta
    shape: AttentionShape
    block_size: int
    num_splits: int  # of the full layers' decodes


def plan_attention(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> AttentionPlan:
    """Returns the plan. Raises ``ValueError`` for shapes that these kernels do not support."""
    for name, value in (("head_dim", shape.head_dim), ("block_size", block_size)):
        if value & (value - 1) or value < (16 if name == "head_dim" else 1):
            raise ValueError(f"ops triton: {name} {value} is not a power of two of at least 16")
    rows = meta.context_lens.shape[0]
    arch = tuning_of(meta.context_lens.device)
    splits = arch.context_splits(rows, shape.num_kv_heads, meta.max_context_len)
    return AttentionPlan(meta, shape, block_size, splits)
