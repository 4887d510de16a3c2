"""``DraftOps`` in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from chorale.kernels.ops import DraftOps, HeadNorms, LayerCache, PairNorms
from chorale.kernels.reference.dense.linear import Linear, pack_linear
from chorale.kernels.reference.dense.rotary import rotate_and_cache


def norm(x: torch.Tensor, norms: torch.Tensor, eps: float) -> torch.Tensor:
    parts = x.float().view(x.shape[0], *norms.shape)
    return (F.rms_norm(parts, norms.shape[1:], eps=eps) * norms).flatten(1)


def linear(x: torch.Tensor, norms: torch.Tensor | None, eps: float, packed: Linear) -> torch.Tensor:
    return packed(x if norms is None else norm(x, norms, eps))


def join(
    embedding: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor, norms: PairNorms, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = F.rms_norm(F.embedding(token_ids, embedding).float(), norms.token.shape, norms.token, eps)
    normed = F.rms_norm(states, norms.state.shape, norms.state, eps)
    return torch.cat((tokens, normed), dim=-1), normed if norms.keeps_normed else states.clone()


def qkv_rope_cache(normed: torch.Tensor, packed: Linear, cache: LayerCache) -> torch.Tensor:
    return rotate_and_cache(packed(normed), cache)


def norm_rope_cache(
    qkv: torch.Tensor,
    norms: HeadNorms,
    eps: float,
    cache: LayerCache,
    *,
    rotate: Callable[..., torch.Tensor] = rotate_and_cache,
) -> torch.Tensor:
    """``rotate``: the back end's ``rotate_and_cache``."""
    (layers, normed, dim), q = norms.weight.shape, qkv.new_empty(0)
    for layer, y in enumerate(qkv.view(len(qkv), layers, -1, dim).unbind(1)):
        heads = F.rms_norm(y[:, :normed], (dim,), eps=eps) * norms.weight[layer]
        own = cache._replace(kv=cache.kv[layer])
        q = rotate(torch.cat((heads, y[:, normed:]), dim=1).flatten(1), own)
    return q


def project_add(y: torch.Tensor, packed: Linear, x: torch.Tensor) -> torch.Tensor:
    return x.add_(packed(y))


def gated_silu(x: torch.Tensor, norm: torch.Tensor, packed: Linear, eps: float) -> torch.Tensor:
    gate, up = packed(F.rms_norm(x, norm.shape, norm, eps)).chunk(2, dim=-1)
    return F.silu(gate) * up


def pack_gated(gate: torch.Tensor, up: torch.Tensor) -> Linear:
    return pack_linear(torch.cat((gate, up)), None)


REFERENCE_DRAFT_OPS = DraftOps(
    norm=norm,
    linear=linear,
    join=join,
    qkv_rope_cache=qkv_rope_cache,
    norm_rope_cache=norm_rope_cache,
    project_add=project_add,
    gated_silu=gated_silu,
    pack_gated=pack_gated,
)
