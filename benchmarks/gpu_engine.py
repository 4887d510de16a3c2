"""The whole engine offline on one GPU, at gpt-oss's sizes, next to vLLM's figures on the same kind of GPU.

    python benchmarks/gpu_engine.py [20b | 120b | FOLDER] [--cases b1 b8 ...] [--output 64] [--json FILE]

A size is made first, as a random checkpoint of the published layout, in ``--scratch`` (memory, by default).
Method: token ids in and out, temperature 1, the model's stop ids ignored, prefix caching off, default limits;
decode rate = tokens after each request's first, over (time of the full run minus time of a run that ends
with the first token); ``whole`` counts everything. ``--output`` shortens the answers (a quick look: the
contexts are then shorter than vLLM's). ``host``: the engine's own time a step (plan, launch, commit).
``device``: a captured step of all rows, from its first kernel to its last, by events, the mean; ``idle``: the
share of the time in which the GPU waited between two such steps in a row (the copies of tokens and
plans included), and ``longest gap``. The collector of cyclic garbage is as calm as the server's.

One run each, after a short warm-up of the same batch; ``--runs`` takes the median of several. With
``--fill`` instead: the largest steps on top of a full pool, and whether memory stays within what
``--gpu-memory-utilization`` allows (``pool_fill.py`` says what that shows). ``--profile`` adds, for each
case, where the time of a step goes by kernel, from a run of its own (the profiler slows it down).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pool_fill import fill_pool

from chorale.config import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec, StepHandle, StepPlan, StepResult
from chorale.model.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import SHAPES, make_config
from chorale.processes import tune_garbage_collector
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.steps.graph_sizes import context_sizes
from chorale.runtime.worker import Worker
from chorale.serve.engine.build import build_engine

# name -> (rows, prompt, output); vLLM 0.26 on one H200: decode tokens a second, the better of its back ends
CASES: dict[str, tuple[int, int, int]] = {
    "b1": (1, 128, 512),
    "b8": (8, 128, 512),
    "b64": (64, 1024, 512),
    "b256": (256, 1024, 512),
    "b1024": (1024, 1024, 1024),
    "prefill": (8, 8192, 1),
}
VLLM: dict[str, dict[str, float]] = {
    "20b": {"b1": 333, "b8": 1608, "b64": 7941, "b256": 16162, "b1024": 25981, "prefill": 69100},
    "120b": {"b1": 235, "b8": 1150, "b64": 2889, "b256": 8645, "prefill": 40800},
}
VLLM_WHOLE = {"20b": {"b1024": 19434}, "120b": {}}


class Watch:
    """An Executor that keeps what the host waited for the device, and what it took to launch a step."""

    def __init__(self, inner: LocalExecutor) -> None:
        self.inner = inner
        self.waited = self.launched = 0.0

    def execute(self, plan: StepPlan) -> StepHandle:
        start = time.perf_counter()
        handle = self.inner.execute(plan)
        self.launched += time.perf_counter() - start
        return Watched(handle, self)

    def use_idle_time(self) -> bool:
        return self.inner.use_idle_time()

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass(frozen=True, slots=True)
class Watched:
    handle: StepHandle
    watch: Watch

    def result(self) -> StepResult:
        start = time.perf_counter()
        found = self.handle.result()
        self.watch.waited += time.perf_counter() - start
        return found


@dataclass
class Run:
    """One batch to its end. ``steady``: the steps in which every row decoded."""

    seconds: float = 0.0
    steady_steps: int = 0
    steady_seconds: float = 0.0
    waited: float = 0.0
    launched: float = 0.0


def play(core: EngineCore, watch: Watch, rows: int, prompt: int, output: int) -> Run:
    rng = np.random.default_rng(rows * 7919 + prompt)
    for row in range(rows):
        ids = rng.integers(0, 199_000, prompt).tolist()
        spec = SamplingSpec(temperature=1.0, ignore_eos=True, max_tokens=output, seed=row)
        core.add_request(GenerateRequest(request_id=f"r{row}", prompt_token_ids=ids, sampling=spec))
    run, started, count = Run(), time.perf_counter(), 0
    while core.has_work:
        begin = time.perf_counter()
        before = (watch.waited, watch.launched)
        chunks = core.step()
        count += sum(len(chunk.token_ids) for chunk in chunks)
        if len(chunks) == rows and core.stats().last_step_tokens == rows:
            run.steady_steps += 1
            run.steady_seconds += time.perf_counter() - begin
            run.waited += watch.waited - before[0]
            run.launched += watch.launched - before[1]
    run.seconds = time.perf_counter() - started
    assert count == rows * output, (count, rows, output)
    return run


class DeviceClock:
    """Events around each replay of a decode step: how long the device was busy, and idle between two."""

    def __init__(self, core: EngineCore) -> None:
        executor: Any = core._executor
        self._steps: list[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._step = (0, 0)  # id and rows of the one that is being launched
        graphs = executor.inner._worker._decode_graphs
        if graphs is not None:
            self._launch, self._graph = graphs.launch, graphs.graph
            graphs.launch, graphs.graph = self.launch, self.graph

    def launch(self, plan: StepPlan) -> Any:
        self._step = (plan.step_id, len(plan.rows))
        return self._launch(plan)

    def graph(self, *key: Any) -> Callable[[], None]:
        replay = self._graph(*key)

        def timed() -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            self._steps.append((*self._step, begin, end))

        return timed

    def take(self, rows: int) -> tuple[list[float], list[float]]:
        """Seconds of each step of ``rows`` rows since the last call, and between two in a row."""
        torch.cuda.synchronize()
        steps, self._steps = [step for step in self._steps if step[1] == rows], []
        busy = [begin.elapsed_time(end) / 1e3 for *_, begin, end in steps]
        pairs = [(one, two) for one, two in pairwise(steps) if two[0] == one[0] + 1]
        return busy, [one[3].elapsed_time(two[2]) / 1e3 for one, two in pairs]


def profile(core: EngineCore, rows: int, prompt: int, output: int) -> dict[str, tuple[float, int]]:
    """Kernel -> (microseconds, launches) of a decode step, or (``output`` 1) of a prompt's; means of some."""
    steps, decodes = 5, output > 1
    rng = np.random.default_rng(rows)
    tokens = rows * prompt // 4096 + 2 * steps + 10 if decodes else 1
    for row in range(rows):
        ids = rng.integers(0, 199_000, prompt).tolist()
        spec = SamplingSpec(temperature=1.0, ignore_eos=True, max_tokens=tokens, seed=row)
        core.add_request(GenerateRequest(request_id=f"p{row}", prompt_token_ids=ids, sampling=spec))
    while decodes and core.has_work and core.stats().last_step_tokens != rows:
        core.step()
    for _ in range(2):
        core.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    while core.has_work:
        core.step()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:60]][0] += event.time_range.elapsed_us() / steps
            found[event.name[:60]][1] += 1
    return {
        name: (time, round(count / steps))
        for name, (time, count) in sorted(found.items(), key=lambda item: -item[1][0])
    }


