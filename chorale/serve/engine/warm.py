"""Compiles all kernels of a server ahead of time. The target GPU need not be present."""

from __future__ import annotations

import functools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from chorale.config.engine import EngineConfig
from chorale.errors import ChoraleError, ConfigError
from chorale.kernels.ops import with_compact
from chorale.kernels.triton.precompile import pool
from chorale.machine.hardware import Hardware, cpu_count, why_no_cuda
from chorale.model.config import ModelConfig
from chorale.model.gpt_oss import GptOss
from chorale.model.weights import weight_shapes
from chorale.parallel.communicator import Silent
from chorale.parallel.rank import Rank
from chorale.parallel.shares import shares_of
from chorale.runtime.device import open_device
from chorale.runtime.progress import Progress
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.runtime.sizing.resolve import resolve
from chorale.runtime.warmup.dry_run import LAYERS
from chorale.runtime.warmup.target_device import TargetDevice
from chorale.serve.engine.build_rank import adapter_store, ops_over_peers, step_sizes, weight_target
from chorale.serve.engine.compile_phase import SOURCES, DryModel, DryRank, wait


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU to compile for. ``architecture``: for example "sm_90" or "gfx942"."""

    hardware: Hardware
    architecture: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of ``warm``. ``num_kernels``: newly compiled kernels; 0 if all were in the cache."""

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
    """Writes all kernels of a server with ``config`` on ``target``, and their manifests, to Triton's cache.

    Afterwards this process cannot compile for another GPU. Raises ``ConfigError`` for invalid configurations,
    and ``ChoraleError`` if a kernel does not compile or the cache cannot be written.
    """
    from chorale.kernels.triton.precompile import target as targets
    from chorale.kernels.triton.precompile.contract import check

    check()
    began, count = time.perf_counter(), 0
    with targets.compiled_for(target.architecture, target.multiprocessors):
        for rank in ranks_of(config, model_config):
            count += _warm_rank(config, model_config, target, rank, report)
    return Warmed(count, time.perf_counter() - began, pool.cache_folder())


def ranks_of(config: EngineConfig, model: ModelConfig) -> list[Rank | None]:
    """Returns all ranks, as each has different kernels. A single rank is None."""
    size = config.tensor_parallel_size
    if size == 1:
        return [None]
    return [Rank(share, Silent(share.rank, size)) for share in shares_of(config, model)]


def _warm_rank(
    config: EngineConfig, model_config: ModelConfig, target: Target, rank: Rank | None, report: Progress
) -> int:
    """Returns the number of kernels that were not in the cache."""
    from chorale.kernels.triton.precompile.compiler import Precompiler

    shapes = shapes_of(config, model_config, target, rank)
    start_pool = functools.cache(functools.partial(pool.start, cpu_count() + 1))
    precompiler = Precompiler(start_pool)
    if precompiler.is_cached(shapes.facts(), shapes.device.torch_device, SOURCES):
        return 0
    _check_writable(pool.cache_folder())
    shapes.record(precompiler)
    count = precompiler.num_kernels
    wait(precompiler, count, report)
    is_written, processes = precompiler.finish(), start_pool()
    if processes is not None:
        processes.join()
    if not is_written:
        why = precompiler.errors or [f"{pool.cache_folder()} cannot be written"]
        raise ChoraleError(f"kernels that were not compiled: {len(precompiler.errors)}; {why[0]}")
    return count


def shapes_of(config: EngineConfig, model_config: ModelConfig, target: Target, rank: Rank | None) -> DryModel:
    """Returns the model of ``rank``, whose weights are meta tensors.

    Raises ``ConfigError`` if the GPU cannot run the configuration.
    """
    from chorale.kernels.triton.ops import triton_ops
    from chorale.kernels.triton.shared_ops import shared_ops

    device, share = TargetDevice(target.hardware), None if rank is None else rank.share
    ops = shared_ops(rank) if rank else triton_ops(batch_invariant=config.batch_invariant)
    resolved = resolve(config, model_config, target.hardware, can_overlap=True, can_capture=True)
    ops = ops_over_peers(config, ops, step_sizes(model_config, resolved), device.torch_device) or ops
    ops = with_compact(ops) if resolved.compact else ops
    dry = None if rank is None else DryRank(rank, ops)
    layers = model_config.num_hidden_layers if model_config.layer_experts else LAYERS
    weights = weight_shapes(weight_target(config, model_config, ops, resolved, device, share), layers)
    own = model_config if share is None else model_config.part(share)
    model = GptOss(own, weights, ops, resolved.limits.max_model_len)
    adapters = adapter_store(config, model_config, ops, resolved, device, rank)
    grammars = GrammarCache(model_config.vocab_size)
    return DryModel(model, resolved, device, grammars, dry, adapters=adapters)


def _check_writable(folder: Path) -> None:
    """Raises ``ChoraleError`` if compiled kernels could not be saved in ``folder``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ChoraleError(f"{folder} cannot be written ({error.strerror})") from None
