"""build_engine: from an EngineConfig to an engine that is ready, phase by phase, each with its seconds."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from chorale.client.base import EngineInfo
from chorale.config import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import CacheGroup, EngineLimits, RowStart, SamplingSpec, StepPlan
from chorale.kernels import select_ops
from chorale.kernels.ops import Compiler, Ops
from chorale.kernels.triton.precompile.pool import Crew, hire
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.hub import resolve_model
from chorale.model.weights import load_weights
from chorale.runtime.cache_dtype import E4M3
from chorale.runtime.device import Device, default_threads, open_device
from chorale.runtime.executor import LocalExecutor
from chorale.runtime.hardware import cpu_count
from chorale.runtime.memory import gib
from chorale.runtime.resolve import Resolved, resolve
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.steps.buffers import Buffers
from chorale.runtime.steps.decode_graphs import DecodeGraphRunner
from chorale.runtime.steps.graph_sizes import (
    BUSY_TOKENS,
    FILTERED_ROWS,
    FIRST_ROWS,
    FIRST_TOKENS,
    MIXED_ROWS,
    MIXED_TOKENS,
    context_sizes,
)
from chorale.runtime.steps.mixed_graphs import MixedGraphRunner
from chorale.runtime.warmup.cache_key import cache_key
from chorale.runtime.warmup.plans import (
    AllowAllGrammars,
    DryRunExecutors,
    UncapturedDevice,
    dry_run,
    eager_plans,
    masked_plans,
    shortened,
)
from chorale.runtime.worker import Worker

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, E4M3: torch.float8_e4m3fn}


# Beyond the first ones: the others are made when there is no work for a second, one at a time, so that a
# request that comes meanwhile waits for one of them at most.
_CAPTURE_SECONDS = 1.0


class Progress(Protocol):
    """``fraction`` is 0..1 within the phase, or None when it cannot be told."""

    def __call__(self, phase: str, fraction: float | None = None, message: str = "") -> None: ...


class _Phases:
    """Reports the start of each phase and keeps its seconds."""

    def __init__(self, progress: Progress | None) -> None:
        self.report: Progress = progress or _silent
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        self.report(name, None, message)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def _silent(phase: str, fraction: float | None = None, message: str = "") -> None:
    return None


def build_engine(
    config: EngineConfig, progress: Progress | None = None, crew: Crew | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Find, load, allocate, warm up. Raises ``ConfigError`` (and its kin) for what cannot run.

    ``crew``: processes that compile, if they were spawned already; they are dismissed here.

    Phases: "download", "device", "load", with Triton "compile", "kv_pool", "warm_up" and, with CUDA graphs,
    "graphs".
    """
    phases = _Phases(progress)
    with phases.phase("download", config.model):
        folder = resolve_model(
            config.model,
            revision=config.revision,
            download_dir=config.download_dir,
            progress=phases.report,
        )
        model_config = ModelConfig.load(folder)
    with phases.phase("device"):
        threads = config.num_threads or default_threads(model_config.num_parameters)
        device = open_device(config.device, threads)
        grammars = GrammarCache(model_config.vocab_size)
        ops = select_ops(config.ops, str(device.torch_device), dense_experts=model_config.dense_experts)
    compiler = None
    if ops.compiler is not None:
        compiler = ops.compiler(cpu_count(), lambda: crew or hire(cpu_count()))
    resolved = resolve(
        config,
        model_config,
        device.hardware,
        can_overlap=device.overlap,
        can_capture=device.can_capture and ops.capturable,
        supports_fp8_kv=ops.supports_fp8_kv,
    )
    # While weights are read: it holds the interpreter's lock for most of a second, which running streams
    # would feel if it came with the first grammar.
    grammars.warm()
    with phases.phase("load", str(folder)):
        fp8 = config.moe_activation_dtype == "fp8"
        model = load_model(folder, model_config, ops, resolved, device, phases.report, fp8_activations=fp8)
        device.trim()
    if compiler is not None:
        with phases.phase("compile"):
            try:
                if not compiler.is_known(cache_key(model, resolved)):
                    compile_kernels(compiler, model, resolved, device, grammars, phases.report)
            except Exception as error:  # then steps compile what they need, as they need it
                log.warning("kernels are not compiled beforehand: %s: %s", type(error).__name__, error)
            device.trim()
    with phases.phase("kv_pool", _pool_message(resolved)):
        kv = allocate_kv(model_config, resolved, device)
        executor = make_executor(model, kv, resolved, device, GrammarRows(device, grammars))
    with phases.phase("warm_up"):
        warm_up(executor, resolved)
    if resolved.graph_rows:
        with phases.phase("graphs"):
            is_busy = compiler is not None and compiler.is_busy  # a capture would wait for its kernels
            capture_first(executor, resolved, phases.report, 0 if is_busy else _CAPTURE_SECONDS)
    if compiler is not None:
        compiler.calm_down()
        log.debug("%d kernels; %d were not foreseen", compiler.num_kernels, compiler.num_late)
    if crew is not None and (compiler is None or not compiler.is_busy):
        crew.dismiss()
    core = EngineCore(resolved.limits, executor, grammars=grammars)
    return core, _info(config, model, resolved, device, phases.seconds)


