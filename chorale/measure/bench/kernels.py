"""Each fused op of the Triton back end, timed inside a CUDA graph and compared with the roofline.

Weights are random, in gpt-oss's sizes, and cover several layers so that no cache holds them. The roofline of
a case is the larger of (bytes to move / measured bandwidth) and (operations / measured rate). Each input
counts once. Of the experts, only those that random routing selects count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chorale.engine.types import CacheGroup
from chorale.errors import ConfigError
from chorale.kernels.ops import (
    AttentionShape,
    ExpertTensors,
    LayerCache,
    Ops,
    QkvWeights,
    Routed,
    RouterWeights,
)
from chorale.measure.bench.gpu_time import graph_seconds
from chorale.measure.steps import PagedSequences
from chorale.model.gpt_oss import LayerWeights

_D, _PAGE, _WINDOW, _VOCAB, _TOP_K, _EPS = 64, 64, 128, 201_088, 4, 1e-5


@dataclass(frozen=True, slots=True)
class Cost:
    """The minimum bytes and operations of a case."""

    bytes: float
    flops: float


def measure_kernels(
    shape: Mapping[str, int],
    batches: Sequence[int],
    context: int,
    *,
    layers: int,
    peak_bytes: float,
    peak_flops: float,
) -> list[dict[str, Any]]:
    """Returns a row per kernel and batch size: median microseconds, GB/s, TFLOP/s, share of the roofline.

    Raises ``ConfigError`` without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("chorale bench kernels needs a GPU")
    from chorale.kernels.triton.ops import TRITON_OPS

    rows = []
    with torch.inference_mode():
        bench = Bench(shape, layers, TRITON_OPS)
        for batch in batches:
            for name, work, count, cost in bench.cases(batch, context):
                seconds = graph_seconds(work) / count
                best = max(cost.bytes / peak_bytes, cost.flops / peak_flops)
                rows.append({
                    "kernel": name, "case": f"{batch} tokens, context {context}", "us": seconds * 1e6,
                    "gb_s": cost.bytes / seconds / 1e9, "tflop_s": cost.flops / seconds / 1e12,
                    "share": best / seconds,
                })  # fmt: skip
    return rows


Works = Iterator[tuple[str, Callable[[], Any], int, Cost]]


