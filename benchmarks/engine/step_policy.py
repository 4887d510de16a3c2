"""Simulates ``--prompt-delay`` and the bound of batches: the real scheduler on a table of step times.

    python -m benchmarks.engine.step_policy [--delays 0 12] [--rates 20 30 40] [--graphs ROWS TOKENS]
    python -m benchmarks.engine.step_policy --batch-delays 0 6 12 [--rates 5 20] [--batch-rows 1024]

The scheduler is the real one; its clock is computed. How long a step of 20b takes on one H200 follows from
docs/lab/kernels.md ("The step, measured": decode steps of 1 to 1,024 rows, prompts of 8,192 tokens, the
shares of attention, head and sampling). Overlap depth 1, as on a GPU; a step without a graph costs the host
``LAUNCH``, a value that reproduces the gaps measured without a bound and with ``--graphs 64 1024``;
a missing graph costs ``CAPTURE`` once.

Workloads: Poisson arrivals at ``--rates`` a second of 1,024 / 512 tokens for 60 s, and 1,024 requests at
once of 1,024 / 1,024. For each bound (milliseconds; 0: none): the time between two tokens of a stream (ITL),
the time to the first token, and the output rate from the first arrival to the last token.

With ``--batch-delays``: the same arrivals alone, and together with a batch of ``--batch-rows`` lines that are
always in flight, for each bound on steps with batch work; and the tokens a second of the batch.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec, StepPlan, StepResult
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS, MIXED_TOKENS, pick

# Tokens of a step -> ms of everything but attention, head and sampling.
LINEAR = ((1, 1.02), (8, 2.3), (64, 4.0), (256, 5.9), (1024, 14.8), (2048, 24.0), (4096, 44.0), (8192, 86.0))
LAUNCH = 22.0  # ms of the host for a step that is launched kernel by kernel
CAPTURE = 60.0  # ms of the host for a graph that is missing
HOST = 0.5  # ms of other host work for a step


def linear_ms(tokens: int) -> float:
    upper = min(max(1, bisect_left([size for size, _ in LINEAR], tokens)), len(LINEAR) - 1)
    (low, low_ms), (high, high_ms) = LINEAR[upper - 1 : upper + 1]
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


def step_ms(plan: StepPlan) -> float:
    """Returns the milliseconds that a step takes on the device."""
    new, ends = plan.num_new.astype(np.int64), plan.num_computed + plan.num_new
    decode = new == 1
    attention = 0.15 + 4.8e-6 * ends[decode].sum() + 2e-4 * new[~decode].sum()
    attention += 4.4e-7 * (new * (plan.num_computed + new / 2))[~decode].sum()
    sampled = int(plan.samples.sum())
    return linear_ms(plan.num_tokens) + float(attention) + 0.26 + 2.1e-3 * sampled


def graph_of(plan: StepPlan, rows: int, tokens: int) -> tuple[int, int] | None:
    """Returns rows and tokens of the graph for a step; graphs have at most ``rows`` and ``tokens``."""
    if (plan.num_new == 1).all():
        return len(plan.rows), len(plan.rows)
    if plan.num_tokens > tokens or len(plan.rows) >= rows:
        return None
    return pick(MIXED_ROWS, len(plan.rows) + 1), pick(MIXED_TOKENS, plan.num_tokens)


@dataclass
class Device:
    """An Executor. ``now`` is the host's clock; the device runs steps in order, later than the host."""

    graphs: tuple[int, int]  # rows and tokens of the largest mixed step that is captured
    is_warm: bool = False  # all graphs are captured
    now: float = 0.0
    busy_until: float = 0.0
    noise: random.Random = field(default_factory=lambda: random.Random(1))
    captured: set[tuple[int, int]] = field(default_factory=set)

    def execute(self, plan: StepPlan) -> Step:
        began = max(self.now, self.busy_until)
        self.now += HOST / 1e3
        graph = graph_of(plan, *self.graphs)
        if graph is None:
            self.now += LAUNCH / 1e3
        elif (plan.num_new > 1).any() and not self.is_warm and graph not in self.captured:
            self.captured.add(graph)
            self.now += CAPTURE / 1e3
        seconds = step_ms(plan) / 1e3 * self.noise.uniform(0.97, 1.05)
        before, self.busy_until = self.busy_until, max(began + seconds, self.now)
        return Step(self, plan, max(before, began), self.busy_until)

    def use_idle_time(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


@dataclass
class Step:
    device: Device
    plan: StepPlan
    began: float
    ends: float

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.ends)
        rows = len(self.plan.rows)
        tokens = np.full((rows, 1), 5, np.int32)
        seconds = self.ends - self.began
        return StepResult(self.plan.step_id, tokens, np.ones(rows, np.int32), seconds=seconds)


@dataclass
class Result:
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    batch_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        gap, first = (np.array(values) * 1e3 for values in (self.gaps, self.first))
        cuts = np.percentile(gap, (50, 90, 99, 99.9, 100))
        cells = " ".join(
            f"{name} {cut:6.1f}"
            for name, cut in zip(("p50", "p90", "p99", "p99.9", "max"), cuts, strict=True)
        )
        firsts = f"p50 {np.percentile(first, 50):6.0f} p99 {np.percentile(first, 99):6.0f}"
        rate, batch_rate = self.tokens / self.seconds, self.batch_tokens / self.seconds
        batch = f" | batch {batch_rate:8,.0f} tok/s" if batch_rate else ""
        return f"ITL {cells} | TTFT {firsts} | {rate:8,.0f} tok/s{batch}"


