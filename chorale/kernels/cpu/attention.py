"""Attention of the CPU back end: passes the step's sequences to the library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from chorale.kernels.cpu.library import BFLOAT16, FLOAT32, Step, library
from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache, Precision
from chorale.kernels.reference import attention as reference
from chorale.kernels.reference.dense.rotary import rotate_and_cache as reference_rotate_and_cache
from chorale.kernels.reference.one_by_one import plan_each

_ELEMENTS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}


@dataclass
class CpuPlan:
    """The part of attention that all layers of a step share."""

    meta: AttentionMeta
    shape: AttentionShape
    block_size: int
    precision: Precision

    @cached_property
    def steps(self) -> tuple[Step, Step]:
        """The library's ``Step`` of each cache group."""
        return self._step(0), self._step(1)

    @cached_property
    def for_reference(self) -> reference.AttentionPlan:
        """The reference's plan, for caches that the library does not support (e4m3)."""
        return reference.plan_attention(self.meta, self.shape, self.block_size)

    @cached_property
    def of_each_token(self) -> list[reference.AttentionPlan]:
        """The reference's plans of the tokens alone."""
        return plan_each(self.meta, self.shape, self.block_size)

    def _step(self, group: int) -> Step:
        meta, shape, table = self.meta, self.shape, self.meta.block_tables[group]
        return Step(
            meta.query_start.data_ptr(), meta.context_lens.data_ptr(),
            table.data_ptr(), meta.slots[group].data_ptr(), len(meta.context_lens), table.stride(0),
            self.block_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
            shape.window(group), self.precision != "exact",
        )  # fmt: skip


def plan_attention(
    meta: AttentionMeta, shape: AttentionShape, block_size: int, precision: Precision
) -> CpuPlan:
    return CpuPlan(meta, shape, block_size, precision)


def rotate_and_cache(qkv: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """qkv [T, (Nq + 2 Nkv) * D], heads in the order q, k, v -> q [T, Nq, D]; writes k and v into kv."""
    plan: CpuPlan = cache.plan
    element = _ELEMENTS.get(cache.kv.dtype)
    if element is None:
        return reference_rotate_and_cache(qkv, cache._replace(plan=plan.for_reference))
    shape = plan.shape
    q = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
    library().functions.rotate_and_cache(
        qkv.data_ptr(), len(qkv), cache.rope.data_ptr(), ctypes.addressof(plan.steps[cache.group]),
        cache.kv.data_ptr(), element, q.data_ptr(),
    )  # fmt: skip
    return q


def attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """q [T, Nq, D], sinks [Nq] -> [T, Nq * D] float32."""
    plan: CpuPlan = cache.plan
    element = _ELEMENTS.get(cache.kv.dtype)
    if element is None:
        return reference.attention(q, sinks, cache._replace(plan=plan.for_reference))
    out = q.new_empty(len(q), plan.shape.num_heads * plan.shape.head_dim)
    library().functions.attention(
        q.data_ptr(),
        cache.kv.data_ptr(),
        element,
        sinks.data_ptr(),
        ctypes.addressof(plan.steps[cache.group]),
        out.data_ptr(),
    )
    return out