class Bench:
    """The weights of several layers and the inputs of one batch, in bfloat16 on a GPU, float32 elsewhere."""

    def __init__(
        self, shape: Mapping[str, int], layers: int, ops: Ops, device: str = "cuda", vocab: int = _VOCAB
    ) -> None:
        self._ops, self._device, self._vocab = ops, device, vocab
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._hidden, self._inter, self._experts = shape["hidden"], shape["inter"], shape["experts"]
        self._heads, self._kv_heads = shape["heads"], shape["kv_heads"]
        self._layers = [self._layer() for _ in range(layers)]
        self._head = ops.pack_head(self._randn(vocab, self._hidden, scale=self._hidden**-0.5))

    def _randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (torch.randn(*shape, device=self._device) * scale).to(dtype or self._dtype)

    def _layer(self) -> LayerWeights:
        ops, hidden, rows = self._ops, self._hidden, (self._heads + 2 * self._kv_heads) * _D
        norm = torch.ones(hidden, device=self._device)
        wide = torch.float32
        router = ops.pack_router(
            self._randn(self._experts, hidden, scale=hidden**-0.5, dtype=wide),
            self._randn(self._experts, dtype=wide),
            self._dtype,
        )
        return LayerWeights(
            qkv=QkvWeights(
                norm, ops.pack_linear(self._randn(rows, hidden, scale=hidden**-0.5), self._randn(rows))
            ),
            sinks=self._randn(self._heads, dtype=wide),
            output=ops.pack_linear(self._randn(hidden, self._heads * _D, scale=0.02), self._randn(hidden)),
            router=RouterWeights(norm, router, _TOP_K, self._dtype),
            experts=ops.pack_experts(self._expert_tensors()),
        )

    def _expert_tensors(self) -> ExpertTensors:
        def codes(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=self._device)

        experts, hidden, inter = self._experts, self._hidden, self._inter
        return ExpertTensors(
            gate_up_bias=self._randn(experts, 2 * inter),
            down_bias=self._randn(experts, hidden),
            swiglu_limit=7.0,
            swiglu_alpha=1.702,
            num_layers=10**6,
            dtype=self._dtype,
            gate_up_blocks=codes(0, 256, experts, 2 * inter, hidden // 32, 16),
            gate_up_scales=codes(117, 121, experts, 2 * inter, hidden // 32),
            down_blocks=codes(0, 256, experts, hidden, inter // 32, 16),
            down_scales=codes(117, 121, experts, hidden, inter // 32),
        )

    def cases(self, batch: int, context: int) -> Works:
        """Yields (name, work of all layers, number of layers, cost of a layer) per op of a decode step."""
        ops, layers = self._ops, self._layers
        rows = PagedSequences([context] * batch, _PAGE, torch.device(self._device))
        meta = rows.decodes(range(context - 1, batch * context, context)).meta
        plan = ops.plan_attention(meta, AttentionShape(self._heads, self._kv_heads, _D, _WINDOW), _PAGE)
        pages, count = rows.num_blocks, min(2, len(layers))
        pools = [self._randn(pages, 2, self._kv_heads, _PAGE, _D) for _ in range(count)]
        x, rope = (
            self._randn(batch, self._hidden, dtype=torch.float32),
            self._randn(batch, _D, dtype=torch.float32),
        )
        q, attended = self._randn(batch, self._heads, _D), self._randn(batch, self._heads * _D)
        normed = self._randn(batch, self._hidden)
        draws = [
            torch.stack([torch.randperm(self._experts)[:_TOP_K] for _ in range(batch)]).to(self._device)
            for _ in layers
        ]
        gates = torch.full((batch, _TOP_K), 1 / _TOP_K, device=self._device)
        index, final = torch.arange(batch, device=self._device), torch.ones(self._hidden, device=self._device)
        touched = statistics.mean(len(draw.unique()) for draw in draws)
        costs = self._costs(batch, context, touched)

        def every(one: Callable[[int, LayerWeights], Any]) -> Callable[[], Any]:
            return lambda: [one(number, layer) for number, layer in enumerate(layers)]

        def cache(number: int, group: int) -> LayerCache:
            return LayerCache(plan, group, pools[number % len(pools)], rope)

        def experts(number: int, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
            return ops.moe(Routed(normed, draws[number], gates), layer.experts, x, layer.qkv, _EPS)

        ahead = experts(0, layers[0])[1]  # normed input that each layer but the first receives

        full, window = CacheGroup.FULL, CacheGroup.WINDOW
        works = {
            "qkv": every(lambda n, w: ops.qkv_rope_cache(x, ahead, w.qkv, _EPS, cache(n, full))),
            "full": every(lambda n, w: ops.attention(q, w.sinks, cache(n, full))),
            "window": every(lambda n, w: ops.attention(q, w.sinks, cache(n, window))),
            "route": every(lambda n, w: ops.project_and_route(attended, w.output, x, w.router, _EPS)),
            "experts": every(experts),
            "head": lambda: ops.lm_head(x, index, final, self._head, _EPS),
        }
        for name, work in works.items():
            yield name, work, 1 if name == "head" else len(layers), costs[name]

    def _costs(self, batch: int, context: int, touched: float) -> dict[str, Cost]:
        hidden, inter, rows = self._hidden, self._inter, (self._heads + 2 * self._kv_heads) * _D
        row = 2 * self._kv_heads * _D * 2
        seen = min(context, _WINDOW)

        def product(n: int, k: int) -> Cost:
            return Cost(n * k * 2 + batch * (n + k) * 2, 2.0 * batch * n * k)

        def attention(keys: int) -> Cost:
            return Cost(batch * keys * row, 4.0 * batch * keys * self._heads * _D)

        projection = product(hidden, self._heads * _D)
        return {
            "qkv": product(rows, hidden),
            "full": attention(context),
            "window": attention(seen),
            "route": Cost(
                projection.bytes + self._experts * hidden * 4 + batch * hidden * 8,
                projection.flops + 2.0 * batch * self._experts * hidden,
            ),
            "experts": Cost(
                touched * 3 * hidden * inter * 4.25 / 8 + batch * hidden * 8,
                2.0 * batch * _TOP_K * 3 * hidden * inter,
            ),
            "head": product(self._vocab, hidden),
        }
