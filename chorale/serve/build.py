"""build_engine: from an EngineConfig to a ready engine, in timed phases."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chorale.client.base import EngineInfo
from chorale.config import EngineConfig
from chorale.engine.core import EngineCore
from chorale.kernels import select_ops
from chorale.kernels.ops import Ops
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.hub import resolve_model
from chorale.model.weights import load_weights
from chorale.runtime.assembly import DTYPES, allocate_kv, make_executor
from chorale.runtime.device import Device, default_threads, open_device
from chorale.runtime.memory import gib
from chorale.runtime.progress import Progress
from chorale.runtime.resolve import Resolved, resolve
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.warmup.captures import CAPTURE_SECONDS, capture_first, warm_up
from chorale.serve import compile_phase

logger = logging.getLogger(__name__)


class _Phases:
    """Reports the start of each phase and measures its seconds."""

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
    config: EngineConfig,
    progress: Progress | None = None,
    pool: CompilePool | None = None,
    prefix_secret: bytes = b"",
) -> tuple[EngineCore, EngineInfo]:
    """Finds, loads, allocates and warms up. Raises ``ConfigError`` or a subclass for invalid configurations.

    ``pool``: compile processes that were already started; they are closed here. ``prefix_secret``: the key of
    the prefix hashes; "" draws one.

    Phases: "download", "device", "load", with Triton "compile", "kv_pool", "warm_up" and, with CUDA graphs,
    "graphs".
    """
    phases = _Phases(progress)
    with phases.phase("download", config.model):
        folder = resolve_model(
            config.model, revision=config.revision, download_dir=config.download_dir, progress=phases.report
        )
        model_config = ModelConfig.load(folder)
    with phases.phase("device"):
        threads = config.num_threads or default_threads(model_config.num_parameters, config.host_share)
        device = open_device(config.device, threads, config.host_share)
        grammars = GrammarCache(model_config.vocab_size)
        ops = select_ops(config.ops, str(device.torch_device), dense_experts=model_config.dense_experts)
    precompiler = compile_phase.make_precompiler(config, ops, pool)
    resolved = resolve(
        config,
        model_config,
        device.hardware,
        can_overlap=device.overlap,
        can_capture=device.can_capture and ops.capturable,
        supports_fp8_kv=ops.supports_fp8_kv,
    )
    # While weights are read: it holds the GIL for most of a second, which running streams
    # would notice if it happened with the first grammar.
    grammars.warm()
    with phases.phase("load", str(folder)):
        fp8 = config.moe_activation_dtype == "fp8"
        model = load_model(folder, model_config, ops, resolved, device, phases.report, fp8_activations=fp8)
        device.trim()
    if precompiler is not None:
        with phases.phase("compile"):
            compile_phase.precompile(precompiler, model, resolved, device, grammars, phases.report)
            device.trim()
    with phases.phase("kv_pool", _pool_message(resolved)):
        kv = allocate_kv(model_config, resolved, device)
        executor = make_executor(model, kv, resolved, device, GrammarRows(device, grammars))
    with phases.phase("warm_up"):
        warm_up(executor, resolved)
    if resolved.graph_rows:
        with phases.phase("graphs"):
            is_busy = precompiler is not None and precompiler.is_busy  # a capture would wait for its kernels
            capture_first(executor, resolved, phases.report, 0 if is_busy else CAPTURE_SECONDS)
    if precompiler is not None:
        precompiler.throttle()
        logger.debug("%d kernels; %d were not recorded", precompiler.num_kernels, precompiler.num_late)
    if pool is not None and (precompiler is None or not precompiler.is_busy):
        pool.close()
    core = EngineCore(resolved.limits, executor, grammars=grammars, prefix_secret=prefix_secret)
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
        dtype=DTYPES[resolved.dtype],
        progress=progress,
        fp8_activations=fp8_activations,
    )
    return GptOss(model_config, weights, ops, resolved.limits.max_model_len)


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
