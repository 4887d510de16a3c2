"""The MXFP4 expert products for few tokens on one GPU: time, GB/s and share of the roofline.

    python benchmarks/expert_kernels.py [--tokens 1,8,64] [--experts 32,128] [--chunks 45] [--sweep]
        [--json FILE]

gpt-oss's sizes, random weights and uniform random routing made on the GPU. First each case against the
float32 reference; then gate_up, down and the whole op (sort and sum included), each inside a CUDA graph of 24
calls with a fresh draw of experts a call: median microseconds a call. Bytes are those of the experts that
were touched. With --sweep: other shapes of the same kernels (compiled first, in parallel processes). With
--chunks 23 or 22 (11, 12): the columns of one of two (four) ranks, in chunks of 64.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chorale.bench.gpu_time import graph_seconds
from chorale.kernels.ops import ExpertTensors, QkvWeights
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.linear import pack_head
from chorale.kernels.triton.dense.norm import Norm
from chorale.kernels.triton.moe import gemv
from chorale.kernels.triton.moe.combine import add_parts
from chorale.kernels.triton.moe.moe import moe
from chorale.kernels.triton.moe.packing import Experts, Matrices, pack_experts

GPU = torch.device("cuda")
H = I = 2880
CALLS = 24
RESULTS: dict[str, Any] = {}
# tiles, columns, warps, group, groups, splits
Shape = tuple[int, int, int, int, int, int]


def shapes(tiles: str, columns: str, warps: str, groups: str, splits: str = "1") -> list[Shape]:
    """All combinations; ``groups``: "3x2" is two groups of three chunks in flight."""
    axes = [[int(n) for n in axis.split()] for axis in (tiles, columns, warps)]
    depths = [tuple(map(int, each.split("x"))) for each in groups.split()]
    rest = itertools.product(depths, map(int, splits.split()))
    return [(*axis, *depth, n) for (depth, n), axis in itertools.product(rest, itertools.product(*axes))]


# Of a rank's columns, of which the whole contraction may be in flight at once.
SHARE_SWEEP: dict[tuple[str, int], list[Shape]] = {
    ("gate_up", 1): shapes("1", "1", "1 2", "3x2 3x4 5x2 5x3 9x1 9x2 9x3 15x1 15x2 15x3"),
    ("down", 1): shapes("1", "1", "1", "23x1 12x1 8x1 6x1 5x1 4x2 3x2", "1 2 3 5"),
    ("gate_up", 8): [
        *shapes("1", "1", "1 2 4", "3x3 3x4 5x2 5x3 9x1 9x2 15x1 15x2"),
        *shapes("2", "1", "1 2", "5x2 9x1"),
    ],
    ("down", 8): [
        *shapes("1", "1", "1 2 4", "3x3 4x3 6x2 8x1 8x2 12x1 23x1"),
        *shapes("2", "1", "1 2", "3x3 4x3 6x2 8x1 12x1"),
    ],
    ("gate_up", 64): shapes("1 2", "1", "1 2 4", "5x2 5x3 9x1 9x2 15x1"),
    ("down", 64): shapes("1 2", "1", "1 2 4", "4x3 6x2 8x1 8x2 12x1 23x1"),
}
SWEEP: dict[tuple[str, int], list[Shape]] = {
    ("gate_up", 1): [
        *shapes("1", "1", "1 2 4", "3x1 3x2 3x3 5x1 9x1"),
    ],
    ("down", 1): shapes("1", "1", "1 2", "3x1 3x2 3x3 5x1", "3 5"),
    ("gate_up", 8): [
        *shapes("1", "1", "1 2 4", "3x1 3x2 3x3 5x1 9x1"),
        *shapes("2", "1", "1 2", "3x1 3x2 3x3 5x1"),
    ],
    ("down", 8): [
        *shapes("1", "1", "1 2 4", "3x1 3x2 3x3 5x1", "1 3"),
        *shapes("2", "1", "1 2", "3x1 3x2 3x3"),
    ],
    ("gate_up", 16): shapes("1 2", "2", "1 2 4", "3x1 3x2"),
    ("down", 16): shapes("1 2", "2", "1 2", "3x1 3x2"),
    ("gate_up", 64): shapes("1 2", "1 2", "1 2 4", "3x1 3x2 5x1"),
    ("down", 64): shapes("1 2", "1 2", "1 2 4", "3x1 3x2 5x1"),
}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=GPU)


def random_experts(count: int) -> Experts:
    """Any word is a valid packed word."""

    def matrices(row_tiles: int, chunks: int) -> Matrices:
        scales = torch.randint(243, 247, (count, row_tiles, chunks, 8, 2, 2), dtype=torch.uint8, device=GPU)
        return Matrices(words(count, row_tiles, chunks, 32, 4), scales)

    def bias(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=GPU)

    return Experts(
        matrices(I // 8, 45), matrices(180, I // 64), bias(2, count, I), bias(count, H), 7.0, 1.702,
        torch.bfloat16,
    )  # fmt: skip


def draw(tokens: int, experts: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)]).to(GPU)


# ------------------------------------------------------------------ errors


def checkpoint_experts(count: int) -> ExpertTensors:
    def blocks(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, rows, 90, 16), dtype=torch.uint8, device=GPU)

    def scales(rows: int) -> torch.Tensor:
        return torch.randint(117, 121, (count, rows, 90), dtype=torch.uint8, device=GPU)

    return ExpertTensors(
        gate_up_bias=torch.randn(count, 2 * I, device=GPU).bfloat16(),
        down_bias=torch.randn(count, H, device=GPU).bfloat16(),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        num_layers=10**6,
        dtype=torch.float32,
        gate_up_blocks=blocks(2 * I),
        gate_up_scales=scales(2 * I),
        down_blocks=blocks(H),
        down_scales=scales(H),
    )


def check() -> None:
    import dataclasses

    exact = checkpoint_experts(32)
    rounded = dataclasses.replace(exact, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.monotonic()
    packed = pack_experts(rounded)
    torch.cuda.synchronize()
    first = time.monotonic() - began
    scratch = (torch.cuda.max_memory_allocated() - before) / 2**30
    began = time.monotonic()
    pack_experts(rounded)
    torch.cuda.synchronize()
    print(
        f"packing 32 experts: {first:.3f} s, again {time.monotonic() - began:.3f} s; peak {scratch:.2f} GiB"
    )
    wide, narrow = reference_moe.pack_experts(exact), reference_moe.pack_experts(rounded)
    for tokens in (1, 2, 3, 8, 9, 16, 17, 33, 64, 100):
        same = torch.tensor([[31, 0, 3, 5]], device=GPU).repeat(tokens, 1)
        for name, ids in (("any", draw(tokens, 32)), ("same", same)):
            normed = torch.randn(tokens, H, device=GPU).bfloat16().float()
            x, gates = torch.randn(tokens, H, device=GPU), torch.rand(tokens, 4, device=GPU)
            truth = reference_moe.moe(normed, ids, gates, wide, x.clone()) - x
            theirs = reference_moe.moe(normed, ids, gates, narrow, x.clone()) - x
            found = moe(normed.bfloat16(), ids, gates, packed, x.clone(), None, 0.0)[0] - x
            again = moe(normed.bfloat16(), ids, gates, packed, x.clone(), None, 0.0)[0] - x
            row = relative(found, truth), relative(theirs, truth)
            RESULTS[f"error {tokens} {name}"] = row
            flag = "" if torch.equal(found, again) else "  DIFFERS FROM RUN TO RUN"
            print(
                f"error T={tokens:3} {name}: {row[0]:.2e} (reference in bf16 {row[1]:.2e}){flag}", flush=True
            )


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


# ------------------------------------------------------------------ times


def graph_us(work: Callable[[], Any], repeats: int = 15) -> float:
    """Of one of the calls that ``work`` makes."""
    return graph_seconds(work, repeats) * 1e6 / CALLS


class Case:
    def __init__(self, layers: list[Experts], tokens: int) -> None:
        count = layers[0].num_experts
        self.layers = [layers[n % len(layers)] for n in range(CALLS)]
        self.tokens = tokens
        self.draws = [draw(tokens, count) for _ in range(CALLS)]
        self.touched = statistics.mean(len(ids.unique()) for ids in self.draws)
        self.normed = torch.randn(tokens, H, device=GPU).bfloat16()
        self.gates = torch.full((tokens, 4), 0.25, device=GPU)
        self.x = torch.randn(tokens, H, device=GPU)
        # The next layer's: only its norm and its type are looked at.
        self.qkv = QkvWeights(torch.ones(H, device=GPU), pack_head(self.normed[:0]))
        self.inner = torch.randn(tokens * 4, I, device=GPU).bfloat16()
        self.works = [gemv.divide_work(ids, self.layers[0]) for ids in self.draws]

    def tile(self, kind: str) -> tuning.GemvConfig:
        choose = tuning.gemv_gate_up if kind == "gate_up" else tuning.gemv_down
        return choose(self.tokens, self.works[0].mean, I // 64)

    def gate_up(self, tile: tuning.GemvConfig) -> None:
        for layer, work in zip(self.layers, self.works, strict=True):
            gemv.gate_up(self.normed, layer, work, tile, self.inner)

    def down(self, tile: tuning.GemvConfig) -> None:
        for layer, work in zip(self.layers, self.works, strict=True):
            gemv.down(self.inner, self.gates, layer, work, tile, H)

    def whole(self) -> None:
        for layer, ids in zip(self.layers, self.draws, strict=True):
            moe(self.normed, ids, self.gates, layer, self.x, self.qkv, 1e-5)

    def bytes_of(self, kind: str) -> float:
        return self.touched * {"gate_up": 2, "down": 1, "whole": 3}[kind] * H * I * 4.25 / 8


def time_case(case: Case, name: str, peak: float) -> None:
    for kind in ("gate_up", "down", "whole"):
        work = functools.partial(getattr(case, kind), *([] if kind == "whole" else [case.tile(kind)]))
        us = graph_us(work)
        rate = case.bytes_of(kind) / us / 1e6
        RESULTS[f"{name} {kind}"] = {"us": us, "rate": rate, "touched": case.touched}
        print(f"{name} {kind:7}: {us:7.2f} us  {rate:5.2f} TB/s  {rate / peak:5.1%}", flush=True)
    parts = torch.zeros(case.tokens, 4, H, device=GPU)
    norm = None if case.tokens <= tuning.SKINNY_TOKENS else Norm(case.qkv.norm, 1e-5, torch.bfloat16)
    us = graph_us(lambda: [add_parts(parts, case.x, norm) for _ in range(CALLS)])
    plan = graph_us(lambda: [gemv.divide_work(ids, case.layers[0]) for ids in case.draws] + [case.x + 1])
    print(f"{name} sum {us:.2f} us, plan (sort) {plan:.2f} us; touched {case.touched:.1f}", flush=True)
    RESULTS[f"{name} sum, sort"] = us, plan


def variants(tokens: int) -> list[tuple[str, tuning.GemvConfig]]:
    swept = SWEEP if I == H else SHARE_SWEEP
    return [
        (kind, tuning.GemvConfig(*each)) for (kind, n), all_ in swept.items() if n == tokens for each in all_
    ]


def sweep(case: Case, name: str, peak: float) -> None:
    rows: list[tuple[str, float, str]] = []
    for kind, tile in variants(case.tokens):
        label = f"{tile.tiles}t {tile.columns}c {tile.num_warps}w {tile.group}x{tile.groups} s{tile.splits}"
        try:
            us = graph_us(lambda k=kind, t=tile: getattr(case, k)(t), 5)
        except Exception as error:  # a shape that does not fit the chip is a result, too
            label += f" {type(error).__name__}"
            us = float("inf")
        rows.append((kind, us, label))
        RESULTS[f"sweep {name} {kind} {label}"] = us
    for kind in ("gate_up", "down"):
        best = sorted(row[1:] for row in rows if row[0] == kind)
        print(
            f"sweep {name} {kind}: " + "; ".join(f"{us:.2f} [{label}]" for us, label in best[:8]), flush=True
        )


def compile_some(tokens: list[int], share: int, of: int) -> None:
    """A worker: runs its share of all variants once, so that they are in the cache."""
    layers = [random_experts(32)]
    work = [(n, kind, tile) for n in tokens for kind, tile in variants(n)]
    cases = {n: Case(layers, n) for n in tokens}
    for n, kind, tile in work[share::of]:
        case = cases[n]
        case.layers, case.works = case.layers[:1], case.works[:1]
        try:
            getattr(case, kind)(tile)
        except Exception as error:  # reported when it is timed
            print(f"{kind} {tile}: {error!r}"[:300], flush=True)
    torch.cuda.synchronize()


def compile_all(tokens: list[int]) -> None:
    of = max(1, min(14, (os.cpu_count() or 2) - 2))
    began = time.monotonic()
    command = [sys.executable, __file__, "--tokens", ",".join(map(str, tokens)), "--chunks", str(I // 64)]
    workers = [subprocess.Popen([*command, "--worker", f"{n}/{of}"]) for n in range(of)]
    codes = [worker.wait() for worker in workers]
    print(f"compiled in {time.monotonic() - began:.1f} s, {sum(map(bool, codes))} workers failed", flush=True)


def main() -> None:
    global I
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--experts", default="32,128")
    parser.add_argument("--chunks", type=int, default=45, help="of 64 columns: a rank's intermediate size")
    parser.add_argument("--peak", type=float, default=4.62, help="TB/s of read-only streaming")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens, I = [int(n) for n in options.tokens.split(",")], 64 * options.chunks
    torch.manual_seed(0)
    if options.worker:
        share, of = map(int, options.worker.split("/"))
        return compile_some(tokens, share, of)
    swept = [n for n in tokens if variants(n)]
    if options.sweep:
        compile_all(swept)
    try:
        if I == H:  # else: tests/kernels/triton/twins.py
            check()
        torch.cuda.empty_cache()
        for count in (int(n) for n in options.experts.split(",")):
            layers = [random_experts(count) for _ in range(max(1, 128 // count))]
            for n in tokens:
                case = Case(layers, n)
                time_case(case, f"E={count} T={n}", options.peak)
                if options.sweep and n in swept:
                    sweep(case, f"E={count} T={n}", options.peak)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(RESULTS, indent=1))
    return None


if __name__ == "__main__":
    main()
