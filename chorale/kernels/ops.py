"""Ops: the frozen record of callables that the model is written in.

Chosen once at worker start, by name: ``reference`` (plain torch: the specification, the oracle, and what a
CPU runs) or ``triton`` (CUDA and ROCm). An op family owns the packing of its own weights. The op boundaries
are the fused kernels of the GPU plan, so that both back ends have one signature.

Shapes: T tokens in the step, R rows, H hidden, Nq/Nkv heads, D head_dim, E experts, K experts per token, V
vocabulary, L rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Who attends to what in this step. One instance a step, shared by all layers.

    ``block_tables`` and ``slots`` are indexed by ``CacheGroup`` (0 full, 1 window).
    """

    positions: torch.Tensor  # [T] int64, position of each new token in its sequence
    query_start: torch.Tensor  # [R + 1] int32, cumulative num_new
    context_lens: torch.Tensor  # [R] int32, num_computed + num_new
    block_tables: tuple[torch.Tensor, torch.Tensor]  # 2 x [R, max_blocks] int32
    slots: tuple[torch.Tensor, torch.Tensor]  # 2 x [T] int64: block * block_size + offset
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything ``GptOss.forward`` needs for one step."""

    token_ids: torch.Tensor  # [T] int64
    logits_index: torch.Tensor  # [L] int64: which of the T tokens need logits
    attention: AttentionMeta


@dataclass(frozen=True, slots=True)
class Ops:
    """One back end. See ``kernels/reference.py`` for what each callable means, exactly.

    kv (one tensor per layer slot): [num_blocks, 2, Nkv, block_size, D]; index 1 is K (0) or V (1).
    """

    name: str
    embed: Callable[..., torch.Tensor]
    qkv_rope_cache: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]
    output_projection: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    moe: Callable[..., torch.Tensor]
    lm_head: Callable[..., torch.Tensor]
    pack_experts: Callable[..., Any]
