"""A draft head, top to bottom, in terms of Ops. EAGLE3:

    s  = fc(norm(aux))                    # aux: the target's states at some depths; the norm is optional
    for each drafted token:
        n  = [norm(embedding[token]), norm(s)]               # 2 H wide
        x  = s, or norm(s)                                   # norm_before_residual
        x  = x + attention(n)                                # its own keys and values, no window, no sink
        x  = x + (silu(t Wgate) * (t Wup)) Wdown             # t = norm(x)
        logits = norm(x) Whead                               # over the draft vocabulary
        s  = x, or norm(x)                                   # norm_output

Position i takes token i + 1 and the state at i, and predicts token i + 2. The head has no state except its
weights, and every rank has the whole head.

P-EAGLE is the same with more layers, whose n is norm(x). One pass drafts all tokens: positions after the last
known token take the masks' token and state.

DFlash keeps keys and values of the target's states, k and v of norm(s) for each layer (``read``). A block,
the last token and then masks, starts as x = embedding[token] and passes through the layers with n = norm(x)
(``run_block``). All of it sees the whole block, and a mask predicts the token at its own position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chorale.errors import ConfigError
from chorale.kernels.ops import (
    AttentionMeta,
    AttentionShape,
    DraftOps,
    HeadNorms,
    LayerCache,
    Ops,
    PairNorms,
    QkvWeights,
)
from chorale.model.config import FULL, RopeConfig
from chorale.model.draft.config import MLP_TOKENS, HeadConfig, Llama3Rope
from chorale.model.rope import angle_table, rope_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    norm: torch.Tensor  # [H] float32, of its input; of the first of EAGLE3: ``HeadWeights.pair.token``
    qkv: Any  # packed [(Nq + 2 Nkv) * D, H or 2 H] and bias
    head_norms: HeadNorms | None  # only of DFlash
    output: Any  # packed [H, Nq * D]
    mlp_norm: torch.Tensor  # [H] float32
    gate_up: Any  # pack_gated
    down: Any  # packed [H, I]


@dataclass(frozen=True, slots=True)
class ContextWeights:
    """DFlash's keys and values of the target's states, of all layers."""

    norm: torch.Tensor  # [1, H] float32
    kv: Any  # packed [Nl * 2 Nkv * D, H] and bias, by layer k heads, then v heads
    head_norms: HeadNorms


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """All parameters, packed by the ops that read them."""

    embedding: torch.Tensor  # [V, H]
    aux_norm: torch.Tensor | None  # [parts, width] float32
    fc: Any | None  # packed [H, A * H of the target]
    pair: PairNorms
    layers: tuple[LayerWeights, ...]
    context: ContextWeights | None  # only of DFlash
    mask: torch.Tensor | None  # [1, A * H] the target's states of a mask; only of P-EAGLE
    final_norm: torch.Tensor  # [H] float32
    head: Any  # packed [draft V, H]
    token_ids: torch.Tensor  # [draft V] int64: the target id of each draft id


class DraftHead:
    """Pure functions of states, tokens and the head's KV tensor."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        ops: Ops,
        max_len: int | None = None,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``max_len``: tokens of the longest sequence; None: the head's maximum. ``embed``: token ids [T] ->
        [T, H], required if ``weights.embedding`` is cut over ranks."""
        self.config, self.weights, self.ops = config, weights, ops
        self.draft_ops = draft_ops(ops)
        self._embed = embed
        self.shape = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            sliding_window=1,  # unused: the head has no window layers
        )
        self._context_shape = replace(self.shape, num_heads=0)
        device = weights.token_ids.device
        table = head_rope_table(config.rope, config.head_dim, max_len or config.max_position_embeddings)
        self.rope = table.to(device)
        self._sinks = torch.full((config.num_attention_heads,), -torch.inf, device=device)  # no sink

    @property
    def token_ids(self) -> torch.Tensor:
        """[draft V] int64: the target id of each draft id."""
        return self.weights.token_ids

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the KV tensor for ``run``."""
        config = self.config
        return config.num_layers, num_blocks, 2, config.num_key_value_heads, block_size, config.head_dim

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Map aux [T, A * H], the target's states in the order of boundaries, to states [T, H] float32."""
        weights, draft, eps = self.weights, self.draft_ops, self.config.rms_norm_eps
        if weights.fc is not None:
            return draft.linear(aux, weights.aux_norm, eps, weights.fc)
        return aux.float() if weights.aux_norm is None else draft.norm(aux, weights.aux_norm, eps)

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, attention: AttentionMeta, kv: torch.Tensor
    ) -> torch.Tensor:
        """Run EAGLE3's layers: states [T, H] float32, token_ids [T] -> x [T, H] float32, the sum before the
        final norm.

        ``kv`` [Nl, num_blocks, 2, Nkv, block_size, D] is the head's, with the full group's slots and tables.
        """
        weights, eps = self.weights, self.config.rms_norm_eps
        table, index = weights.embedding, token_ids
        if self._embed is not None:
            table, index = self._embed(token_ids), torch.arange(len(token_ids), device=token_ids.device)
        normed, x = self.draft_ops.join(table, index, states, weights.pair, eps)  # [T, 2 H], [T, H]
        return self._layers(x, normed, attention, kv)

    def read(self, states: torch.Tensor, attention: AttentionMeta, kv: torch.Tensor) -> None:
        """Write DFlash's keys and values of the target's states [T, H] into ``kv``, see ``run``."""
        context, draft, eps = self.weights.context, self.draft_ops, self.config.rms_norm_eps
        assert context is not None
        plan = self.ops.plan_attention(attention, self._context_shape, kv.shape[4])
        cache = LayerCache(plan, FULL, kv, self.rope.index_select(0, attention.positions))
        draft.norm_rope_cache(
            draft.linear(states, context.norm, eps, context.kv), context.head_norms, eps, cache
        )

    def run_block(self, token_ids: torch.Tensor, attention: AttentionMeta, kv: torch.Tensor) -> torch.Tensor:
        """Run DFlash's layers: token_ids [T] of blocks -> x [T, H] float32. Every token is a row of
        ``attention`` whose context ends with its block."""
        embed = self._embed or partial(self.ops.embed, self.weights.embedding)
        return self._layers(embed(token_ids).float(), None, attention, kv)

    def _layers(
        self, x: torch.Tensor, normed: torch.Tensor | None, attention: AttentionMeta, kv: torch.Tensor
    ) -> torch.Tensor:
        """``normed``: the input of the first layer's product; None: the norm of x."""
        ops, draft, eps = self.ops, self.draft_ops, self.config.rms_norm_eps
        plan = ops.plan_attention(attention, self.shape, kv.shape[4])
        rope = self.rope.index_select(0, attention.positions)
        for number, layer in enumerate(self.weights.layers):
            cache = LayerCache(plan, FULL, kv[number], rope)
            if normed is not None:
                q = draft.qkv_rope_cache(normed, layer.qkv, cache)  # [T, Nq, D]
            elif layer.head_norms is None:
                q = ops.qkv_rope_cache(x, None, QkvWeights(layer.norm, layer.qkv), eps, cache)
            else:
                qkv = draft.linear(x, layer.norm.unsqueeze(0), eps, layer.qkv)
                only = cache._replace(kv=kv[number : number + 1])
                q = draft.norm_rope_cache(qkv, layer.head_norms, eps, only)
            normed = None
            attended = ops.attention(q, self._sinks, cache)
            x = draft.project_add(attended, layer.output, x)
            parts = [self._mlp(some, layer) for some in x.split(MLP_TOKENS)]
            x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return x

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        draft, eps = self.draft_ops, self.config.rms_norm_eps
        inner = draft.gated_silu(x, layer.mlp_norm, layer.gate_up, eps)  # [T, I]
        return draft.project_add(inner, layer.down, x)

    def next_states(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states [T, H] of the next draft step from x [T, H] of ``run``."""
        if not self.config.norm_output:
            return x
        return self.draft_ops.norm(x, self.weights.final_norm.unsqueeze(0), self.config.rms_norm_eps)

    def logits(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return logits [L, draft V] float32 of x [T, H] of ``run`` at ``index`` [L] int64."""
        weights, eps = self.weights, self.config.rms_norm_eps
        return self.ops.lm_head(x, index, weights.final_norm, weights.head, eps)


def draft_ops(ops: Ops) -> DraftOps:
    """Return the draft ops. Raises ``ConfigError`` if the back end does not support draft heads."""
    if ops.draft is None:
        raise ConfigError(f"ops {ops.name!r} have no draft heads")
    return ops.draft


def head_rope_table(rope: RopeConfig | Llama3Rope, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, D] float32: D/2 cosines, then D/2 sines."""
    if isinstance(rope, RopeConfig):
        return rope_table(rope, head_dim, num_positions)
    return angle_table(_llama3_frequencies(rope, head_dim), num_positions)


def _llama3_frequencies(rope: Llama3Rope, head_dim: int) -> torch.Tensor:
    """Return radians per position of the D/2 pairs, float32.

    A pair with at most ``low_freq_factor`` turns within the original context is slowed; one with at least
    ``high_freq_factor`` turns is not.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = rope.original_max_position * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return plain * kept + plain / rope.factor * (1.0 - kept)
