"""Does the rehearsal find every kernel of every step? A script: needs Triton, no GPU.

    python -m tests.support.kernels.rehearse_steps 20b|120b [--compile THREADS [--crew]] [-v]

Tensors of the CPU pass for a Hopper GPU's, the driver is a stand-in, and nothing is compiled, unless told so:
what counts are the keys by which Triton tells kernels apart. Steps are rehearsed as at start-up; then other
steps are played, and what they ask for must be there. Run by ``test_rehearsal.py``.
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

from chorale.config import EngineConfig
from chorale.kernels.triton import launch
from chorale.kernels.triton.dense import linear, qkv
from chorale.kernels.triton.moe import grouped, packing
from chorale.kernels.triton.moe import router as route
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.precompile.compiler import Compiling
from chorale.kernels.triton.precompile.pool import Crew
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.gpt_oss import GptOss, LayerWeights, QkvWeights, RouterWeights, Weights
from chorale.runtime.device import CpuDevice
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.hardware import Hardware
from chorale.runtime.resolve import Resolved, resolve
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows, Masks, allow_all_masks
from chorale.runtime.steps.graph_sizes import MIXED_ROWS, MIXED_TOKENS
from chorale.runtime.warmup.plans import eager_plan
from chorale.runtime.worker import Worker
from chorale.serve import build

DEVICE = CpuDevice(Hardware("cuda", "stand-in", 140 * 2**30, 139 * 2**30), can_capture=True, overlap=True)

STEPS = 40  # without a graph, of random sizes


class StandInDriver:
    """As much of Triton's driver as a launch that launches nothing asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


compiled: list[str] = []


def _compile(source: Any, **_: Any) -> Any:
    compiled.append(source.name)
    target = GPUTarget("stand-in", 90, 32)
    return SimpleNamespace(metadata=SimpleNamespace(name=source.name, target=target), src=source, hash="")


def pretend() -> None:
    """This process has a Hopper GPU, as far as our launches look."""
    triton.runtime.driver.set_active(StandInDriver())
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    launch._has_dependent_launch = lambda device: True
    for module in (launch, packing, grouped):
        module.is_hopper = lambda device: True  # type: ignore[attr-defined]
    linear.product = qkv.product = route.product = _product
    linear.float32_product = route.float32_product = _float32_product


def _product(x: torch.Tensor, matrix: linear.Linear) -> torch.Tensor:
    """Instead of cuBLAS: nobody looks at the values, and the CPU would take long."""
    return torch.zeros(x.shape[0], matrix.weight.shape[0], dtype=x.dtype)


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], weight.shape[0])


def make_model(config: ModelConfig) -> GptOss:
    """Of the real shape, with few layers, all of which share one set of experts."""
    hidden, heads, kv, dim = (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    count, inter = config.num_local_experts, config.intermediate_size
    half = torch.bfloat16

    def linear_of(rows: int, depth: int) -> Any:
        return linear.pack_linear(torch.zeros(rows, depth, dtype=half), torch.zeros(rows, dtype=half))

    def matrices(rows: int, depth: int) -> packing.Matrices:
        tiles, chunks = -(-rows // 16), -(-depth // 64)
        # As large as in the model, but of one expert: nothing reads them.
        blocks = torch.empty(1, tiles, chunks, 32, 4, dtype=torch.int32)
        return packing.Matrices(blocks, torch.empty(1, tiles, chunks, 8, 2, 2, dtype=torch.uint8))

    packed = packing.Experts(
        gate_up=matrices(2 * inter, hidden), down=matrices(hidden, inter),
        gate_up_bias=torch.zeros(2, count, inter, dtype=half),
        down_bias=torch.zeros(count, hidden, dtype=half),
        swiglu_limit=7.0, swiglu_alpha=1.702, dtype=half,
    )  # fmt: skip
    router = route.pack_router(torch.zeros(count, hidden), torch.zeros(count), half)
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
    return GptOss(config, weights, TRITON_OPS, 4096)


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
    """Launches end where they would need a device."""
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: original(  # type: ignore[method-assign]
        self, *args, grid=grid, warmup=True, **options
    )


class SomeGrammars(GrammarRows):
    """While there are ``some``, every other row of a step has a grammar."""

    some = False

    def masks(self, rows: np.ndarray) -> Masks | None:
        places = np.arange(0, len(rows), 2)
        if not self.some or not len(places):
            return None
        found = allow_all_masks(self._device, len(places))
        return Masks(places, found.octets)


def serve(executor: LocalExecutor, found: Resolved, grammar: SomeGrammars) -> None:
    """What comes after the rehearsal: captures, and steps without a graph, of any size."""
    build.warm_up(executor, found)
    build.capture_first(executor, found, lambda *_: None, budget=0)
    while executor.use_idle_time():
        pass
    for tokens in MIXED_TOKENS:  # those that no idle moment makes are captured when a step needs them
        for rows in MIXED_ROWS:
            executor.prepare(partial(Worker.try_size, num_tokens=tokens, rows=rows))
    random = np.random.default_rng(1)
    limits = found.limits
    for number in range(STEPS):
        rows = int(random.integers(1, limits.max_num_seqs + 1))
        tokens = int(random.integers(rows, limits.max_num_batched_tokens + 1))
        tokens = min(tokens, rows * limits.max_model_len)
        grammar.some = number % 3 == 0
        executor.execute(eager_plan(tokens, rows, limits, filtered=number % 4 == 0)).result()


def main(size: str, threads: int, with_crew: bool) -> None:
    """``threads``: compile in so many, or in so many processes. 0: compile nothing."""
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    begin, crew = time.perf_counter(), Crew(threads) if with_crew else None
    pretend()
    if not threads:
        triton.compiler.compile = triton.compiler.compiler.compile = _compile
    # A small vocabulary: logits are the only large tensors that would be filled.
    config = make_config(**{**SHAPES[size], "layers": 4}, vocab=5000)
    found, grammars = resolved_for(config), GrammarCache(config.vocab_size)
    model, compiler = make_model(config), Compiling(threads or 2, lambda: crew)
    print(f"made after {time.perf_counter() - begin:.1f} s")
    begin, playing, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    build.compile_kernels(compiler, model, found, DEVICE, grammars, lambda *_: None)
    first = time.perf_counter() - begin
    compiler.wait(compiler.num_kernels, lambda *_: None)
    seconds = time.perf_counter() - begin
    playing, cpu = time.thread_time() - playing, time.process_time() - cpu
    launch_nothing()
    kv = build.allocate_kv(config, found, DEVICE)
    grammar = SomeGrammars(DEVICE, grammars)
    serve(build.make_executor(model, kv, found, DEVICE, grammar), found, grammar)
    print(f"first kernels after {first:.1f} s, all after {seconds:.1f} s")
    print(f"{cpu:.1f} s of CPU, of it {playing:.1f} s playing, without child processes")
    print(f"{compiler.num_kernels} kernels found, {compiler.num_late} not foreseen")
    if crew is not None:
        print(f"{compiler.num_here} kernels were left to this process")
    if "-v" in sys.argv:
        print(collections.Counter(compiled))


if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--compile") + 1]) if "--compile" in sys.argv else 0
    main(sys.argv[1], count, "--crew" in sys.argv)