def load_model(
    folder: Path,
    model_config: ModelConfig,
    ops: Ops,
    resolved: Resolved,
    device: Device,
    progress: Progress,
    *,
    fp8_activations: bool = False,
) -> GptOss:
    weights = load_weights(
        folder,
        model_config,
        ops,
        device=str(device.torch_device),
        dtype=_DTYPES[resolved.dtype],
        progress=progress,
        fp8_activations=fp8_activations,
    )
    return GptOss(model_config, weights, ops, resolved.limits.max_model_len)


def compile_kernels(
    compiler: Compiler,
    model: GptOss,
    resolved: Resolved,
    device: Device,
    grammars: GrammarCache,
    report: Progress,
) -> None:
    """Find all kernels that steps will launch, and wait for those of the first ones. The others go on
    compiling. Raises ``EngineError``.
    """
    small = replace(resolved, limits=replace(resolved.limits, num_blocks=1))
    cut, stand_in = shortened(model), UncapturedDevice(device)
    eager, rows = replace(small, graph_rows=()), GrammarRows(device, grammars)
    kv = allocate_kv(model.config, small, device)
    executors = DryRunExecutors(
        captured=make_executor(cut, kv, small, stand_in, rows),
        launched=make_executor(cut, kv, eager, stand_in, rows),
        masked=make_executor(cut, kv, eager, stand_in, AllowAllGrammars(device, grammars)),
    )
    pieces = preparations(resolved.graph_rows, resolved.limits).values() if resolved.graph_rows else ()
    plans = eager_plans(resolved.limits, resolved.graph_rows)
    masked, first = masked_plans(resolved.limits), first_plan(small.limits)
    needed = dry_run(compiler, executors, pieces, plans, masked, first)

    def tell(done: int, count: int) -> None:
        report("compile", done / max(count, 1), f"kernels: {done} of {count}")

    compiler.wait(needed, tell)


def allocate_kv(model: ModelConfig, resolved: Resolved, device: Device) -> list[torch.Tensor]:
    """One tensor a slot: [num_blocks, 2, Nkv, block_size, D]; zeros, as ``AttentionMeta`` asks.

    With graphs there is one block more, for their dummy rows.
    """
    limits = resolved.limits
    shape = (
        limits.num_blocks + bool(resolved.graph_rows),
        2,
        model.num_key_value_heads,
        limits.block_size,
        model.head_dim,
    )
    dtype = _DTYPES[resolved.kv_dtype]
    return [torch.zeros(shape, dtype=dtype, device=device.torch_device) for _ in range(model.num_kv_tensors)]


def make_executor(
    model: GptOss, kv: list[torch.Tensor], resolved: Resolved, device: Device, grammar: GrammarRows
) -> LocalExecutor:
    limits = resolved.limits
    buffers = Buffers(
        device,
        num_rows=limits.max_num_seqs,
        max_len=limits.max_model_len,
        block_size=limits.block_size,
        vocab_size=limits.vocab_size,
    )
    sampler = Sampler(device, limits.vocab_size, make_sampler=model.ops.make_sampler)
    decode_graphs = mixed_graphs = None
    if resolved.graph_rows:
        decode_graphs = DecodeGraphRunner(
            device, model, kv, buffers, sampler, resolved.graph_rows, limits.max_model_len
        )
        longest = limits.max_model_len if resolved.mixed_graphs else 0  # 0: no mixed step is captured
        mixed_graphs = MixedGraphRunner(device, model, kv, buffers, longest)
    worker = Worker(device, model, kv, buffers, sampler, grammar, decode_graphs, mixed_graphs)
    return LocalExecutor(worker, overlaps=device.overlap)


def warm_up(executor: LocalExecutor, resolved: Resolved) -> None:
    """The first step, in a pool that nobody uses yet. Raises ``EngineError``."""
    executor.execute(first_plan(resolved.limits)).result()


