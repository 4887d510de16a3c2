"""Batched generation with the trained weights: the model of ``chorale.model``, with a dense KV cache.

Used to evaluate right after training, hundreds of conversations at once; ``tests/training`` compares it with
the served path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chorale.harmony.vocab import CALL, ENDOFTEXT, RETURN, VOCAB_SIZE
from chorale.kernels.ops import AttentionMeta, AttentionShape, ForwardBatch, LayerCache, QkvWeights
from chorale.model.gpt_oss import GptOss
from training.net import DemoNet
from training.ops import TRAINING_OPS, project, rms_norm

STOPS = (RETURN, CALL, ENDOFTEXT)
PAD = ENDOFTEXT
MAX_PREFILL = 32_768  # tokens per forward pass, which bounds the memory for any batch


class DenseCache:
    """k and v [B, S, Nkv, D] of one slot, one pair per group."""

    shape = (1, 2, 1, 1, 1)

    def __init__(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        self.k, self.v = k, v

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> DenseCache:
        k, v = ([torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in "kv")
        return cls(k, v)

    def rows(self, chosen: slice) -> DenseCache:
        """A view of some rows."""
        return DenseCache([one[chosen] for one in self.k], [one[chosen] for one in self.v])


@dataclass(frozen=True, slots=True)
class DensePlan:
    rows: torch.Tensor  # [B, 1]
    positions: torch.Tensor  # [B, S]
    masks: tuple[torch.Tensor, torch.Tensor]  # [B, 1, 1, S, capacity]
    shape: AttentionShape


def _attention(q: torch.Tensor, sinks: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    plan, group, kv = cache.plan, cache.group, cache.kv
    shape, size = plan.shape, tuple(plan.positions.shape)
    heads = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads)
    capacity = plan.masks[group].shape[-1]
    q = q.view(*size, *heads, shape.head_dim).permute(0, 2, 3, 1, 4)  # [B, Nkv, rep, S, D]
    k = kv.k[group][:, :capacity].permute(0, 2, 3, 1).unsqueeze(2)  # [B, Nkv, 1, D, C]
    v = kv.v[group][:, :capacity].permute(0, 2, 1, 3).unsqueeze(2)  # [B, Nkv, 1, C, D]
    scores = (q @ k).float() * shape.head_dim**-0.5
    scores = scores.masked_fill(~plan.masks[group], float("-inf"))
    sink = sinks.float().view(1, *heads, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return (weights.to(v.dtype) @ v).permute(0, 3, 1, 2, 4).reshape(-1, shape.num_heads * shape.head_dim)


class Generator:
    """``temperature`` 0 is greedy. Tables are expanded once."""

    def __init__(self, net: DemoNet, max_len: int = 1280) -> None:
        self.device, self.max_len = net.final_norm.device, max_len
        self.config = net.config
        with torch.no_grad():
            all_tokens = torch.arange(VOCAB_SIZE, device=self.device)
            embedding, self.head = net.table("embed")(all_tokens), net.table("unembed")(all_tokens)
            weights = replace(net.weights(), embedding=embedding)
            self.final_norm = net.final_norm.detach()
        ops = replace(
            TRAINING_OPS,
            name="generation",
            plan_attention=lambda meta, shape, block_size: self._plan(meta, shape),
            embed=lambda embedding, ids: torch.nn.functional.embedding(ids, embedding).float(),
            qkv_rope_cache=self._qkv,
            attention=_attention,
        )
        self.model = GptOss(net.config, weights, ops, max_len=max_len)

    def _plan(self, meta: AttentionMeta, shape: AttentionShape) -> DensePlan:
        positions = meta.positions.view(-1, meta.max_query_len)
        keys = torch.arange(meta.max_context_len, device=self.device)
        distance = positions.unsqueeze(-1) - keys  # [B, S, C]
        causal = (distance >= 0)[:, None, None]
        window = causal & (distance < shape.sliding_window)[:, None, None]
        rows = torch.arange(positions.shape[0], device=self.device).unsqueeze(1)
        return DensePlan(rows, positions, (causal, window), shape)

    def _qkv(
        self, x: torch.Tensor, normed: None, weights: QkvWeights, eps: float, cache: LayerCache
    ) -> torch.Tensor:
        plan, group, kv = cache.plan, cache.group, cache.kv
        q, k, v = project(x, weights, eps, cache.rope, plan.shape)
        size = tuple(plan.positions.shape)
        kv.k[group][plan.rows, plan.positions] = k.unflatten(0, size).bfloat16()
        kv.v[group][plan.rows, plan.positions] = v.unflatten(0, size).bfloat16()
        return q

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, caches: Any, context: int
    ) -> torch.Tensor:
        """Returns logits [B, V] of the tokens at ``last`` [B] of each row."""
        empty = torch.empty(0, dtype=torch.int32, device=self.device)
        size = token_ids.shape[1]
        meta = AttentionMeta(positions.flatten(), empty, empty, (empty, empty), (empty, empty), size, context)
        index = torch.arange(len(token_ids), device=self.device) * size + last
        x = self.model.run(ForwardBatch(token_ids.flatten(), index, meta), caches)
        normed = rms_norm(x[index], self.final_norm, self.config.rms_norm_eps)
        return (normed.bfloat16() @ self.head.mT).float()

    def _prefill(self, prompts: Sequence[Sequence[int]], caches: list[DenseCache]) -> torch.Tensor:
        """Returns logits [B, V] after each prompt; fills the caches of these rows."""
        width = max(map(len, prompts))
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        padded = torch.tensor(
            [[*prompt, *[PAD] * (width - len(prompt))] for prompt in prompts], device=self.device
        )
        positions = torch.arange(width, device=self.device).expand(len(prompts), -1).contiguous()
        return self._forward(padded, positions, last, caches, width)

    def noise(self, logits: torch.Tensor, positions: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Returns Gumbel noise for ``logits`` [B, V] of the tokens at ``positions`` [B]."""
        uniform = torch.rand(logits.shape, device=self.device, generator=random).clamp_(1e-20, 1 - 1e-7)
        return -torch.log(-torch.log(uniform))

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new: int, temperature: float, seed: int = 0
    ) -> list[list[int]]:
        """Returns the tokens after each prompt, including the stop token."""
        random = torch.Generator(self.device).manual_seed(seed)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = int(lengths.max())
        capacity = min(width + max_new, self.max_len)
        shape = (len(prompts), capacity, self.config.num_key_value_heads, self.config.head_dim)
        caches = [DenseCache.empty(shape, self.device) for _ in range(self.config.num_kv_tensors)]
        rows = max(1, MAX_PREFILL // width)
        parts = [slice(start, start + rows) for start in range(0, len(prompts), rows)]
        logits = torch.cat(
            [self._prefill(prompts[part], [one.rows(part) for one in caches]) for part in parts]
        )
        made = torch.full((len(prompts), max_new), PAD, device=self.device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        stops = torch.tensor(STOPS, device=self.device)
        for step in range(max_new):
            if temperature > 0:
                logits = logits / temperature + self.noise(logits, lengths + step, random)
            chosen = logits.argmax(-1)
            made[:, step] = torch.where(done, PAD, chosen)
            done = done | torch.isin(chosen, stops)
            if (step % 8 == 7 and bool(done.all())) or width + step + 1 >= capacity:
                break
            at = (lengths + step).unsqueeze(1)
            logits = self._forward(
                made[:, step : step + 1], at, torch.zeros_like(lengths), caches, width + step + 1
            )
        return [_until_stop(row) for row in made.tolist()]


def _until_stop(ids: list[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in STOPS:
            return ids[: index + 1]
    return ids
