"""Measures the matrix products of one layer of gpt-oss-20b on one thread of a CPU, by number of tokens.

    CHORALE_CPU_ISA=amx python -m benchmarks.cpu.layer [--tokens 1 8 16 75 512]

Prints milliseconds of the thread's CPU time, the best of several runs. Other programs still affect it,
since they share caches and memory. Weights and choices of experts are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.timing import times
from chorale.kernels.cpu.experts import CpuExperts
from chorale.kernels.cpu.library import library
from chorale.kernels.cpu.linear import CpuLinear
from chorale.kernels.ops import ExpertTensors

HIDDEN, INTER, EXPERTS, TOP_K, QKV = 2880, 2880, 32, 4, 5120


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 75, 512])
    options.add_argument("--runs", type=int, default=5)
    given = options.parse_args()
    library().set_threads(1, None)
    torch.manual_seed(0)
    experts = CpuExperts(random_experts(), "int8")
    dense = CpuLinear(torch.randn(QKV, HIDDEN, dtype=torch.bfloat16), None, "int8")
    print(f"{library().name}: milliseconds of one thread")
    print("tokens     experts       dense")
    for tokens in given.tokens:
        normed, x = torch.randn(tokens, HIDDEN), torch.zeros(tokens, HIDDEN)
        ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
        gates = torch.full((tokens, TOP_K), 1 / TOP_K)
        spent = best(given.runs, lambda: experts(normed, ids, gates, x))  # noqa: B023
        print(f"{tokens:6d}{spent:12.2f}{best(given.runs, lambda: dense(normed)):12.2f}")  # noqa: B023


def random_experts() -> ExpertTensors:
    def octets(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (EXPERTS, *shape), dtype=torch.uint8)

    return ExpertTensors(
        gate_up_bias=torch.randn(EXPERTS, 2 * INTER), down_bias=torch.randn(EXPERTS, HIDDEN),
        swiglu_limit=7.0, swiglu_alpha=1.702, num_layers=1, dtype=torch.bfloat16,
        gate_up_blocks=octets(0, 256, 2 * INTER, HIDDEN // 32, 16),
        gate_up_scales=octets(118, 122, 2 * INTER, HIDDEN // 32),
        down_blocks=octets(0, 256, HIDDEN, INTER // 32, 16),
        down_scales=octets(118, 122, HIDDEN, INTER // 32),
    )  # fmt: skip


def best(runs: int, action: Callable[[], object]) -> float:
    """Returns milliseconds of this thread's CPU time."""
    return 1000 * min(times(action, runs, clock=time.thread_time))


if __name__ == "__main__":
    main()
