"""Checks and measures the all-reduce between GPUs of one host: results, microseconds in a graph, faults.

    python -m benchmarks.gpu.all_reduce --ranks 2 [--check] [--json FILE] [--rows 1 8 64 ...]

Each GPU has one process. First, every form is compared with the float32 reference for each number of rows,
in calls of changing sizes, and all ranks must get the same bits. Then a graph of 100 calls is timed: our
all-reduce with residual and norm, and those of NCCL and torch's symmetric memory, alone and followed by our
kernel for addition and norm. Last, a rank skips a call, and then a rank is killed: the others must name it
within the limit. ``--check``: no times. NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from chorale.kernels.ops import RouterWeights
from chorale.kernels.reference import reduce as reference
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense.norm import Norm, add_norm
from chorale.kernels.triton.moe.router import pack_router, route
from chorale.kernels.triton.reduce.memory import Layout
from chorale.kernels.triton.reduce.reducer import SymmetricReducer
from chorale.machine.processes import die_with_parent
from chorale.measure.bench.gpu_time import captured
from chorale.parallel.peer_memory import PeerMemory, symmetric_memory

H, EPS, CALLS = 2880, 1e-5, 100
ROWS = (1, 8, 64, 256, 1024, 4096)
LIMIT = 0.5  # seconds until a missing rank is named, in the fault tests
Work = Callable[[], Any]


@dataclass
class Bench:
    """One rank's inputs and results."""

    rank: int
    size: int
    group: dist.ProcessGroup
    reducer: SymmetricReducer
    norm: Norm
    routers: dict[int, RouterWeights]
    results: list[dict[str, Any]]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def randn(self, *shape: int, seed: int) -> torch.Tensor:
        """Returns random numbers, the same on all ranks for the same seed."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator)

    def use(self, form: str) -> None:
        """Makes the reducer use ``form`` ("one" or "two") for every number of rows that fits its memory."""
        tuning.one_shot_rows = lambda _: 10**6 if form == "one" else 0


# ------------------------------------------------------------------ correctness


def gathered(bench: Bench, tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(bench.size)]
    dist.all_gather(found, tensor.contiguous(), group=bench.group)
    return found


def same_bits(bench: Bench, name: str, tensor: torch.Tensor) -> None:
    mine = tensor.contiguous().view(torch.uint8)
    for rank, other in enumerate(gathered(bench, mine)):
        assert torch.equal(mine, other), (
            f"{name}: the bits of rank {bench.rank} differ from those of rank {rank}"
        )


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(found.isfinite().all())
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_rows(bench: Bench, form: str, rows: int, splits: int, seed: int) -> None:
    """Compares one call on new random inputs with the reference."""
    bench.use(form)
    dtype = torch.float32 if splits > 1 else torch.bfloat16
    parts = [bench.randn(splits, rows, H, seed=100 * seed + r).to(dtype) for r in range(bench.size)]
    bias = bench.randn(H, seed=7).bfloat16()
    biases = [bias if r == 0 else None for r in range(bench.size)]
    x = bench.randn(rows, H, seed=seed)
    wide = form == "one" and rows <= tuning.REDUCE_WIDE_ROWS
    sent_in = torch.float32 if wide else torch.bfloat16
    sent = [reference.sent_part(p, b, sent_in) for p, b in zip(parts, biases, strict=True)]
    total, normed = reference.add_norm(sent, x, bench.norm.weight, EPS)
    exact = x + sum(reference.sent_part(p, b, torch.float32) for p, b in zip(parts, biases, strict=True))
    found = bench.reducer.add_norm(
        parts[bench.rank], biases[bench.rank], x.clone(), bench.norm, low=form == "two"
    )
    torch.cuda.synchronize()
    bench.reducer.check()
    name = f"{form}-shot, {rows} rows"
    own = slice(0, rows)
    if form == "two":
        owned = -(-rows // bench.size)
        own = slice(bench.rank * owned, (bench.rank + 1) * owned)
        assert found.low is not None
        if found.low.numel():
            assert error_of(found.normed[own].float() + found.low.float(), normed[own]) < 2**-14
    else:
        same_bits(bench, name, found.x)
    same_bits(bench, name, found.normed)
    error = error_of(found.x[own], total[own]) if total[own].numel() else 0.0
    assert error < 1e-6, (name, error)
    rounding = error_of(found.normed.float(), normed)
    assert rounding < 4e-3, (name, rounding)
    if seed % 10 == 0:
        lost = error_of(total, exact)
        bench.say(
            f"  {name:22} x {error:.1e}  norm {rounding:.1e}  (lost by rounding sent values: {lost:.1e})"
        )
    if form == "two":  # the call of the last layer: all rows of x, no norm
        last = bench.reducer.add_norm(parts[bench.rank], biases[bench.rank], found.x, None, whole=True)
        torch.cuda.synchronize()
        bench.reducer.check()
        same_bits(bench, name, last.x)
        assert error_of(last.x, reference.add_norm(sent, total, bench.norm.weight, EPS)[0]) < 1e-6


def check_route(bench: Bench, rows: int, experts: int, seed: int) -> None:
    bench.use("one")
    weights = bench.routers[experts]
    parts = [bench.randn(4, rows, H, seed=100 * seed + r) for r in range(bench.size)]
    x = bench.randn(rows, H, seed=seed)
    wide = rows <= tuning.REDUCE_WIDE_ROWS
    sent = [reference.sent_part(p, None, torch.float32 if wide else torch.bfloat16) for p in parts]
    total, normed = reference.add_norm(sent, x, weights.norm, EPS)
    logits = normed.double() @ weights.linear.weight.double().t() + weights.linear.bias.double()
    found = bench.reducer.add_norm(parts[bench.rank], None, x, None).x
    _, (rounded, ids, gates) = route(found, weights, EPS)
    torch.cuda.synchronize()
    bench.reducer.check()
    for tensor in (found, rounded, ids, gates):
        same_bits(bench, f"route, {rows} rows", tensor)
    assert error_of(found, total) < 1e-6
    chosen = logits.gather(1, ids)
    assert float((chosen.amin(1) - logits.topk(weights.top_k).values.amin(1)).abs().max()) < 1e-3
    torch.testing.assert_close(gates.double(), torch.softmax(chosen, -1), rtol=1e-3, atol=1e-4)


def check(bench: Bench, rows: list[int]) -> None:
    bench.say("correct: relative errors against float32, and the same bits on all ranks")
    for repeat in range(3):
        for position, count in enumerate(rows if repeat % 2 == 0 else rows[::-1]):
            for form in ("one", "two"):
                check_rows(bench, form, count, 1 + 3 * (count <= 64), seed=10 * (position + 1) + repeat)
    for repeat in range(3):
        for experts, count in ((32, 1), (32, 8), (32, 32), (128, 1), (128, 8)):
            check_route(bench, count, experts, seed=500 + repeat)
    check_graph(bench)


def check_graph(bench: Bench) -> None:
    """Replays a graph with an odd number of calls of changing sizes: the counters are on the device."""
    bench.use("one")
    sizes = (8, 1, 3)
    parts = [bench.randn(1, n, H, seed=n + 31 * bench.rank) for n in sizes]
    x = [torch.zeros(n, H, device=bench.device) for n in sizes]

    def work() -> None:
        for part, mine in zip(parts, x, strict=True):
            bench.reducer.add_norm(part, None, mine, bench.norm)

    graph = captured(work, "thread_local")  # runs once before it captures
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    bench.reducer.check()
    for n, mine in zip(sizes, x, strict=True):
        every = [bench.randn(1, n, H, seed=n + 31 * r)[0] for r in range(bench.size)]
        assert error_of(mine, 21 * sum(every)) < 1e-5
        same_bits(bench, "graph", mine)


# ------------------------------------------------------------------ times


def time_of(bench: Bench, work: Work, calls: int = CALLS) -> float:
    """Returns microseconds of one of ``calls`` calls in a graph: the slowest rank's median over replays."""
    graph = captured(lambda: [work() for _ in range(calls)], "thread_local")
    graph.replay()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier(group=bench.group)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor(statistics.median(times), device=bench.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=bench.group)
    bench.reducer.check()
    return float(slowest)