def limits(delay_ms: float, batch_ms: float = 0.0) -> EngineLimits:
    return EngineLimits(
        num_blocks=60_000,
        block_size=64,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=131072,
        enable_prefix_caching=False,
        async_scheduling=1,
        prompt_delay=delay_ms / 1e3,
        max_prompt_delay=0.25,
        batch_delay=batch_ms / 1e3,
        long_batch_delay=0.03,
        least_chunk=1024,
    )


def play(
    delay_ms: float, graphs: tuple[int, int], arrivals: Iterator[float], prompt: int, output: int
) -> Result:
    device, result = Device(graphs), Result()
    core = EngineCore(limits(delay_ms), device, lambda: device.now)
    waiting = list(arrivals)[::-1]
    came: dict[str, float] = {}
    last: dict[str, float] = {}
    while waiting or core.has_work:
        if not core.has_work:
            device.now = max(device.now, waiting[-1])
        while waiting and waiting[-1] <= device.now:
            name = f"r{len(came)}"
            came[name] = waiting.pop()
            spec = SamplingSpec(ignore_eos=True, max_tokens=output, seed=1)
            core.add_request(GenerateRequest(request_id=name, prompt_token_ids=[9] * prompt, sampling=spec))
        for chunk in core.step():
            before = last.get(chunk.request_id)
            if before is None:
                result.first.append(device.now - came[chunk.request_id])
            else:
                result.gaps.append(device.now - before)
            last[chunk.request_id] = device.now
            result.tokens += len(chunk.token_ids)
    result.seconds = device.now
    return result


def play_with_batch(
    batch_ms: float, num_lines: int, graphs: tuple[int, int], arrivals: Iterator[float], seconds: float
) -> Result:
    """Plays requests of 1,024 / 512 tokens while ``num_lines`` batch lines of the same size are in flight."""
    device, result = Device(graphs, is_warm=True), Result()
    core = EngineCore(limits(12, batch_ms), device, lambda: device.now)
    waiting = list(arrivals)[::-1]
    came: dict[str, float] = {}
    last: dict[str, float] = {}
    num_begun = 0

    def add(name: str, *, is_batch: bool) -> None:
        output = 256 + 512 * (len(last) % 2) if is_batch else 512
        spec = SamplingSpec(ignore_eos=True, max_tokens=output, seed=1)
        core.add_request(
            GenerateRequest(request_id=name, prompt_token_ids=[9] * 1024, sampling=spec, is_batch=is_batch)
        )

    while device.now < seconds:
        while num_begun < num_lines:
            add(f"b{num_begun}", is_batch=True)
            num_begun += 1
        if not core.has_work:
            if not waiting:
                break
            device.now = max(device.now, waiting[-1])
        while waiting and waiting[-1] <= device.now:
            name = f"r{len(came)}"
            came[name] = waiting.pop()
            add(name, is_batch=False)
        for chunk in core.step():
            name = chunk.request_id
            if name not in came:
                result.batch_tokens += len(chunk.token_ids)
                num_lines += chunk.finish_reason is not None
                continue
            if name not in last:
                result.first.append(device.now - came[name])
            else:
                result.gaps.append(device.now - last[name])
            last[name] = device.now
            result.tokens += len(chunk.token_ids)
    result.seconds = device.now
    return result


def compare_batches(given: argparse.Namespace, graphs: tuple[int, int]) -> None:
    for rate in given.rates:
        runs = [("alone", 0.0, 0)]
        runs += [(f"{delay:g} ms", delay, given.batch_rows) for delay in given.batch_delays]
        for name, delay, rows in runs:
            arrivals = poisson(rate, given.seconds)
            found = play_with_batch(delay, rows, graphs, arrivals, given.seconds)
            print(f"{rate:.0f} a second, {name}: {found}", flush=True)


def poisson(rate: float, seconds: float) -> Iterator[float]:
    generator, now = random.Random(3), 0.0
    while (now := now + generator.expovariate(rate)) < seconds:
        yield now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 12])
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 30, 40])
    parser.add_argument("--batch-delays", type=float, nargs="+")
    parser.add_argument("--batch-rows", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024, help="requests of the burst")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--graphs", type=int, nargs=2, default=(MIXED_ROWS[-1], MIXED_TOKENS[-1]))
    given = parser.parse_args()
    graphs = tuple(given.graphs)
    if given.batch_delays:
        compare_batches(given, graphs)
        return
    for delay in given.delays:
        for rate in given.rates:
            found = play(delay, graphs, poisson(rate, given.seconds), 1024, 512)
            print(f"{delay:4.0f} ms, {rate:.0f} a second: {found}", flush=True)
        burst = play(delay, graphs, iter([0.0] * given.rows), 1024, 1024)
        print(f"{delay:4.0f} ms, burst of {given.rows}: {burst}", flush=True)


if __name__ == "__main__":
    main()
