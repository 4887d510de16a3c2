"""The Triton kernels on one GPU, at gpt-oss-20b's sizes with random weights (made on the GPU; no checkpoint).

    python benchmarks/gpu_kernels.py [--layers 24] [--json FILE]

1. errors: each op in bfloat16 against the float32 reference on the same weights, beside the reference's own
   bfloat16 error; 2. each op inside a CUDA graph over all layers' weights (so the L2 holds none of them):
   median microseconds a layer, GB/s and share of ``--peak``; 3. the whole step, eager and as a graph, and
   where its time goes by kernel; 4. prefill. Expert products alone: expert_kernels.py, gpu_moe_large.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chorale.bench.gpu_time import event_seconds, graph_seconds
from chorale.kernels.ops import (
    AttentionMeta,
    AttentionShape,
    ExpertTensors,
    ForwardBatch,
    QkvWeights,
    RouterWeights,
)
from chorale.kernels.reference import (
    attention as reference_attention,
)
from chorale.kernels.reference import (
    moe as reference_moe,
)
from chorale.kernels.reference import (
    ops as reference,
)
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss, LayerWeights, Weights

GPU = torch.device("cuda")
H, I, NQ, NKV, D, KV_BLOCK, V = 2880, 2880, 64, 8, 64, 64, 201088
SHAPE = AttentionShape(NQ, NKV, D, 128)
QKV_ROWS = (NQ + 2 * NKV) * D
EPS = 1e-5
RESULTS: dict[str, Any] = {}


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def expert_tensors(experts: int, dtype: torch.dtype = torch.bfloat16) -> ExpertTensors:
    def blocks(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (experts, rows, H // 32, 16), dtype=torch.uint8, device=GPU)

    def scales(rows: int) -> torch.Tensor:
        return torch.randint(117, 121, (experts, rows, H // 32), dtype=torch.uint8, device=GPU)

    return ExpertTensors(
        gate_up_bias=randn(experts, 2 * I),
        down_bias=randn(experts, H),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        num_layers=10**6,
        dtype=dtype,
        gate_up_blocks=blocks(2 * I),
        gate_up_scales=scales(2 * I),
        down_blocks=blocks(H),
        down_scales=scales(H),
    )


def make_router(experts: int) -> RouterWeights:
    wide, narrow = torch.float32, torch.bfloat16
    weight, bias = randn(experts, H, scale=H**-0.5, dtype=wide), randn(experts, dtype=wide)
    norm = 1 + randn(H, scale=0.1, dtype=wide)
    return RouterWeights(norm, TRITON_OPS.pack_router(weight, bias, narrow), 4, narrow)


def make_layer(experts: int) -> LayerWeights:
    ops = TRITON_OPS
    return LayerWeights(
        qkv=QkvWeights(
            1 + randn(H, scale=0.1, dtype=torch.float32),
            ops.pack_linear(randn(QKV_ROWS, H, scale=H**-0.5), randn(QKV_ROWS)),
        ),
        sinks=randn(NQ, dtype=torch.float32),
        output=ops.pack_linear(randn(H, NQ * D, scale=0.02), randn(H, scale=0.1)),
        router=make_router(experts),
        experts=ops.pack_experts(expert_tensors(experts)),
    )


def make_meta(rows: int, context: int, new: int) -> tuple[AttentionMeta, int]:
    """``rows`` sequences of ``context`` tokens of which ``new`` are new; and the pages of the pool."""
    width = -(-context // KV_BLOCK)
    ids = torch.randperm(2 * rows * width, device=GPU).int().view(2, rows, width)
    positions = torch.arange(context - new, context, device=GPU).repeat(rows)
    row = torch.arange(rows, device=GPU).repeat_interleave(new)
    slots = ids[:, row, positions // KV_BLOCK].long() * KV_BLOCK + positions % KV_BLOCK
    meta = AttentionMeta(
        positions=positions,
        query_start=(torch.arange(rows + 1, device=GPU) * new).int(),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=GPU),
        block_tables=(ids[0].contiguous(), ids[1].contiguous()),
        slots=(slots[0].contiguous(), slots[1].contiguous()),
        max_query_len=new,
        max_context_len=context,
    )
    return meta, 2 * rows * width


def make_pool(pages: int, count: int) -> list[torch.Tensor]:
    return [randn(pages, 2, NKV, KV_BLOCK, D) for _ in range(count)]


# ------------------------------------------------------------------ errors


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def errors() -> None:
    """Fresh weights of one layer; exact: the reference in float32 on the same (decoded) weights."""
    weight, bias = randn(QKV_ROWS, H, scale=H**-0.5), randn(QKV_ROWS)
    out_weight, out_bias, head = randn(H, NQ * D, scale=0.02), randn(H), randn(V, H, scale=H**-0.5)
    norm, sinks = 1 + randn(H, scale=0.1, dtype=torch.float32), randn(NQ, dtype=torch.float32)
    router = make_router(32)
    low = expert_tensors(32)
    exact = dataclasses.replace(low, dtype=torch.float32)
    packed, plain, wide = (
        TRITON_OPS.pack_experts(low),
        reference_moe.pack_experts(low),
        reference_moe.pack_experts(exact),
    )
    for tokens in (1, 2, 8, 16, 64, 300, 1024):
        x, rope = randn(tokens, H, dtype=torch.float32), randn(tokens, D, dtype=torch.float32)
        row: dict[str, tuple[float, float]] = {}
        meta, pages = make_meta(1, tokens, tokens) if tokens > 100 else make_meta(tokens, 700, 1)
        pool = make_pool(pages, 1)[0]
        theirs = reference_attention.plan_attention(meta, SHAPE, KV_BLOCK)
        ours = TRITON_OPS.plan_attention(meta, SHAPE, KV_BLOCK)
        pools = [pool.float(), pool.clone(), pool.clone()]
        q32 = reference.qkv_rope_cache(
            x,
            None,
            QkvWeights(norm, reference.pack_linear(weight.float(), bias.float())),
            EPS,
            rope,
            theirs,
            0,
            pools[0],
        )
        qt = TRITON_OPS.qkv_rope_cache(
            x, None, QkvWeights(norm, TRITON_OPS.pack_linear(weight, bias)), EPS, rope, ours, 0, pools[1]
        )
        qr = reference.qkv_rope_cache(
            x, None, QkvWeights(norm, reference.pack_linear(weight, bias)), EPS, rope, theirs, 0, pools[2]
        )
        row["qkv"] = relative(qt, q32), relative(qr, q32)
        row["kv"] = relative(pools[1], pools[0]), relative(pools[2], pools[0])
        for group, name in ((0, "full"), (1, "window")):
            full = reference_attention.attention(qt.float(), pools[1].float(), sinks, theirs, group)
            found = TRITON_OPS.attention(qt, pools[1], sinks, ours, group)
            again = reference_attention.attention(qt.float(), pools[1], sinks, theirs, group)
            row[name] = relative(found, full), relative(again, full)
        attended = found
        o32 = (
            reference.output_projection(
                attended, reference.pack_linear(out_weight.float(), out_bias.float()), x.clone()
            )
            - x
        )
        output = TRITON_OPS.pack_linear(out_weight, out_bias)
        ot = TRITON_OPS.project_and_route(attended, output, x.clone(), router, EPS)[0]
        orf = reference.output_projection(attended, reference.pack_linear(out_weight, out_bias), x.clone())
        row["out"] = relative(ot - x, o32), relative(orf - x, o32)
        ids = torch.stack([torch.randperm(32, device=GPU)[:4] for _ in range(tokens)])
        gates = torch.softmax(randn(tokens, 4, dtype=torch.float32), -1)
        m32 = reference_moe.moe(x, ids, gates, wide, x.clone()) - x
        next_qkv = QkvWeights(norm, TRITON_OPS.pack_linear(weight, bias))
        added, ahead = TRITON_OPS.moe(x, ids, gates, packed, x.clone(), next_qkv, EPS)
        mt = added - x
        mr = reference_moe.moe(x, ids, gates, plain, x.clone()) - x
        row["moe"] = relative(mt, m32), relative(mr, m32)
        if ahead is not None:
            n32 = reference.rms_norm(added, norm, EPS)
            row["norm"] = relative(ahead, n32), relative(n32.bfloat16(), n32)
        if tokens <= 64:
            index = torch.arange(tokens, device=GPU)
            h32 = reference.lm_head(x, index, norm, reference.pack_linear(head.float(), None), EPS)
            ht = TRITON_OPS.lm_head(x, index, norm, TRITON_OPS.pack_head(head), EPS)
            hr = reference.lm_head(x, index, norm, reference.pack_head(head), EPS)
            row["head"] = relative(ht, h32), relative(hr, h32)
        RESULTS[f"errors {tokens}"] = row
        print(
            f"error T={tokens:5}: "
            + "  ".join(f"{name} {a:.1e} (ref {b:.1e})" for name, (a, b) in row.items()),
            flush=True,
        )


# ------------------------------------------------------------------ times


def graph_us(work: Callable[[], Any], repeats: int = 15) -> float:
    return graph_seconds(work, repeats) * 1e6


def events_us(work: Callable[[], Any], repeats: int = 10) -> float:
    return event_seconds(work, repeats) * 1e6


class Bench:
    """All layers' weights, and one case's inputs."""

    def __init__(self, layers: int, peak: float) -> None:
        self.peak = peak
        self.layers = [make_layer(32) for _ in range(layers)]
        self.head = TRITON_OPS.pack_head(randn(V, H, scale=H**-0.5))
        self.norm = torch.ones(H, device=GPU)
        config = make_config(**{**SHAPES["20b"], "layers": layers})
        weights = Weights(randn(V, H), tuple(self.layers), self.norm, self.head, 0)
        self.model = GptOss(config, weights, TRITON_OPS, 16384)

    def case(self, rows: int, context: int) -> dict[str, Callable[[], Any]]:
        """What each op does in a decode step, over all layers."""
        self.meta, pages = make_meta(rows, context, 1)
        self.plan = TRITON_OPS.plan_attention(self.meta, SHAPE, KV_BLOCK)
        self.pool = make_pool(pages, len(self.layers) // 2)
        self.x = randn(rows, H, dtype=torch.float32)
        rope = randn(rows, D, dtype=torch.float32)
        q = randn(rows, NQ, D)
        attended = randn(rows, NQ * D)
        draws = [torch.stack([torch.randperm(32)[:4] for _ in range(rows)]).to(GPU) for _ in self.layers]
        gates = torch.full((rows, 4), 0.25, device=GPU)
        index = torch.arange(rows, device=GPU)
        normed = randn(rows, H, dtype=torch.float32)
        self.touched = statistics.mean(len(draw.unique()) for draw in draws)
        layers, ops = self.layers, TRITON_OPS
        # As every layer gets it but the first.
        ahead = ops.moe(normed, draws[0], gates, layers[0].experts, self.x, layers[0].qkv, EPS)[1]

        def every(one: Callable[[int, LayerWeights], Any]) -> Callable[[], Any]:
            return lambda: [one(n, layer) for n, layer in enumerate(layers)]

        return {
            "qkv": every(
                lambda n, w: ops.qkv_rope_cache(
                    self.x, ahead, w.qkv, EPS, rope, self.plan, 0, self.pool[n // 2]
                )
            ),
            "full": every(lambda n, w: ops.attention(q, self.pool[n // 2], w.sinks, self.plan, 0)),
            "window": every(lambda n, w: ops.attention(q, self.pool[n // 2], w.sinks, self.plan, 1)),
            "route": every(lambda n, w: ops.project_and_route(attended, w.output, self.x, w.router, EPS)),
            "moe": every(lambda n, w: ops.moe(normed, draws[n], gates, w.experts, self.x, w.qkv, EPS)),
            "head": lambda: ops.lm_head(self.x, index, self.norm, self.head, EPS),
        }

    def bytes_of(self, name: str, rows: int, context: int) -> float:
        row = 2 * NKV * D * 2
        return {
            "qkv": QKV_ROWS * H * 2,
            "full": rows * context * row,
            "window": rows * min(context, 128) * row,
            "route": H * NQ * D * 2 + 32 * H * 4,
            "moe": self.touched * 3 * H * I * 4.25 / 8,
            "head": V * H * 2,
        }[name]

    def time_ops(self, rows: int, context: int) -> None:
        for name, work in self.case(rows, context).items():
            us = graph_us(work) / (1 if name == "head" else len(self.layers))
            rate = self.bytes_of(name, rows, context) / us / 1e6
            RESULTS[f"{name} {rows}x{context}"] = us
            print(
                f"  {name:7} batch {rows:4}: {us:8.2f} us  {rate:5.2f} TB/s  {rate / self.peak:5.1%}",
                flush=True,
            )

    def batch(self) -> ForwardBatch:
        tokens = self.meta.positions.shape[0]
        last = self.meta.query_start[1:].long() - 1
        return ForwardBatch(torch.randint(0, V, (tokens,), device=GPU), last, self.meta)

    def time_step(self, rows: int, context: int) -> None:
        self.case(rows, context)
        batch = self.batch()
        with torch.inference_mode():
            eager = events_us(lambda: self.model.forward(batch, self.pool))
            graph = graph_us(lambda: self.model.forward(batch, self.pool))
        RESULTS[f"step {rows}x{context}"] = {"eager_us": eager, "graph_us": graph}
        print(
            f"step batch {rows} context {context}: eager {eager:.0f} us, graph {graph:.0f} us = "
            f"{rows / graph * 1e6:.0f} tok/s",
            flush=True,
        )
        self.profile(batch, f"kernels {rows}x{context}")

    def profile(self, batch: ForwardBatch, name: str) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.model.forward(batch, self.pool)
            torch.cuda.synchronize()
        rows = [(e.key[:48], e.self_device_time_total, e.count) for e in trace.key_averages()]
        rows.sort(key=lambda each: -each[1])
        RESULTS[name] = rows[:20]
        total = sum(each[1] for each in rows)
        print(
            f"  kernels {total:.0f} us: " + ", ".join(f"{k} {t:.0f}/{n}" for k, t, n in rows[:11]), flush=True
        )

    def time_prefill(self, tokens: int) -> None:
        self.meta, pages = make_meta(1, tokens, tokens)
        self.pool = make_pool(pages, len(self.layers) // 2)
        batch = self.batch()
        us = events_us(lambda: self.model.forward(batch, self.pool), repeats=3)
        RESULTS[f"prefill {tokens}"] = us
        print(f"prefill {tokens}: {us / 1e3:.1f} ms = {tokens / us * 1e6:.0f} tok/s", flush=True)
        self.profile(batch, f"kernels prefill {tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--peak", type=float, default=4.6, help="TB/s of read-only streaming")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    try:
        errors()
        torch.cuda.empty_cache()
        bench = Bench(options.layers, options.peak)
        for rows, context in ((1, 640), (8, 640), (64, 1280), (256, 1280)):
            bench.time_ops(rows, context)
            bench.time_step(rows, context)
        bench.time_prefill(8192)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