def measure(
    core: EngineCore, watch: Watch, clock: DeviceClock, name: str, output: int | None, runs: int
) -> dict[str, Any]:
    rows, prompt, full = CASES[name]
    full = full if output is None else min(full, output)
    play(core, watch, rows, prompt if rows <= 16 else 64, min(full, 6))  # what compiles, compiles here
    if full == 1:
        seconds = statistics.median(play(core, watch, rows, prompt, 1).seconds for _ in range(runs))
        return {"case": name, "prefill tok/s": rows * prompt / seconds}
    clock.take(rows)
    found = [(play(core, watch, rows, prompt, full), play(core, watch, rows, prompt, 1)) for _ in range(runs)]
    busy, gaps = clock.take(rows)
    decode = statistics.median(rows * (full - 1) / (run.seconds - first.seconds) for run, first in found)
    run, first = found[0]
    steps = max(run.steady_steps, 1)
    step = run.steady_seconds / steps
    result = {
        "case": name,
        "decode tok/s": decode,
        "whole tok/s": rows * full / run.seconds,
        "prefill tok/s": rows * prompt / first.seconds,
        "step ms": step * 1e3,
        "host ms": (run.steady_seconds - run.waited) / steps * 1e3,
        "launch ms": run.launched / steps * 1e3,
    }
    if gaps:
        idle = sum(gaps) / (sum(gaps) + statistics.fmean(busy) * len(gaps))
        result |= {
            "device ms": statistics.fmean(busy) * 1e3,
            "idle": idle,
            "longest gap ms": max(gaps) * 1e3,
        }
    return result


