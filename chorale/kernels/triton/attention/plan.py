"""The attention plan that all layers of a step share: ``Ops.plan_attention``."""

from __future__ import annotations

from dataclasses import dataclass

from chorale.kernels.ops import AttentionMeta, AttentionShape
from chorale.kernels.triton.launch import tuning_of

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan: host integers and device tensors."""

    meta: AttentionMeta
    shape: AttentionShape
    sizes: dict[str, int]  # NUM_Q, NUM_KV, D and KV_BLOCK of the kernels
    scale: float  # factor of the scores, times log2(e)
    num_splits: int  # parts of a context in decodes of the full group
    num_e4m3_splits: int  # the same for e4m3 blocks


def plan_attention(meta: AttentionMeta, shape: AttentionShape, block_size: int) -> AttentionPlan:
    """Returns the plan. Raises ``ValueError`` for shapes that these kernels do not support."""
    for name, value in (("head_dim", shape.head_dim), ("block_size", block_size)):
        if value & (value - 1) or value < (16 if name == "head_dim" else 1):
            raise ValueError(f"ops triton: {name} {value} is not a power of two of at least 16")
    rows = meta.context_lens.shape[0]
    arch = tuning_of(meta.context_lens.device)
    longest = min(meta.max_context_len, shape.full_window or meta.max_context_len)
    splits, e4m3_splits = (
        arch.context_splits(rows, shape.num_kv_heads, longest, is_e4m3=is_e4m3) for is_e4m3 in (False, True)
    )
    sizes = {
        "NUM_Q": shape.num_heads,
        "NUM_KV": shape.num_kv_heads,
        "D": shape.head_dim,
        "KV_BLOCK": block_size,
    }
    return AttentionPlan(meta, shape, sizes, shape.head_dim**-0.5 * LOG2E, splits, e4m3_splits)
