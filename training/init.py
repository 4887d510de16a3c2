"""An initialisation with which copying is learned at once: hand-written previous-token and induction heads.

From random weights, the two heads that together copy what followed an earlier occurrence of the current
token ("induction") take most of a short training run to appear, and nearly all of this model's tasks
need them. So layer 0 starts with heads that look one and two tokens back (biases alone do that: after
rotation their score is a sum of cosines that peaks at a fixed distance), the first of which writes what it
saw into dimensions that embeddings leave nearly free, and layers 1 and 3 with heads that compare those with
the current token and pass on the token found. Training then changes all of them.
"""

from __future__ import annotations

import torch

from chorale.model.rope import yarn_frequencies
from training.net import DemoNet, Layer

_PEAK = 9.0  # logits by which the wanted distance exceeds its neighbours
_MATCH = 12.0  # logits of a token that matches
_PASSED_ON = 1.5
_UNEMBED = 0.02


@torch.no_grad()
def write_heads(net: DemoNet) -> None:
    """Overwrites parts of a newly initialised net."""
    dim, hidden = net.config.head_dim, net.config.hidden_size
    free = slice(hidden - dim, hidden)  # dimensions for previous tokens
    used = hidden - dim
    net.embed_w[:, free] *= 0.1
    net.unembed_w.copy_(net.embed_w * _UNEMBED)
    orthogonal = torch.linalg.qr(torch.randn(used, used))[0]
    identity = orthogonal[:dim]  # [D, used], the values of previous-token heads
    layers = [layer for layer in net.layers if isinstance(layer, Layer)]
    _previous_token(net, layers[0], identity, free)
    for layer in (layers[1], layers[3]):
        _induction(net, layer, identity, orthogonal[-2 * dim :] if used >= 2 * dim else orthogonal, free)


def _rows(net: DemoNet, kind: str, head: int) -> slice:
    """Returns the rows of ``qkv`` of one q, k or v head."""
    config = net.config
    first = {
        "q": 0,
        "k": config.num_attention_heads,
        "v": config.num_attention_heads + config.num_key_value_heads,
    }[kind] + head
    return slice(first * config.head_dim, (first + 1) * config.head_dim)


def _previous_token(net: DemoNet, layer: Layer, identity: torch.Tensor, free: slice) -> None:
    config, dim = net.config, net.config.head_dim
    theta = yarn_frequencies(config.rope, dim)[: dim // 4]  # the fast pairs
    gap = float((1 - torch.cos(theta)).sum()) * config.rope.concentration**2 * dim**-0.5
    size = (_PEAK / gap) ** 0.5
    pairs = torch.arange(dim // 4)
    key = torch.zeros(dim)
    key[pairs] = size
    rows = _rows(net, "k", 0)
    layer.qkv[rows] *= 0.1
    layer.qkv_bias[rows] = key
    layer.qkv[_rows(net, "v", 0)] = 0.0
    layer.qkv[_rows(net, "v", 0), : identity.shape[1]] = identity
    for head, back in ((0, 1), (1, 2)):
        query = torch.zeros(dim)
        query[pairs] = size * torch.cos(theta * back)
        query[pairs + dim // 2] = -size * torch.sin(theta * back)
        rows = _rows(net, "q", head)
        layer.qkv[rows] *= 0.1
        layer.qkv_bias[rows] = query
    layer.output[:, :dim] *= 0.1
    layer.output[free, :dim] = torch.eye(dim)
    layer.sinks[:2] = -4.0


def _induction(
    net: DemoNet, layer: Layer, identity: torch.Tensor, carried: torch.Tensor, free: slice
) -> None:
    config, dim, used = net.config, net.config.head_dim, identity.shape[1]
    half = dim // 2
    slow = torch.cat((torch.arange(dim // 4, half), torch.arange(dim // 4 + half, dim)))  # nearly unrotated
    size = (_MATCH / (half * config.rope.concentration**2 * dim**-0.5)) ** 0.5
    per_group = config.num_attention_heads // config.num_key_value_heads
    for kv_head in range(2):
        part = torch.arange(kv_head * half, (kv_head + 1) * half)
        q_rows, k_rows, v_rows = (
            _rows(net, "q", kv_head * per_group),
            _rows(net, "k", kv_head),
            _rows(net, "v", kv_head),
        )
        for rows in (q_rows, k_rows):
            layer.qkv[rows] *= 0.1
        query = layer.qkv[q_rows]
        query[slow, :used] = identity[part] * size
        layer.qkv[q_rows] = query
        key = layer.qkv[k_rows]
        key[slow, free.start + part] = size
        layer.qkv[k_rows] = key
        basis = carried[(kv_head * dim) % len(carried) :][:dim]
        layer.qkv[v_rows] = 0.0
        layer.qkv[v_rows, :used][: len(basis)] = basis
        columns = slice(kv_head * per_group * dim, kv_head * per_group * dim + len(basis))
        layer.output[:, columns] *= 0.1
        layer.output[:used, columns] = basis.mT * _PASSED_ON
