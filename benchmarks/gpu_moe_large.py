"""Expert layers and attention of large steps on one Hopper GPU, at gpt-oss sizes with random weights.

    python benchmarks/gpu_moe_large.py [--sweep] [--experts 32 128] [--tokens 256 1024 8192] [--json FILE]

1. errors: ``grouped_moe`` in bfloat16 against the float32 reference; 2. for each number of experts and
tokens: microseconds of both products, of placing and gathering, of the combination; TFLOP/s, TB/s and share
of the roofline (the larger of operations over ``--tflops`` and bytes over ``--tbs``); 3. prefill attention.
With --sweep, other tile shapes too. Layers' weights are rotated, so that the L2 holds none of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chorale.bench.gpu_time import graph_seconds
from chorale.kernels import mxfp4
from chorale.kernels.ops import AttentionMeta, AttentionShape, ExpertTensors, QkvWeights
from chorale.kernels.reference import attention as reference_attention
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.triton import tuning
from chorale.kernels.triton.attention import prefill
from chorale.kernels.triton.attention.plan import AttentionPlan, plan_attention
from chorale.kernels.triton.dense.linear import pack_head
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.launch import tuning_of
from chorale.kernels.triton.moe import grouped, hopper_kernel, moe, tiles
from chorale.kernels.triton.moe.combine import combine
from chorale.kernels.triton.moe.packing import Experts, Matrices, pack_experts

GPU = torch.device("cuda")
H = 2880
RESULTS: dict[str, Any] = {}
# Fields of tuning.GroupedTile from wide to mid. By e4m3 inputs and pairs an expert.
WIDES: dict[tuple[bool, int], list[tuple[int, ...]]] = {
    (False, 32): [(64, 32, 8), (64, 32, 4, 80, 2), (32, 16, 6, 80, 2)],
    (False, 128): [(128, 32, 5), (128, 32, 3), (64, 32, 4, 80, 2), (128, 32, 4, 0, 1, 32)],
    (False, 256): [(256, 64, 3), (128, 32, 5), (256, 64, 2, 0, 1, 32), (256, 64, 3, 0, 1, 0, 128)],
    (False, 1024): [(256, 64, 3), (256, 64, 3, 0, 1, 0, 128)],
    (True, 32): [(64, 32, 8), (64, 32, 5, 80, 2)],
    (True, 128): [(128, 32, 8), (128, 32, 7, 0, 1, 32)],
    (True, 256): [(256, 64, 5), (256, 64, 5, 0, 1, 32), (256, 64, 5, 0, 1, 0, 128)],
    (True, 1024): [(256, 64, 5), (256, 64, 5, 0, 1, 32), (256, 64, 5, 0, 1, 0, 128)],
}
ATTENTION = [
    (128, 64, True, 8, 2),
    (128, 64, False, 8, 2),
    (128, 64, False, 8, 3),
    (128, 128, False, 8, 2),
    (128, 64, False, 4, 3),
    (64, 64, True, 4, 2),
    (64, 64, True, 4, 3),
    (64, 64, False, 4, 3),
]
WINDOWED = [(128, 64, False, 4, 2), (128, 64, False, 8, 2), (64, 64, False, 4, 2), (128, 128, False, 8, 2)]


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def random_experts(experts: int, fp8: bool = False) -> Experts:
    """Any bytes are weights; scale bytes of 2^-10 to 2^-7."""

    def matrices(tiles: int) -> Matrices:
        size = (experts, tiles, 45, 32, 4)
        blocks = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=GPU)
        scales = torch.randint(117, 121, (experts, tiles, 45, 8, 2, 2), dtype=torch.uint8, device=GPU)
        return Matrices(blocks, scales + 126)

    made = Experts(
        matrices(360), matrices(180), randn(2, experts, H), randn(experts, H), 7.0, 1.702, torch.bfloat16
    )
    return with_fp8(made, H) if fp8 else made


def with_fp8(experts: Experts, hidden: int) -> Experts:
    return dataclasses.replace(
        experts,
        gate_up_largest=experts.gate_up.largest(experts.intermediate, paired=True),
        down_largest=experts.down.largest(hidden),
    )


def draw(tokens: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device=GPU).topk(4, dim=1).indices


def graph_us(work: Callable[[], Any]) -> float:
    return graph_seconds(work) * 1e6


def say(text: str) -> None:
    print(text, flush=True)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# ------------------------------------------------------------------ errors


def checkpoint_tensors(experts: int, hidden: int, inter: int, dtype: torch.dtype) -> ExpertTensors:
    def blocks(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, device=GPU)

    def scales(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(117, 121, (experts, rows, columns // 32), dtype=torch.uint8, device=GPU)

    return ExpertTensors(
        gate_up_bias=randn(experts, 2 * inter),
        down_bias=randn(experts, hidden),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        num_layers=10**6,
        dtype=dtype,
        gate_up_blocks=blocks(2 * inter, hidden),
        gate_up_scales=scales(2 * inter, hidden),
        down_blocks=blocks(hidden, inter),
        down_scales=scales(hidden, inter),
    )


def added(
    normed: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, experts: Experts, x: torch.Tensor
) -> torch.Tensor:
    x = x.clone()
    grouped.grouped_moe(normed, ids, gates, experts, x)
    return x


def errors() -> None:
    cases = [(7, 160, 96, 700), (32, 256, 320, 2000), (32, H, H, 256), (32, H, H, 1100)]
    for experts, hidden, inter, tokens in cases:
        low = checkpoint_tensors(experts, hidden, inter, torch.bfloat16)
        wide = reference_moe.pack_experts(dataclasses.replace(low, dtype=torch.float32))
        packed, plain = pack_experts(low), reference_moe.pack_experts(low)
        normed, x = randn(tokens, hidden), randn(tokens, hidden, dtype=torch.float32)
        ids = draw(tokens, experts - 1)
        gates = torch.softmax(randn(tokens, 4, dtype=torch.float32), -1)
        exact = reference_moe.moe(normed.float(), ids, gates, wide, x.clone()) - x
        theirs = reference_moe.moe(normed, ids, gates, plain, x.clone()) - x
        say(
            f"errors E={experts} H={hidden} I={inter} T={tokens}: reference in bfloat16 "
            f"{relative(theirs, exact):.1e}, with e4m3 inputs "
            f"{relative(in_fp8(normed, ids, gates, low), exact):.1e}"
        )
        for shape, fp8 in [(s, f) for f in (False, True) for s in SHAPES[f]]:
            tuning.grouped = lambda *_, fp8=fp8, shape=shape: tuning.GroupedTile(*shape)
            mine = with_fp8(packed, hidden) if fp8 else packed
            found, *again = (added(normed, ids, gates, mine, x) for _ in range(6))
            same = all(torch.equal(found, other) for other in again)
            against = in_fp8(normed, ids, gates, low) if fp8 else exact
            say(
                f"  tile {shape} {'e4m3' if fp8 else 'bf16'}: {relative(found - x, exact):.1e}, against the "
                f"same arithmetic {relative(found - x, against):.1e}, same again {same}"
            )


SHAPES: dict[bool, list[tuple[int, ...]]] = {
    False: [(256, 64, 3), (128, 32, 5), (128, 32, 4, 0, 1, 32), (64, 32, 4, 80, 2)],
    True: [(256, 64, 5), (256, 64, 5, 0, 1, 32), (128, 32, 8), (64, 32, 5, 80, 2)],
}


def e4m3(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def in_fp8(
    normed: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, tensors: ExpertTensors
) -> torch.Tensor:
    """The layer in float32 but for its two inputs, which are e4m3: a row's largest is 448; SwiGLU's is 56."""
    x = normed.float()
    x = e4m3(x, x.abs().amax(1, keepdim=True) / 448)
    out = torch.zeros_like(x)
    for expert in range(tensors.down_bias.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate_up = mxfp4.dequantize(
            tensors.gate_up_blocks[expert], tensors.gate_up_scales[expert], torch.float32
        )
        down = mxfp4.dequantize(tensors.down_blocks[expert], tensors.down_scales[expert], torch.float32)
        both = x[token] @ gate_up.t() + tensors.gate_up_bias[expert].float()
        gate, up = both[:, 0::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
        inner = e4m3(gate * torch.sigmoid(1.702 * gate) * (up + 1), 56 / 448)
        result = inner @ down.t() + tensors.down_bias[expert].float()
        out.index_add_(0, token, result * gates[token, k][:, None])
    return out


# ------------------------------------------------------------------ experts


def layer_times(
    layers: list[Experts], ids: list[torch.Tensor], normed: torch.Tensor, tile: tuning.GroupedTile
) -> dict[str, float]:
    """Microseconds a layer of each part."""
    experts, gates = layers[0].num_experts, torch.full((normed.shape[0], 4), 0.25, device=GPU)
    x = randn(normed.shape[0], H, dtype=torch.float32)

    norm = Norm(torch.ones(H, device=GPU), 1e-5, torch.bfloat16)  # as in all layers but the last

    def place(n: int) -> tiles.Permutation:
        return tiles.permute_pairs(ids[n], experts, tile)

    fp8 = layers[0].down_largest is not None

    def gather(n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if fp8:
            return grouped.gather8(normed, permuted[n], layers[n], tile)
        return grouped.gather(normed, permuted[n], layers[n], tile), None

    permuted = [place(n) for n in range(len(ids))]
    inputs, scale = gather(0)
    inner = hopper_kernel.gate_up(inputs, scale, permuted[0].tiles, layers[0], tile)
    parts = hopper_kernel.down(inner, permuted[0].tiles, layers[0], H, tile)
    every = range(len(layers))
    works: dict[str, Callable[[], Any]] = {
        "place": lambda: [place(n) for n in every],
        "gather": lambda: [gather(n) for n in every],
        "gate_up": lambda: [
            hopper_kernel.gate_up(inputs, scale, permuted[n].tiles, layers[n], tile) for n in every
        ],
        "down": lambda: [hopper_kernel.down(inner, permuted[n].tiles, layers[n], H, tile) for n in every],
        "combine": lambda: [combine(parts, permuted[n].place, gates, x, norm) for n in every],
    }
    return {name: graph_us(work) / len(layers) for name, work in works.items()}


def report(
    kind: str,
    tokens: int,
    experts: int,
    tile: tuning.GroupedTile,
    us: dict[str, float],
    peaks: tuple[float, float],
) -> None:
    flops = tokens * 4 * 2 * H * H
    weights = experts * H * H * 4.25 / 8
    parts = []
    for name, times, in_out in (("gate_up", 2, 2 * 2 * H), ("down", 1, 2 * 2 * H)):
        work, size = flops * times, weights * times + tokens * 4 * in_out
        best = max(work / peaks[0], size / peaks[1]) * 1e6
        parts.append(
            f"{name} {us[name]:7.1f} us {work / us[name] / 1e6:4.0f} TFLOP/s "
            f"{size / us[name] / 1e6:4.2f} TB/s {best / us[name]:4.0%}"
        )
    rest = " ".join(f"{name} {us[name]:.1f}" for name in ("place", "gather", "combine"))
    shape = f"{kind} {tile.wide}+{tile.tail}/{tile.middle}/{tile.narrow} s{tile.num_stages} p{tile.programs}"
    RESULTS[f"{experts} {tokens} {shape}"] = us
    say(f"E={experts:3} T={tokens:5} {shape:25} {'  '.join(parts)}  {rest}  all {sum(us.values()):.0f}")


def time_experts(experts: int, tokens: list[int], sweep: bool, fp8: bool, peaks: tuple[float, float]) -> None:
    layers = [random_experts(experts, fp8) for _ in range(6 if experts <= 32 else 2)]
    kind = "e4m3" if fp8 else "bf16"
    for count in tokens:
        normed = randn(count, H)
        ids = [draw(count, experts) for _ in layers]
        each = count * 4 / experts
        shapes = [tuning.grouped(each, experts, fp8=fp8)]
        if sweep:
            near = min((32, 128, 256, 1024), key=lambda size: abs(size - each))
            shapes = [tuning.GroupedTile(*shape) for shape in WIDES[fp8, near]]
        for tile in shapes:
            try:
                report(kind, count, experts, tile, layer_times(layers, ids, normed, tile), peaks)
            except Exception as error:
                say(f"E={experts} T={count} {tile}: {type(error).__name__} {str(error)[:200]}")
        if not fp8:
            say(f"E={experts} T={count} moe: {whole_us(layers, ids, normed):.0f} us")
        if not fp8 and each <= 32:
            chosen, moe.can_use_grouped = moe.can_use_grouped, lambda *_: False
            say(f"E={experts} T={count} moe without grouped_moe: {whole_us(layers, ids, normed):.0f} us")
            moe.can_use_grouped = chosen


def whole_us(layers: list[Experts], ids: list[torch.Tensor], normed: torch.Tensor) -> float:
    """A layer as the model calls it, the next one's norm included."""
    qkv = QkvWeights(torch.ones(H, device=GPU), pack_head(randn(0, H)))  # only its type is looked at
    gates = torch.full((normed.shape[0], 4), 0.25, device=GPU)
    x = randn(normed.shape[0], H, dtype=torch.float32)
    return graph_us(
        lambda: [moe.moe(normed, i, gates, w, x, qkv, 1e-5) for i, w in zip(ids, layers, strict=True)]
    ) / len(layers)


