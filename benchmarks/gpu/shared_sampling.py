"""Sampling over the GPUs of one host, each with the logits of its token ids: correctness, then microseconds.

    python -m benchmarks.gpu.shared_sampling --ranks 2 [--check] [--rows 1 64 256]

One process a GPU, random logits of 201,088 token ids. First the tokens and what filters keep are compared
with the kernels of one rank on whole rows: top_k, top_p, min_p, launched and in graphs that are replayed with
other logits, exchanged in the kernels and by NCCL. Then a graph of 20 samplings is timed in three forms:
gathering the logits of rows with filters (as before), exchanging sums by NCCL, and in the kernels.
``--check``: no times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import numpy as np
import torch
import torch.multiprocessing as processes
import torch.nn.functional as F

from chorale.bench.gpu_time import captured
from chorale.kernels.ops import SamplingInputs
from chorale.kernels.reference.noise import row_keys
from chorale.kernels.reference.shared_sampling import agree
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.kernels.triton.sampling.sample import best_of_pieces, sample
from chorale.kernels.triton.sampling.shared_sample import SharedSample
from chorale.kernels.triton.sampling.shared_thresholds import shared_thresholds
from chorale.kernels.triton.sampling.thresholds import thresholds
from chorale.parallel.distributed import Nccl
from chorale.parallel.rank import Rank
from chorale.parallel.shares import CHUNK, Share, cut
from chorale.processes import die_with_parent

V, H, CALLS, MOST = 201088, 2880, 20, 256
Filter = tuple[float, float, float]  # top_k, top_p, min_p
OFF: Filter = (float(V), 1.0, 0.0)
CASES: dict[str, list[Filter]] = {
    "no filters": [],
    "top_p 0.95": [(float(V), 0.95, 0.0)],
    "top_k 50": [(50.0, 1.0, 0.0)],
    "top_k 50, top_p 0.95": [(50.0, 0.95, 0.0)],
    "top_p 0.95, every 8th row": [(float(V), 0.95, 0.0), *[OFF] * 7],
}
KEPT: list[Filter] = [
    *((float(k), 1.0, 0.0) for k in (1, 5, 50, 1024, 5000)),
    *((float(V), p, 0.0) for p in (0.1, 0.5, 0.9, 0.95, 0.999)),
    (float(V), 1.0, 0.05),
    (50.0, 0.5, 0.0),
    (1024.0, 0.999, 0.01),
    OFF,
]
Draw = Callable[[], object]


@dataclass
class Bench:
    """One rank's end."""

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
        return SharedSample(self.rank, self.forbidden, self.reducer.rows if in_kernels else None)


@dataclass
class Step:
    """Rows of logits and how to sample from them."""

    whole: torch.Tensor
    mine: torch.Tensor
    draws: SamplingInputs
    last: torch.Tensor
    out: torch.Tensor