def first_plan(limits: EngineLimits) -> StepPlan:
    """One token in row 0, in the first two blocks, or one where there is no second."""
    one = np.zeros(1, np.int32)
    return StepPlan(
        step_id=-1,
        starts=(RowStart(0, one, 1, SamplingSpec(), 0, limits.eos_token_ids),),
        rows=one,
        num_computed=one,
        num_new=one + 1,
        samples=np.ones(1, np.bool_),
        token_ids=one,
        append_row=np.zeros(2, np.int32),
        append_group=np.array([CacheGroup.FULL, CacheGroup.WINDOW], np.int32),
        append_index=np.zeros(2, np.int32),
        append_block=np.array([0, min(1, limits.num_blocks - 1)], np.int32),
    )


def capture_first(
    executor: LocalExecutor, resolved: Resolved, report: Progress, budget: float = _CAPTURE_SECONDS
) -> None:
    """Capture the steps that any service meets, try the largest, and go on for ``budget`` seconds.

    The rest is left for idle moments. Raises ``EngineError``.
    """
    pieces = preparations(resolved.graph_rows, resolved.limits)
    ordered = sorted(pieces.items(), key=lambda item: not item[1][1])  # those that are first; stable
    start = time.perf_counter()
    for number, (name, (action, is_first)) in enumerate(ordered):
        if is_first or time.perf_counter() - start < budget:
            report("graphs", number / len(ordered), name)
            executor.prepare(action)
        else:
            executor.later(action)


def preparations(
    graph_rows: tuple[int, ...], limits: EngineLimits
) -> dict[str, tuple[Callable[[Worker], None], bool]]:
    """By name: what can be done before a step needs it, and whether it should be done before any step."""
    longest, most = limits.max_model_len, min(limits.max_num_batched_tokens, limits.max_model_len)
    found: dict[str, tuple[Callable[[Worker], None], bool]] = {}

    def decode(size: int, context: int, filtered: bool, is_first: bool) -> None:
        name = f"decode, {size} rows of up to {context} tokens{', filtered' if filtered else ''}"
        action = partial(Worker.capture_decode, rows=size, longest=context, filtered=filtered)
        found[name] = (action, is_first)

    def mixed(tokens: int, rows: int, is_first: bool) -> None:
        action = partial(Worker.try_size, num_tokens=tokens, rows=rows)
        found[f"prefill, {tokens} tokens, {rows} rows"] = (action, is_first)

    for rows in MIXED_ROWS[2:]:
        for tokens in BUSY_TOKENS:
            if tokens < most and rows // 4 <= limits.max_num_seqs:
                mixed(tokens, rows, False)
    for size in graph_rows:
        for context in context_sizes(size, longest):
            decode(size, context, False, size in FIRST_ROWS)
    for tokens in sorted({size for size in MIXED_TOKENS if size < most} | {min(most, 2048), most}):
        for rows in MIXED_ROWS[:2]:
            is_first = rows == MIXED_ROWS[0] and (tokens in FIRST_TOKENS or tokens == most)
            if tokens in MIXED_TOKENS or rows == MIXED_ROWS[0]:
                mixed(tokens, rows, is_first)
    for size in graph_rows:
        if size <= FILTERED_ROWS:
            decode(size, context_sizes(size, longest)[-1], True, False)
    return found


def _pool_message(resolved: Resolved) -> str:
    limits = resolved.limits
    size = gib(limits.num_blocks * resolved.geometry.bytes_per_block)
    return f"{limits.num_blocks:,} blocks of {limits.block_size} tokens, {size}"


def _info(
    config: EngineConfig, model: GptOss, resolved: Resolved, device: Device, seconds: dict[str, float]
) -> EngineInfo:
    limits = resolved.limits
    sampling = dict(model.config.default_sampling) if config.generation_config == "auto" else {}
    sampling |= config.override_generation_config or {}
    return EngineInfo(
        model=config.model,
        revision=config.revision,
        engine_id=uuid.uuid4().hex[:16],
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        num_kv_tokens=resolved.geometry.tokens_in(limits.num_blocks),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        device=device.hardware.name,
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.kv_dtype,
        ops=model.ops.name,
        parameters=model.weights.num_parameters,
        enable_prefix_caching=limits.enable_prefix_caching,
        max_logprobs=resolved.max_logprobs,
        default_sampling=sampling,
        notes=resolved.notes,
        startup_seconds=seconds,
    )
