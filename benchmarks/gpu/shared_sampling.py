"""Checks sampling on several GPUs of one host, where each GPU has the logits of a share of the token ids.

    python -m benchmarks.gpu.shared_sampling --ranks 2

Starts a process for each GPU, with random logits of 201,088 token ids. Tokens and the sets that filters keep
are compared with the kernels of one rank on whole rows: top_k, top_p, min_p, launched directly and in graphs
that are replayed with new logits, with the exchange in the kernels and through NCCL.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import numpy as np
import torch
import torch.multiprocessing as processes

from chorale.kernels.ops import SamplingInputs
from chorale.kernels.reference.sampling.noise import row_keys
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.kernels.triton.sampling.sample import sample
from chorale.kernels.triton.sampling.shared_sample import SharedSample
from chorale.kernels.triton.sampling.thresholds import thresholds
from chorale.machine.processes import die_with_parent
from chorale.measure.bench.gpu_time import captured
from chorale.parallel.distributed import Nccl
from chorale.parallel.rank import Rank
from chorale.parallel.shares import CHUNK, Share, cut

V, H, MOST = 201088, 2880, 256
Filter = tuple[float, float, float]  # top_k, top_p, min_p
OFF: Filter = (float(V), 1.0, 0.0)
KEPT: list[Filter] = [
    *((float(k), 1.0, 0.0) for k in (1, 5, 50, 1024, 5000)),
    *((float(V), p, 0.0) for p in (0.1, 0.5, 0.9, 0.95, 0.999)),
    (float(V), 1.0, 0.05),
    (50.0, 0.5, 0.0),
    (1024.0, 0.999, 0.01),
    OFF,
]


@dataclass
class Bench:
    """One rank's objects."""

    rank: Rank
    ranks: Nccl
    reducer: SymmetricReducer
    forbidden: torch.Tensor
    device: torch.device

    @property
    def own(self) -> range:
        return self.rank.share.vocabulary

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def sampler(self, *, in_kernels: bool) -> SharedSample:
        return SharedSample(self.rank, self.forbidden, MOST, self.reducer.rows if in_kernels else None)


@dataclass
class Step:
    """Rows of logits and how to sample from them."""

    whole: torch.Tensor
    mine: torch.Tensor
    draws: SamplingInputs
    last: torch.Tensor
    out: torch.Tensor


def logits_of(rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """Returns the same logits on all ranks: most are low, and about 20 stand out."""
    generator = torch.Generator(device=device).manual_seed(seed)
    bulk = torch.randn(rows, V, device=device, generator=generator) * 2.5
    return bulk + 10.0 * (torch.rand(rows, V, device=device, generator=generator) < 1e-4)


def step_of(bench: Bench, filters: list[Filter], rows: int, seed: int) -> Step:
    device, own = bench.device, bench.own
    whole = logits_of(rows, seed, device)
    keys = torch.from_numpy(row_keys(np.arange(rows, dtype=np.uint64), np.full(rows, seed))).to(device)
    given = None
    if filters:
        given = torch.tensor([filters[row % len(filters)] for row in range(rows)], device=device)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    draws = SamplingInputs(keys, torch.full((rows,), 0.9, device=device), index, given)
    last, out = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    return Step(whole, whole[:, own.start : own.stop].contiguous(), draws, last, out)


# ------------------------------------------------------------------ correctness


def check_tokens(bench: Bench, step: Step, name: str) -> None:
    wanted, last = torch.empty_like(step.out), torch.empty_like(step.last)
    sample(bench.forbidden, step.whole, step.draws, last, wanted)
    torch.cuda.synchronize()
    bench.reducer.check()
    wrong = (step.out != wanted).nonzero().flatten().tolist()
    assert len(wrong) <= len(wanted) // 100, (
        name,
        wrong,
    )  # a sum of probabilities may round to the other side of a threshold
    assert torch.equal(step.last, step.out)
    found = bench.ranks.all_gather(step.out)
    assert bool((found == found[0]).all()), f"{name}: the ranks chose different tokens"


def check_kept(bench: Bench, step: Step) -> None:
    """Checks that as many tokens reach the threshold as with one rank; with top_p, up to rounding."""
    own = bench.own
    local = bench.forbidden[own.start : own.stop].contiguous()
    edge = thresholds(step.mine, step.draws, local, own.start, V, bench.reducer.rows)
    edges = bench.ranks.all_gather(edge)
    assert bool((edges == edges[0]).all()), "the ranks found different thresholds"
    alone = thresholds(step.whole, step.draws, bench.forbidden)
    scores = step.whole / step.draws.temperature.unsqueeze(1)
    scores[:, bench.forbidden.bool()] = -torch.inf
    kept, wanted = ((scores >= each.unsqueeze(1)).sum(1) for each in (edge, alone))
    assert step.draws.filters is not None
    by_mass = step.draws.filters[:, 1] < 1
    allowed = torch.where(by_mass, (wanted * 1e-3).ceil().long(), 0)
    worst = (kept - wanted).abs()
    assert bool((worst <= allowed).all()), (step.draws.filters[worst > allowed], kept, wanted)
    equal = int((kept == wanted).sum())
    bench.say(f"  {len(kept)} rows: {equal} keep as many tokens as with one rank")


def check(bench: Bench) -> None:
    bench.say("correct: against the kernels of one rank on whole rows")
    for rows in (1, 5, MOST, MOST + 44):  # the last exceeds the shared memory and uses NCCL
        for in_kernels in (True, False):
            step = step_of(bench, KEPT, rows, seed=rows)
            sampler = bench.sampler(in_kernels=in_kernels)
            sampler(step.mine, step.draws, step.last, step.out)
            check_tokens(bench, step, f"{rows} rows")
            if rows <= MOST and in_kernels:
                check_kept(bench, step)
    for rows in (3, 64):
        step = step_of(bench, KEPT, rows, seed=1)
        sampler = bench.sampler(in_kernels=True)

        def work(sampler: SharedSample = sampler, step: Step = step) -> None:
            sampler(step.mine, step.draws, step.last, step.out)

        graph = captured(work, "thread_local")
        for seed in range(2, 12):
            step.whole.copy_(logits_of(rows, seed, bench.device))
            step.mine.copy_(step.whole[:, bench.own.start : bench.own.stop])
            graph.replay()
            check_tokens(bench, step, f"a graph of {rows} rows")
    bench.say("  graphs of 3 and of 64 rows, replayed with other logits: one rank's tokens")


# ------------------------------------------------------------------ ranks


def run_rank(rank: int, parent: int, store: str, options: argparse.Namespace) -> None:
    die_with_parent(parent)
    torch.cuda.set_device(rank)
    device, size = torch.device("cuda", rank), options.ranks
    ranks = Nccl(Path(store), rank, size, device)
    layout = Layout(size, H, MOST, 96, torch.bfloat16)
    memory = ranks.peer_memory(layout.num_bytes, device)
    assert memory is not None, "the GPUs do not share memory"
    reducer = SymmetricReducer(memory, layout, seconds=60.0)  # the other ranks compile, too
    share = Share(rank, size, *[range(1)] * 4, cut(V, size, CHUNK, "token ids")[rank], num_experts=1)
    forbidden = torch.zeros(V, dtype=torch.uint8, device=device)
    forbidden[200013:] = 1
    bench = Bench(Rank(share, ranks), ranks, reducer, forbidden, device)
    check(bench)
    torch.cuda.synchronize()
    ranks.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        sys.exit(f"{options.ranks} GPUs are needed, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run_rank, (os.getpid(), f"{folder}/store", options), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