def capture_all(core: EngineCore, most: int) -> None:
    """Every decode step of up to ``most`` rows: as requests end one by one, all of these come up."""
    executor: Any = core._executor
    graphs = executor.inner._worker._decode_graphs
    if graphs is None:
        return
    start, count = time.perf_counter(), 0
    for size in (size for size in graphs._sizes if size <= most):
        for longest in context_sizes(size, core.limits.max_model_len):
            executor.inner.prepare(partial(Worker.capture_decode, rows=size, longest=longest))
            count += 1
    torch.cuda.synchronize()
    print(f"{count} graphs of up to {most} rows in {time.perf_counter() - start:.1f} s", flush=True)


def find_checkpoint(model: str, scratch: Path) -> Path:
    if model not in SHAPES:
        return Path(model)
    folder = scratch / f"random-{model}"
    if not (folder / "config.json").exists():
        start = time.perf_counter()
        write_random_checkpoint(folder, make_config(**SHAPES[model]), device="cuda", threads=12)
        print(f"checkpoint made in {time.perf_counter() - start:.1f} s", flush=True)
    torch.cuda.empty_cache()
    return folder


def build(folder: Path, given: argparse.Namespace) -> tuple[EngineCore, Watch, dict[str, float]]:
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        ops=given.ops,
        enable_prefix_caching=False,
        enforce_eager=given.enforce_eager,
        async_scheduling=not given.serial,
        gpu_memory_utilization=given.gpu_memory_utilization,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        moe_activation_dtype=given.moe_activation_dtype,
        kv_cache_dtype=given.kv_cache_dtype,
    )
    core, info = build_engine(config)
    tune_garbage_collector()
    assert isinstance(core._executor, LocalExecutor)
    watch = Watch(core._executor)
    core._executor = watch
    for note in info.notes:
        print("note:", note)
    print(f"pages: {info.num_blocks} of {info.block_size}; start-up, s: {info.startup_seconds}", flush=True)
    return core, watch, info.startup_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="20b")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--output", type=int)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="no case is begun after so many")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--moe-activation-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-model-len", type=int)
    given = parser.parse_args()
    began = time.perf_counter()
    folder = find_checkpoint(given.model, given.scratch)
    torch.cuda.reset_peak_memory_stats()
    core, watch, startup = build(folder, given)
    results = []
    if given.fill:
        sys.exit(not fill_pool(core, watch.inner, given.gpu_memory_utilization))
    capture_all(core, max(CASES[name][0] for name in given.cases))
    clock = DeviceClock(core)
    for name in given.cases:
        if time.perf_counter() - began > given.seconds:
            print(f"{name}: no time left")
            continue
        found = measure(core, watch, clock, name, given.output, given.runs)
        vllm = VLLM.get(given.model, {}).get(name)
        whole = VLLM_WHOLE.get(given.model, {}).get(name)
        theirs = (f" | vLLM {vllm:,.0f}" if vllm else "") + (f", whole {whole:,.0f}" if whole else "")
        figures = "  ".join(
            f"{k} {v:,.3g}" if v < 100 else f"{k} {v:,.0f}" for k, v in found.items() if k != "case"
        )
        print(f"{name:8s} {figures}{theirs}  [{time.perf_counter() - began:.0f} s]", flush=True)
        if given.profile:
            found["kernels"] = profile(core, *CASES[name])
            for kernel, (spent, count) in list(found["kernels"].items())[:24]:
                print(f"    {spent:9.1f} us a step in {count:4d} of {kernel}", flush=True)
        results.append(found)
    peak = torch.cuda.max_memory_reserved()
    free, total = (number / 2**30 for number in torch.cuda.mem_get_info())
    retries = torch.cuda.memory_stats()["num_alloc_retries"]  # each stops the device
    print(
        f"memory: peak reserved {peak / 2**30:.2f} GiB, now free {free:.2f} of {total:.2f} GiB, "
        f"{retries} retries"
    )
    if given.json:
        record = {
            "model": given.model,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "startup": startup,
            "peak_reserved": peak,
            "results": results,
        }
        given.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
