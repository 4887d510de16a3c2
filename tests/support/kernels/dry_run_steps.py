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
import logging
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from chorale.config.engine import EngineConfig
from chorale.kernels.ops import Allowed, Ops
from chorale.kernels.triton import launch, shared_ops
from chorale.kernels.triton.dense import linear, qkv
from chorale.kernels.triton.moe import packing
from chorale.kernels.triton.moe import router as route
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.kernels.triton.precompile.target import TargetDriver
from chorale.machine.hardware import Hardware
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss, LayerWeights, QkvWeights, RouterWeights, Weights
from chorale.model.weights import Target, weight_shapes
from chorale.parallel.communicator import Silent
from chorale.parallel.rank import Rank
from chorale.parallel.shares import make_shares
from chorale.runtime.build_worker import make_worker
from chorale.runtime.device import CpuDevice
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows, allow_all
from chorale.runtime.sizing.graph_sizes import MIXED_ROWS, MIXED_TOKENS
from chorale.runtime.sizing.resolve import Resolved, resolve
from chorale.runtime.warmup import captures
from chorale.runtime.warmup.plans import eager_plan
from chorale.runtime.warmup.target_device import TargetDevice
from chorale.runtime.worker import Worker
from chorale.serve.engine import build_rank, compile_phase

DEVICE = CpuDevice(Hardware("cuda", "stand-in", 140 * 2**30, 139 * 2**30), can_capture=True, overlap=True)

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


def make_model(config: ModelConfig, ops: Ops, rank: Rank | None) -> GptOss:
    """Returns a model of the real shape with few layers and shared experts. ``config``: the rank's."""
    hidden, heads, kv, dim = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    count, inter = config.num_local_experts, config.intermediate_size
    half = torch.bfloat16

    def linear_of(rows: int, depth: int) -> Any:
        return linear.pack_linear(torch.zeros(rows, depth, dtype=half), torch.zeros(rows, dtype=half))

    def matrices(rows: int, depth: int) -> packing.Matrices:
        tiles, chunks = -(-rows // 16), -(-depth // 64)
        # The size is as in the model, but for one expert: the values are not read.
        blocks = torch.empty(1, tiles, chunks, 32, 4, dtype=torch.int32)
        return packing.Matrices(blocks, torch.empty(1, tiles, chunks, 8, 2, 2, dtype=torch.uint8))

    packed = packing.Experts(
        gate_up=matrices(2 * inter, hidden), down=matrices(hidden, inter),
        gate_up_bias=torch.zeros(2, count, inter, dtype=half),
        down_bias=torch.zeros(count, hidden, dtype=half),
        swiglu_limit=7.0, swiglu_alpha=1.702, dtype=half,
        owned=None if rank is None else shared_ops.owned(rank.share),
    )  # fmt: skip
    routed = count if rank is None else rank.share.num_experts
    router = route.pack_router(torch.zeros(routed, hidden), torch.zeros(routed), half)
    layer = LayerWeights(
        qkv=QkvWeights(torch.zeros(hidden), linear_of((heads + 2 * kv) * dim, hidden)),
        sinks=torch.zeros(heads),
        output=linear_of(hidden, heads * dim),
        router=RouterWeights(torch.zeros(hidden), router, 4, half),
        experts=packed,
    )
    head = linear.pack_head(torch.empty(config.vocab_size, hidden, dtype=half))
    embedding = torch.zeros(1, hidden, dtype=half).expand(config.vocab_size, hidden)
    weights = Weights(embedding, (layer,) * config.num_hidden_layers, torch.zeros(hidden), head, 1)
    return GptOss(config, weights, ops, 4096)


def first_of(config: ModelConfig, num_ranks: int, *, by_expert: bool) -> Rank | None:
    if num_ranks == 1:
        return None
    return Rank(make_shares(config, num_ranks, by_expert=by_expert)[0], Silent(0, num_ranks))


def ops_of(rank: Rank | None, config: ModelConfig, found: Resolved, device: torch.device) -> Ops:
    if rank is None:
        return TRITON_OPS
    ops = shared_ops.over_peers(rank, build_rank.step_sizes(config, found), device)
    assert ops is not None
    return ops


def resolved_for(config: ModelConfig) -> Resolved:
    options = EngineConfig(
        model="x",
        max_model_len=4096,
        max_num_seqs=80,
        num_gpu_blocks_override=80,
        max_num_batched_tokens=8192,
    )
    return resolve(
        options,
        config,
        DEVICE.hardware,
        can_overlap=True,
        can_capture=True,
        supports_fp8_kv=TRITON_OPS.supports_fp8_kv,
    )


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
    config = make_config(**{**SHAPES[size], "layers": 2}, vocab=5000)
    found, grammars = resolved_for(config), GrammarCache(config.vocab_size)
    rank = first_of(config, num_ranks, by_expert="--by-expert" in sys.argv)
    own = config if rank is None else config.part(rank.share)
    ops = ops_of(rank, config, found, DEVICE.torch_device)
    model, precompiler = make_model(own, ops, rank), Precompiler(lambda: pool)
    print(f"made after {time.perf_counter() - begin:.1f} s")
    begin, cpu = time.perf_counter(), time.thread_time()
    device = TargetDevice(DEVICE.hardware) if on_meta else DEVICE
    dry_ops = ops_of(rank, config, found, device.torch_device)
    dry = None if rank is None else compile_phase.DryRank(rank, dry_ops)
    shapes = model
    if on_meta:
        share = None if rank is None else rank.share
        weights = weight_shapes(Target(config, dry_ops, torch.bfloat16, share=share), 2)
        shapes = GptOss(own, weights, dry_ops, 4096)
    needed = compile_phase.DryModel(shapes, found, device, grammars, dry).record(precompiler)
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
