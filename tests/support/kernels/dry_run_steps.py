"""A script that checks that the dry run finds every kernel of every step. Needs Triton, but no GPU.

    python -m tests.support.kernels.dry_run_steps 20b|120b [--meta] [--ranks N [--by-expert]]
        [--compile [PROCESSES]] [-v]

CPU tensors replace those of a Hopper GPU, and nothing is compiled without ``--compile``: the script compares
the keys by which Triton distinguishes kernels. The dry run is that of a server's start, on CPU tensors, or
with ``--meta`` that of ``chorale warm``, on meta tensors. Then other steps run on CPU tensors, and the dry
run must have found all their kernels. ``--ranks``: kernels of the first of N ranks, which all-reduce with
Chorale's kernels; ``--by-expert``: ranks have whole experts. ``test_dry_run.py`` runs this script.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from chorale.config.engine import EngineConfig
from chorale.kernels.ops import Allowed
from chorale.kernels.triton import launch
from chorale.kernels.triton.dense import linear, qkv
from chorale.kernels.triton.moe import router as route
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.kernels.triton.precompile.target import TargetDriver
from chorale.kernels.triton.shared_ops import shared_ops
from chorale.machine.hardware import Hardware
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import CpuDevice
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarRows, allow_all
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS, MIXED_TOKENS
from chorale.runtime.sizing.resolve import Resolved
from chorale.runtime.warmup import captures
from chorale.runtime.warmup.plans import eager_plan
from chorale.runtime.worker import Worker
from chorale.serve.engine import build_rank, compile_phase
from chorale.serve.engine.warm import Target, ranks_of, shapes_of

HARDWARE = Hardware("cuda", "stand-in", 140 * 2**30, 139 * 2**30, capability=90)
DEVICE = CpuDevice(HARDWARE, can_capture=True, overlap=True)

STEPS = 40  # number of steps without a graph, of random sizes


compiled: list[str] = []


def _compile(source: Any, **_: Any) -> Any:
    compiled.append(source.name)
    target = GPUTarget("stand-in", 90, 32)
    return SimpleNamespace(metadata=SimpleNamespace(name=source.name, target=target), src=source, hash="")


def pretend() -> None:
    """Makes launches treat this process's tensors as those of a Hopper GPU."""
    triton.runtime.driver.set_active(TargetDriver("sm_90", 132))
    launch.architecture_of = lambda device: ("sm_90", 132)
    linear.product = qkv.product = route.product = _product
    linear.float32_product = route.float32_product = _float32_product


def _product(x: torch.Tensor, matrix: linear.Linear) -> torch.Tensor:
    """Replaces cuBLAS: the values are not used, and the CPU would be slow."""
    return x.new_empty(x.shape[0], matrix.weight.shape[0])


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def on_cpu(shapes: Any) -> Any:
    """Returns packed weights with tensors in place of meta tensors. Those of experts have no values: they are
    large, and no kernel reads them."""
    if isinstance(shapes, torch.Tensor):
        made = torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype)
        return made.zero_() if made.is_floating_point() else made
    if isinstance(shapes, tuple):
        return tuple(map(on_cpu, shapes))
    if not dataclasses.is_dataclass(shapes):
        return shapes
    fields = (each.name for each in dataclasses.fields(shapes))
    return replace(shapes, **{name: on_cpu(getattr(shapes, name)) for name in fields})  # type: ignore[type-var]


def launch_nothing() -> None:
    """Makes launches return where they would need a device."""
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: original(  # type: ignore[method-assign]
        self, *args, grid=grid, warmup=True, **options
    )


class SomeGrammars(GrammarRows):
    """Gives a grammar to every second row of a step while ``some`` is set."""

    some = False

    def allowed(self, rows: np.ndarray, drafts: np.ndarray | None = None) -> Allowed | None:
        samples = np.arange(0, len(rows), 2)
        if not self.some or not len(samples):
            return None
        return allow_all(self._device, samples, len(rows))


