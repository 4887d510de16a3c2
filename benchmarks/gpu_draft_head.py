"""A draft head of the published size on one GPU, with random weights: errors, passes, ops, shapes to choose.

    python benchmarks/gpu_draft_head.py [--rows 1 2 4 8 16 32 64] [--context 1024] [--sweep [OP ...]]
    TRITON_INTERPRET=1 python benchmarks/gpu_draft_head.py --dry      (a CPU, small sizes: errors, no times)

1. errors of a pass in bfloat16 against the float32 reference, beside the reference's own in bfloat16;
2. a captured pass (layer, logits, sampling of draft ids) and one of ``--drafts`` passes in a chain, with
   microseconds a pass beside the bytes of the weights at ``--peak``;
3. each op in a graph over several heads' weights, so that the L2 holds none: microseconds, GB/s;
4. where a captured pass's time goes, by kernel; 5. with ``--sweep``, other shapes of the products.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chorale.bench.gpu_time import captured, event_seconds, graph_seconds
from chorale.kernels.ops import AttentionMeta, Ops, SamplingInputs
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton import tuning
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.draft.config import HeadConfig, published_head, small_head
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import pack_weights
from chorale.model.draft.random_head import random_tensors, random_token_ids

BLOCK = 64
RESULTS: dict[str, Any] = {}


class Case:
    """Some rows, each with a context, and the head's KV."""

    def __init__(self, head: DraftHead, rows: int, context: int, device: str) -> None:
        config, dtype = head.config, head.weights.pair.dtype
        width = -(-context // BLOCK)
        table = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
        position = torch.full((rows,), context - 1, device=device)
        slots = table[:, (context - 1) // BLOCK].long() * BLOCK + (context - 1) % BLOCK
        self.meta = AttentionMeta(
            positions=position,
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            block_tables=(table, table),
            slots=(slots, slots),
            max_query_len=1,
            max_context_len=context,
        )
        shape = head.kv_shape(rows * width, BLOCK)
        self.kv = torch.randn(shape, device=device).to(dtype)
        self.states = torch.randn(rows, config.hidden_size, device=device)
        self.aux = 3 * torch.randn(rows, config.aux_width, device=device)
        self.token_ids = torch.arange(rows, device=device) * 7 % config.vocab_size
        self.every = torch.arange(rows, device=device)
        self.out, self.last = torch.empty_like(self.token_ids), torch.empty_like(self.token_ids)
        keys = torch.randint(-(2**31), 2**31, (rows, 2), device=device).int()
        heat = torch.ones(rows, device=device)
        self.draws = SamplingInputs(keys, heat, self.every.int())


def make_head(
    config: HeadConfig, ops: Ops, dtype: torch.dtype, device: str, seed: int, shared: Any
) -> DraftHead:
    tensors = random_tensors(config, seed, device)
    tensors["embedding"] = tensors["embedding"] if shared is None else shared
    ids = random_token_ids(config).to(device)
    return DraftHead(config, pack_weights(config, tensors.get, ids, ops, dtype), ops, 131072)


def one_pass(head: DraftHead, case: Case, sample: Any, states: Any, token_ids: Any) -> Any:
    x = head.run(states, token_ids, case.meta, case.kv)
    sample(head.logits(x, case.every), case.draws, case.last, case.out)
    return head.next_states(x)


def chain(head: DraftHead, case: Case, sample: Any, drafts: int) -> None:
    """Positions stay, which changes no time."""
    states, token_ids = case.states, case.token_ids
    for _ in range(drafts):
        states, token_ids = one_pass(head, case, sample, states, token_ids), case.out


def errors(config: HeadConfig, rows: list[int], device: str, wide: bool) -> None:
    dtype = torch.float32 if wide else torch.bfloat16
    exact = make_head(config, REFERENCE_OPS, torch.float32, device, 0, None)
    shared = exact.weights.embedding
    heads = {
        "triton": make_head(config, TRITON_OPS, dtype, device, 0, shared),
        "reference": make_head(config, REFERENCE_OPS, torch.bfloat16, device, 0, shared),
    }
    for count in rows:
        case = Case(exact, count, 300, device)
        expected, logits = outputs(exact, case, case.kv.clone())
        for name, head in heads.items():
            found = outputs(head, case, case.kv.to(head.weights.pair.dtype))
            pair = [
                float((a.double() - b.double()).norm() / b.double().norm())
                for a, b in zip(found, (expected, logits), strict=True)
            ]
            RESULTS[f"error {name} {count}"] = pair
            print(f"rows {count:3}  {name:9} error of x {pair[0]:.2e}  of logits {pair[1]:.2e}", flush=True)


def outputs(head: DraftHead, case: Case, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = head.run(head.project(case.aux), case.token_ids, case.meta, kv)
    return x, head.logits(x, case.every)


def pass_bytes(head: DraftHead) -> int:
    weights = head.weights
    parts = (weights.qkv, weights.output, weights.gate_up, weights.down, weights.head)
    return sum(part.weight.nbytes for part in parts)


def ops_of(heads: list[DraftHead], case: Case) -> dict[str, tuple[Callable[[DraftHead], Any], int]]:
    """(the op of one head, bytes of its weights)"""
    draft, eps, head = heads[0].draft_ops, heads[0].config.rms_norm_eps, heads[0]
    weights, dtype = head.weights, head.weights.pair.dtype
    plan = TRITON_OPS.plan_attention(case.meta, head.shape, BLOCK)
    rope = head.rope[case.meta.positions]
    normed, x = draft.join(weights.embedding, case.token_ids, case.states, weights.pair, eps)
    q = draft.qkv_rope_cache(normed, weights.qkv, rope, plan, 0, case.kv)
    attended = TRITON_OPS.attention(q, case.kv, head._sinks, plan, 0)
    inner = torch.randn(len(x), head.config.intermediate_size, device=x.device).to(dtype)
    kv_bytes = (
        2 * int(case.meta.context_lens.sum()) * head.config.num_key_value_heads * head.config.head_dim * 2
    )
    ops: dict[str, tuple[Callable[[DraftHead], Any], int]] = {
        "join": (
            lambda h: draft.join(h.weights.embedding, case.token_ids, case.states, h.weights.pair, eps),
            0,
        ),
        "qkv": (
            lambda h: draft.qkv_rope_cache(normed, h.weights.qkv, rope, plan, 0, case.kv),
            weights.qkv.weight.nbytes,
        ),
        "attention": (lambda h: TRITON_OPS.attention(q, case.kv, h._sinks, plan, 0), kv_bytes),
        "output": (lambda h: draft.project_add(attended, h.weights.output, x), weights.output.weight.nbytes),
        "gated": (
            lambda h: draft.gated_silu(x, h.weights.mlp_norm, h.weights.gate_up, eps),
            weights.gate_up.weight.nbytes,
        ),
        "down": (lambda h: draft.project_add(inner, h.weights.down, x), weights.down.weight.nbytes),
        "logits": (lambda h: h.logits(case.states, case.every), weights.head.weight.nbytes),
        "project": (lambda h: h.project(case.aux), weights.fc.weight.nbytes),
    }
    return ops


def time_op(heads: list[DraftHead], op: Callable[[DraftHead], Any], dry: bool) -> float:
    """Microseconds of one."""
    if dry:
        op(heads[0])
        return 1.0
    repeats = 6  # so that starting the graph does not count

    def work() -> None:
        for _ in range(repeats):
            for head in heads:
                op(head)

    return graph_seconds(work, 15) * 1e6 / (repeats * len(heads))


def time_rows(
    heads: list[DraftHead], rows: int, context: int, drafts: int, peak: float, dry: bool, device: str
) -> None:
    head = heads[0]
    case = Case(head, rows, context, device)
    forbidden = torch.zeros(head.config.vocab_size, dtype=torch.uint8, device=device)
    sample = TRITON_OPS.make_sampler(forbidden, 256, ids=head.token_ids)
    roofline = pass_bytes(head) / peak * 1e6
    for name, count in (("pass", 1), ("chain", drafts)):
        if dry:
            chain(head, case, sample, count)
            continue
        us = graph_seconds(lambda count=count: chain(head, case, sample, count), 25) * 1e6 / count  # type: ignore[misc]
        RESULTS[f"{name} {rows}"] = us
        share = roofline / us
        print(
            f"rows {rows:3}  {name:9} {us:7.1f} us a pass   weights alone {roofline:.1f} ({share:.0%})",
            flush=True,
        )
    total = 0.0
    for name, (op, size) in ops_of(heads, case).items():
        us = time_op(heads, op, dry)
        total += 0 if name == "project" else us
        RESULTS[f"{name} {rows}"] = us
        print(f"rows {rows:3}  {name:9} {us:7.2f} us  {size / us / 1e3:6.0f} GB/s", flush=True)
    print(f"rows {rows:3}  sum of a pass's ops {total:.1f} us", flush=True)
    if not dry:
        by_kernel(head, case, sample, rows)


def by_kernel(head: DraftHead, case: Case, sample: Any, rows: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    graph = captured(lambda: chain(head, case, sample, 1))
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    for event in sorted(trace.key_averages(), key=lambda e: -e.device_time_total):
        if event.device_time_total:
            each = event.device_time_total / 10
            print(
                f"rows {rows:3}    {each:7.2f} us in {event.count / 10:4.1f} x {event.key[:80]}", flush=True
            )


@contextmanager
def chosen(name: str, value: Any) -> Iterator[None]:
    """``tuning`` answers ``value`` to the question ``name``."""
    before = getattr(tuning, name)
    setattr(tuning, name, (lambda *_: value) if callable(before) else value)
    try:
        yield
    finally:
        setattr(tuning, name, before)


ROW_TILES = [
    tuning.Tile(rows, 1, depth, warps, 3)
    for rows, depth, warps in itertools.product((2, 4, 8), (512, 1024), (4, 8))
]
GATED_TILES = [tuning.Tile(rows, 1, 0, warps, 1) for rows, warps in itertools.product((1, 2, 4), (2, 4, 8))]
FUSED = [
    tuning.SkinnyConfig(*shape)
    for shape in (
        (5, 8, 1, 2, 2),
        (5, 8, 1, 2, 3),
        (4, 8, 1, 3, 2),
        (2, 8, 2, 3, 2),
        (2, 8, 1, 6, 4),
        (1, 8, 2, 4, 4),
    )
]
# op -> (questions that others answer with None, the question, its answers)
SWEEPS: dict[str, list[tuple[tuple[str, ...], str, list[Any]]]] = {
    "qkv": [(("draft_qkv",), "stream_row", ROW_TILES), ((), "draft_qkv", FUSED)],
    "down": [(("draft_down",), "stream_row", ROW_TILES), ((), "draft_down", FUSED)],
    "gated": [(("draft_gated",), "gated_row", GATED_TILES), ((), "draft_gated", FUSED)],
    "logits": [((), "head_row", ROW_TILES)],
    "project": [((), "stream_row", ROW_TILES)],
}


def sweep(heads: list[DraftHead], names: list[str], context: int, dry: bool, device: str) -> None:
    """Shapes of products, each op alone; those for one token only at one row."""
    for name, rows in itertools.product(names, (1, 4, 8)):
        case = Case(heads[0], rows, context, device)
        op, size = ops_of(heads, case)[name]
        found = []
        for others, question, answers in SWEEPS[name]:
            of_one = question in ("stream_row", "gated_row", "head_row")
            for answer in ([None] if of_one and rows > 1 else answers)[: 2 if dry else None]:
                with ExitStack() as stack:
                    for other in others:
                        stack.enter_context(chosen(other, None))
                    if answer is not None:
                        stack.enter_context(chosen(question, answer))
                    label = "split product or cuBLAS" if answer is None else str(answer)
                    try:
                        found.append((time_op(heads, op, dry), label))
                    except Exception as problem:  # a shape that does not fit
                        print(f"  {name} {label}: {type(problem).__name__}", flush=True)
        for us, label in sorted(found)[:8]:
            print(f"sweep {rows} {name:8} {us:7.2f} us  {size / us / 1e3:6.0f} GB/s  {label}", flush=True)
        RESULTS[f"sweep {name} {rows}"] = sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=3, help="passes of a chain")
    parser.add_argument("--heads", type=int, default=4, help="whose weights are read in turn")
    parser.add_argument("--peak", type=float, default=4.8e12, help="bytes a second")
    parser.add_argument("--sweep", nargs="*", choices=sorted(SWEEPS), help="ops (default: all)")
    parser.add_argument("--dry", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if given.dry else ("cuda", torch.bfloat16)
    if given.dry:
        target = make_config(
            layers=8, experts=8, hidden=64, inter=96, heads=8, kv_heads=2, head_dim=16, vocab=512
        )
        config, given.rows, given.context, given.heads = small_head(target), [1, 3], 70, 2
    else:
        config = published_head(make_config(**SHAPES["20b"]))
    config = replace(config, norm_before_fc=True)
    with torch.inference_mode():
        errors(config, given.rows if given.dry else [1, 4, 16, 64], device, given.dry)
        first = make_head(config, TRITON_OPS, dtype, device, 0, None)
        heads = [first]
        heads += [
            make_head(config, TRITON_OPS, dtype, device, n, first.weights.embedding)
            for n in range(1, given.heads)
        ]
        if not given.dry:
            empty = event_seconds(captured(lambda: first.token_ids[:1].clone()).replay, 15) * 1e6
            print(
                f"{torch.cuda.get_device_name()}; a graph of one small kernel takes {empty:.1f} us",
                flush=True,
            )
        for rows in given.rows:
            time_rows(heads, rows, given.context, given.drafts, given.peak, given.dry, device)
        if given.sweep is not None:
            sweep(heads, given.sweep or sorted(SWEEPS), given.context, given.dry, device)
    if given.json:
        given.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
