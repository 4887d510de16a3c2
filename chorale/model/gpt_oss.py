"""gpt-oss, top to bottom, in terms of Ops.

    x = embedding[tokens]
    for each layer:                                            # even layers see a window, odd ones all
        q, k, v = split(norm(x) Wqkv + bqkv);  q, k = rotate(q), rotate(k);  cache k, v
        p       = softmax([q k^T / sqrt(D), sink])             # the sink takes part of the mass, has no value
        x       = x + (p v) Wo + bo
        t       = norm(x);  chosen = top4(t Wr + br);  gate = softmax(over the chosen four only)
        g, u    = t W1 + b1, columns alternating               # per chosen expert, W in MXFP4
        x       = x + sum over chosen: gate * ((g' sigmoid(1.702 g') (u' + 1)) W2 + b2)
                                                               # g' = min(g, 7),  u' = clamp(u, -7, 7)
    logits = norm(x) Whead

    norm(x) = x / sqrt(mean(x^2) + eps) * w

This file owns the order of the operations. It knows nothing about devices, packed
weights or the purpose of a row of the batch. Shape letters are those of ``kernels/ops.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chorale.kernels.ops import AttentionShape, ForwardBatch, LayerCache, Ops, QkvWeights, RouterWeights
from chorale.model.config import ModelConfig
from chorale.model.rope import rope_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: QkvWeights
    sinks: torch.Tensor  # [Nq] float32
    output: Any  # packed [H, Nq * D] and bias
    router: RouterWeights
    experts: Any  # packed


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters, packed by the ops that read them."""

    embedding: Any  # [V, H] on the device, or packed by the ops to stay in host memory
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [H] float32
    head: Any  # packed [V, H]
    num_parameters: int


@dataclass(frozen=True, slots=True)
class AuxStates:
    """The input of a draft head: the residual stream after ``boundaries`` blocks, concatenated.

    Without ``boundaries`` it is the final, normed state.
    """

    boundaries: tuple[int, ...]
    states: torch.Tensor  # [T, A * H], written by the model

    def first(self, num_tokens: int) -> AuxStates:
        """Return the states of the first tokens."""
        return AuxStates(self.boundaries, self.states[:num_tokens])

    def keep(self, num_blocks: int, x: torch.Tensor) -> None:
        """Copy x [T, H], the stream after ``num_blocks`` blocks, if it is one of the boundaries."""
        for part, boundary in enumerate(self.boundaries):
            if boundary == num_blocks:
                self.states[:, part * x.shape[1] : (part + 1) * x.shape[1]].copy_(x)


class GptOss:
    """The model: pure functions of a batch and the KV pool, without state except weights and ``routed``."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_len: int | None = None) -> None:
        """``max_len``: tokens of the longest sequence (rows of the rotary table); None: the model's."""
        self.config = config
        self.weights = weights
        self.ops = ops
        shape = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            sliding_window=config.sliding_window,
        )
        self.shapes = [replace(shape, full_window=window) for window in config.full_windows]
        table = rope_table(config.rope, config.head_dim, max_len or config.max_position_embeddings)
        self.rope = table.to(weights.final_norm.device)
        # [tokens, layers, K] uint8: memory for the expert ids that the newest step chose; None: not kept.
        self.routed: torch.Tensor | None = None
        # (weights, cache group, index of its KV tensor, index of its shape).
        self.layers = [(each, *config.place_of(index)) for index, each in enumerate(weights.layers)]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step: write the new tokens' K and V into ``kv`` and return logits [L, V] float32.

        ``kv`` has ``config.num_kv_tensors`` tensors [num_blocks, 2, Nkv, block_size, D].
        """
        return self.logits(self.hidden(batch, kv), batch.logits_index, batch.adapters)

    @torch.inference_mode()
    def hidden(
        self, batch: ForwardBatch, kv: Sequence[torch.Tensor], aux: AuxStates | None = None
    ) -> torch.Tensor:
        """``forward`` without the output head: returns x [T, H] after the last layer, before the final
        norm."""
        return self.run(batch, kv, aux)

    def run(
        self, batch: ForwardBatch, kv: Sequence[torch.Tensor], aux: AuxStates | None = None
    ) -> torch.Tensor:
        """``hidden`` without inference mode, for training with other ops."""
        ops, eps = self.ops, self.config.rms_norm_eps
        layer_ops: Any = ops if batch.adapters is None else ops.lora
        plans = [ops.plan_attention(batch.attention, shape, kv[0].shape[3]) for shape in self.shapes]
        rope = self.rope.index_select(0, batch.attention.positions)  # [T, D]: cos | sin
        x = ops.embed(self.weights.embedding, batch.token_ids)  # [T, H]
        normed = None  # [T, H], if the previous layer has normed x for this layer
        # The weights that read each layer's result.
        following = [*(layer.qkv for layer, *_ in self.layers[1:]), None]
        if aux is not None:
            aux.keep(0, x)
        pairs = zip(self.layers, following, strict=True)
        for number, ((layer, group, tensor, shape), next_qkv) in enumerate(pairs, 1):
            extra = () if batch.adapters is None else (batch.adapters, number - 1)
            cache = LayerCache(plans[shape], group, kv[tensor], rope)
            q = layer_ops.qkv_rope_cache(x, normed, layer.qkv, eps, cache, *extra)  # [T, Nq, D]
            attended = ops.attention(q, layer.sinks, cache)  # [T, Nq * D]
            x, routed = layer_ops.project_and_route(attended, layer.output, x, layer.router, eps, *extra)
            if self.routed is not None:
                self.routed[: len(x), number - 1].copy_(routed.expert_ids)
            x, normed = layer_ops.moe(routed, layer.experts, x, next_qkv, eps, *extra)  # [T, H], [T, H]
            if aux is not None:
                aux.keep(number, x)
        if aux is not None and not aux.boundaries:
            spread = x.float().pow(2).mean(-1, keepdim=True)
            aux.states.copy_(x.float() * torch.rsqrt(spread + eps) * self.weights.final_norm)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, index: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        """Return logits [L, V] float32 of the tokens at ``index`` [L] int64 of ``hidden`` [T, H].
        ``adapters``: those of the T tokens."""
        weights, eps = self.weights, self.config.rms_norm_eps
        if adapters is not None and self.ops.lora is not None:
            head = self.ops.lora.lm_head
            return head(hidden, index, weights.final_norm, weights.head, eps, adapters)
        return self.ops.lm_head(hidden, index, weights.final_norm, weights.head, eps)