def serve(executor: LocalExecutor, found: Resolved, grammar: SomeGrammars) -> None:
    """Runs everything that follows the dry run: captures, and steps without a graph, of any size."""
    captures.warm_up(executor, found)
    captures.capture_first(executor, found, lambda *_: None, budget=0)
    while executor.use_idle_time():
        pass
    for tokens in MIXED_TOKENS:  # graphs that are captured only when a step needs them
        for rows in MIXED_ROWS:
            executor.prepare(partial(Worker.try_size, num_tokens=tokens, rows=rows))
    random = np.random.default_rng(1)
    limits = found.limits
    for number in range(STEPS):
        rows = int(random.integers(1, limits.max_num_seqs + 1))
        tokens = int(random.integers(rows, limits.max_num_batched_tokens + 1))
        tokens = min(tokens, rows * limits.max_model_len)
        grammar.some = number % 3 == 0
        executor.execute(eager_plan(tokens, rows, limits, filtered=number % 4 == 0))()


def main(size: str, processes: int, on_meta: bool, num_ranks: int) -> None:
    """``processes``: 0 compiles nothing."""
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    begin, pool = time.perf_counter(), CompilePool(processes) if processes else None
    pretend()
    if not processes:
        triton.compiler.compile = triton.compiler.compiler.compile = _compile
    # A small vocabulary: logits are the only large tensors that would be filled.
    config = make_config(**{**SHAPES[size], "layers": 2}, vocab=5056)
    options = EngineConfig(
        model="x",
        max_model_len=4096,
        max_num_seqs=80,
        num_gpu_blocks_override=80,
        max_num_batched_tokens=8192,
        tensor_parallel_size=num_ranks,
        enable_expert_parallel="--by-expert" in sys.argv,
    )
    rank = ranks_of(options, config)[0]
    on_meta_tensors = shapes_of(options, config, Target(DEVICE.hardware, "sm_90", 132), rank)
    found, grammars, shapes = on_meta_tensors.resolved, on_meta_tensors.grammars, on_meta_tensors.model
    ops = shapes.ops
    if rank is not None:  # those exchange through memory, which here are tensors too
        sizes = build_rank.step_sizes(config, found)
        ops = build_rank.ops_over_peers(options, shared_ops(rank), sizes, DEVICE.torch_device) or ops
    model, precompiler = GptOss(shapes.config, on_cpu(shapes.weights), ops, 4096), Precompiler(lambda: pool)
    dry = None if rank is None else compile_phase.DryRank(rank, ops)
    of_server = compile_phase.DryModel(model, found, DEVICE, grammars, dry)
    print(f"made after {time.perf_counter() - begin:.1f} s")
    begin, cpu = time.perf_counter(), time.thread_time()
    needed = (on_meta_tensors if on_meta else of_server).record(precompiler)
    cpu = time.thread_time() - cpu
    precompiler.wait(needed, lambda *_: None)
    first = time.perf_counter() - begin
    precompiler.wait(precompiler.num_kernels, lambda *_: None)
    seconds = time.perf_counter() - begin
    launch_nothing()
    grammar = SomeGrammars(DEVICE, grammars)
    serve(LocalExecutor(make_worker(model, found, DEVICE, grammar, rank)), found, grammar)
    print(f"dry run: {cpu:.1f} s of CPU; {needed} kernels after {first:.1f} s, all after {seconds:.1f} s")
    print(f"{precompiler.num_kernels} kernels found, {precompiler.num_late} not recorded")
    print(f"{precompiler.num_here} kernels were left to this process")
    if "-v" in sys.argv:
        print(collections.Counter(compiled))


if __name__ == "__main__":
    count = sys.argv[sys.argv.index("--compile") + 1 :] if "--compile" in sys.argv else ["0"]
    ranks = int(sys.argv[sys.argv.index("--ranks") + 1]) if "--ranks" in sys.argv else 1
    main(sys.argv[1], int(count[0]) if count else 2, "--meta" in sys.argv, ranks)
