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
    LayerCache,
    Ops,
    Routed,
    with_compact,
)
from chorale.kernels.triton.tuning import SKINNY_TOKENS
from chorale.measure.bench.checkpoint_writer import RandomSource
from chorale.measure.bench.gpu_time import graph_seconds
from chorale.measure.steps import PagedSequences
from chorale.model.config_writer import make_config
from chorale.model.gpt_oss import LayerWeights
from chorale.model.weights import Loader, Target

_D, _PAGE, _VOCAB, _TOP_K, _EPS = 64, 64, 201_088, 4, 1e-5


@dataclass(frozen=True, slots=True)
class Cost:
    """The minimum bytes and operations of a case."""

    bytes: float
    flops: float


def measure_kernels(
    shape: Mapping[str, Any],
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
        bench = Bench(shape, layers, with_compact(TRITON_OPS))
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
        self, shape: Mapping[str, Any], layers: int, ops: Ops, device: str = "cuda", vocab: int = _VOCAB
    ) -> None:
        self._ops, self._device = ops, device
        self._config = config = make_config(**({**shape, "layers": layers}), vocab=vocab)
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16
        target = Target(config, ops, self._dtype, torch.device(device))
        loader = Loader(RandomSource(config, device), target)
        self._layers, self._head = [*map(loader.layer, range(layers))], loader.group(None, "head")

    def _randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(dtype or self._dtype)

    def cases(self, batch: int, context: int) -> Works:
        """Yields (name, work of all layers, number of layers, cost of a layer) per op of a decode step."""
        ops, layers, config = self._ops, self._layers, self._config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = PagedSequences([context] * batch, _PAGE, torch.device(self._device))
        meta = rows.decodes(range(context - 1, batch * context, context)).meta
        plan = ops.plan_attention(meta, AttentionShape(heads, kv_heads, _D, config.sliding_window), _PAGE)
        pages, count = rows.num_blocks, min(2, len(layers))
        pools = [self._randn(pages, 2, kv_heads, _PAGE, _D) for _ in range(count)]
        x, rope = (self._randn(batch, size, dtype=torch.float32) for size in (config.hidden_size, _D))
        q, attended = self._randn(batch, heads, _D), self._randn(batch, heads * _D)
        normed = self._randn(batch, config.hidden_size)
        draws = [
            torch.stack([torch.randperm(config.num_local_experts)[:_TOP_K] for _ in range(batch)]).to(
                self._device
            )
            for _ in layers
        ]
        gates = torch.full((batch, _TOP_K), 1 / _TOP_K, device=self._device)
        index = torch.arange(batch, device=self._device)
        final = torch.ones(config.hidden_size, device=self._device)
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
        config = self._config
        hidden, inter, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        seen = min(context, config.sliding_window)

        has_compact = batch <= SKINNY_TOKENS and getattr(self._head, "compact", None) is not None
        weight = 1.5 if has_compact else 2

        def product(n: int, k: int) -> Cost:
            return Cost(n * k * weight + batch * (n + k) * 2, 2.0 * batch * n * k)

        def attention(keys: int) -> Cost:
            return Cost(batch * keys * 4 * kv_heads * _D, 4.0 * batch * keys * heads * _D)

        projection = product(hidden, heads * _D)
        return {
            "qkv": product((heads + 2 * kv_heads) * _D, hidden),
            "full": attention(context),
            "window": attention(seen),
            "route": Cost(
                projection.bytes + experts * hidden * 4 + batch * hidden * 8,
                projection.flops + 2.0 * batch * experts * hidden,
            ),
            "experts": Cost(
                touched * 3 * hidden * inter * 4.25 / 8 + batch * hidden * 8,
                2.0 * batch * _TOP_K * 3 * hidden * inter,
            ),
            "head": product(config.vocab_size, hidden),
        }