def record(bench: Bench, variant: str, rows: int, work: Work) -> float:
    try:
        us = time_of(bench, work)
    except (RuntimeError, ValueError) as error:  # not supported by this library
        bench.say(f"{variant:44} {rows:5} rows: {type(error).__name__}: {str(error)[:120]}")
        return float("nan")
    bench.results.append({"variant": variant, "rows": rows, "us": round(us, 2), "ranks": bench.size})
    return us


def ours(bench: Bench, form: str, rows: int) -> Work:
    """Returns a call of our all-reduce with norm; the inputs are small, so that x stays finite."""
    parts = (bench.randn(1, rows, H, seed=bench.rank) * 0.01).bfloat16()
    x = torch.zeros(rows, H, device=bench.device)

    def work() -> None:
        bench.use(form)
        bench.reducer.add_norm(parts, None, x, bench.norm)

    return work


def libraries(bench: Bench, rows: int) -> dict[str, Work]:
    """Returns the libraries' all-reduce in bfloat16, alone and with our kernel for residual and norm."""
    import torch.distributed._symmetric_memory as symmetric

    plain = torch.zeros(rows, H, dtype=torch.bfloat16, device=bench.device)
    x = torch.zeros(rows, H, device=bench.device)
    shared = symmetric.empty(rows, H, dtype=torch.bfloat16, device=bench.device)
    symmetric.rendezvous(shared, bench.group.group_name)
    shared.zero_()
    name, ops = bench.group.group_name, torch.ops.symm_mem

    def after(result: torch.Tensor) -> None:
        add_norm(x, result.view(1, rows, H), None, bench.norm.weight, EPS, torch.bfloat16)

    def nccl() -> torch.Tensor:
        dist.all_reduce(plain, group=bench.group)
        return plain

    forms: dict[str, Callable[[], torch.Tensor]] = {
        "NCCL": nccl,
        "torch one-shot": lambda: ops.one_shot_all_reduce(shared, "sum", name),
        "torch two-shot": lambda: ops.two_shot_all_reduce_(shared, "sum", name),
    }
    found: dict[str, Work] = dict(forms)
    for variant, form in forms.items():
        found[f"{variant}, addition, norm"] = lambda form=form: after(form())
    found["addition and norm alone"] = lambda: after(plain)
    return found