def time_grouped(tokens: int) -> None:
    """torch's grouped product on bfloat16 weights that are already decoded, to compare."""
    weight = randn(32, H, 2 * H, scale=0.02)
    x = randn(tokens * 4, H)
    ends = (torch.arange(1, 33, device=GPU) * (tokens // 8)).int()
    try:
        us = graph_us(lambda: torch._grouped_mm(x, weight, offs=ends))
        say(f"torch._grouped_mm gate_up T={tokens}: {us:.0f} us {tokens * 16 * H * H / us / 1e6:.0f} TFLOP/s")
    except Exception as error:
        say(f"torch._grouped_mm: {type(error).__name__} {str(error)[:200]}")


# ------------------------------------------------------------------ attention


def prompts(rows: int, length: int) -> tuple[AttentionPlan, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(plan, q, kv, sinks) of ``rows`` whole prompts."""
    width = -(-length // 64)
    table = torch.randperm(rows * width, device=GPU).int().view(rows, width)
    tokens = rows * length
    meta = AttentionMeta(
        positions=torch.arange(length, device=GPU).repeat(rows),
        query_start=(torch.arange(rows + 1, device=GPU) * length).int(),
        context_lens=torch.full((rows,), length, dtype=torch.int32, device=GPU),
        block_tables=(table, table),
        slots=(torch.zeros(tokens, dtype=torch.int64, device=GPU),) * 2,
        max_query_len=length,
        max_context_len=length,
    )
    plan = plan_attention(meta, AttentionShape(64, 8, 64, 128), 64)
    return plan, randn(tokens, 64, 64), randn(rows * width, 2, 8, 64, 64), randn(64, dtype=torch.float32)


def time_prefill(case: tuple[AttentionPlan, torch.Tensor, torch.Tensor, torch.Tensor], group: int) -> float:
    plan, q, kv, sinks = case
    out = torch.empty_like(q)
    return graph_us(lambda: [prefill.prefill(q, kv, sinks, plan, group, out) for _ in range(4)]) / 4


def time_attention(sweep: bool) -> None:
    for rows, length in ((1, 8192), (8, 1024)):
        case = prompts(rows, length)
        for group, shapes in ((0, ATTENTION), (1, WINDOWED)):
            small, q, kv, sinks = prompts(2, 700)
            theirs = reference_attention.plan_attention(small.meta, small.shape, 64)
            exact = reference_attention.attention(q.float(), kv.float(), sinks, theirs, group)
            flops = rows * length * 4 * 4096 * (length / 2 if group == 0 else 128)
            arch, chosen = tuning_of(q.device), prefill.tuning_of
            own = arch.prefill_tile(is_window=group != 0)
            for shape in [tuning.PrefillTile(*s) for s in shapes] if sweep else [own]:
                forced = dataclasses.replace(arch, prefill=shape, prefill_window=shape)
                prefill.tuning_of = lambda _, forced=forced: forced
                try:
                    found = torch.empty_like(q)
                    prefill.prefill(q, kv, sinks, small, group, found)
                    us = time_prefill(case, group)
                    RESULTS[f"attention {rows}x{length} {group} {shape}"] = us
                    error = relative(found.view(exact.shape), exact)
                    say(
                        f"attention {rows}x{length} group {group} {shape}: {us:.0f} us "
                        f"{flops / us / 1e6:.0f} TFLOP/s error {error:.1e}"
                    )
                except Exception as problem:
                    say(f"attention {shape}: {type(problem).__name__} {str(problem)[:150]}")
                finally:
                    prefill.tuning_of = chosen


# ------------------------------------------------------------------ compiling ahead, in parallel


def compile_one(job: tuple[str, tuple[Any, ...], int]) -> None:
    """Runs one variant once on little work, so that its machine code is in the cache."""
    kind, shape, number = job
    try:
        if kind == "experts":
            experts = random_experts(8, bool(number))
            tuning.grouped = lambda *_, fp8: tuning.GroupedTile(*shape)
            ids, normed = draw(64, 8), randn(64, H)
            gates, x = torch.full((64, 4), 0.25, device=GPU), randn(64, H, dtype=torch.float32)
            grouped.grouped_moe(normed, ids, gates, experts, x)
        else:
            plan, q, kv, sinks = prompts(2, 256)
            tile = tuning.PrefillTile(*shape)
            prefill.tuning_of = lambda _: dataclasses.replace(tuning.H200, prefill=tile, prefill_window=tile)
            prefill.prefill(q, kv, sinks, plan, number, torch.empty_like(q))
        torch.cuda.synchronize()
    except Exception as error:
        sys.stderr.write(f"{job}: {type(error).__name__} {str(error)[:300]}\n")


def compile_ahead(attention_too: bool) -> None:
    every = {(shape, int(fp8)) for (fp8, _), some in WIDES.items() for shape in some}
    jobs: list[tuple[str, tuple[Any, ...], int]] = [("experts", shape, fp8) for shape, fp8 in sorted(every)]
    if attention_too:
        jobs += [("attention", shape, 0) for shape in ATTENTION] + [
            ("attention", shape, 1) for shape in WINDOWED
        ]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    say(f"compiled {len(jobs)} variants in {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--tflops", type=float, default=694)
    parser.add_argument("--tbs", type=float, default=4.6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    try:
        if options.sweep:
            compile_ahead(not options.no_attention)
        chosen = tuning.grouped
        errors()
        tuning.grouped = chosen
        for experts, fp8 in [(e, f) for e in options.experts for f in (False, True)]:
            peaks = options.tflops * 1e12 * (1.86 if fp8 else 1), options.tbs * 1e12
            time_experts(experts, options.tokens, options.sweep, fp8, peaks)
            torch.cuda.empty_cache()
        if not options.no_attention:
            time_grouped(8192)
            time_attention(options.sweep)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
