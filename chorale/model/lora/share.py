"""part_of_rank: what one of several ranks needs of an adapter, cut like the base's weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from chorale.kernels.adapters import Adapter, ExpertLowRank, LayerAdapter, LowRank
from chorale.model.config import ModelConfig
from chorale.parallel.shares import Share


def part_of_rank(adapter: Adapter, model: ModelConfig, share: Share) -> Adapter:
    """Return copies of the rank's part. ``model``: the whole model's sizes.

    Outputs of q, k, v, gate_up and the head are the rank's; inputs of o and down are. The router and the
    halves that are not cut are whole on every rank.
    """
    layers = tuple(_layer(layer, model, share) for layer in adapter.layers)
    head, ids = adapter.head, _slice(share.vocabulary)
    if head is not None:
        head = replace(head, b=head.b[ids]) if isinstance(head, LowRank) else head[ids]
    return Adapter(layers, head).map(torch.clone)


def _layer(layer: LayerAdapter, model: ModelConfig, share: Share) -> LayerAdapter:
    dim, heads, kv_heads = model.head_dim, share.heads, share.kv_heads
    # First output of q, k and v in the whole model -> (the rank's heads, first output in its part).
    first_k, own_k = dim * model.num_attention_heads, dim * len(heads)
    first_v, own_v = first_k + dim * model.num_key_value_heads, own_k + dim * len(kv_heads)
    places = {0: (heads, 0), first_k: (kv_heads, own_k), first_v: (kv_heads, own_v)}
    output, gate_up, down = layer.output, _experts(layer.gate_up, share), _experts(layer.down, share)
    if output is not None:  # the ranks' results are added: one of them adds the bias
        bias = output.bias if share.is_first else None
        output = replace(output, a=output.a[:, _slice(heads, dim)], bias=bias)
    if gate_up is not None:
        gate_up = replace(gate_up, b=gate_up.b[:, _slice(share.columns, 2)])
    if down is not None:
        down = replace(down, a=down.a[:, :, _slice(share.columns)])
    qkv = tuple(_rows(part, *places[part.first], dim) for part in layer.qkv)
    return LayerAdapter(qkv, output, layer.router, gate_up, down)


def _rows(part: LowRank, heads: range, first: int, dim: int) -> LowRank:
    rows = _slice(heads, dim)
    return LowRank(part.a, part.b[rows], None if part.bias is None else part.bias[rows], first)


def _experts(part: ExpertLowRank | None, share: Share) -> ExpertLowRank | None:
    """Return the pairs of the rank's experts, or None if it has none of those that are adapted."""
    own = [] if part is None else [part.places[expert] for expert in share.experts]
    kept = [place for place in own if place >= 0]
    if part is None or not kept:
        return None
    places = tuple(kept.index(place) if place >= 0 else -1 for place in own)
    return ExpertLowRank(part.a[kept], part.b[kept], places)


def _slice(some: range, width: int = 1) -> slice:
    return slice(some.start * width, some.stop * width)