def logits_of(rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """The same on all ranks: a bulk, and about 20 tokens above it."""
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
    assert len(wrong) <= len(wanted) // 100, (name, wrong)  # a mass may round to the other side
    assert torch.equal(step.last, step.out)
    found = bench.ranks.all_gather(step.out)
    assert bool((found == found[0]).all()), f"{name}: the ranks chose other tokens"


def check_kept(bench: Bench, step: Step, *, in_kernels: bool) -> None:
    """The number of tokens at or above the threshold is one rank's; of a nucleus, up to rounding."""
    exchange = bench.reducer.rows if in_kernels else None
    own = bench.own
    local = bench.forbidden[own.start : own.stop].contiguous()
    edge = shared_thresholds(step.mine, step.draws, local, own.start, V, bench.ranks, exchange)
    edges = bench.ranks.all_gather(edge)
    assert bool((edges == edges[0]).all()), "the ranks found other thresholds"
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
    bench.say(f"  {len(kept)} rows, in kernels {in_kernels}: {equal} keep as many tokens as with one rank")


def check(bench: Bench) -> None:
    bench.say("correct: against the kernels of one rank on whole rows")
    for rows in (1, 5, MOST, MOST + 44):  # the last: more than the memory is for, by NCCL
        for in_kernels in (True, False):
            step = step_of(bench, KEPT, rows, seed=rows)
            sampler = bench.sampler(in_kernels=in_kernels)
            sampler(step.mine, step.draws, step.last, step.out)
            check_tokens(bench, step, f"{rows} rows")
            if rows <= MOST:
                check_kept(bench, step, in_kernels=in_kernels)
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


# ------------------------------------------------------------------ times


def gathering(bench: Bench, step: Step) -> Draw:
    """As it was before: the logits of rows with filters cross."""
    own, widths = bench.own, [len(each) for each in cut(V, bench.ranks.size, CHUNK, "token ids")]
    local = bench.forbidden[own.start : own.stop].contiguous()

    def all_gather(found: torch.Tensor) -> torch.Tensor:
        return bench.reducer.all_gather(found)

    def work() -> None:
        draws, edge = step.draws, None
        if draws.filters is not None:
            parts = bench.ranks.all_gather(F.pad(step.mine, (0, widths[0] - len(own)))).unbind(0)
            whole = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
            edge = thresholds(whole, draws, bench.forbidden)
        best, columns, most = best_of_pieces(step.mine, draws, local, edge, own.start)
        top = best.amax(1)
        lowest = torch.where(best == top.unsqueeze(1), columns, len(local)).amin(1)
        found = torch.stack((top, (lowest + own.start).float(), most.amax(1)))
        step.out.copy_(agree(found, all_gather))
        step.last.index_copy_(0, draws.rows.long(), step.out.clamp(min=0))

    return work


def sharing(bench: Bench, step: Step, *, in_kernels: bool) -> Draw:
    sampler = bench.sampler(in_kernels=in_kernels)
    return lambda: sampler(step.mine, step.draws, step.last, step.out)


def alone(bench: Bench, step: Step) -> Draw:
    return lambda: sample(bench.forbidden, step.whole, step.draws, step.last, step.out)


def time_of(bench: Bench, work: Draw) -> float:
    """Microseconds of one of the calls in a graph: the median of the replays, of the slowest rank."""
    graph = captured(lambda: [work() for _ in range(CALLS)], "thread_local")
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bench.ranks.all_reduce_(torch.zeros(1, device=bench.device))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    bench.reducer.check()
    return float(bench.ranks.maximum_(torch.tensor([statistics.median(times)], device=bench.device)))


def time_table(bench: Bench, rows: list[int]) -> None:
    head = "".join(f"{n:9}" for n in rows)
    bench.say(f"\n{bench.ranks.size} GPUs, us a sampling, {CALLS} in a graph; rows:{'':20}{head}")
    for name, filters in CASES.items():
        steps = [step_of(bench, filters, count, seed=count) for count in rows]
        forms: dict[str, Callable[[Step], Draw]] = {
            "one rank, all logits": lambda step: alone(bench, step),
            "gathered logits": lambda step: gathering(bench, step),
            "sums by NCCL": lambda step: sharing(bench, step, in_kernels=False),
            "sums in the kernels": lambda step: sharing(bench, step, in_kernels=True),
        }
        for form, make in forms.items():
            times = [time_of(bench, make(step)) for step in steps]
            bench.say(f"{name:28}{form:24}" + "".join(f"{us:9.1f}" for us in times))


# ------------------------------------------------------------------ ranks


def run_rank(parent: int, rank: int, store: str, options: argparse.Namespace) -> None:
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
    if not options.check:
        time_table(bench, options.rows)
    torch.cuda.synchronize()
    ranks.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        sys.exit(f"{options.ranks} GPUs are needed, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        started = [
            context.Process(
                target=run_rank, args=(os.getpid(), rank, f"{folder}/store", options), daemon=True
            )
            for rank in range(options.ranks)
        ]
        for process in started:
            process.start()
        while any(process.is_alive() for process in started):
            for process in started:
                process.join(0.2)
            if any(process.exitcode not in (None, 0) for process in started):
                for process in started:
                    process.kill()
        return max(abs(process.exitcode or 0) for process in started)


if __name__ == "__main__":
    sys.exit(main())
