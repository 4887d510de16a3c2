"""Compiles every kernel of a server before its start, for a GPU that need not be present."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from chorale.config import EngineConfig
from chorale.errors import ChoraleError, ConfigError
from chorale.kernels.triton.precompile import pool
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import weight_shapes
from chorale.runtime.assembly import DTYPES
from chorale.runtime.device import open_device
from chorale.runtime.hardware import Hardware, cpu_count, why_no_cuda
from chorale.runtime.progress import Progress
from chorale.runtime.resolve import resolve
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.runtime.warmup.cache_key import cache_key
from chorale.runtime.warmup.dry_run import LAYERS
from chorale.runtime.warmup.target_device import TargetDevice
from chorale.serve.compile_phase import SOURCES, record, wait


@dataclass(frozen=True, slots=True)
class Target:
    """``architecture``: "sm_90" or "gfx942". ``hardware``: as the engine will detect it."""

    hardware: Hardware
    architecture: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """``num_kernels`` is 0 if all were in the cache."""

    num_kernels: int
    seconds: float
    folder: Path


def local_target() -> Target:
    """Returns this machine's GPU. Raises ``ConfigError`` if there is none."""
    import torch

    from chorale.kernels.triton.launch import architecture_of

    if not torch.cuda.is_available():
        why = why_no_cuda() or "PyTorch finds no GPU here"
        raise ConfigError(f"{why}; --gpu NAME compiles for a GPU that is not here, for example --gpu h200")
    return Target(open_device("cuda").hardware, *architecture_of(torch.device("cuda", 0)))


def warm(config: EngineConfig, model_config: ModelConfig, target: Target, report: Progress) -> Warmed:
    """Writes all kernels of a server of ``config`` on ``target``, and their manifest, to Triton's cache.

    The process can compile for no other GPU afterwards. Raises ``ConfigError`` for invalid configurations,
    and ``ChoraleError`` if a kernel does not compile or the cache cannot be written.
    """
    from chorale.kernels.triton.ops import TRITON_OPS
    from chorale.kernels.triton.precompile import target as targets
    from chorale.kernels.triton.precompile.compiler import Precompiler
    from chorale.kernels.triton.precompile.contract import check

    check()
    began = time.perf_counter()
    device = TargetDevice(target.hardware)
    resolved = resolve(config, model_config, target.hardware, can_overlap=True, can_capture=True)
    fp8 = config.moe_activation_dtype == "fp8"
    with targets.compiled_for(target.architecture, target.multiprocessors):
        dtype = DTYPES[resolved.dtype]
        weights = weight_shapes(model_config, TRITON_OPS, dtype=dtype, layers=LAYERS, fp8_activations=fp8)
        model = GptOss(model_config, weights, TRITON_OPS, resolved.limits.max_model_len)
        start_pool = functools.cache(functools.partial(pool.start, cpu_count() + 1))
        precompiler = Precompiler(start_pool)
        facts, count = cache_key(model, resolved), 0
        if not precompiler.is_cached(facts, device.torch_device, SOURCES):
            record(precompiler, model, resolved, device, GrammarCache(model_config.vocab_size))
            count = precompiler.num_kernels
            wait(precompiler, count, report)
            is_written, processes = precompiler.finish(), start_pool()
            if processes is not None:
                processes.join()
            if not is_written:
                why = precompiler.errors or [f"{pool.cache_folder()} cannot be written"]
                raise ChoraleError(f"kernels that were not compiled: {len(precompiler.errors)}; {why[0]}")
    return Warmed(count, time.perf_counter() - began, pool.cache_folder())
