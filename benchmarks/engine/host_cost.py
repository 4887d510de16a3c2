"""Measures the host time of an engine step: scheduling and committing, with a device that costs nothing.

    python -m benchmarks.engine.host_cost

Every row decodes with a context of at least ``--prompt`` tokens. The device is an object that answers each
plan with an array, so only the engine's own Python is measured, in CPU time of the thread. With ``--runtime``
the plans also go through the worker: packed into the memory of a captured step, whose replay does nothing,
and the results read back (a GPU adds its driver's calls). For scale: one decode step of gpt-oss-20b on an
H200 is about 1.2 ms at batch 1 and 12 ms at batch 1,024.
With ``--llm``: the same through ``LLM.generate``, and the time of 1,024 prompts of one token each (CPU time
of all threads of the process).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.timing import spent, times
from chorale.engine.core import EngineCore
from chorale.engine.types import EngineLimits, GenerateRequest, SamplingSpec, StepPlan, StepResult
from chorale.machine.processes import quiet_collector


@dataclass(frozen=True, slots=True)
class Done:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


class NullExecutor:
    """Samples token 5 everywhere."""

    def execute(self, plan: StepPlan) -> Done:
        rows = len(plan.rows)
        tokens = np.full((rows, 1), 5, np.int32)
        return Done(StepResult(plan.step_id, tokens, np.ones(rows, np.int32)))

    def use_idle_time(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


def measure(rows: int, depth: int, caching: bool, prompt: int, steps: int) -> list[float]:
    """Returns the seconds of each of ``steps`` decode steps over ``rows`` rows."""
    block_size = 16
    blocks = rows * (2 + (prompt + steps + 64) // block_size + 10)
    limits = EngineLimits(
        num_blocks=int(blocks * 1.05) + 100,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=prompt + steps + 64,
        enable_prefix_caching=caching,
        async_scheduling=1 if depth else 0,
    )
    core = EngineCore(limits, NullExecutor())
    for index in range(rows):
        # Lengths differ, so that block boundaries are spread over the steps as in practice.
        ids = [index % 1000 + 10] * (prompt + index % block_size)
        core.add_request(
            GenerateRequest(request_id=f"request-{index}", prompt_token_ids=ids, sampling=SamplingSpec())
        )
    while core.stats().generation_tokens < rows or core.stats().last_step_tokens != rows:
        core.step()
    found = times(core.step, steps, clock=time.thread_time)
    assert core.stats().last_step_tokens == rows
    return found


def measure_churn(rows: int, depth: int, caching: bool, prompt: int, steps: int) -> list[float]:
    """Like ``measure``, but requests end after 64 tokens and are replaced, so that most steps prefill."""
    output = 64
    limits = EngineLimits(
        num_blocks=rows * (2 + (prompt + output) // 16 + 10) * 2,
        block_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=prompt + output + 64,
        enable_prefix_caching=caching,
        async_scheduling=1 if depth else 0,
    )
    core = EngineCore(limits, NullExecutor())
    for index in range(rows + rows * steps // output):
        # The first ones have outputs of all lengths, so that ends are spread over the steps.
        tokens = 1 + index % output if index < rows else output
        request = GenerateRequest(
            request_id=f"request-{index}",
            prompt_token_ids=[index + 10] * prompt,
            sampling=SamplingSpec(max_tokens=tokens),
        )
        core.add_request(request)
    return times(core.step, steps - steps // 2, warm=steps // 2, clock=time.thread_time)


def measure_runtime(rows: int, prompt: int, steps: int) -> list[float]:
    """Like ``measure`` at depth 1, with the runtime's worker and a device whose graphs do nothing."""
    import torch

    from chorale.config.engine import EngineConfig
    from chorale.kernels.reference.ops import REFERENCE_OPS
    from chorale.machine.hardware import Hardware
    from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
    from chorale.model.config import ModelConfig
    from chorale.model.config_writer import make_config
    from chorale.runtime.build_worker import make_worker
    from chorale.runtime.device import CpuDevice
    from chorale.runtime.executor import LocalExecutor
    from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
    from chorale.runtime.sizing.resolve import resolve
    from chorale.serve.engine.build_rank import load_model, weight_target

    class Idle(CpuDevice):
        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            return lambda: None

    torch.set_num_threads(1)
    device = Idle(Hardware("cpu", "idle", 2**35, 2**35), can_capture=True, overlap=True)
    sizes = {"layers": 2, "experts": 4, "hidden": 64, "inter": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_checkpoint(Path(scratch), make_config(**sizes, vocab=512))
        model_config = ModelConfig.load(folder)
        config = EngineConfig(
            max_model_len=prompt + steps + 64,
            max_num_seqs=rows,
            num_gpu_blocks_override=rows * (prompt + steps + 64) // 64 * 2 + 100,
            block_size=64,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )
        found = resolve(config, model_config, device.hardware, can_overlap=True, can_capture=True)
        model = load_model(folder, weight_target(config, model_config, REFERENCE_OPS, found, device), found)
        grammar = GrammarRows(device, GrammarCache(512))
        core = EngineCore(found.limits, LocalExecutor(make_worker(model, found, device, grammar)))
    for index in range(rows):
        sampling = SamplingSpec(min_tokens=4 * steps, seed=index)
        ids = [index % 500 + 10] * (prompt + index % 64)
        core.add_request(GenerateRequest(request_id=f"r{index}", prompt_token_ids=ids, sampling=sampling))
    while core.stats().generation_tokens < rows or core.stats().last_step_tokens != rows:
        core.step()
    return times(core.step, steps // 2, clock=time.thread_time)


def llm_engine(rows: int, length: int) -> EngineCore:
    limits = EngineLimits(
        num_blocks=int(rows * (length // 16 + 14) * 1.1) + 100,
        block_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=length + 64,
        enable_prefix_caching=False,
        async_scheduling=True,
    )
    return EngineCore(limits, NullExecutor())


def measure_alone(rows: int, prompt: int, steps: int) -> float:
    """Returns the seconds of the engine alone for ``rows`` requests of ``steps`` tokens each."""
    core = llm_engine(rows, prompt + steps)
    sampling = SamplingSpec(ignore_eos=True, max_tokens=steps, min_tokens=steps)
    start = time.process_time()
    for index in range(rows):
        ids = [index % 1000 + 10] * prompt
        core.add_request(GenerateRequest(request_id=str(index), prompt_token_ids=ids, sampling=sampling))
    with quiet_collector():  # as both the server and LLM do
        while core.has_work:
            core.step()
    return time.process_time() - start


def measure_llm(rows: int, prompt: int, steps: int) -> float:
    """Like ``measure_alone``, through ``LLM.generate``, with token ids as input and output."""
    from chorale import LLM, SamplingParams
    from chorale.client.base import EngineInfo
    from chorale.serve.engine import build

    core = llm_engine(rows, prompt + steps)
    info = EngineInfo(model="none", max_model_len=prompt + steps + 64, max_num_seqs=rows)
    build.build_engine = lambda *_, **__: (core, info)  # type: ignore[assignment]
    prompts = [{"prompt_token_ids": [index % 1000 + 10] * prompt} for index in range(rows)]
    params = SamplingParams(ignore_eos=True, max_tokens=steps, min_tokens=steps, detokenize=False)
    with LLM() as llm:
        llm.generate(prompts[:1], params, use_tqdm=False)
        return spent(lambda: llm.generate(prompts, params, use_tqdm=False), time.process_time)


def print_llm(all_rows: list[int], steps: int) -> None:
    """Prints the cost of a step: the difference between a long run and a run of one token, per step."""
    print("rows  engine alone, us a step  through LLM.generate, us a step")
    for rows in all_rows:
        count = max(steps, 3000 // rows)
        alone, through = (
            min(run(rows, 64, count) - run(rows, 64, 1) for _ in range(3)) / (count - 1) * 1e6
            for run in (measure_alone, measure_llm)
        )
        print(f"{rows:4d}  {alone:23.0f}  {through:31.0f}")
    alone, through = (min(run(1024, 1024, 1) for _ in range(3)) for run in (measure_alone, measure_llm))
    print(f"1,024 prompts of 1,024 ids, 1 token each: {alone * 1e3:.0f} ms, {through * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runtime", action="store_true")
    parser.add_argument("--llm", action="store_true")
    options = parser.parse_args()
    if options.llm:
        print_llm(options.rows, options.steps)
        return
    if options.runtime:
        print("rows  median us  p90 us")
        for rows in options.rows:
            seconds = sorted(measure_runtime(rows, 8, options.steps))
            median, p90 = statistics.median(seconds), seconds[len(seconds) * 9 // 10]
            print(f"{rows:4d}  {median * 1e6:9.0f}  {p90 * 1e6:6.0f}")
        return
    for title, function in (("decode only", measure), ("with arrivals and ends", measure_churn)):
        print(f"\n{title}\nrows  depth  prefix cache  median us  p90 us  ns/row")
        for rows, depth, caching in product(options.rows, (0, 1), (False, True)):
            seconds = sorted(function(rows, depth, caching, options.prompt, options.steps))
            median, p90 = statistics.median(seconds), seconds[int(len(seconds) * 0.9)]
            print(
                f"{rows:4d}  {depth:5d}  {'on' if caching else 'off':>12}  {median * 1e6:9.0f}"
                f"  {p90 * 1e6:6.0f}  {median / rows * 1e9:6.0f}"
            )


if __name__ == "__main__":
    main()
