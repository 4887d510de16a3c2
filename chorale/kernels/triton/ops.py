"""The Triton op set as an ``Ops`` record. The residual stream is float32, as in the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
import triton

from chorale.kernels.ops import Ops
from chorale.kernels.triton import invariant
from chorale.kernels.triton.attention.decode import attention
from chorale.kernels.triton.attention.invariant import attention as invariant_attention
from chorale.kernels.triton.attention.plan import plan_attention
from chorale.kernels.triton.dense.compact import pack_compact
from chorale.kernels.triton.dense.draft import TRITON_DRAFT_OPS
from chorale.kernels.triton.dense.host_rows import HostRows, pack_host_rows
from chorale.kernels.triton.dense.linear import Linear, pack_head, pack_linear, project_head
from chorale.kernels.triton.dense.norm import rms_norm
from chorale.kernels.triton.dense.qkv import qkv_rope_cache
from chorale.kernels.triton.lora.ops import lora_ops
from chorale.kernels.triton.moe.moe import moe
from chorale.kernels.triton.moe.packing import pack_experts
from chorale.kernels.triton.moe.router import pack_router, project_and_route
from chorale.kernels.triton.pages import TritonPageCopies
from chorale.kernels.triton.precompile import make_precompiler
from chorale.kernels.triton.sampling.decode_inputs import decode_inputs
from chorale.kernels.triton.sampling.draft_steps import accept, draft_passes, verify_inputs
from chorale.kernels.triton.sampling.sample import make_sampler


def embed(embedding: torch.Tensor | HostRows, token_ids: torch.Tensor) -> torch.Tensor:
    if isinstance(embedding, HostRows):
        return embedding.gather(token_ids)
    return F.embedding(token_ids, embedding).float()


def lm_head(
    x: torch.Tensor, logits_index: torch.Tensor, norm: torch.Tensor, head: Linear, eps: float
) -> torch.Tensor:
    return project_head(rms_norm(x, norm, eps, head.weight.dtype, index=logits_index), head)


_PLAIN_OPS = Ops(
    name="triton",
    plan_attention=plan_attention,
    embed=embed,
    qkv_rope_cache=qkv_rope_cache,
    attention=attention,
    project_and_route=project_and_route,
    moe=moe,
    lm_head=lm_head,
    pack_linear=pack_linear,
    pack_router=pack_router,
    pack_experts=pack_experts,
    pack_head=pack_head,
    pack_compact=pack_compact,
    make_sampler=make_sampler,
    decode_inputs=decode_inputs,
    verify_inputs=verify_inputs,
    accept=accept,
    draft_passes=draft_passes,
    page_copies=TritonPageCopies,
    draft=TRITON_DRAFT_OPS,
    pack_host_rows=pack_host_rows,
    supports_fp8_kv=True,
    capturable=True,
    precompiler=None if triton.knobs.runtime.interpret else make_precompiler,  # nothing to compile
)

TRITON_OPS = replace(_PLAIN_OPS, lora=lora_ops(_PLAIN_OPS))

_INVARIANT = replace(
    _PLAIN_OPS,
    pack_compact=None,
    qkv_rope_cache=invariant.qkv_rope_cache,
    attention=invariant_attention,
    project_and_route=invariant.project_and_route,
    moe=partial(moe, invariant=True),
    lm_head=invariant.lm_head,
    detail="batch invariant",
)
INVARIANT_OPS = replace(_INVARIANT, lora=lora_ops(_INVARIANT, invariant=True))


def triton_ops(*, batch_invariant: bool = False) -> Ops:
    """Return the ops of one rank. ``batch_invariant``: a token's bits do not depend on its batch."""
    return INVARIANT_OPS if batch_invariant else TRITON_OPS