def time_table(bench: Bench, rows: list[int]) -> None:
    columns = {count: libraries(bench, count) for count in rows}
    names = ["ours one-shot", "ours two-shot", *columns[rows[0]]]
    table: dict[str, list[float]] = {name: [] for name in names}
    for count in rows:
        works = {f"ours {form}-shot": ours(bench, form, count) for form in ("one", "two")} | columns[count]
        for name, work in works.items():
            if count > 1024 and name == "ours one-shot":
                table[name].append(float("nan"))
                continue
            table[name].append(record(bench, name, count, work))
    bench.say(
        f"\n{bench.size} GPUs, us a call, {CALLS} in a graph" + " " * 12 + "".join(f"{n:9}" for n in rows)
    )
    for name, times in table.items():
        bench.say(f"{name:44}" + "".join(f"{us:9.1f}" for us in times))


# ------------------------------------------------------------------ faults


def peer_memory(layout: Layout, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    return symmetric_memory(layout.num_bytes, group.group_name, device, lambda: dist.barrier(group=group))


def skip_a_call(bench: Bench) -> None:
    """The last rank skips the call. The others must return within the limit, twice, and name it."""
    bench.use("one")
    last = bench.size - 1
    bench.reducer.set_limit(LIMIT)
    dist.barrier(group=bench.group)
    if bench.rank != last:
        report_missing(bench, last, "a rank that skips a call")
    dist.barrier(group=bench.group)


def report_missing(bench: Bench, last: int, what: str) -> None:
    times = []
    for _ in range(2):
        begin = time.monotonic()
        ours(bench, "one", 8)()
        torch.cuda.synchronize()
        times.append(time.monotonic() - begin)
        assert bench.reducer.missing == last, bench.reducer.missing
    assert times[0] < LIMIT + 1.0, times
    assert times[1] < 0.3, times
    bench.say(f"{what}: rank {last} named after {times[0]:.3f} s; the next call took {times[1]:.3f} s")


def die(bench: Bench) -> None:
    """The last rank kills itself after one call with a new reducer. The others must name it."""
    layout = bench.reducer.layout
    memory = peer_memory(layout, bench.group, bench.device)
    bench.reducer = SymmetricReducer(memory, layout, LIMIT)
    bench.use("one")
    ours(bench, "one", 8)()
    torch.cuda.synchronize()
    dist.barrier(group=bench.group)
    if bench.rank == bench.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    report_missing(bench, bench.size - 1, "a rank that was killed")
    os._exit(0)  # NCCL's threads would wait for the killed rank


# ------------------------------------------------------------------ ranks


def run_rank(parent: int, rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    die_with_parent(parent)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    layout = Layout(size, H, max(8192, *options.rows), 1024, torch.bfloat16)
    memory = peer_memory(layout, group, device)
    reducer = SymmetricReducer(memory, layout, seconds=60.0)  # the other ranks compile, too
    norm = Norm(torch.linspace(0.5, 1.5, H, device=device), EPS, torch.bfloat16)
    routers = {}
    for experts in (32, 128):
        generator = torch.Generator(device=device).manual_seed(experts)
        weight = torch.randn(experts, H, device=device, generator=generator) * H**-0.5
        packed = pack_router(weight, torch.zeros(experts, device=device), torch.bfloat16)
        routers[experts] = RouterWeights(norm.weight, packed, 4, torch.bfloat16)
    bench = Bench(rank, size, group, reducer, norm, routers, [])
    rows = [n for n in options.rows if n <= 1024]
    check(bench, sorted({*rows, 2, 3, 33}))
    if max(options.rows) > 1024:
        check_rows(bench, "two", max(options.rows), 1, seed=990)
    if not options.check:
        time_table(bench, options.rows)
        if rank == 0 and options.json:
            Path(options.json).write_text(json.dumps(bench.results, indent=1))
    skip_a_call(bench)
    die(bench)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        sys.exit(f"{options.ranks} GPUs are needed, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        started = [
            context.Process(
                target=run_rank,
                args=(os.getpid(), rank, options.ranks, f"{folder}/store", options),
                daemon=True,
            )
            for rank in range(options.ranks)
        ]
        for process in started:
            process.start()
        return wait_for(started)


def wait_for(started: list[Any]) -> int:
    """Returns 0 if the last rank ended by SIGKILL and all others with exit code 0."""
    while any(process.is_alive() for process in started):
        time.sleep(0.2)
        if any(process.exitcode not in (None, 0, -signal.SIGKILL) for process in started):
            time.sleep(2.0)  # the other ranks print their messages
            for process in started:
                process.kill()
    codes = [process.exitcode for process in started]
    print("exit codes", codes, flush=True)
    return 0 if codes == [0] * (len(started) - 1) + [-signal.SIGKILL] else 1


if __name__ == "__main__":
    sys.exit(main())
